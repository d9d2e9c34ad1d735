"""An installed vllm-gaudi does what we say of it, on the double of its bridge: ``ci/test --vllm-gaudi PYTHON``.

PYTHON is the interpreter of an environment that its owner made. The double is compiled for that environment's torch,
into a folder of the test, and found by PYTHONPATH: nothing is written into the environment.
"""

from __future__ import annotations

import http.client
import itertools
import json
import logging
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.backends.base import Target
from aotgaudi.bucketing.strategy import Bucket, BucketingInputs
from aotgaudi.bucketing.upstream import UpstreamLookup, warmed_prompts
from aotgaudi.bucketing.versions import GaudiVersion, find_version
from aotgaudi.from_vllm.command import VllmCommand
from aotgaudi.from_vllm.limits import Pin
from aotgaudi.from_vllm.spec import VllmSetup, spec_from_vllm
from aotgaudi.from_vllm.warm_up_log import warm_up_log
from aotgaudi.gaudi.live_graphs import not_closed
from aotgaudi.manifest.bucket_file import bucket_file_of
from aotgaudi.manifest.coverage import coverage_of_server, live_graphs_of
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.wrap.adapters import vllm_gaudi
from tests.environment import ROOT
from tests.guests_real.tiny_models import GEMMA3, LLAMA, QWEN3_MOE, written_model
from tests.hpu.test_vllm_gaudi import Bench, get, running, wait_until_ready
from tests.ports import free_port

pytestmark = [pytest.mark.guests, pytest.mark.timeout(5400)]

PYTHON_VARIABLE = "AOTGAUDI_VLLM_GAUDI_PYTHON"
NUM_GENERATED = 6


@dataclass(frozen=True)
class Limits:
    """Length, sequences, batched tokens, blocks, and tokens of a block."""

    max_model_len: int = 512
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 256
    num_gpu_blocks_override: int = 33
    block_size: int = 128


@dataclass(frozen=True)
class Case:
    """A configuration.

    With `has_file` the server reads our bucket file. `max_logprobs` is a flag; None for its default. `model` is a name of
    `MODELS`, `more` are other flags.
    """

    limits: Limits = field(default_factory=Limits)
    prefix_caching: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    has_file: bool = False
    max_logprobs: int | None = None
    model: str = "llama"
    more: tuple[str, ...] = ()

    @property
    def flags(self) -> tuple[str, ...]:
        """The command's."""
        pairs = ((f"--{name.replace('_', '-')}", str(value)) for name, value in vars(self.limits).items())
        caching = "--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching"
        logprobs = () if self.max_logprobs is None else ("--max-logprobs", str(self.max_logprobs))
        return (
            "--dtype",
            "bfloat16",
            *(word for pair in pairs for word in pair),
            caching,
            *logprobs,
            *self.more,
        )


SMALL = Limits(block_size=64, num_gpu_blocks_override=40)
ODD = Limits(700, 6, 384, 9)
CONTIGUOUS = {"VLLM_CONTIGUOUS_PA": "true"}  # And so the defragmenter.
SEVERAL = {"VLLM_PROMPT_BS_BUCKET_MAX": "4"}
MERGED = {"VLLM_MERGED_PREFILL": "true"}
CASES = {
    "plain": Case(),
    "prefix caching": Case(prefix_caching=True),
    "contiguous": Case(variables=CONTIGUOUS),
    "odd limits": Case(ODD, prefix_caching=True),
    "small blocks": Case(SMALL),
    "small blocks, contiguous": Case(SMALL, variables=CONTIGUOUS),
    "linear": Case(variables={"VLLM_BUCKETING_STRATEGY": "lin"}),
    "linear, prefix caching": Case(SMALL, prefix_caching=True, variables={"VLLM_BUCKETING_STRATEGY": "lin"}),
    "one sequence": Case(Limits(max_num_seqs=1)),
    "long": Case(Limits(1024, 8, 512, 80), prefix_caching=True),
    "four prompts a step": Case(Limits(512, 4, 512, 33), variables=SEVERAL),
    "four prompts a step, prefix caching": Case(ODD, prefix_caching=True, variables=SEVERAL),
    "merged prompts": Case(variables=MERGED),
    "merged prompts, long": Case(Limits(2048, 2, 512, 80), variables=MERGED),
    "file": Case(has_file=True),
    "file, prefix caching": Case(prefix_caching=True, has_file=True),
    "file, contiguous": Case(variables=CONTIGUOUS, has_file=True),
    "file, odd limits": Case(ODD, prefix_caching=True, has_file=True),
}


