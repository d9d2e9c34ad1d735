"""Building a capture of a server that compiles: what is sealed was proved, and nothing else is ever sealed."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.capture_receipt import CaptureReceipt
from aotgaudi.bundle.launch import WarmUp, load_launch
from aotgaudi.bundle.signing import generate_key
from aotgaudi.bundle.verify import verify_bundle
from aotgaudi.cli.main import cli
from aotgaudi.errors import CaptureError, SpecError, StoreError, store_error
from aotgaudi.share.remote_cache import Sharing
from aotgaudi.store.store import Store
from aotgaudi.wrap import prove as prove_module
from aotgaudi.wrap.adapters import fake
from aotgaudi.wrap.capture import Built, CaptureRequest, build_capture
from aotgaudi.wrap.capture_records import UnprovenRow, capture_key, find_unproven, unproven_key
from aotgaudi.wrap.events import Event, ProcessLog
from aotgaudi.wrap.exercise import completion
from aotgaudi.wrap.launch import weights_stamp
from aotgaudi.wrap.prove import RunResult, prove
from tests.guests.capturing import Bench, processes_of
from tests.guests.fake import Fake as GuestLaunch
from tests.guests.running import Runs
from tests.ports import free_port

EXACT = {"compile": 0, "generate": 0, "new_files": 0, "loads": 1, "requests": 22, "processes": 3}


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    folder = Path(tempfile.mkdtemp(prefix="ag-", dir="/tmp"))
    yield Bench(folder, level="sampler")  # It asks for logprobs, which take a kernel of their own.
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def built(bench: Bench) -> Built:
    """One build that goes well; what others of this module damage is a copy."""
    return bench.build()


@pytest.fixture
def receipt(built: Built) -> CaptureReceipt:
    assert isinstance(built.bundle.receipt, CaptureReceipt)
    return built.bundle.receipt


@pytest.fixture
def fresh(folder: Path) -> Bench:
    return Bench(folder)


def cold_of(receipt: CaptureReceipt, **changes: object) -> UnprovenRow:
    row = UnprovenRow(
        label="",
        files=receipt.files,
        left_out=(),
        answers=receipt.expected.answers,
        saved={"vllm.num_aot_artifacts_saved": 1},
        cold_seconds=1.0,
        cold_counts={},
    )
    return row.model_copy(update=changes)


class Counted:
    """A second start, of which only the counters are known."""

    def __init__(self, counters: dict[str, int]) -> None:
        self._counters = counters

    def counters(self, suffix: str = "") -> dict[str, int]:
        return {name: value for name, value in self._counters.items() if name.endswith(suffix)}


def test_what_torchs_own_caches_saved_need_not_be_looked_up_again(receipt: CaptureReceipt) -> None:
    """A real vLLM loads its artifact whole, and asks torch's caches for nothing that is in it."""
    saved = {"vllm.num_aot_artifacts_saved": 1, "torch.aot_autograd.autograd_cache_saved": 2}
    cold = cold_of(receipt, saved=saved)

    def missing(**counters: int) -> list[str]:
        ran = Counted({f"vllm.{name}": value for name, value in counters.items()})
        return list(prove_module._not_loaded(ran, cold))  # type: ignore[arg-type]

    assert missing(num_aot_artifacts_loaded=1) == []
    assert missing() == ["vllm.num_aot_artifacts: 0 of 1 artifacts that the first start saved were loaded"]


def tree(root: Path) -> dict[str, int]:
    return {str(path.relative_to(root)): path.stat().st_mtime_ns for path in root.rglob("*")}


@pytest.mark.smoke
def test_what_is_sealed_was_proved(bench: Bench, built: Built, receipt: CaptureReceipt) -> None:
    assert built.is_new
    assert receipt.proof.counts == EXACT
    assert receipt.proof.witnesses == ("counters", "files", "inotify", "process")
    assert receipt.expected.loads
    assert sum(receipt.expected.loads.values()) == 1
    assert receipt.expected.roles == {"APIServer": 1, "EngineCore": 1, "Worker": 1}
    assert len(receipt.expected.answers) == 22
    assert built.bundle.launch.id == receipt.manifest_id
    assert verify_bundle(built.bundle).is_intact
    assert {file.kind for file in receipt.files} >= {"library", "pickle", "python"}
    assert [row.pattern for row in receipt.left_out] == ["*.lock"]
    assert built.row.cold_counts["process"] >= 2
    assert built.row.places["root"] > 0
    assert (
        find_unproven(bench.store, unproven_key(built.bundle.launch, weights_stamp(bench.model)).hex) is None
    )


