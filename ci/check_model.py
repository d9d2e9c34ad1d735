"""Right answers on the real model: compares a served bundle's programs with transformers.generate.

Greedy text of 20 prompts x 64 tokens. In float32 it must be identical; in bfloat16 the agreement is
reported (two roundings of one logit may tie: which of two equal logits wins is then chance).

    python ci/check_model.py --bundle DIR --model DIR [--prompts 20] [--tokens 64]
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from aotgaudi.backends.online import make_runtime
from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.engine.output import ErrorEvent, Event
from aotgaudi.engine.runner import ProgramRunner
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.llm.assemble import make_engine
from aotgaudi.llm.tokenizer import Tokenizer
from aotgaudi.manifest.codec import loads
from aotgaudi.runtime.allocator import keep_freed_memory
from aotgaudi.runtime.executables import ExecutableTable
from aotgaudi.runtime.load import Artifacts, Loader, declare_samplers

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "Photosynthesis is the process by which",
    "def fibonacci(n):",
    "The three laws of thermodynamics are",
    "In 1969, the first humans",
    "To bake a loaf of bread, you need",
    "The quick brown fox",
    "Water boils at",
    "A compiler is a program that",
    "The largest planet in the solar system",
    "Shakespeare wrote",
    "If it rains tomorrow, we will",
    "The recipe calls for two cups of",
    "Machine learning models are trained by",
    "The Roman Empire fell because",
    "My favourite season is autumn, since",
    "An electron is",
    "Dear Sir or Madam,\n\nI am writing to",
    "List of prime numbers: 2, 3, 5, 7,",
)


def main() -> int:
    """Returns 0 when the texts agree as they must."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    tokenizer = Tokenizer.load(args.model)
    prompts = [tokenizer.encode(text, True) for text in PROMPTS[: args.prompts]]
    dtype, ours = generate(args.bundle, args.model, tokenizer, prompts, args.tokens)
    theirs = transformers_generate(args.model, dtype, prompts, args.tokens)
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    agreeing = [common_prefix(a, b) for a, b in zip(ours, theirs, strict=True)]
    total = sum(len(t) for t in theirs)
    print(
        f"{dtype}: {same} of {len(prompts)} texts identical; {sum(agreeing)} of {total} tokens before the first difference"
    )
    return 0 if same == len(prompts) or dtype != "float32" else 1


def generate(
    bundle_dir: Path, model_dir: Path, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], num_tokens: int
) -> tuple[str, list[list[int]]]:
    """Returns the bundle's dtype and greedy tokens of every prompt, all batched together by the engine."""
    keep_freed_memory()
    bundle = open_bundle(bundle_dir)
    manifest = loads(bundle.manifest_bytes)
    table = ExecutableTable()
    declare_samplers(manifest.entries, table)
    loader = Loader(make_runtime(bundle.receipt.target), model_dir)
    loader.load(
        manifest.entries,
        Artifacts(bundle.receipt, bundle.program, bundle.read_object, bundle.object_path),
        table,
    )
    runner = ProgramRunner(table, manifest.spec.limits.block_size)
    engine = make_engine(manifest, runner, tokenizer)
    outputs: list[list[int]] = [[] for _ in prompts]
    ended = [threading.Event() for _ in prompts]

    def listen(i: int) -> object:
        def on_event(event: Event) -> None:
            if isinstance(event, ErrorEvent):
                ended[i].set()
                raise event.error
            outputs[i].extend(event.token_ids)
            if event.finish_reason:
                ended[i].set()

        return on_event

    engine.start()
    for i, ids in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
        engine.add(ids, params, request_id=str(i), on_event=listen(i))  # type: ignore[arg-type]
    for event in ended:
        event.wait()
    engine.shutdown(30)
    return manifest.spec.model.dtype, outputs


def transformers_generate(
    model_dir: Path, dtype: str, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    """Returns the greedy tokens of ``transformers.generate``, each prompt alone in its batch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
    outputs = []
    for ids in prompts:
        out = model.generate(torch.tensor([list(ids)]), max_new_tokens=num_tokens, do_sample=False)
        outputs.append(out[0, len(ids) :].tolist())
    return outputs


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns how many leading tokens agree."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


if __name__ == "__main__":
    sys.exit(main())
