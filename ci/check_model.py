"""Right answers on the real model: compares a served bundle's programs with transformers.generate.

Greedy text of 20 prompts x 64 tokens. In float32 it must be identical; in bfloat16 the agreement is
reported (two roundings of one logit may tie: which of two equal logits wins is then chance).

    python ci/check_model.py --bundle DIR --model DIR [--prompts 20] [--tokens 64]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from aotgaudi import LLM, SamplingParams, open_bundle

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
    dtype = open_bundle(args.bundle).manifest.spec.model.dtype
    with LLM(args.bundle, args.model) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=args.tokens)
        outputs = llm.generate(PROMPTS[: args.prompts], params)
        if sum(llm.warmth.compilations.values()):
            sys.exit("something was compiled while it ran")
    prompts = [output.prompt_token_ids for output in outputs]
    ours = [list(output.token_ids) for output in outputs]
    theirs = transformers_generate(args.model, dtype, prompts, args.tokens)
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    agreeing = [common_prefix(a, b) for a, b in zip(ours, theirs, strict=True)]
    total = sum(len(t) for t in theirs)
    print(
        f"{dtype}: {same} of {len(prompts)} texts identical; {sum(agreeing)} of {total} tokens before the first difference"
    )
    return 0 if same == len(prompts) or dtype != "float32" else 1


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
