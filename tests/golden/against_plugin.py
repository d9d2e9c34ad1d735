"""Compares our tables and refusals with those of the plugin's own code, for random servers.

vllm-gaudi's code is not in this repository. Give a git directory of it (a bare clone will do), and how many servers to try::

    python -m tests.golden.against_plugin PATH/vllm-gaudi.git --count 9600 --seed 1

For each version a process loads the plugin's modules from the tag's files, with stand-ins for the device, and goes the way
of a server's start: all variables are read (``finalize_config``), attention is set up, buckets are generated. Its outcome is
a table, or *dies*: an exception, 5 seconds of computing, 3 GiB, or a million buckets. Ours is a table, *refused*, or a
*traceback*.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import types
from collections import Counter
from pathlib import Path
from typing import Any

TAGS = ("v0.11.2", "v0.13.0", "v0.14.1", "v0.16.0", "v0.17.1", "v0.19.1", "v0.21.0", "v0.24.0", "v0.26.0")
Server = dict[str, Any]
LARGEST = 2**31 - 1
_MOST_BUCKETS = 1_000_000
_SECONDS = 5.0
_ALIKE = ("plugin dies, we refused", "plugin table, we equal", "plugin late, we table")
_AXES = ("PROMPT_BS", "PROMPT_QUERY", "PROMPT_SEQ", "PROMPT_CTX", "DECODE_BS", "DECODE_BLOCK")
_ODD = (
    "+5",
    " 7 ",
    "1_000",
    "-3",
    "-1",
    "0",
    "abc",
    "1.5",
    "",
    "10**3",
    "1" + "0" * 30,
    "-" + "9" * 25,
    "\u0663",
    "0x10",
)
_LINES = ("(1, 128, 0)", "([1, 2], [128, 256, 512], range(0, 8, 2))", "(1, 1, range(1, 64))", "([1, 4], 1, [8, 64, 512])",
          "# none", "", "(1, 128)", "(1, 128, x)", "(4, 1, 2)", "(1, 4096, 0)")  # fmt: skip


def random_server(rng: random.Random) -> Server:
    """Returns the numbers and variables of a server that vLLM itself would start."""
    block_size = rng.choice((16, 64, 128, 128, 128, 256))
    length = rng.choice((rng.randint(2, 2000), 4096, 8192, rng.randint(2000, 40000), 131072))
    tokens = rng.choice((rng.randint(block_size, 9000), 512, 1024, 2048, 2048, 8192))
    seqs = min(tokens, rng.choice((1, 2, 3, 8, 64, 128, 256, rng.randint(1, 300))))
    blocks = -(-length // block_size) + rng.choice((1, 2, 7, 100, 4000, rng.randint(1, 5000)))
    environment: dict[str, str] = {}

    def maybe(chance: float, name: str, *values: str) -> None:
        if rng.random() < chance:
            environment[name] = rng.choice(values)

    maybe(0.6, "VLLM_BUCKETING_STRATEGY", "exp", "lin", "pad", "lin", "pad", "exponential_bucketing",
          "linear_bucketing", "EXP", "", "pad ")  # fmt: skip
    maybe(0.3, "VLLM_EXPONENTIAL_BUCKETING", "true", "false", "0", "maybe", "")
    maybe(0.4, "VLLM_CONTIGUOUS_PA", "true", "1", "false", "")
    maybe(0.1, "VLLM_MERGED_PREFILL", "true", "no")
    maybe(0.1, "VLLM_UNIFIED_ATTN", "true", "1", "false")
    maybe(0.1, "PT_HPU_SDPA_QKV_SLICE_MODE_FWD", "true", "false")
    for name in ("PT_HPU_SDPA_BC_FACTOR", "VLLM_FUSEDSDPA_SLIDE_THLD", "VLLM_DEFRAG_THRESHOLD"):
        maybe(0.04, name, "1024", "512", *_ODD)
    maybe(0.05, "VLLM_HPU_FSDPA_SLICE_ENABLED", "true", "false")
    maybe(0.05, "VLLM_HPU_FSDPA_SLICE_SEQ_LEN_THLD", "1024", "512", "4096", "-1", "x")
    maybe(0.05, "VLLM_HPU_FSDPA_SLICE_CHUNK_SIZE", "1024", "512", "8192", "x")
    maybe(0.15, "VLLM_PROMPT_BS_BUCKET_MAX", "1", "2", "4", "16", "400")
    for axis in _AXES:
        for parameter in ("MIN", "STEP", "MAX", "LIMIT", "PAD_MAX", "PAD_PERCENT"):
            usual = [str(rng.choice((1, 2, 4, 8, 32, 128, 256, 512, 2048))) for _ in range(8)]
            maybe(0.06, f"VLLM_{axis}_BUCKET_{parameter}", *usual, *rng.sample(_ODD, 2))
    lines = None
    if rng.random() < 0.12:
        lines = "\n".join([*_LINES[:1], *_LINES[2:3], *rng.choices(_LINES, k=4)][rng.choice((0, 0, 0, 1)) :])
    return {"numbers": {"max_num_seqs": seqs, "block_size": block_size, "max_num_batched_tokens": tokens,
                        "max_model_len": length}, "num_blocks": blocks, "environment": environment, "file": lines,
            "drafted": rng.choice((0, 0, 0, 0, 1, 3)), "mamba_chunk": rng.choice((0,) * 9 + (128, 256))}  # fmt: skip


def plugin_outcome(server: Server, folder: Path) -> Any:
    """Returns the plugin's tables, or why it dies. The plugin's package is on the path."""
    from vllm_gaudi.extension import runtime
    from vllm_gaudi.extension.bucketing import common

    for name in [*os.environ]:
        if name.startswith(("VLLM_", "PT_HPU")):
            del os.environ[name]
    os.environ |= {
        "VLLM_HW": "gaudi3",
        "VLLM_BUILD": "1.23.0.695",
        "VLLM_BRIDGE_MODE": "eager",
        "VLLM_MODEL_TYPE": "llama",
    }
    os.environ |= server["environment"]
    if server["file"] is not None:
        (folder / "buckets.txt").write_text(server["file"], encoding="utf-8")
        os.environ["VLLM_BUCKETING_FROM_FILE"] = str(folder / "buckets.txt")
    runtime.RUNTIME_CONFIG = None
    config = runtime.get_config()
    config.finalize()
    numbers = server["numbers"]
    most = config.VLLM_PROMPT_BS_BUCKET_MAX
    prompts = numbers["max_num_seqs"] if config.merged_prefill else 1 if most is None else most
    if not 1 <= prompts <= LARGEST:
        raise ValueError("no prompt is ever computed")
    unified = "VLLM_UNIFIED_ATTN" in runtime.EXPERIMENTAL_FLAGS and config.unified_attn
    assert not unified or config.merged_prefill, (
        "Unified attn requires merged_prefill!"
    )  # hpu_model_runner.py
    common.HPUBucketingManager._instance = None
    manager = common.HPUBucketingManager()
    accepted = common.HPUBucketingManager.initialize.__code__.co_varnames
    further = {"num_speculative_tokens": server["drafted"], "mamba_chunk_size": server["mamba_chunk"],
               "mamba_chunk_size_is_explicit": bool(server["mamba_chunk"])}  # fmt: skip
    manager.initialize(
        max_num_prefill_seqs=prompts, **numbers, **{k: v for k, v in further.items() if k in accepted}
    )
    _set_up_attention(folder)
    manager.num_hpu_blocks = server["num_blocks"]
    if unified:
        manager.generate_unified_buckets()
        return [_checked(manager.unified_buckets), []]
    manager.generate_prompt_buckets()
    manager.generate_decode_buckets()
    return [_checked(manager.prompt_buckets), _checked(manager.decode_buckets)]


def _set_up_attention(folder: Path) -> None:
    """Runs what each attention layer runs when the model is loaded (``SlicedFusedSDPABase`` in extension/utils.py)."""
    text = (folder / "utils.txt").read_text(encoding="utf-8")
    found = [
        n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == "_setup_slicing"
    ]
    if not found:
        return
    from vllm_gaudi.extension.logger import logger
    from vllm_gaudi.extension.runtime import get_config

    for name in ("warning_once", "debug_once"):
        setattr(logger(), name, lambda *_: None)
    scope: dict[str, Any] = {"math": __import__("math"), "os": os, "logger": logger, "get_config": get_config}
    exec(compile(ast.Module(found[:1], []), "utils.py", "exec"), scope)  # The plugin's own function.
    scope["_setup_slicing"](types.SimpleNamespace())


def _checked(table: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    if len(table) > _MOST_BUCKETS or any(abs(value) > LARGEST for row in table for value in row):
        raise OverflowError("a table that no server warms up")
    return [tuple(map(int, row)) for row in table]


def worker(folder: Path) -> None:
    """Reads servers as lines of JSON, and prints the plugin's outcome for each."""
    sys.path.insert(0, str(folder))
    for name in ("habana_frameworks", "habana_frameworks.torch", "habana_frameworks.torch.hpex",
                 "habana_frameworks.torch.hpex.kernels"):  # fmt: skip
        sys.modules[name] = types.ModuleType(name)
    sys.modules["habana_frameworks.torch.hpex.kernels"].FusedSDPA = object  # type: ignore[attr-defined]
    internal = types.SimpleNamespace(internal=types.SimpleNamespace(is_lazy=lambda: False))
    sys.modules["habana_frameworks.torch"].utils = internal  # type: ignore[attr-defined]
    sys.modules["habana_frameworks"].torch = sys.modules["habana_frameworks.torch"]  # type: ignore[attr-defined]
    hpu = types.SimpleNamespace(block_softmax_adjustment=object, softmax_fa2=object)
    sys.modules["torch"] = types.ModuleType("torch")
    sys.modules["torch"].ops = types.SimpleNamespace(hpu=hpu)  # type: ignore[attr-defined]
    __import__("vllm_gaudi.extension.bucketing.common")
    answers, sys.stdout = sys.stdout, sys.stderr
    _limit()
    for line in sys.stdin:
        print(json.dumps(guarded(plugin_outcome, json.loads(line), folder)), file=answers, flush=True)
    os._exit(0)  # Whatever the stand-ins have left behind.


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))

    def late(*_: object) -> None:
        raise TimeoutError("5 seconds")

    signal.signal(signal.SIGPROF, late)