def test_a_build_leaves_nothing_running_and_nothing_in_its_place(bench: Bench, built: Built) -> None:
    assert processes_of(bench.folder) == []
    assert [
        path for path in bench.root.rglob("*") if path.is_file() and path.parts[-2] in ("cache", "tmp")
    ] == []
    assert list((bench.folder / "store" / "tmp").iterdir()) == []


def test_the_second_build_of_a_launch_runs_nothing(bench: Bench, built: Built) -> None:
    before = tree(built.bundle.path)
    shutil.rmtree(bench.root)

    again = bench.build()

    assert not again.is_new
    assert again.row == built.row
    assert tree(built.bundle.path) == before
    assert not bench.root.exists()


def test_another_builder_takes_the_capture_from_a_remote(bench: Bench, built: Built, tmp_path: Path) -> None:
    order, url = bench.order(out="shared"), str(tmp_path / "remote")
    other = Store.open(tmp_path / "store")

    given = build_capture(order, bench.store, bench.told, Sharing(url, push=True))
    taken = build_capture(replace(order, out=tmp_path / "taken"), other, bench.told, Sharing(url))

    assert (given.is_new, taken.is_new) == (False, False)
    assert given.remote is not None
    assert taken.remote is not None
    assert (given.remote.num_uploaded, taken.remote.num_fetched) == (1, 1)
    assert taken.bundle.index == built.bundle.index
    assert verify_bundle(taken.bundle).is_intact


def test_a_model_in_another_directory_is_sealed_without_a_run_and_named_where_it_is(
    bench: Bench, built: Built, receipt: CaptureReceipt
) -> None:
    moved = bench.moved("elsewhere")

    again = moved.build(out="moved")

    assert not again.is_new
    assert again.bundle.receipt == receipt
    assert again.bundle.launch.id == built.bundle.launch.id
    assert again.bundle.launch.model.name == str(moved.model)
    assert str(moved.model) in again.bundle.launch.words


def test_what_every_start_does_again_is_in_the_receipt(
    bench: Bench, receipt: CaptureReceipt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "FAKE", replace(fake.FAKE, residuals=lambda _: ("graphs are captured",)))
    with bench.setting() as setting:
        proved = prove(setting, cold_of(receipt))

    assert receipt.residuals == ()
    assert proved.receipt.residuals == ("graphs are captured",)


def test_what_is_traced_or_compiled_in_memory_in_a_warm_start_is_told_once() -> None:
    """Measured with vLLM 0.32: from a whole cache the first request with logprobs still traces, for seconds."""
    events = [
        Event("trace", number, 1.0, 7, "e", {"name": name})
        for number, name in enumerate(["b:2 g", "a:1 f", "a:1 f"])
    ]
    events.append(Event("compile", 3, 1.0, 7, "l", {"what": "numba", "name": "draft(int32)"}))
    many = [Event("trace", number, 1.0, 7, "e", {"name": f"{number:03}"}) for number in range(150)]

    assert list(prove_module._again([ProcessLog(7, tuple(events))])) == [
        "Dynamo traces a:1 f",
        "Dynamo traces b:2 g",
        "Numba compiles draft(int32)",
    ]
    assert list(prove_module._again([ProcessLog(7, tuple(many))]))[-1] == "Dynamo traces 50 more"


