"""A server that drives the recipe cache as vllm-gaudi does is captured with the shapes of a spec, and proved."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.backends.base import Target
from aotgaudi.bucketing.bucket_file import DYNAMIC_SHAPES_VARIABLE
from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.launch import WarmUpLevel
from aotgaudi.errors import AotGaudiError, CaptureError, NotWarmError, SpecError
from aotgaudi.gaudi.recipes import RecipeName
from aotgaudi.manifest.bucket_file import bucket_file_of
from aotgaudi.manifest.coverage import left_out
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.parse import spec_from_json
from aotgaudi.store.store import Store
from aotgaudi.wrap import capture, exercise
from aotgaudi.wrap.adapters import vllm_gaudi
from aotgaudi.wrap.capture import Built, CaptureRequest, build_capture, build_shard
from aotgaudi.wrap.capture_records import Sharding, UnprovenRow
from aotgaudi.wrap.launch import Shaped, describe, shaped_command
from aotgaudi.wrap.run import run
from aotgaudi.wrap.run_options import Listen, Policy, RunOptions
from tests.environment import ROOT
from tests.guests.capturing import Told
from tests.guests_here import Here
from tests.hpu.conftest import InstalledDouble
from tests.ports import free_port
from tests.specs import ONE_SEQUENCE, spec_tables

pytestmark = pytest.mark.hpu_double

SERVER = ROOT / "tests" / "guests" / "gaudi_server.py"
BUCKETS = "cache/shapes/vllm.buckets"
TWO_RANKS = ("--tensor-parallel-size", "2")
TWO_SEQUENCES = {**ONE_SEQUENCE, "max_num_seqs": 2, "max_model_len": 64, "num_blocks": 16}
"""Enough for batches, padded or not, and for prompts in chunks beside decodes."""

TWO_CARDS = {"AOTGAUDI_DOUBLE_CARDS": "2", "PT_HPU_INFERENCE_MODE": "1"}


@dataclass
class Bench:
    """A folder with the stand-in as ``vllm``, beside a plugin's metadata, a model, a store and a place."""

    folder: Path
    double: Path
    flags: tuple[str, ...] = ()
    told: Told = field(default_factory=Told)
    level: WarmUpLevel = "smoke"
    limits: Mapping[str, int] = field(default_factory=lambda: ONE_SEQUENCE)
    ready_seconds: float = 240

    def __post_init__(self) -> None:
        here = Here(self.folder)
        here.install("vllm-gaudi", "0.27.0")
        here.install("vllm", "0.27.0")
        here.model()
        command = here.script()
        command.write_text(
            f"#!{sys.executable}\nimport runpy\nrunpy.run_path({str(SERVER)!r}, run_name='__main__')\n"
        )

    @property
    def spec(self) -> BuildSpec:
        target = {"backend": "hpu", "execution_mode": "torch_compile"}
        return spec_from_json(spec_tables(limits=self.limits, scheduler={"engine": "vllm"}, target=target))

    def environ(self, more: Mapping[str, str]) -> dict[str, str]:
        paths = [str(self.double), str(self.folder / "site"), str(ROOT)]
        kept = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
        return {
            **kept,
            "PATH": f"{self.folder / 'bin'}:{self.double / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": ":".join(paths),
            "AOTGAUDI_DOUBLE_COMPILE_MS": "1",
            "OMP_NUM_THREADS": "1",
            **more,
        }

    def words(self, port: int) -> tuple[str, ...]:
        """The user's command."""
        return ("vllm", "serve", str(self.folder / "tiny"), "--port", str(port), *self.flags)

    def shaped(self, **environ: str) -> Shaped:
        words = self.words(free_port())
        return shaped_command(words, self.environ(environ), self.spec, self.folder / "r")

    def order(self, **environ: str) -> CaptureRequest:
        given = self.shaped(**environ)
        launch = describe(
            given.found,
            root=str(self.folder / "r"),
            asked=given.asked(self.level),
            manifest_id=given.shapes.manifest_id,
        )
        ready = self.ready_seconds
        return CaptureRequest(
            given.found,
            launch,
            self.folder / "out",
            ready_seconds=ready,
            given=given.shapes.files,
            live_graphs=given.live_graphs(launch.exercise),
        )

    @property
    def store(self) -> Store:
        return Store.open(self.folder / "store")

    def build(self, **environ: str) -> Built:
        return build_capture(self.order(**environ), self.store, self.told)


