"""Peak memory of the serving process after many requests, against weights + KV cache + 450 MB.

VmHWM counts every page that was ever resident at once: weights, mapped libraries, caches, buffers.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import harness
from harness import Server, Table, verdict

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.verify import hold_bundle
from aotgaudi.manifest.manifest import Manifest, loads
from aotgaudi.runtime.weights import placed, weight_bindings

ALLOWED_BYTES = 450e6
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def main() -> None:
    """Measures, prints, writes."""
    args = _arguments()
    machine = harness.environment(args.threads)
    manifest = loads((args.bundle / "manifest.json").read_bytes())
    weights, kv = weight_bytes(args.model), kv_bytes(manifest)
    allowed = weights + kv + ALLOWED_BYTES
    with harness.serving(args.bundle, args.model, args.threads) as server:
        ready = memory(server.pid)
        tokens = send(server, manifest, args)
        after = memory(server.pid)
        compilations = server.metric("aotgaudi_compilations_total")
    peak = after["VmHWM"]
    beyond, twice = peak - weights - kv, twice_bytes(args.bundle)
    rows = (
        ("weights (safetensors)", _mb(weights), ""),
        ("KV cache (limits)", _mb(kv), ""),
        ("resident when ready", _mb(ready["VmRSS"]), ""),
        (
            f"peak after {args.requests} requests, {tokens} tokens",
            _mb(peak),
            verdict(peak / 1e6, allowed / 1e6),
        ),
        ("peak beyond weights and KV cache", _mb(beyond), verdict(beyond / 1e6, ALLOWED_BYTES / 1e6)),
        ("of it: weights that are there twice, as stored and in a layout", _mb(twice), ""),
    )
    measurements: dict[str, Any] = {
        "weights_bytes": weights,
        "kv_bytes": kv,
        "allowed_bytes": allowed,
        "twice_bytes": twice,
        "when_ready": ready,
        "after": after,
        "tokens": tokens,
        "compilations": compilations,
    }
    note = (
        "VmHWM of the front and of the engine's process, added up; after: "
        f"anonymous {_mb(after['RssAnon'])}, mapped files {_mb(after['RssFile'])}."
    )
    table = Table("Memory of the server", ("measure", "MB", "target"), rows, note)
    harness.finish("memory", args, machine, measurements, [table])


def _arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def weight_bytes(model: Path) -> int:
    """The tensors of all safetensors files; their headers are left out."""
    total = 0
    for path in model.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        total += sum(
            tensor["data_offsets"][1] - tensor["data_offsets"][0]
            for name, tensor in header.items()
            if name != "__metadata__"
        )
    return total


def twice_bytes(path: Path) -> int:
    """Of weights that one unit takes as they are stored and another in a layout: a tied embedding is such a one."""
    bundle = open_bundle(path)
    held = hold_bundle(bundle)
    programs = [placed(program, bundle.require_programs()) for program in held.programs.values()]
    held.objects.close()
    specs = {spec.name: spec for program in programs for spec in program.weights}
    bindings = list(weight_bindings(programs))
    plain = {name for binding in bindings if binding.is_plain for name in binding.names}
    others = {name for binding in bindings if not binding.is_plain for name in binding.names}
    return sum(prod(specs[name].shape) * _DTYPE_BYTES[specs[name].dtype] for name in plain & others)


def kv_bytes(manifest: Manifest) -> int:
    """K and V of every layer, the padding block included."""
    model, limits = manifest.spec.model, manifest.spec.limits
    config = model.config
    heads = int(str(config["num_attention_heads"]))
    kv_heads = int(str(config.get("num_key_value_heads") or heads))
    head_dim = int(str(config.get("head_dim") or model.hidden_size // heads))
    shape = (2, limits.num_blocks + 1, kv_heads, limits.block_size, head_dim)
    return model.num_layers * prod(shape) * _DTYPE_BYTES[model.dtype]


def memory(pid: int) -> Counter[str]:
    """The memory rows of the status of a server's front and of its engine's process, in bytes, added up.

    Peaks count as if they came at once. Pages of files that both have count once: what the front shares with anybody is
    taken for the engine's, too.
    """
    wanted = ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem")
    found: Counter[str] = Counter()
    for each in (pid, *_engines(pid)):
        for line in Path(f"/proc/{each}/status").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name in wanted:
                found[name] += int(value.split()[0]) * 1024
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    (shared,) = [int(line.split()[1]) * 1024 for line in rollup if line.startswith("Shared_Clean:")]
    for name in ("VmHWM", "VmRSS", "RssFile"):
        found[name] -= shared
    return found


def _engines(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    lines = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    return [child for child, line in lines.items() if b"aotgaudi.server.engine.main" in line]


def send(server: Server, manifest: Manifest, args: argparse.Namespace) -> int:
    """Sends the requests, twice as many at once as the server runs. Returns the tokens they took."""
    random, limits = Random(args.seed), manifest.spec.limits
    longest = limits.max_model_len - args.max_tokens
    if longest < 1:
        raise SystemExit(
            f"--max-tokens {args.max_tokens} leaves no room: max_model_len is {limits.max_model_len}"
        )
    lengths = [longest, *(random.randint(1, longest) for _ in range(args.requests - 1))]

    def body(length: int) -> dict[str, Any]:
        prompt = [random.randrange(manifest.spec.model.vocab_size) for _ in range(length)]
        sampling = random.choice(({"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 50}))
        return {"model": "model", "prompt": prompt, "max_tokens": args.max_tokens, **sampling}

    bodies = [body(length) for length in lengths]
    with ThreadPoolExecutor(2 * limits.max_num_seqs) as pool:
        answers = list(pool.map(lambda one: server.post("/v1/completions", one), bodies))
    return sum(answer["usage"]["total_tokens"] for answer in answers)


def _mb(value: float) -> str:
    return f"{value / 1e6:.0f}"


if __name__ == "__main__":
    main()