def test_a_fault_of_ours_in_a_build_is_not_called_a_log_that_cannot_be_written(
    fresh: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise OSError(errno.E2BIG, "Argument list too long")

    monkeypatch.setattr("aotgaudi.wrap.capture._cold", failing)

    with pytest.raises(OSError, match="Argument list too long"):
        fresh.build()
    (log,) = (fresh.folder / "store" / "logs").iterdir()
    assert log.stat().st_mode & 0o777 == 0o600


PROOFS = {
    "silent-miss": "Worker.* generate .*generated code again",
    "compile-at-start": "Worker.* process .*a compiler was run: ",
    "builds-by-script": "process .* a compiler was run: .*g\\+\\+ .*build.sh.cpp",
    "loads-what-it-made": "made.so was loaded, and was made since",
    "eager": "vllm.num_aot_artifacts: 0 of 1 artifacts that the first start saved were loaded",
}
MORE_PROOFS = {
    "plant-and-load": r"planted\.so",
    "load-failure": "Worker.* generate .*generated code again",
    "rewrite": "does not have the bytes that were sealed",
    "delete": "was removed from the cache",
    "counts-wrong": "Worker.* generate ",
    "skip-plugin": "an agent in 1 of 1 Worker",
    "worker-dies": "did not answer the request|ended before its report was complete",
    "plant": r"planted\.so",
}


def _refused(fault: str, why: str, bench: Bench, receipt: CaptureReceipt) -> None:
    with bench.setting(FAKE_FAULTS=fault) as setting, pytest.raises(CaptureError, match=why) as error:
        prove(setting, cold_of(receipt))

    assert error.value.exit_code == 6
    assert "nothing was sealed" in str(error.value)
    assert processes_of(bench.folder) == []


def test_a_second_start_that_answers_otherwise_is_no_proof(
    fresh: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = fresh.folder / "now"
    monkeypatch.setattr(fake, "FAKE", replace(fake.FAKE, settle=lambda _: now.touch()))

    with pytest.raises(CaptureError, match="not answered as in the build"):
        fresh.build(FAKE_FAULTS=f"wrong-answer@{now}")


LAZY = WarmUp(
    level="shapes",
    requests=(
        completion("greedy", is_greedy=True),
        completion("a bias", logit_bias={"5": 2}).model_copy(update={"at_start": False}),
        completion("logprobs", logprobs=1, is_greedy=True).model_copy(update={"at_start": False}),
        completion("sampled", temperature=0.5, copies=2),
    ),
)


@pytest.mark.parametrize(("fault", "asks_all"), [("", False), ("order-matters", True)])
def test_a_start_sends_what_was_proved_to_be_enough_or_all(
    fresh: Bench, tmp_path: Path, fault: str, asks_all: bool
) -> None:
    fresh.environ["FAKE_FAULTS"] = fault
    order = fresh.order()
    launch = order.launch.model_copy(update={"exercise": LAZY})
    built = build_capture(replace(order, launch=launch), fresh.store, fresh.told)

    start = built.bundle.require_capture().start

    assert start is not None
    assert (start.requests, start.asks_all) == ((5, True) if asks_all else (3, False))
    assert any("each start has to send all requests" in line for line in fresh.told.warnings) == asks_all
    assert load_launch(built.bundle.launch.dumps()) == launch
    guest = GuestLaunch(fresh.model, free_port(), (fault,) if fault else (), ("--log-level", "debug"))
    runs = Runs(built.bundle.path, tmp_path, fresh.environ)
    with runs.started(guest) as running:
        running.wait_ready()
        assert running.metric("aotgaudi_guest_warm") == 1
        assert running.log.count('"POST /v1/completions') == start.requests
        assert f"a start sends {start.requests} warm-up requests" in running.log
        running.complete(logprobs=1)
        assert running.report()["compilations"] == {}
        assert running.end() == 0


def test_a_server_that_probes_its_folders_and_leaves_nothing_is_captured(fresh: Bench) -> None:
    built = fresh.build(FAKE_FAULTS="probes,keeps-a-lock")

    assert built.bundle.require_capture().proof.counts["new_files"] == 0


@pytest.mark.parametrize("fault", PROOFS)
def test_a_second_start_that_is_not_warm_is_no_proof(
    fault: str, bench: Bench, receipt: CaptureReceipt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prove_module, "MAX_ADDITIONS", 0)  # What adding does is asked below, and at night.
    _refused(fault, PROOFS[fault], bench, receipt)


@pytest.mark.nightly
@pytest.mark.parametrize("fault", MORE_PROOFS)
def test_whatever_else_a_second_start_does_is_no_proof(
    fault: str, bench: Bench, receipt: CaptureReceipt
) -> None:
    _refused(fault, MORE_PROOFS[fault], bench, receipt)


def test_what_a_second_start_adds_is_added_and_proved_again(bench: Bench, receipt: CaptureReceipt) -> None:
    """A kernel is taken away, as if the first start had not come to it: the second one makes it, the third needs nothing."""
    fewer = tuple(file for file in receipt.files if not file.path.endswith(("logprobs.so", "logprobs.cpp")))
    assert len(fewer) == len(receipt.files) - 2

    with bench.setting() as setting:
        proved = prove(setting, cold_of(receipt, files=fewer)).receipt

    assert [file.path for file in proved.files] == [file.path for file in receipt.files]
    assert proved.proof.counts == EXACT


def test_what_is_seen_only_once_the_server_has_ended_is_no_proof_either(
    bench: Bench, receipt: CaptureReceipt, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = prove_module._Watch.look

    def look_late(watch: prove_module._Watch) -> None:
        if watch._session.child.poll() is not None:
            look(watch)

    monkeypatch.setattr(prove_module, "MAX_ADDITIONS", 0)
    monkeypatch.setattr(prove_module._Watch, "look", look_late)
    _refused("builds-by-script", PROOFS["builds-by-script"], bench, receipt)


def test_what_is_never_done_adding_is_given_up(
    bench: Bench, receipt: CaptureReceipt, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = []

    def run_twice_at_most(setting: object, held: object, cold: object) -> object:
        starts.append(len(held))  # type: ignore[arg-type]
        more = receipt.files[0].model_copy(update={"path": f"cache/more{len(starts)}"})
        return prove_module._Failure((), ("cache/more was added to the cache",), (more,))

    monkeypatch.setattr(prove_module, "_start", run_twice_at_most)
    with (
        bench.setting() as setting,
        pytest.raises(CaptureError, match="although what it added was captured; nothing was sealed"),
    ):
        prove(setting, cold_of(receipt))
    assert [count - starts[0] for count in starts] == [0, 1]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("leak-secret", "notes.json holds the value of FAKE_TOKEN, a secret"),
        ("link", "link is a link that leads out of the server's caches"),
        (
            "crash-at-start",
            r"exit code 13 before it served \(its last line: fatal: no device for \*\*\*; all of it: ",
        ),
        ("skip-plugins", "no process of the server has an agent"),
    ],
)
def test_a_cold_run_that_cannot_be_captured_seals_nothing(fault: str, why: str, fresh: Bench) -> None:
    with pytest.raises(CaptureError, match=why) as error:
        fresh.build(FAKE_FAULTS=fault, FAKE_TOKEN="hf_topsecret123")

    assert error.value.exit_code == 6
    assert "hf_topsecret123" not in str(error.value)
    assert not (fresh.folder / "out").exists()
    assert list(fresh.store.actions) == []
    assert processes_of(fresh.folder) == []


@pytest.mark.nightly
def test_a_server_that_hangs_is_given_up_and_ended(fresh: Bench) -> None:
    fresh.ready_seconds = 2.0

    with pytest.raises(CaptureError, match=r"did not serve within 2 s .its log, .*capture-.*\.log"):
        fresh.build(FAKE_FAULTS="hang")
    assert processes_of(fresh.folder) == []


STEP = """
import http.server, sys, threading, time

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
time.sleep(float(sys.argv[2]))
sys.exit(int(sys.argv[3]))
"""


def with_step(bench: Bench, seconds: str, status: str) -> CaptureRequest:
    """An order whose build first runs a program that serves for a while, as SGLang's DeepGEMM compiler does."""
    order = bench.order()
    step = (sys.executable, "-c", STEP, str(order.found.flags.address.port), seconds, status)
    adapter = replace(order.found.adapter, build_steps=lambda _: (step,))
    return replace(order, found=replace(order.found, adapter=adapter))


def test_a_build_step_may_serve_until_it_ends(fresh: Bench) -> None:
    assert build_capture(with_step(fresh, "1", "0"), fresh.store, fresh.told).is_new


@pytest.mark.parametrize(
    ("seconds", "status", "ready_seconds", "why"),
    [("0", "7", 60.0, "ended with exit code 7"), ("600", "0", 1.0, "did not end in time")],
)
def test_a_build_step_that_fails_or_does_not_end_is_named(
    fresh: Bench, seconds: str, status: str, ready_seconds: float, why: str
) -> None:
    fresh.ready_seconds = ready_seconds

    with pytest.raises(CaptureError, match=f" {seconds} {status}: {why} "):
        build_capture(with_step(fresh, seconds, status), fresh.store, fresh.told)

    assert not processes_of(fresh.folder)


def test_two_builds_of_one_launch_at_once_run_it_once(fresh: Bench) -> None:
    other = Bench(fresh.folder)
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.submit(fresh.build), pool.submit(other.build, out="other")
        results = [one.result(), two.result()]

    assert sorted(result.is_new for result in results) == [False, True]
    assert results[0].row == results[1].row
    assert [*fresh.told.warnings, *other.told.warnings] == [
        "another build of this launch is under way; waiting for its result"
    ]


def test_a_build_that_is_stopped_in_its_proof_goes_on_from_the_draft(
    fresh: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> RunResult:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("aotgaudi.wrap.capture.prove", stopped)
        with pytest.raises(KeyboardInterrupt):
            fresh.build()
    assert not (fresh.folder / "out").exists()

    fresh.told.lines.clear()
    assert fresh.build().is_new
    assert "done before, by a build that was stopped in its proof" in fresh.told.lines[0]


def test_a_destination_that_is_not_ours_is_refused_before_anything_is_run(fresh: Bench) -> None:
    (fresh.folder / "out").mkdir()
    (fresh.folder / "out" / "mine").touch()

    with pytest.raises(StoreError, match="neither a bundle nor empty"):
        fresh.build()
    assert not fresh.root.exists()


def _kill_while_it_builds(bench: Bench, seconds: float) -> None:
    """Starts a build in a process of its own, and kills that after so long."""
    build = subprocess.Popen(
        [sys.executable, "-m", "aotgaudi", *bench.command("--exercise", bench.level)],
        env=bench.environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        build.wait(seconds)
    except subprocess.TimeoutExpired:
        os.kill(build.pid, signal.SIGKILL)
        build.wait()


def _nothing_is_left(bench: Bench, seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while processes_of(bench.folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _check_kills(bench: Bench, moments: list[float]) -> None:
    for seconds in moments:
        _kill_while_it_builds(bench, seconds)
        assert _nothing_is_left(bench), processes_of(bench.folder)
        out = bench.folder / "out"
        if out.exists():  # It was done.
            shutil.rmtree(out)
            shutil.rmtree(bench.folder / "store")
    built = bench.build()

    assert verify_bundle(built.bundle).is_intact
    assert sorted(path.name for path in bench.folder.iterdir()) == ["model", "out", "r", "store"]


def test_a_build_that_is_killed_leaves_no_bundle_no_process_and_no_lock(fresh: Bench) -> None:
    _check_kills(fresh, [2.5])


@pytest.mark.nightly
def test_a_build_that_is_killed_at_twenty_moments_leaves_nothing(fresh: Bench) -> None:
    choose = random.Random(20)

    _check_kills(fresh, [choose.uniform(0.2, 14.0) for _ in range(20)])


def test_verify_compares_a_command_with_the_sealed_launch(
    bench: Bench, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bench.environ.items():
        monkeypatch.setenv(name, value)

    def verify(*words: str) -> Result:
        return CliRunner().invoke(cli, ["verify", str(built.bundle.path), *(["--", *words] if words else [])])

    same = verify(*bench.words("--log-level", "debug"))
    assert (same.exit_code, "this command can serve it" in same.output) == (0, True), same.output
    assert "no command was given to compare" in verify().output
    other = verify(*bench.words("--max-model-len", "256"))
    assert other.exit_code == 3
    assert "flag.max-model-len is 256, the capture was built for (default)" in other.output


def test_a_root_of_the_store_keeps_a_capture(bench: Bench, built: Built) -> None:
    store = str(bench.folder / "store")
    arguments = ["cache", "root", "add", "release", str(built.bundle.path), "--store", store, "--json"]

    kept = json.loads(CliRunner().invoke(cli, arguments).output)

    assert (kept["num_records"], kept["num_objects"]) == (1, built.bundle.index.counts.objects)
    assert bench.store.actions.get(capture_key(built.bundle.launch).hex) is not None


def test_fsck_finds_a_store_of_captures_sound_and_names_one_that_lost_a_file(
    bench: Bench, built: Built
) -> None:
    store = str(bench.folder / "store")

    assert "all sound" in CliRunner().invoke(cli, ["cache", "fsck", "--store", store]).output
    (bench.folder / "copy").mkdir()
    shutil.copytree(store, bench.folder / "copy" / "store")
    lost = Store.open(bench.folder / "copy" / "store")
    lost.objects.discard(built.row.objects[0])
    told = CliRunner().invoke(cli, ["cache", "fsck", "--store", str(lost.root)]).output
    assert f"capture of fake {bench.folder}/model" in told


def test_the_command_says_what_was_sealed_and_runs_nothing_again(
    bench: Bench, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bench.environ.items():
        monkeypatch.setenv(name, value)
    generate_key(bench.folder / "key")
    key = ("--sign-key", str(bench.folder / "key"))

    told = CliRunner().invoke(cli, bench.command(*key, out="signed"))

    assert told.exit_code == 0, told.output
    launch, gap, start, sealed = told.output.splitlines()
    assert re.fullmatch(
        r"start      \d+ warm-up requests, [\d,]+ tokens, about \d+ s before it is ready", start
    )
    assert gap.startswith("not asked  prompts in chunks: --max-num-batched-tokens is not given")
    assert re.fullmatch(
        r"launch     fake \(cpu\), 0 flags, \d+ variables?, model .*, id [0-9a-f]{12}\.\.\.", launch
    )
    assert re.fullmatch(
        r"sealed     .*/signed: \d+ files, 0\.1 MB, signed \(captured before; nothing was run\)",
        sealed,
    )
    document = json.loads(CliRunner().invoke(cli, bench.command(*key, "--json", out="signed")).stdout)
    assert document["launch_id"] == built.bundle.launch.id
    assert (document["is_new"], document["num_files"]) == (False, len(built.row.objects))


def test_another_server_on_the_port_is_not_taken_for_ours(fresh: Bench) -> None:
    order = fresh.order()
    port = order.found.flags.address.port
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(SpecError, match=f"--port {port}: is in use"),
    ):
        build_capture(order, fresh.store, fresh.told)

    assert not (fresh.folder / "out").exists()
    assert processes_of(fresh.folder) == []


def test_a_disk_that_is_full_at_any_step_leaves_no_bundle_and_the_next_build_works(
    fresh: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise store_error("write to", fresh.folder, OSError(errno.ENOSPC, "No space left on device"))

    for step in ("wrap.collect._take", "wrap.capture.record_capture", "bundle.staging._exchange"):
        with monkeypatch.context() as patched:
            patched.setattr(f"aotgaudi.{step}", full)
            with pytest.raises(StoreError, match="No space left"):
                fresh.build()
        assert not (fresh.folder / "out").exists()
        assert processes_of(fresh.folder) == []

    fresh.told.lines.clear()
    assert verify_bundle(fresh.build().bundle).is_intact
    assert fresh.told.lines == []  # Only sealing was left to do.


def test_a_request_of_the_exercise_that_is_refused_fails_the_capture_by_name(fresh: Bench) -> None:
    fresh.level = "sampler"

    with pytest.raises(
        CaptureError, match=r"answered the request 'JSON' of the exercise with 400: .*not here"
    ):
        fresh.build(FAKE_FAULTS="refuses-json")
    assert not (fresh.folder / "out").exists()


SWITCHED: dict[str, tuple[str, ...]] = {
    "LoRA adapters": ("--enable-lora", "--lora-modules", "sql=/nowhere"),
    "tools": ("--enable-auto-tool-choice",),
    "embeddings": ("--runner", "pooling"),
}


@pytest.mark.parametrize("feature", SWITCHED)
def test_what_a_launch_switches_on_is_captured_and_proved_and_told_apart_where_it_is_not(
    fresh: Bench, feature: str
) -> None:
    fresh.level = "sampler"
    whole = fresh.build(*SWITCHED[feature]).bundle.require_capture()
    fresh.level = "none"
    without = fresh.build(*SWITCHED[feature], out="without").bundle.require_capture()

    assert not [line for line in whole.not_exercised if line.startswith(feature)]
    assert f"{feature}: --exercise none does not ask for it" in without.not_exercised
    assert {file.path for file in without.files} < {file.path for file in whole.files}


def test_the_owners_requests_are_sealed_and_captured(fresh: Bench) -> None:
    own = fresh.folder / "own.jsonl"
    own.write_text('{"custom_id": "b", "url": "/v1/embeddings", "body": {"input": "Rome"}}\n')
    options = ("--exercise", "smoke", "--exercise", str(own))
    command = [*fresh.command(*options), "--max-num-batched-tokens", "600"]

    result = CliRunner().invoke(cli, command, env=fresh.environ)

    assert result.exit_code == 0, result.output
    bundle = open_bundle(fresh.folder / "out")
    assert [request.name for request in bundle.launch.exercise.requests] == [
        "greedy",
        "sampled",
        "own.jsonl:1 b",
    ]
    assert [file.path for file in bundle.require_capture().files if file.path.endswith("input.so")]
    shown = CliRunner().invoke(cli, ["verify", str(fresh.folder / "out")], env=fresh.environ).output
    assert "not asked kinds of sampling: --exercise smoke does not ask for it" in " ".join(shown.split())