def guarded(call: Any, *arguments: Any) -> Any:
    """Returns what a call returns, or ``{"kind": ..., "text": ...}`` of what it raises, after 5 seconds too."""
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)
    try:
        return call(*arguments)
    except BaseException as error:
        cause = error.__cause__ or error
        return {"kind": type(error).__name__, "text": f"{error} <- {type(cause).__name__}: {cause}"[:200]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def our_outcome(server: Server, version: str) -> Any:
    """Returns our tables. Raises SpecError where we refuse the server."""
    from aotgaudi.bucketing.strategy import BucketingInputs
    from aotgaudi.bucketing.versions import find_strategy, find_unified
    from aotgaudi.from_vllm.command import VllmCommand
    from aotgaudi.from_vllm.limits import Pin
    from aotgaudi.from_vllm.spec import VllmSetup, spec_from_vllm

    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in server["numbers"].items())
    drafted = f" --num-speculative-tokens {server['drafted']}" if server["drafted"] else ""
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
              "vocab_size": 100, "max_position_embeddings": 131072, "torch_dtype": "bfloat16"}  # fmt: skip
    if server["mamba_chunk"]:
        config |= {"layer_types": ["mamba", "attention"], "mamba_chunk_size": server["mamba_chunk"]}
    setup = VllmSetup(
        command=VllmCommand.parse(f"vllm serve m {flags}{drafted}"),
        environment=server["environment"]
        | ({} if server["file"] is None else {"VLLM_BUCKETING_FROM_FILE": "f"}),
        config=config,
        version=version,
        pin=Pin(num_blocks=server["num_blocks"]),
        read_file=lambda _: server["file"],
        digest_file=lambda _: "",
    )
    spec, _ = spec_from_vllm(setup)
    inputs = BucketingInputs.from_spec(spec.limits, spec.bucketing)
    if spec.bucketing.strategy == "unified":
        return [_checked(list(find_unified(version).unified_table(inputs))), []]
    strategy = find_strategy(version, spec.bucketing.strategy)
    return [_checked(list(strategy.prompt_table(inputs))), _checked(list(strategy.decode_table(inputs)))]


