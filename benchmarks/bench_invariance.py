"""Does a text depend on the others of its batch, and what does it cost that it does not?

Sixteen prompts, greedy and with a seed, each alone and then in companies of six sizes: 96 pairs each. With
``--default``, a bundle of the same limits in the default mode, both are compared, and step times are taken in turns.
Some prompts grow beyond their blocks, so that companies of sixteen preempt.

    aotgaudi build benchmarks/specs/smollm2-135m.invariant.toml -o invariant.bundle
    aotgaudi build default.toml -o default.bundle        # the same without batch_invariant
    python benchmarks/bench_invariance.py --invariant invariant.bundle --default default.bundle --model DIR
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Union

from aotgaudi import LLM
from aotgaudi.engine.steps import Step
from aotgaudi.llm import SamplingParams
from benchmarks import harness, online
from benchmarks.harness import Spread, Table

COMPANIES = (2, 3, 5, 8, 12, 16)
CONTEXT, PROMPT = 100, 128
SENTENCES = (
    "The harbour froze in January, and the boats stood still until March.",
    "She wrote every number twice, once in ink and once from memory.",
    "Nobody had opened the third drawer since the clock stopped.",
    "A train to the north leaves at six, unless the bridge is closed.",
)
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.7, "seed": 11},
}


def prompts() -> list[str]:
    """Sixteen different prompts of 15 to 125 tokens."""
    random = Random(9)
    return [f"Story {n}. " + " ".join(random.choices(SENTENCES, k=1 + n % 8)) for n in range(16)]


def main() -> None:
    """Compares, measures, prints and writes."""
    args = _arguments()
    bundles = {"invariant": args.invariant, **({"default": args.default} if args.default else {})}
    differing = {name: _differing(path, args) for name, path in bundles.items()}
    times = _times(bundles, args)
    tables = [_texts_table(differing, args), _times_table(times, args)]
    results = {
        "differing": differing,
        "times": {n: {c: s.json() for c, s in t.items()} for n, t in times.items()},
    }
    harness.finish("invariance", args, harness.environment([args.threads]), results, tables)


def _arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--invariant", type=Path, required=True)
    parser.add_argument("--default", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


# Texts


def _differing(bundle: Path, args: argparse.Namespace) -> dict[str, int]:
    """Returns how many of 96 texts have other tokens in company than alone, by setting."""
    with LLM(bundle, args.model, threads=args.threads, generation_config="vllm") as llm:
        found = {name: _differing_under(llm, setting, args.max_tokens) for name, setting in SETTINGS.items()}
    print(bundle.name, found, flush=True)
    return found


def _differing_under(llm: LLM, setting: Mapping[str, Any], max_tokens: int) -> int:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **setting)

    def tokens(company: Sequence[str]) -> list[tuple[int, ...]]:
        return [output.token_ids for output in llm.generate(company, params)]

    alone = [tokens([prompt])[0] for prompt in prompts()]
    return sum(
        got != want
        for size in COMPANIES
        for start in range(0, len(alone), size)
        for got, want in zip(
            tokens(prompts()[start : start + size]), alone[start : start + size], strict=True
        )
    )


# Times


def _times(bundles: Mapping[str, Path], args: argparse.Namespace) -> dict[str, dict[str, Spread]]:
    """Returns seconds by case and bundle, taken in turns."""
    loaded = {name: online.load(path, args.model, args.threads) for name, path in bundles.items()}
    times: dict[str, dict[str, Spread]] = {}
    for case, steps_of in CASES.items():
        steps = {name: steps_of(model) for name, model in loaded.items()}
        able = {name: found for name, found in steps.items() if not isinstance(found, str)}
        samples: dict[str, list[float]] = {name: [] for name in able}
        for number in range(1 + args.rounds):
            for name, found in able.items():
                seconds = _seconds(loaded[name], found)
                if number:  # The first round warms up.
                    samples[name].append(seconds)
        times[case] = {name: Spread(tuple(values)) for name, values in samples.items()}
        print(case, {name: spread.text(1, 1e3) for name, spread in times[case].items()}, flush=True)
    return times


def _decode(model: online.Online, batch_size: int) -> Sequence[Step] | str:
    step = model.decode(batch_size, CONTEXT, Random(0))
    return step if isinstance(step, str) else [step]


Case = Callable[[online.Online], Union[Sequence[Step], str]]
CASES: Mapping[str, Case] = {
    **{f"decode, {size} rows of {CONTEXT} tokens": partial(_decode, batch_size=size) for size in (1, 4, 16)},
    f"prompt of {PROMPT} tokens": lambda model: model.prefill(PROMPT, Random(0)),
}
"""Steps to time; a bundle that has no entry for one says why not."""


def _seconds(model: online.Online, steps: Sequence[Step]) -> float:
    start = time.perf_counter()
    for step in steps:
        model.runner.run(step)
    return time.perf_counter() - start


# Tables


def _texts_table(differing: Mapping[str, Mapping[str, int]], args: argparse.Namespace) -> Table:
    rows = tuple((name, *(f"{of[s]} of 96" for s in SETTINGS)) for name, of in differing.items())
    note = f"{args.max_tokens} tokens each, companies of {', '.join(map(str, COMPANIES))}, {args.threads} threads"
    return Table("Texts that differ in company from alone", ("bundle", *SETTINGS), rows, note)


def _times_table(times: Mapping[str, Mapping[str, Spread]], args: argparse.Namespace) -> Table:
    bundles = list(next(iter(times.values())))
    rows = tuple(
        (case, *(of[name].text(1, 1e3) if name in of else "-" for name in bundles))
        for case, of in times.items()
    )
    note = f"median (min to max) of {args.rounds} rounds in turns, {args.threads} threads"
    return Table("Milliseconds a step", ("step", *bundles), rows, note)


if __name__ == "__main__":
    main()
