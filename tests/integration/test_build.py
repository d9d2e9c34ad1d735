"""``aotgaudi build`` as a process, on the fake backend: everything but the compiler is real."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import psutil
import pytest

from aotgaudi.manifest.manifest import Manifest
from aotgaudi.store.store import Store
from tests.parallel import nightly
from tests.workload import SPEC_TEXT, key_of, seed, tiny_spec

DEADLINE_SECONDS = 300.0
COMMAND = (sys.executable, "-m", "aotgaudi")
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None and os.environ.get("AOTGAUDI_REQUIRE_RAY") != "1",
    reason="Ray is not installed: pip install 'aotgaudi[ray]'",
)
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def aotgaudi(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )


def write_spec(folder: Path, config: dict[str, object]) -> Path:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    text = "\n".join(
        'config = "config.json"' if line.startswith("config =") else line for line in SPEC_TEXT.splitlines()
    )
    (folder / "tiny.toml").write_text(text, encoding="utf-8")
    return folder / "tiny.toml"


def test_a_spec_becomes_a_verified_bundle_and_a_second_build_does_nothing(tmp_path: Path) -> None:
    write_spec(tmp_path, LLAMA)

    built = aotgaudi(tmp_path, "build", "tiny.toml", "--store", "store", "-j", "2")

    assert built.returncode == 0, built.stderr
    assert all(line.startswith("[") for line in built.stderr.splitlines()), "progress and nothing else"
    again = aotgaudi(tmp_path, "build", "tiny.toml", "--store", "store")
    assert (again.returncode, again.stderr) == (0, "")
    assert "cache: nothing to do" in again.stdout
    verified = aotgaudi(tmp_path, "verify", "tiny.bundle", "--no-target", "--json")
    assert (verified.returncode, verified.stderr) == (0, "")
    document = json.loads(verified.stdout)
    assert document["intact"] is True
    checked = aotgaudi(tmp_path, "build", "manifest", "tiny.toml", "--check", "--json")
    assert json.loads(checked.stdout)["id"] == document["manifest_id"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "bert", "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
            | {"intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 64},
            "error: model (BertSelfAttention, layer 0): attention keyword",
        ),
        (
            {**LLAMA, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
            "error: model.config.rope_parameters.rope_type: 'dynamic' depends on the batch",
        ),
    ],
    ids=["another attention keyword", "another rope type"],
)
def test_a_model_that_is_not_supported_is_one_error_whatever_the_number_of_entries(
    tmp_path: Path, config: dict[str, object], message: str
) -> None:
    write_spec(tmp_path, config)

    done = aotgaudi(tmp_path, "build", "tiny.toml", "--store", "store", "-j", "2")

    errors = [line for line in done.stderr.splitlines() if not line.startswith("[")]
    assert done.returncode == 2
    assert len(errors) == 1
    assert errors[0].startswith(message)
    assert not (tmp_path / "tiny.bundle").exists()


class Build:
    """A running ``aotgaudi build cache``, leader of its own process group."""

    def __init__(self, folder: Path, labels: list[str], *options: str) -> None:
        self.folder, self.labels = folder, labels
        self.store = Store.open(folder / "store")
        spec = tiny_spec()
        (folder / "tiny.toml").write_text(SPEC_TEXT, encoding="utf-8")
        seed(self.store, spec, Manifest.of(spec).entries, [labels])
        self.arguments = ("build", "cache", "tiny.toml", "--store", "store", "-j", "2", "--json", *options)
        self._log = folder / "stderr"
        with self._log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [*COMMAND, *self.arguments],
                cwd=folder,
                env=environment(),
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )

    def stderr(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def num_built(self) -> int:
        return len(self.store.actions.get_many(map(key_of, self.labels)))

    def wait_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            assert self.process.poll() is None, self.stderr()
            assert time.monotonic() < deadline, self.stderr()
            Event().wait(0.01)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(DEADLINE_SECONDS)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Build]]:
    builds: list[Build] = []

    def start_one(labels: list[str], *options: str) -> Build:
        builds.append(Build(tmp_path, labels, *options))
        return builds[-1]

    yield start_one
    for build in builds:
        build.kill()


SLOW_LABELS = [f"layer {number} !slow" for number in range(12)]


@pytest.mark.parametrize(
    ("number", "to_group"),
    [
        (signal.SIGINT, True),
        (signal.SIGTERM, False),
        pytest.param(signal.SIGINT, False, marks=pytest.mark.nightly),
        pytest.param(signal.SIGTERM, True, marks=pytest.mark.nightly),
    ],
)
def test_a_signal_stops_a_build_cleanly_and_the_next_one_finishes_it(
    start: Callable[..., Build], number: signal.Signals, to_group: bool
) -> None:
    build = start(SLOW_LABELS)
    build.wait_until(build.num_built)

    (os.killpg if to_group else os.kill)(build.process.pid, number)

    assert build.process.wait(DEADLINE_SECONDS) == 130
    num_built = build.num_built()
    assert 0 < num_built < len(SLOW_LABELS)
    within = " within 5 s" if number == signal.SIGTERM else ""
    errors = [line for line in build.stderr().splitlines() if not line.startswith("[")]
    assert errors == [
        f"stopping after the units under way{within} (again to stop at once)...",
        f"error: stopped at a unit boundary with {num_built} units done;"
        " resumable: run the same command again",
    ]
    rest = aotgaudi(build.folder, *build.arguments)
    assert rest.returncode == 0, rest.stderr
    assert json.loads(rest.stdout)["num_compiled"] == len(SLOW_LABELS) - num_built


@pytest.mark.parametrize("number", [signal.SIGINT, *nightly(signal.SIGTERM)])
def test_a_signal_while_the_workers_start_is_clean_too(
    start: Callable[..., Build], number: signal.Signals
) -> None:
    build = start(SLOW_LABELS)
    build.wait_until(lambda: "[0/12]" in build.stderr())

    os.killpg(build.process.pid, number)

    assert build.process.wait(DEADLINE_SECONDS) == 130
    assert "Traceback" not in build.stderr()
    assert "resumable" in build.stderr()


@pytest.mark.parametrize(
    ("numbers", "last"),
    [
        ((signal.SIGINT, signal.SIGINT), "interrupted"),
        (
            (signal.SIGTERM,),
            "error: stopped with units under way; resumable: run the same command again",
        ),
    ],
    ids=["interrupted twice", "SIGTERM"],
)
def test_a_unit_that_hangs_is_not_waited_for(
    start: Callable[..., Build], numbers: tuple[signal.Signals, ...], last: str
) -> None:
    build = start(["layer !hang"])
    build.wait_until((build.folder / "store" / "logs").is_dir)
    workers = psutil.Process(build.process.pid).children(recursive=True)

    for number in numbers:
        os.killpg(build.process.pid, number)
        build.wait_until(lambda: "stopping" in build.stderr())

    assert build.process.wait(DEADLINE_SECONDS) == 130
    assert build.stderr().splitlines()[-1] == last
    assert build.num_built() == 0
    assert workers
    assert psutil.wait_procs(workers, timeout=DEADLINE_SECONDS)[1] == []


def test_a_unit_that_takes_longer_than_it_may_is_named_with_its_log(
    start: Callable[..., Build],
) -> None:
    build = start(["layer !hang", "head a"], "--timeout", "12")  # A worker's start is within it.

    assert build.process.wait(DEADLINE_SECONDS) == 6
    lines = build.stderr().splitlines()
    assert "  layer !hang: timed out" in lines
    log = Path(lines[lines.index("  layer !hang: timed out") + 1].removeprefix("    log: "))
    assert log.is_file()
    assert build.store.actions.get(key_of("head a")) is not None


def test_two_builders_trace_each_program_once(tmp_path: Path) -> None:
    """And each of them waits for what the other one is at."""
    write_spec(tmp_path, LLAMA)
    command = [*COMMAND, "build", "cache", "tiny.toml", "--store", "store", "-j", "1", "--json"]
    builders = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    done = [builder.communicate(timeout=DEADLINE_SECONDS) for builder in builders]

    assert [builder.returncode for builder in builders] == [0, 0], done
    documents = [json.loads(stdout) for stdout, _ in done]
    store = Store.open(tmp_path / "store")
    rows = list(store.actions.get_many(store.actions).values())
    assert sum(document["num_traced"] for document in documents) == sum("program" in row for row in rows)
    assert sum(document["num_compiled"] for document in documents) == sum("artifact" in row for row in rows)


@needs_ray
@pytest.mark.parametrize("number", [signal.SIGTERM, *nightly(signal.SIGINT)])
def test_a_build_on_ray_stops_at_a_signal_to_its_group_and_is_finished_here(
    start: Callable[..., Build], number: signal.Signals
) -> None:
    build = start([f"layer {n} !slow" for n in range(30)], "--ray", "local")
    build.wait_until(build.num_built)

    os.killpg(build.process.pid, number)

    assert build.process.wait(DEADLINE_SECONDS) == 130, build.stderr()
    assert "Traceback" not in build.stderr()
    assert "resumable" in build.stderr()
    num_built = build.num_built()
    assert 0 < num_built < 30
    rest = aotgaudi(build.folder, *build.arguments[:-2])
    assert json.loads(rest.stdout)["num_compiled"] == 30 - num_built


@needs_ray
def test_a_cluster_of_our_own_ends_with_a_builder_that_is_killed(start: Callable[..., Build]) -> None:
    build = start([f"layer {n} !slow" for n in range(30)], "--ray", "local")
    build.wait_until(build.num_built)
    processes = psutil.Process(build.process.pid).children(recursive=True)
    assert "gcs_server" in {process.name() for process in processes}

    build.process.kill()

    _, alive = psutil.wait_procs(processes, timeout=60.0)
    assert alive == []


@needs_ray
@pytest.mark.slow
def test_nodes_that_share_no_store_compile_through_a_remote(tmp_path: Path) -> None:
    """A real compiler: two workers trace and compile, and a builder elsewhere takes what they gave."""
    write_spec(tmp_path, LLAMA)
    spec = tmp_path / "tiny.toml"
    spec.write_text(spec.read_text(encoding="utf-8").replace('backend = "fake"', 'backend = "cpu"'))
    remote = tmp_path / "remote"
    common = ("build", "cache", "tiny.toml", "--remote", remote, "--json")

    made = aotgaudi(tmp_path, *common, "--store", "store", "--ray", "local", "-j", "2")
    taken = aotgaudi(tmp_path, *common, "--store", "other", "-j", "1")

    assert made.returncode == 0, made.stderr
    assert taken.returncode == 0, taken.stderr
    first, second = json.loads(made.stdout), json.loads(taken.stdout)
    assert first["num_compiled"] > 0
    assert (second["num_compiled"], second["num_traced"]) == (0, 0)
    assert second["remote"]["num_fetched"] > first["num_compiled"]


def test_a_build_that_is_killed_leaves_a_store_that_the_next_one_finishes(
    start: Callable[..., Build],
) -> None:
    build = start(SLOW_LABELS)
    build.wait_until(build.num_built)

    build.process.kill()
    build.process.wait(DEADLINE_SECONDS)

    rest = aotgaudi(build.folder, *build.arguments)
    assert rest.returncode == 0, rest.stderr
    assert build.num_built() == len(SLOW_LABELS)
    for digest in build.store.objects.digests():
        build.store.objects.verify(digest)