def extract(git_dir: str, tag: str, folder: Path) -> None:
    """Writes the tag's modules to a folder."""
    archive = subprocess.run(
        ["git", f"--git-dir={git_dir}", "archive", tag, "vllm_gaudi/extension"],
        check=True,
        capture_output=True,
    )
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive.stdout, check=True)
    (folder / "vllm_gaudi" / "__init__.py").touch()
    (folder / "vllm_gaudi/extension/utils.py").rename(folder / "utils.txt")  # It needs torch.


def compare(git_dir: str, tag: str, servers: list[Server], shown: int) -> Counter[str]:
    """Returns how many servers have each pair of outcomes, and prints some that differ."""
    from aotgaudi.errors import SpecError

    with tempfile.TemporaryDirectory() as name:
        extract(git_dir, tag, Path(name))
        text = "\n".join(map(json.dumps, servers))
        command = [sys.executable, "-m", "tests.golden.against_plugin", "--worker", name]
        lines = subprocess.run(
            command, input=text, check=True, capture_output=True, text=True
        ).stdout.splitlines()
    counts: Counter[str] = Counter()
    for server, line in zip(servers, lines, strict=True):
        theirs = json.loads(line)
        ours = guarded(our_outcome, server, f"vllm-gaudi@{tag}")
        died = isinstance(theirs, dict)
        kind = "table"
        if isinstance(ours, dict):
            is_refused = ours["kind"] in (SpecError.__name__, OverflowError.__name__)
            kind = "refused" if is_refused else "traceback"
        same = not died and kind == "table" and json.loads(json.dumps(ours)) == theirs
        late = (
            died and theirs["kind"] == "TimeoutError" and kind == "table"
        )  # A large table, or an endless loop.
        outcome = f"plugin {'late' if late else 'dies' if died else 'table'}, we {'equal' if same else kind}"
        counts[outcome] += 1
        if outcome not in _ALIKE and counts[outcome] <= shown:
            print(tag, outcome, json.dumps(server), "| plugin:", theirs if died else len(theirs[0]), "| ours:",
                  ours if isinstance(ours, dict) else "", file=sys.stderr)  # fmt: skip
    return counts


def main() -> None:
    """Compares, and exits with 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("git_dir", nargs="?")
    parser.add_argument("--worker", type=Path)
    parser.add_argument("--count", type=int, default=900)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", type=int, default=0, help="differences to print of each kind and version")
    parser.add_argument("--tags", nargs="*", default=TAGS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return
    rng = random.Random(options.seed)
    servers = [random_server(rng) for _ in range(options.count)]
    total: Counter[str] = Counter()
    signal.signal(signal.SIGPROF, lambda *_: (_ for _ in ()).throw(TimeoutError("5 seconds")))
    for number, tag in enumerate(options.tags):
        counts = compare(options.git_dir, tag, servers[number :: len(options.tags)], options.show)
        print(tag, dict(counts), flush=True)
        total += counts
    print("all", dict(total))
    sys.exit(any(outcome not in _ALIKE for outcome in total))


if __name__ == "__main__":
    main()
