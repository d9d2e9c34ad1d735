"""An installed vllm-gaudi does what we say of it, on the double of its bridge: ``ci/test --vllm-gaudi PYTHON``.

PYTHON is the interpreter of an environment that its owner made. The double is compiled for that environment's torch,
into a folder of the test, and found by PYTHONPATH: nothing is written into the environment.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.backends.base import Target
from aotgaudi.bucketing.strategy import Bucket, BucketingInputs
from aotgaudi.bucketing.upstream import UpstreamLookup, warmed_prompts
from aotgaudi.bucketing.versions import GaudiVersion, find_version
from aotgaudi.manifest.bucket_file import bucket_file_of
from aotgaudi.manifest.coverage import coverage_of_server
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.wrap.adapters.vllm_gaudi import VllmGaudi
from aotgaudi.wrap.from_vllm.command import VllmCommand
from aotgaudi.wrap.from_vllm.limits import Pin
from aotgaudi.wrap.from_vllm.spec import VllmSetup, spec_from_vllm
from aotgaudi.wrap.from_vllm.warm_up_log import warm_up_log
from tests.environment import ROOT
from tests.guests_real.tiny_models import LLAMA, written_model
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
    """A configuration. With `has_file` the server reads our bucket file."""

    limits: Limits = field(default_factory=Limits)
    prefix_caching: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    has_file: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        """The command's."""
        pairs = ((f"--{name.replace('_', '-')}", str(value)) for name, value in vars(self.limits).items())
        caching = "--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching"
        return ("--dtype", "bfloat16", *(word for pair in pairs for word in pair), caching)


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


@dataclass(frozen=True)
class Plugin:
    """Somebody's environment, with a double for it."""

    python: Path
    double: Path
    model: Path

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
    return Plugin(Path(given).absolute(), folder / "double", written_model(folder / "llama"))


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
            command=VllmCommand.parse(f"vllm serve {plugin.model} {' '.join(case.flags)}"),
            environment=variables,
            config=LLAMA,
            version=plugin.rules,
            pin=Pin(),
            read_file=lambda path: Path(path).read_text(encoding="utf-8"),
            digest_file=lambda path: path,
        )
        spec = spec_from_vllm(setup)[0]
        if not case.has_file:
            return cls(case, spec, variables)
        file = bucket_file_of(spec)
        path = plugin.model.parent / f"{len(list(plugin.model.parent.iterdir()))}.buckets"
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
        [plugin.python, ROOT / "tests" / "guests_real" / "vllm_gaudi_engine.py", plugin.model],
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
        served = (str(self.installed.python.parent / "vllm"), "serve", str(self.installed.model))
        place = ("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny")
        return (*served, *self.case.flags, *place, "--load-format", "dummy")

    def environ(self, more: Mapping[str, str]) -> dict[str, str]:
        return self.installed.environ(**self.case.variables, **more)


def test_a_server_from_a_capture_of_each_kind_of_batch_compiles_no_recipe_for_mixed_traffic(
    plugin: Plugin,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(VllmGaudi, "target", lambda *_: Target(backend="hpu", machine="gaudi2"))
    folder = tmp_path_factory.mktemp("c")  # Sockets' paths are short.
    bench = RealBench(folder, plugin.double, level="shapes", ready_seconds=1200, plugin=plugin)

    built = bench.build()

    receipt = built.bundle.require_capture()
    assert receipt.expected.counters == {"hpu.graph_compilation": 0, "hpu.recipe_misses": 0}
    assert receipt.proof.counts["compile"] == receipt.proof.counts["new_files"] == 0
    port, guest = free_port(), free_port()
    capfd.readouterr()
    with running(bench, port, guest) as process:
        wait_until_ready(port, process, 1200)
        first = answered(guest, GREEDY)
        with ThreadPoolExecutor(bench.case.limits.max_num_seqs) as clients:
            list(clients.map(partial(answered, guest), mixed_traffic(random.Random(5), bench.case.limits)))
        assert answered(guest, GREEDY) == first
        metrics = get(port, "/metrics")[1]
    counts = [line for line in metrics.splitlines() if line.startswith("aotgaudi_compilations_total{")]
    recipes = [line for line in counts if 'phase="live",what="hpu"' in line]
    assert counts
    assert sum(float(line.rpartition(" ")[2]) for line in recipes) == 0
    log = "".join(capfd.readouterr())
    assert "Warmup finished" in log
    assert "was not warmed-up" not in log


GREEDY: Mapping[str, Any] = {"prompt": [*range(10, 60)], "max_tokens": 12, "temperature": 0}


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


def answered(port: int, body: Mapping[str, Any]) -> str:
    """Returns the text of the answer to a completion."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    asked = json.dumps({"model": "tiny", **body})
    connection.request("POST", "/v1/completions", asked, {"Content-Type": "application/json"})
    text: str = json.load(connection.getresponse())["choices"][0]["text"]
    return text
