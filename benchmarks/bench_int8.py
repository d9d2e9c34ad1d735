"""Weights in 8 bits against the same model as it is stored: decode tokens/s, prefill, bytes, time to load, perplexity.

Two bundles of one model, whose specs differ in ``model.quantization = "int8"`` alone. Each is a process of its own, idle
while the other is measured; rounds alternate, so that a slow moment of the machine meets both. A step is one call of the
compiled programs with greedy sampling, without engine and HTTP. Perplexity is of the text of this project's accepted
decisions, which never change, token by token through decode steps, in pieces of --piece tokens that begin anew.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import harness
from harness import ROOT, Spread, Table, verdict

TEXTS = tuple(f"docs/adr/{number:04d}-*.md" for number in range(1, 13))
NAMES = ("as stored", "int8")
WARM_UPS = 3
GOAL, PERPLEXITY_GOAL = 1.4, 1.0


def main() -> None:
    """Measures, prints, writes; or is one of its own worker processes."""
    args = _arguments()
    if args.worker:
        _Worker(args.worker, args.model, args.threads).serve()
        return
    machine = harness.environment(args.threads)
    bundles = dict(zip(NAMES, (args.bundle, args.int8_bundle), strict=True))
    workers = {name: _Process(bundle, args) for name, bundle in bundles.items()}
    try:
        result = _measure(workers, args)
    finally:
        for worker in workers.values():
            worker.close()
    harness.finish("int8", args, machine, result, _tables(result, args))


def _arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--int8-bundle", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=256, help="length for prefill")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=32, help="decode steps a round")
    parser.add_argument("--tokens", type=int, default=1024, help="of the text, for perplexity; 0: none")
    parser.add_argument("--piece", type=int, default=256)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure(workers: dict[str, _Process], args: argparse.Namespace) -> dict[str, Any]:
    cases: list[dict[str, Any]] = [
        {"do": "decode", "batch": batch, "context": args.context, "steps": args.steps}
        for batch in args.batches
    ]
    cases.append({"do": "prefill", "length": args.prompt})
    rates: list[dict[str, Any]] = []
    for case in cases:
        samples: dict[str, list[float]] = {name: [] for name in workers}
        for _, (name, worker) in itertools.product(range(args.rounds), workers.items()):
            samples[name].append(worker.ask(case))
        rates.append({**case, "tokens_per_second": {n: Spread(tuple(s)).json() for n, s in samples.items()}})
        print(json.dumps({**case, **{n: Spread(tuple(s)).text(1) for n, s in samples.items()}}), flush=True)
    text = {"do": "perplexity", "tokens": args.tokens, "piece": args.piece}
    return {
        "rates": rates,
        "perplexity": {name: worker.ask(text) if args.tokens else None for name, worker in workers.items()},
        "loaded": {name: worker.ask({"do": "loaded"}) for name, worker in workers.items()},
    }


class _Process:
    """A worker process, seen from outside."""

    def __init__(self, bundle: Path, args: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--worker", bundle, "--model", args.model]
        command += ["--threads", str(args.threads)]
        self._process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            sys.exit("a worker has ended")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


class _Worker:
    """In a worker: one bundle, loaded."""

    def __init__(self, bundle: Path, model: Path, threads: int) -> None:
        import online

        started = time.perf_counter()
        self._online = online.load(bundle, model, threads)
        self._seconds = time.perf_counter() - started
        self._model = model
        self._random = Random(0)

    def serve(self) -> None:
        def work() -> None:
            for line in sys.stdin:
                print(json.dumps(self._answer(json.loads(line))), flush=True)

        harness.on_engine_thread(work)

    def _answer(self, request: dict[str, Any]) -> Any:
        do = request["do"]
        if do == "decode":
            return self._decode(request["batch"], request["context"], request["steps"])
        if do == "prefill":
            return self._prefill(request["length"])
        if do == "perplexity":
            return self._perplexity(request["tokens"], request["piece"])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"seconds": self._seconds, "peak_bytes": peak}

    def _decode(self, batch: int, context: int, steps: int) -> float:
        step = self._online.decode(batch, context, self._random)
        assert not isinstance(step, str), step
        for _ in range(WARM_UPS):
            self._online.runner.run(step)
        started = time.perf_counter()
        for _ in range(steps):
            self._online.runner.run(step)
        return batch * steps / (time.perf_counter() - started)

    def _prefill(self, length: int) -> float:
        steps = self._online.prefill(length, self._random)
        assert not isinstance(steps, str), steps
        started = time.perf_counter()
        for step in steps:
            self._online.runner.run(step)
        return length / (time.perf_counter() - started)

    def _perplexity(self, num_tokens: int, piece: int) -> float:
        from aotgaudi.bundle.model_directory import ModelDirectory
        from aotgaudi.engine.steps import DecodeStep
        from aotgaudi.llm.tokenizer import Tokenizer

        paths = [path for pattern in TEXTS for path in sorted(ROOT.glob(pattern))]
        text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
        tokens = Tokenizer.load(ModelDirectory(self._model)).encode(text, add_special_tokens=False)[
            :num_tokens
        ]
        losses = []
        for first in range(0, len(tokens), piece):
            part = tokens[first : first + piece]
            for position, (token, following) in enumerate(itertools.pairwise(part)):
                model_step = self._online.decode(1, position + 1, self._random)
                assert not isinstance(model_step, str), model_step
                step = DecodeStep(model_step.entry, (replace(model_step.rows[0], token_id=token),))
                logits = self._online.runner.logits(step)[0].float()
                losses.append(-logits.log_softmax(-1)[following].item())
        return math.exp(sum(losses) / len(losses))


def _tables(result: dict[str, Any], args: argparse.Namespace) -> list[Table]:
    rows = []
    for case in result["rates"]:
        medians = [case["tokens_per_second"][name]["median"] for name in NAMES]
        what = f"decode, batch {case['batch']}, context {case['context']}" if "batch" in case else ""
        ratio = medians[1] / medians[0]
        goal = verdict(ratio, GOAL, at_least=True) if case.get("batch") == 1 else ""
        row = (what or f"prefill of {case['length']}", *(f"{value:.1f}" for value in medians))
        rows.append((*row, f"{ratio:.2f}", goal))
    note = f"{args.threads} threads; medians of {args.rounds} rounds, in process, without engine and HTTP."
    rates = Table("Weights in 8 bits, tokens/s", ("what", *NAMES, "ratio", "goal"), tuple(rows), note)
    loaded = result["loaded"]
    more = [
        ("seconds to load", *(f"{loaded[name]['seconds']:.2f}" for name in NAMES), ""),
        ("peak memory, MB", *(f"{loaded[name]['peak_bytes'] / 1e6:.0f}" for name in NAMES), ""),
    ]
    if args.tokens:
        one, other = (result["perplexity"][name] for name in NAMES)
        goal = verdict(other / one - 1, PERPLEXITY_GOAL)
        more.insert(
            0, ("perplexity", f"{one:.3f}", f"{other:.3f}", f"{100 * (other / one - 1):+.2f} %: {goal}")
        )
    text = f"Perplexity: {args.tokens} tokens of accepted decisions (docs/adr), in pieces of {args.piece}."
    return [rates, Table("Weights in 8 bits, what else differs", ("what", *NAMES, ""), tuple(more), text)]


if __name__ == "__main__":
    main()