@pytest.fixture(scope="module", autouse=True)
def _gaudi() -> Iterator[None]:
    """A card that the driver shows, which the double does not stand in for."""
    with pytest.MonkeyPatch.context() as patch:
        gaudi = Target(backend="hpu", machine="gaudi2")
        patch.setattr(vllm_gaudi, "VLLM_GAUDI", replace(vllm_gaudi.VLLM_GAUDI, target=lambda _: gaudi))
        yield


@pytest.fixture(scope="module")
def captured(double: InstalledDouble, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A bench whose server has been captured."""
    bench = Bench(tmp_path_factory.mktemp("captured"), double("1.24.1"))
    bench.build()
    return bench


def test_a_capture_holds_the_recipes_of_the_closed_table_and_is_proved_from_them_alone(
    captured: Bench,
) -> None:
    bundle = open_bundle(captured.folder / "out")
    receipt, launch = bundle.require_capture(), bundle.launch
    recipes = [file for file in receipt.files if file.kind == "recipe"]
    keys = {name.key for name in map(RecipeName.parse, (Path(file.path).name for file in recipes)) if name}
    table = bucket_file_of(captured.spec)
    assert launch.manifest_id == Manifest.of(table.spec).id
    assert len(recipes) == 2 * len(keys) > 0
    assert len(keys) >= len({*table.prompt, *table.decode})
    assert [file.path for file in receipt.files if file not in recipes] == [BUCKETS]
    assert receipt.expected.counters == {"hpu.graph_compilation": 0, "hpu.recipe_misses": 0}
    assert receipt.expected.loads == {f"recipe:{key}": 1 for key in keys}
    assert receipt.proof.counts["compile"] == receipt.proof.counts["new_files"] == 0
    assert launch.flags["num-gpu-blocks-override"] == "8"
    assert launch.place.variables["VLLM_BUCKETING_FROM_FILE"] == str(captured.folder / "r" / BUCKETS)


@pytest.mark.parametrize(
    "names", [("top_k",), pytest.param(("top_k", "top_p", "min_p"), marks=pytest.mark.nightly)]
)
def test_it_serves_warm_by_its_user_s_command_whatever_is_asked_at_the_same_time(
    newest: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, ...],
) -> None:
    """Greedy and random, in one batch or not; chunks of prompts beside decodes; two at a time and one that waits.

    The sampler has a graph for each set of truncations, and so 20 graphs with one of them, 74 with all three. A start does
    not ask for each: Dynamo traces the others on live traffic (docs/adr/0020-capture.md), and their recipes are there.
    """
    truncations = {text: body for text, body in exercise._truncations().items() if {*body} <= {*names}}
    monkeypatch.setattr(exercise, "_truncations", lambda: truncations)
    bench = Bench(tmp_path_factory.mktemp("m"), newest, level="shapes", limits=TWO_SEQUENCES)
    bench.build()
    port, guest, draws = free_port(), free_port(), random.Random(5)
    asked = [sampled(draws, TWO_SEQUENCES["max_model_len"], names) for _ in range(300)]
    with running(bench, port, guest) as process, ThreadPoolExecutor(3) as clients:
        wait_until_ready(port, process)
        list(clients.map(partial(ask, guest), asked))
        metrics = get(port, "/metrics")[1]
    assert "aotgaudi_guest_warm 1" in metrics
    counted = [line for line in metrics.splitlines() if line.startswith("aotgaudi_compilations_total")]
    is_live_trace = 'aotgaudi_compilations_total{phase="live",what="trace"}'
    traced = [float(line.rpartition(" ")[2]) for line in counted if line.startswith(is_live_trace)]
    others = {float(line.rpartition(" ")[2]) for line in counted if not line.startswith(is_live_trace)}
    assert others == {0.0}
    only_built = [
        one for one in open_bundle(bench.folder / "out").launch.exercise.requests if not one.at_start
    ]
    assert traced[0] <= len(only_built)


def test_a_server_whose_blocks_are_others_than_the_sealed_ones_is_ended(captured: Bench) -> None:
    with running(captured, free_port(), free_port(), STANDIN_FAULT="drifts") as process:
        process.join(240)

        assert process.exitcode == NotWarmError.exit_code


def serve(options: RunOptions) -> None:
    """`aotgaudi run`, in this process. A SIGTERM ends the guest, and so this."""
    try:
        code = run(options)
    except AotGaudiError as error:
        os.write(2, f"{error}\n".encode())
        code = error.exit_code
    os._exit(code)


@contextmanager
def running(bench: Bench, port: int, guest: int, **environ: str) -> Iterator[BaseProcess]:
    """`aotgaudi run` with the command that was given to the build, without what the shapes added to it."""
    options = RunOptions(
        bundle=bench.folder / "out",
        words=bench.words(guest),
        environ=bench.environ(environ),
        policy=Policy(require_warm=True),
        listen=Listen("127.0.0.1", port),
    )
    process = multiprocessing.get_context("fork").Process(target=serve, args=(options,))
    process.start()
    try:
        yield process
    finally:
        if process.is_alive():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGTERM)
        process.join(60)
        assert process.exitcode is not None


def wait_until_ready(port: int, process: BaseProcess, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.is_alive():
        with suppress(OSError):
            if get(port, "/ready")[0] == 200:
                return
        time.sleep(0.5)
    pytest.fail(f"not ready; exit code {process.exitcode}")


def get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def sampled(draws: random.Random, max_model_len: int, names: tuple[str, ...]) -> dict[str, Any]:
    """Returns a request of any length that fits, greedy or random, with or without each of `names` and a seed."""
    num_generated = draws.randrange(1, 9)
    num_tokens = draws.randrange(1, max_model_len - num_generated)
    body: dict[str, Any] = {"prompt": list(range(num_tokens)), "max_tokens": num_generated, "temperature": 0}
    if draws.random() < 0.7:
        values = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 1}
        body |= {name: values[name] for name in (*names, "seed") if draws.random() < 0.4}
        body["temperature"] = 0.8
    return body


def ask(port: int, asked: Mapping[str, Any]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"model": "tiny", **asked}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    assert connection.getresponse().status == 200


def compiled_live(bench: Bench, file: str, is_dynamic: str, fault: str = "") -> int:
    """Returns how many graphs greedy traffic compiles after the warm-up of a bucket file, beside a `fault` in our code."""
    (bench.folder / "buckets").write_text(file)
    code = (
        f"import json, sys\n{fault}from tests.guests.gaudi_server import Engine, Runner\n"
        "engine = Engine(json.loads(sys.argv[1]), Runner())\nengine.warm_up()\n"
        "before = engine.runner.num_compiled()\n"
        "for number in range(300):\n"
        "    engine.add(number, 59 - number * number % 59, number % 5 + 1, {'temperature': 0})\n"
        "while not engine.is_idle:\n    engine.step()\n"
        "print(engine.runner.num_compiled() - before)"
    )
    place = {"VLLM_BUCKETING_FROM_FILE": str(bench.folder / "buckets"), DYNAMIC_SHAPES_VARIABLE: is_dynamic}
    command = [sys.executable, "-c", code, json.dumps(dict(bucket_file_of(bench.spec).pinned))]
    shown = bench.environ(place)
    return int(subprocess.run(command, env=shown, check=True, stdout=subprocess.PIPE, text=True).stdout)


def test_without_static_shapes_a_closed_table_compiles_on_traffic_and_so_is_refused_and_told(
    newest: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The table is the same, each bucket was run, and all requests find one: a bucket is a graph in static shapes alone."""
    bench = Bench(tmp_path_factory.mktemp("d"), newest, limits=TWO_SEQUENCES)

    assert compiled_live(bench, bucket_file_of(bench.spec).text, "false") == 0
    assert compiled_live(bench, bucket_file_of(bench.spec).text, "true") > 0
    with pytest.raises(SpecError, match=DYNAMIC_SHAPES_VARIABLE):
        bench.build(**{DYNAMIC_SHAPES_VARIABLE: "true"})
    assert any(f"set {DYNAMIC_SHAPES_VARIABLE}=false" in line for line in left_out(bench.spec))


def test_a_fault_of_our_look_up_is_noticed_by_the_server_which_has_its_own(
    newest: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A look-up that takes buckets with a block too few would find one in this file for every step."""
    bench = Bench(tmp_path_factory.mktemp("f"), newest, limits=TWO_SEQUENCES)
    whole = bucket_file_of(bench.spec).text
    short = whole.replace("(2, 1, range(2, 9, 2))", "(2, 1, [2, 4, 6, 7])")
    assert short != whole
    fault = (
        "import aotgaudi.bucketing.upstream as ours\n"
        "ours.first_covering = lambda table, step: next(\n"
        "    one for one in table if all(have >= want - 1 for have, want in zip(one, step)))\n"
    )

    assert compiled_live(bench, short, "false", fault) > 0


@pytest.mark.nightly
def test_a_server_that_counts_its_blocks_anew_is_not_sealed(
    newest: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As where the number of KV blocks follows free memory: another shape, and so other recipes, at each start."""
    bench = Bench(tmp_path_factory.mktemp("b"), newest)  # Sockets' paths are short.

    with pytest.raises(CaptureError, match=r"is not warm.*nothing was sealed") as caught:
        bench.build(STANDIN_FAULT="drifts")

    assert "hpu" in str(caught.value)
    assert not (bench.folder / "out").exists()


def test_shards_are_run_and_their_union_is_proved(
    captured: Bench, newest: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose server died costs only itself; the server that starts from the union compiles nothing that a shard did.

    Nothing is requested: a batch with seeds would be a graph that no shard has.
    """
    bench = Bench(tmp_path_factory.mktemp("s"), newest, level="none")
    order = replace(bench.order(), sharding=Sharding(3, runs=False))
    with pytest.raises(CaptureError, match=r"no record of the shards 1/3, 2/3, 3/3 \(build capture --shard"):
        build_capture(order, bench.store, bench.told)
    order = replace(order, sharding=Sharding(3, runs=True))
    asked: list[int] = []

    def dying(order: CaptureRequest, number: int, *rest: Any) -> UnprovenRow:
        asked.append(number)
        if number == 2:  # Its server finds no module.
            order = replace(
                order, found=replace(order.found, environ={**order.found.environ, "PYTHONPATH": ""})
            )
        return build_shard(order, number, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(capture, "build_shard", dying)
        with pytest.raises(CaptureError, match="1 shard failed; the others are recorded"):
            build_capture(order, bench.store, bench.told)
    assert asked == [1, 2, 3]

    built = build_capture(order, bench.store, bench.told)

    assert len([line for line in bench.told.lines if line.startswith("shard ")]) == 3
    assert [line for line in bench.told.lines if line.startswith("3 shards: 1 run; ")]
    assert built.row.cold_counts.get("hpu", 0) == 0
    assert bench.told.lines[-1].endswith("; the shards' files are all that it takes, so this is the proof")
    whole = open_bundle(captured.folder / "out").require_capture()
    only_requested = {f.path for f in whole.files} - {f.path for f in built.bundle.require_capture().files}
    assert len(only_requested) == 2, "the files of one recipe"
    assert len(built.bundle.require_capture().files) == len(whole.files) - 2


def test_one_set_of_recipes_serves_every_rank(
    captured: Bench, newest: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In inference mode each rank has a directory of its own, with its number."""
    bench = Bench(tmp_path_factory.mktemp("t"), newest, flags=TWO_RANKS)

    built = bench.build(**TWO_CARDS)

    receipt = built.bundle.require_capture()
    of_rank = {
        rank: {Path(file.path).name for file in receipt.files if file.path.startswith(f"cache/hpu{rank}/")}
        for rank in (0, 1)
    }
    alone = open_bundle(captured.folder / "out").require_capture()
    assert of_rank[0] == of_rank[1] == {Path(f.path).name for f in alone.files if f.kind == "recipe"}
    assert receipt.expected.roles == {"APIServer": 1, "EngineCore": 1, "Worker": 2}
    assert set(receipt.expected.loads.values()) == {2}


@pytest.mark.nightly
def test_every_rank_is_watched(newest: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    bench = Bench(tmp_path_factory.mktemp("u"), newest, flags=TWO_RANKS)

    with pytest.raises(CaptureError, match="is not warm") as caught:
        bench.build(STANDIN_FAULT="drifts-1", **TWO_CARDS)

    assert "(VllmWorker-1)" in str(caught.value)
    assert "(VllmWorker-0)" not in str(caught.value)
