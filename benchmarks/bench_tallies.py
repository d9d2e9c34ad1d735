"""What counting costs: `aotgaudi.engine.stats`, once a decode step, on one thread and without a model.

Target: <= 10 us a step, whatever its rows.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import harness
from harness import Spread, Table, verdict

from aotgaudi.engine.request import Request
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.engine.stats import Counters
from aotgaudi.engine.steps import GREEDY_ROW, DecodeRow, DecodeStep, StepWork, work_of
from aotgaudi.entries import DecodeEntry

TARGET_US = 10.0
BLOCK_SIZE = 128


def main() -> None:
    """Measures, prints, writes."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--steps", type=int, default=2000, help="steps of a sample")
    parser.add_argument("--samples", type=int, default=15)
    args = parser.parse_args()
    machine = harness.environment(1)
    measurements, rows = {}, []
    for num_rows in args.rows:
        counted, before = measure(args, num_rows)
        added = counted.median - before.median
        measurements[str(num_rows)] = {"counted": counted.json(), "before": before.json(), "added_us": added}
        cells = (str(num_rows), f"{before.text()} us", f"{counted.text()} us", f"{added:.2f} us")
        rows.append((*cells, verdict(added, TARGET_US)))
    columns = ("rows", "work alone", "with entries, gaps", "added", "target")
    note = f"median of {args.samples} samples of {args.steps} steps; work alone is what was counted before."
    harness.finish(
        "tallies", args, machine, measurements, [Table("Counting a decode step", columns, tuple(rows), note)]
    )


def measure(args: argparse.Namespace, num_rows: int) -> tuple[Spread, Spread]:
    """Microseconds of a step, with tallies and with padded work alone; samples in turn."""
    step, requests = decode(num_rows)
    counted, before = [], []
    for _ in range(args.samples):
        before.append(alone(args.steps, step))
        counted.append(tallied(args.steps, step, requests))
    return Spread(tuple(counted)), Spread(tuple(before))


def decode(num_rows: int) -> tuple[DecodeStep, list[Request]]:
    """A step of so many rows, each of eight blocks, and its requests, which have all had a token."""
    row = DecodeRow(1, 8 * BLOCK_SIZE - 1, tuple(range(1, 9)), GREEDY_ROW)
    requests = [request(number) for number in range(num_rows)]
    return DecodeStep(DecodeEntry(num_rows, 1, 8 * num_rows), (row,) * num_rows), requests


def request(number: int) -> Request:
    made = Request(
        request_id=str(number), prompt_token_ids=[1], params=SamplingParams(), max_tokens=9, seed=0
    )
    made.last_token_at = 0.0
    return made


def tallied(num_steps: int, step: DecodeStep, requests: list[Request]) -> float:
    counters, clock = Counters(), time.perf_counter
    started = clock()
    for number in range(num_steps):
        counters.count(step, BLOCK_SIZE, requests, requests, (number * 0.01, (number + 1) * 0.01))
    return (clock() - started) / num_steps * 1e6


def alone(num_steps: int, step: DecodeStep) -> float:
    work: dict[str, Any] = {"decode": StepWork()}
    started = time.perf_counter()
    for _ in range(num_steps):
        work[step.entry.kind] += work_of(step, BLOCK_SIZE)
    return (time.perf_counter() - started) / num_steps * 1e6


if __name__ == "__main__":
    main()