MODELS: Mapping[str, Mapping[str, Any]] = {"llama": LLAMA, "qwen3_moe": QWEN3_MOE, "gemma3": GEMMA3}


@dataclass(frozen=True)
class Plugin:
    """Somebody's environment, with a double for it. `models` has a folder for each of `MODELS`."""

    python: Path
    double: Path
    models: Path

    @property
    def rules(self) -> str:
        """The version whose rules apply."""
        code = "import importlib.metadata as m; print(m.version('vllm-gaudi'))"
        done = subprocess.run([self.python, "-c", code], check=True, capture_output=True, text=True)
        return f"vllm-gaudi@v{done.stdout.strip()}"

    def environ(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
        return {
            **kept,
            "PATH": f"{self.double / 'bin'}:{self.python.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(self.double),
            "AOTGAUDI_DOUBLE_COMPILE_MS": "0",
            "PT_HPU_LAZY_MODE": "0",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            **more,
        }


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Plugin:
    given = os.environ.get(PYTHON_VARIABLE)
    if not given:
        pytest.skip("no interpreter with vllm-gaudi is named: ci/test --vllm-gaudi PYTHON")
    folder = tmp_path_factory.mktemp("g")
    script = ROOT / "tests" / "double" / "install.py"
    subprocess.run([given, script, folder / "double", "--profile", "1.24.1"], check=True)
    for name, config in MODELS.items():
        written_model(folder / name, config)
    return Plugin(Path(given).absolute(), folder / "double", folder)


@dataclass(frozen=True)
class Served:
    """A case as we read it."""

    case: Case
    spec: BuildSpec
    variables: Mapping[str, str]

    @classmethod
    def of(cls, case: Case, plugin: Plugin) -> Served:
        variables = {"PT_HPU_LAZY_MODE": "0", **case.variables}
        setup = VllmSetup(
            command=VllmCommand.parse(f"vllm serve {plugin.models / case.model} {' '.join(case.flags)}"),
            environment=variables,
            config=MODELS[case.model],
            version=plugin.rules,
            pin=Pin(),
            read_file=lambda path: Path(path).read_text(encoding="utf-8"),
            digest_file=lambda path: path,
        )
        spec = spec_from_vllm(setup)[0]
        if not case.has_file:
            return cls(case, spec, variables)
        file = bucket_file_of(spec)
        path = plugin.models / f"{len(list(plugin.models.iterdir()))}.buckets"
        path.write_text(file.text, encoding="utf-8")
        return cls(case, file.spec, {**variables, **file.variables(str(path))})

    @property
    def configuration(self) -> dict[str, Any]:
        """What `vllm_gaudi_engine.py` reads."""
        engine = {**vars(self.case.limits), "enable_prefix_caching": self.case.prefix_caching}
        engine["dtype"] = "bfloat16"
        return {"engine": engine, "variables": dict(self.variables), "prompts": prompts(self.case.limits)}

    @property
    def version(self) -> GaudiVersion:
        version = find_version(self.spec.bucketing.version)
        assert isinstance(version, GaudiVersion)
        return version

    @property
    def inputs(self) -> BucketingInputs:
        return BucketingInputs.from_spec(self.spec.limits, self.spec.bucketing)

    @property
    def tables(self) -> tuple[tuple[Bucket, ...], tuple[Bucket, ...]]:
        strategy = self.version.strategies[self.spec.bucketing.strategy]
        return strategy.prompt_table(self.inputs), strategy.decode_table(self.inputs)

    def warmed(self) -> Iterator[tuple[str, Bucket]]:
        """The shapes of the warm-up's steps, in order: each table from its end, as the look-up pads the dummy batches."""
        inputs, (prompt, decode) = self.inputs, self.tables
        lookup = UpstreamLookup(self.version.lookup, inputs, prompt, decode)
        for shape in warmed_prompts(prompt, self.version.product, self.version.lookup, inputs):
            yield "prompt", shape
        for asked, _, blocks in reversed(decode):
            # Contiguous: each sequence has a block, the last of which is the bucket's.
            size = lookup.find_decode(asked, 2 * asked).bucket[0] if inputs.contiguous_pa else asked
            _, query, padded = lookup.find_decode(size, blocks).bucket
            yield "decode", (size, query, max(blocks, padded))


def prompts(limits: Limits) -> list[list[int]]:
    """Short and long ones, in chunks, and some that begin alike; they come at once."""
    draw = random.Random(25)
    most = limits.max_model_len - NUM_GENERATED - 1
    shared = [draw.randrange(3, 2048) for _ in range(most)]
    found = []
    for number in range(24):
        length = draw.choice([draw.randint(1, 64), draw.randint(1, most), most - draw.randint(0, 40)])
        begin = shared[: draw.randint(0, length)] if number % 3 == 0 else []
        found.append([*begin, *(draw.randrange(3, 2048) for _ in range(length - len(begin)))])
    return found


def distinct(steps: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(steps))


@pytest.fixture(scope="module")
def seen(plugin: Plugin) -> dict[str, tuple[Served, dict[str, Any]]]:
    """What engines of all cases did: one process, which imports vLLM once."""
    served = {name: Served.of(case, plugin) for name, case in CASES.items()}
    asked = "".join(json.dumps(one.configuration) + "\n" for one in served.values())
    done = subprocess.run(
        [plugin.python, ROOT / "tests" / "guests_real" / "vllm_gaudi_engine.py", plugin.models / "llama"],
        env=plugin.environ(TORCHDYNAMO_DISABLE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0"),
        input=asked,
        capture_output=True,
        text=True,
        check=False,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(CASES), done.stderr[-4000:]
    return {name: (served[name], answer) for name, answer in zip(CASES, answers, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_it_has_our_tables_and_warms_them_up_in_our_order(
    seen: dict[str, tuple[Served, dict[str, Any]]], name: str
) -> None:
    served, found = seen[name]

    assert "failed" not in found, found["failed"]
    prompt, decode = served.tables
    assert [tuple(bucket) for bucket in found["prompt"]] == list(prompt)
    assert [tuple(bucket) for bucket in found["decode"]] == list(decode)
    warmed = [(phase, tuple(shape)) for phase, *shape in found["warmed"]]
    assert distinct(warmed) == distinct(served.warmed())
    ours = [line.text for line in warm_up_log(Manifest.of(served.spec))]
    heads = ("Warming up", "temp=", "Starting sampler", "Sampler warmup", "Defragmenter", "Skipping defrag")
    assert [line for line in found["log"] if line.startswith(heads)] == ours


@pytest.mark.parametrize("name", CASES)
def test_what_is_cold_is_what_we_say_is_cold(
    seen: dict[str, tuple[Served, dict[str, Any]]], name: str
) -> None:
    served, found = seen[name]
    coverage = coverage_of_server(served.spec)
    assert coverage is not None

    warmed = {(phase, tuple(shape)) for phase, *shape in found["warmed"]}
    tables = dict(zip(("prompt", "decode"), served.tables, strict=True))
    left = {bucket for phase, table in tables.items() for bucket in table if (phase, bucket) not in warmed}
    assert left == set(coverage.cold)
    live = {(phase, tuple(shape)) for phase, *shape in found["live"]} - warmed
    outside = {shape for phase, shape in live if shape not in tables[phase]}
    assert {shape for _, shape in live} - outside <= set(coverage.cold)
    assert not outside or coverage.coverage.smallest is not None
    assert len(found["live"]) > len(prompts(served.case.limits))
    if served.case.has_file:
        assert not live


@dataclass
class RealBench(Bench):
    """The server of a case, in place of the stand-in."""

    plugin: Plugin | None = None
    case: Case = field(default_factory=Case)

    def __post_init__(self) -> None:
        pass

    @property
    def installed(self) -> Plugin:
        assert self.plugin is not None
        return self.plugin

    @property
    def spec(self) -> BuildSpec:
        return Served.of(self.case, self.installed).spec

    def words(self, port: int) -> tuple[str, ...]:
        served = (
            str(self.installed.python.parent / "vllm"),
            "serve",
            str(self.installed.models / self.case.model),
        )
        place = ("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny")
        return (*served, *self.case.flags, *place, "--load-format", "dummy")

    def environ(self, more: Mapping[str, str]) -> dict[str, str]:
        return self.installed.environ(**self.case.variables, **more)


CAPTURED = {
    "does not preempt": Case(Limits(512, 2, 256, 9), max_logprobs=1),  # Nine blocks: not one too many.
    "preempts": Case(Limits(512, 4, 256, 9), prefix_caching=True),
}
SURELY = {
    "does not preempt": {"prompt_logprobs", "penalties"},
    "preempts": {"prompt_logprobs", "preemption", "logprobs"},
}
"""What compiles in each case. In the second, Dynamo has stopped making graphs of the sampler when penalties come."""


@pytest.mark.parametrize("name", CAPTURED)
def test_only_traffic_that_we_call_not_closed_compiles_recipes_on_a_captured_server(
    plugin: Plugin,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    name: str,
) -> None:
    gaudi = Target(backend="hpu", machine="gaudi2")
    monkeypatch.setattr(vllm_gaudi, "VLLM_GAUDI", replace(vllm_gaudi.VLLM_GAUDI, target=lambda _: gaudi))
    folder = tmp_path_factory.mktemp("c")  # Sockets' paths are short.
    case = CAPTURED[name]
    bench = RealBench(folder, plugin.double, level="shapes", ready_seconds=3600, plugin=plugin, case=case)

    built = bench.build()

    receipt = built.bundle.require_capture()
    assert receipt.expected.counters == {"hpu.graph_compilation": 0, "hpu.recipe_misses": 0}
    assert receipt.proof.counts["compile"] == receipt.proof.counts["new_files"] == 0
    assert receipt.live_graphs == live_graphs_of(bench.spec)
    rows = {row.kind: row for row in receipt.live_graphs}
    assert receipt.start is not None
    assert not receipt.start.asks_all, bench.told.warnings
    assert receipt.start.requests < receipt.proof.counts["requests"], (
        "HTTP requests, fewer than the build's batches"
    )
    port, guest = free_port(), free_port()
    capfd.readouterr()
    with logged_to(folder / "supervisor.log"), running(bench, port, guest) as process:
        wait_until_ready(port, process, 3600)
        first = answered(guest, GREEDY)
        assert answered(guest, {**GREEDY, "logit_bias": {"77": 100}}) == first, (
            "it is ignored, as its row says"
        )
        live = Live(guest, folder / "r" / "cache" / "hpu", case)
        compiled = Counter[str]()
        for kind in (*TRAFFIC, "sampling"):
            compiled[kind] += live.compiled_by(kind)
        assert answered(guest, GREEDY) == first
        state = get(port, "/ready")[1]
        preempted = metric_of(guest, "vllm:num_preemptions_total")
    log = "".join(capfd.readouterr())
    print(f"{receipt.proof.counts['requests']} batches in the build; a start sends {receipt.start}")
    print(f"{name}: {dict(compiled)} recipes compiled live, {preempted:g} preempted")
    assert set(TRAFFIC) == set(rows)
    closed = {kind for kind, row in rows.items() if row.state != "open"}
    assert {kind: compiled[kind] for kind in closed} == dict.fromkeys(closed, 0)
    assert SURELY[name] <= {kind for kind, num in compiled.items() if num} <= set(rows) - closed
    assert (rows["preemption"].state == "open") == (preempted > 0)
    assert [line for line in state.splitlines() if line.startswith("not closed: ")] == [
        f"not closed: {line}" for line in not_closed(receipt.live_graphs)
    ]
    lines = (folder / "supervisor.log").read_text(encoding="utf-8").splitlines()
    (told,) = [line for line in lines if "the first compile after ready: " in line]
    assert "-live-" in told, "it names a request"
    assert "Warmup finished" in log
    assert "was not warmed-up" not in log


ONE, TWO = Limits(512, 1, 256, 5), Limits(512, 2, 256, 9)
OTHERS = {
    "lora": Case(ONE, max_logprobs=1, more=("--enable-lora", "--max-lora-rank", "8")),
    "qwen3_moe": Case(ONE, max_logprobs=1, model="qwen3_moe"),
    "gemma3": Case(ONE, max_logprobs=1, model="gemma3"),
    "two cards": Case(
        TWO, max_logprobs=1, more=("--tensor-parallel-size", "2"), variables={"AOTGAUDI_DOUBLE_CARDS": "2"}
    ),
}
CLOSED = (
    *("sampling", "n", "min_p, logit_bias, min_tokens", "unfinished prompts"),
    *("preemption", "structured outputs", "logprobs"),
)
"""The kinds of traffic that are closed or bounded for a llama with these limits: 202 requests."""


@pytest.mark.parametrize("name", OTHERS)
def test_closed_traffic_compiles_nothing_on_other_captured_servers(
    plugin: Plugin, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Room for adapters, experts, windows and two ranks.

    Adapters themselves are not served: the worker of vllm-gaudi 0.26.0 has no ``add_lora``, so `--lora-modules` ends it.
    """
    gaudi = Target(backend="hpu", machine="gaudi2")
    monkeypatch.setattr(vllm_gaudi, "VLLM_GAUDI", replace(vllm_gaudi.VLLM_GAUDI, target=lambda _: gaudi))
    folder, case = tmp_path_factory.mktemp("o"), OTHERS[name]
    bench = RealBench(folder, plugin.double, level="shapes", ready_seconds=3600, plugin=plugin, case=case)

    receipt = bench.build().bundle.require_capture()

    print(f"{name}: {receipt.proof.counts}; a start sends {receipt.start}", *bench.told.warnings, sep="\n")
    assert receipt.expected.counters == {"hpu.graph_compilation": 0, "hpu.recipe_misses": 0}
    assert receipt.expected.roles.get("Worker", 0) == (2 if name == "two cards" else 0)
    port, guest = free_port(), free_port()
    with logged_to(folder / "supervisor.log"), running(bench, port, guest) as process:
        wait_until_ready(port, process, 3600)
        first = answered(guest, GREEDY)
        live = Live(guest, folder / "r" / "cache" / "hpu", case)
        compiled = Counter({kind: live.compiled_by(kind) for kind in CLOSED})
        assert answered(guest, GREEDY) == first
    print(f"{name}: {dict(compiled)} recipes compiled live; a start sends {receipt.start}")
    print(*(f"{row.kind}: {row.state}" for row in receipt.live_graphs), sep="; ")
    closed = {row.kind for row in receipt.live_graphs if row.state != "open"} & {*CLOSED}
    assert {kind: compiled[kind] for kind in closed} == dict.fromkeys(closed, 0)
    assert {*CLOSED} - closed <= {"preemption"}


GREEDY: Mapping[str, Any] = {"prompt": [*range(10, 60)], "max_tokens": 12, "temperature": 0}


@contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """What aotgaudi logs, here and in processes that are forked, goes to a file, too."""
    logger, handler = logging.getLogger("aotgaudi"), logging.FileHandler(path)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()


Bodies = Iterator[Mapping[str, Any]]


def short_requests(draws: random.Random, num: int = 25, **more: Callable[[], Any]) -> Bodies:
    """Yields requests of some tokens with what `more` draws for each."""
    for _ in range(num):
        body = {"prompt": token_ids(draws, draws.randrange(1, 100)), "max_tokens": draws.randrange(2, 12)}
        temperature = {"temperature": draws.choice([0, 0.8]), "ignore_eos": True}
        yield {**body, **temperature, **{name: draw() for name, draw in more.items()}}


def token_ids(draws: random.Random, num: int) -> list[int]:
    return [draws.randrange(10, 2000) for _ in range(num)]


def _long_prompts(draws: random.Random, case: Case) -> Bodies:
    least, most = case.limits.max_num_batched_tokens, case.limits.max_model_len - 20
    yield from short_requests(draws, prompt=lambda: token_ids(draws, draws.randrange(least + 1, most)))


def _long_answers(draws: random.Random, case: Case) -> Bodies:
    """Yields requests that begin in two blocks and end in three or four: four of them do not fit eight blocks."""
    yield from short_requests(
        draws,
        prompt=lambda: token_ids(draws, draws.randrange(150, 250)),
        max_tokens=lambda: draws.randrange(140, 250),
        temperature=lambda: 0,
    )


def _logprobs(draws: random.Random, case: Case) -> Bodies:
    most = 5 if case.max_logprobs is None else case.max_logprobs
    kinds = ({}, {"top_k": lambda: 5}, {"top_p": lambda: 0.9, "seed": lambda: draws.randrange(9)})
    for kind in kinds:
        yield from short_requests(draws, 9, logprobs=lambda: draws.randint(0, most), **kind)


def _ignored(draws: random.Random, case: Case) -> Bodies:
    yield from short_requests(draws, 8, logit_bias=lambda: {str(draws.randrange(10, 200)): 1})
    yield from short_requests(draws, 8, min_tokens=lambda: 2, stop_token_ids=lambda: [draws.randrange(999)])
    yield from short_requests(draws, 9, min_p=lambda: 0.1, temperature=lambda: 0.8)


def _of_each(**more: Callable[[random.Random], Any]) -> Callable[[random.Random, Case], Bodies]:
    def bodies(draws: random.Random, case: Case) -> Bodies:
        return short_requests(draws, **{name: partial(draw, draws) for name, draw in more.items()})

    return bodies


TRAFFIC: Mapping[str, Callable[[random.Random, Case], Bodies]] = {
    "sampling": lambda draws, case: mixed_traffic(draws, case.limits, 50),
    "n": _of_each(
        n=lambda draws: draws.randint(2, 4),
        temperature=lambda _: 0.8,
        seed=lambda draws: draws.choice([None, 1]),
    ),
    "min_p, logit_bias, min_tokens": _ignored,
    "unfinished prompts": _long_prompts,
    "preemption": _long_answers,
    "structured outputs": _of_each(structured_outputs=lambda _: {"regex": "[a-f]{9,20}"}),
    "allowed_token_ids": _of_each(allowed_token_ids=lambda draws: token_ids(draws, draws.randrange(1, 5))),
    "bad_words": _of_each(bad_words=lambda draws: [draws.choice(["a", "be", "cat"])]),
    "logprobs": _logprobs,
    "prompt_logprobs": _of_each(prompt_logprobs=lambda _: 1),
    "penalties": _of_each(repetition_penalty=lambda _: 1.1, presence_penalty=lambda draws: draws.random()),
}
"""Kind of traffic -> requests: 302 in all. Penalties come last: after so many graphs Dynamo may make no more."""
ALONE = frozenset({"bad_words"})
"""Two such requests in a step end the engine of vllm-gaudi 0.26.0 (an IndexError)."""
MAY_FAIL = frozenset({"structured outputs"})
"""It ends some of several such requests: "grammar rejected tokens"."""


@dataclass
class Live:
    """A wrapped server that serves, and the folder of its recipes."""

    port: int
    recipes: Path
    case: Case
    draws: random.Random = field(default_factory=lambda: random.Random(5))

    def compiled_by(self, kind: str) -> int:
        """Sends the requests of a kind, as many at a time as the server computes. Returns how many recipes they compiled."""
        before = self._settled()
        num_clients = 1 if kind in ALONE else self.case.limits.max_num_seqs
        send = partial(answered, self.port, may_fail=kind in MAY_FAIL)
        with ThreadPoolExecutor(num_clients) as clients:
            list(clients.map(send, TRAFFIC[kind](self.draws, self.case)))
        return self._settled() - before

    def _settled(self) -> int:
        """Returns the number of recipes once it no longer grows: a thread of the bridge writes them."""
        seen = -1
        while seen != (now := len(list(self.recipes.glob("*_syn*.recipe")))):
            seen = now
            time.sleep(1)
        return now


def metric_of(port: int, name: str) -> float:
    lines = get(port, "/metrics")[1].splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def mixed_traffic(draws: random.Random, limits: Limits, num: int = 300) -> Iterator[Mapping[str, Any]]:
    """Yields greedy and random requests, some longer than a step takes, some with a prefix of others."""
    shared = [draws.randrange(10, 2000) for _ in range(limits.max_model_len)]
    for _ in range(num):
        length, more = draws.randrange(1, limits.max_model_len - 16), draws.randrange(1, 12)
        own = [draws.randrange(10, 2000) for _ in range(length)]
        prompt = shared[:length] if draws.random() < 0.4 else own
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": more, "ignore_eos": True, "temperature": 0}
        if draws.random() < 0.7:
            body["temperature"] = draws.choice([0.5, 0.8, 1.0])
            truncations = {"top_k": [5, 50], "top_p": [0.5, 0.9], "min_p": [0.05, 0.2]}
            body |= {
                name: draws.choice(values) for name, values in truncations.items() if draws.random() < 0.4
            }
            if draws.random() < 0.3:
                body["seed"] = draws.randrange(100)
        yield body


def answered(port: int, body: Mapping[str, Any], *, may_fail: bool = False) -> str:
    """Returns the text of the answer to a completion; nothing for one that fails and `may_fail`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    asked = json.dumps({"model": "tiny", **body})
    headers = {"Content-Type": "application/json", "X-Request-Id": f"live-{next(NUMBERS)}"}
    connection.request("POST", "/v1/completions", asked, headers)
    answer = connection.getresponse()
    document = json.load(answer)
    assert answer.status == 200 or may_fail, document
    text: str = "" if may_fail else document["choices"][0]["text"]
    return text


NUMBERS = itertools.count()
