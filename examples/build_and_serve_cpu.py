"""From a spec to text, in one Python process: compile what is missing, seal a bundle, look into it, generate from it.

    python examples/build_and_serve_cpu.py SPEC MODEL_DIR BUNDLE [--store DIR] [--prompt TEXT]

Run again, it compiles nothing. What it does is, on the command line: `aotgaudi build`, `aotgaudi verify`, and the part of
`aotgaudi serve` that needs no HTTP. Needs `pip install 'aotgaudi[build,serve]'`.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import aotgaudi
from aotgaudi.errors import AotGaudiError


def main() -> int:
    """Returns the process's exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("spec", type=Path, help="a spec, or the manifest of one")
    parser.add_argument("model", type=Path, help="the model directory: config, weights, tokenizer")
    parser.add_argument("bundle", type=Path, help="where the bundle is sealed")
    parser.add_argument("--store", type=Path, help="what was compiled before [default: the user's cache]")
    parser.add_argument("--prompt", default="The sea is")
    args = parser.parse_args()
    try:
        build(args.spec, args.bundle, args.store)
        show(args.bundle)
        generate(args.bundle, args.model, args.prompt)
    except AotGaudiError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def build(spec: Path, bundle: Path, store: Path | None) -> None:
    """Offline: compiles what `store` lacks of `spec`, and seals `bundle`."""
    result = aotgaudi.build(spec, bundle, store=store)
    print(f"built:     {len(result.outcome.compiled)} units in {result.outcome.seconds:.0f} s")


def show(path: Path) -> None:
    """Anywhere, without torch: what the bundle is for, what is in it, and that it is intact."""
    bundle = aotgaudi.open_bundle(path)
    kinds = Counter(entry.kind for entry in bundle.manifest.entries)
    print(f"manifest:  {bundle.manifest.id[:16]}, {', '.join(f'{n} {kind}' for kind, n in kinds.items())}")
    print(f"verified:  {'intact' if aotgaudi.verify_bundle(bundle).is_intact else 'damaged'}")


def generate(bundle: Path, model: Path, prompt: str) -> None:
    """Online: starts warm or not at all, and compiles nothing."""
    with aotgaudi.LLM(bundle, model) as llm:
        params = aotgaudi.SamplingParams(temperature=0, max_tokens=16)
        for output in llm.generate([prompt], params):
            print(f"generated: {output.text!r} ({output.finish_reason})")
        print(f"compiled while it ran: {sum(llm.warmth.compilations.values())}")


if __name__ == "__main__":
    sys.exit(main())
