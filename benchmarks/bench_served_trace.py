"""A tuned bundle beside the default one, on a real model: both serve the same part of a public trace, in turns.

``python benchmarks/bench_served_trace.py TRACE --model MODEL --work WORK``

The spec's table is the default one. What is lacking in WORK is made there first, in this order, and kept:

1. **The default bundle**, built.
2. **Step times.** It serves requests of the trace's first half; the text of its ``/metrics`` is kept.
3. **The trace, scaled.** Lengths are divided by --divisor and rounded up; requests that do not fit then are left out.
   Arrivals are stretched until the default table, replayed with these step times on what is served below, is busy for
   --busy of the time. Whatever it would be on another machine, so the load is as high on it.
4. **The tuned spec.** ``aotgaudi tune`` on the scaled first half, with these step times, for as many entries as the
   default table has.
5. **The tuned bundle**, built.

Then both are started, and serve the same slices of the second half, which are spread over it evenly: a slice is served by
one and then by the other, each being first as often. Prompts are random tokens, decoding is greedy, and answers are as
long as the trace says. At last each serves requests of the second half that come all at once, some times: no arrivals
bound these.
Only step times and serving need the machine for themselves: ``--stop-before`` ends before what comes after them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import harness
from harness import ROOT, Server, Table, percentile
from streams import Answer, Turn, stream_all

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.manifest.coverage import coverage_of
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.parse import load_spec
from aotgaudi.traffic.cost import WorkModel, read_step_times
from aotgaudi.traffic.replay import replay
from aotgaudi.traffic.trace import Trace, read_trace

NAMES = ("default", "tuned")
MODEL_NAME = "model"
STRETCHES = 24
"""Halvings of the interval in which the stretch is sought."""
MOST_STRETCH = 4096.0
WARM_UP_REQUESTS = 8


def main() -> None:
    """Makes what is lacking, measures, prints, writes."""
    args = _arguments()
    work: Path = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    spec = load_spec(args.spec)
    bundles = {name: work / f"{name}.bundle" for name in NAMES}
    _build(bundles["default"], args.spec, args)
    first, second = (_scaled(half, args.divisor) for half in read_trace(args.trace).halves())
    first, second = _fitting(first, spec.limits), _fitting(second, spec.limits)
    if args.stop_before == "measuring":
        return
    _measure_steps(work / "metrics.txt", bundles["default"], first, args)
    if args.stop_before == "tuning":
        return
    model = read_step_times(work / "metrics.txt").work(spec.limits.block_size)
    stretch = _kept_stretch(
        work / "stretch.txt",
        lambda: _stretch(spec, model, lambda factor: _slices(_stretched(second, factor), args), args.busy),
    )
    _tune(work, spec, _stretched(first, stretch), args)
    _build(bundles["tuned"], work / "tuned.toml", args)
    if args.stop_before == "serving":
        return
    machine = {**harness.environment(args.threads), "commit": _commit()}
    slices = _slices(_stretched(second, stretch), args)
    served = _serve(bundles, [*slices, *_bursts(second, args)], args)
    replayed = {name: _replayed(open_bundle(path).manifest, model, slices) for name, path in bundles.items()}
    measurements = {
        "stretch": stretch,
        "slices": [len(one) for one in slices],
        "at_once": args.at_once,
        "bundles": {name: _described(open_bundle(path).manifest) for name, path in bundles.items()},
        "step_times": (work / "metrics.txt")
        .read_text(encoding="utf-8")
        .count("aotgaudi_entry_step_seconds_count{"),
        "replayed": replayed,
        "served": served,
    }
    harness.finish("served_trace", args, machine, measurements, _tables(measurements, args))


def _arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__)
    parser.add_argument("trace", type=Path, help="CSV, .gz or not")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="keeps bundles, and what was tuned")
    parser.add_argument(
        "--spec", type=Path, default=ROOT / "benchmarks" / "specs" / "smollm2-135m.trace.toml"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--divisor", type=int, default=8, help="of the lengths")
    parser.add_argument("--busy", type=float, default=0.7, help="of the time, the default table as replayed")
    parser.add_argument("--rounds", type=int, default=4, help="slices")
    parser.add_argument("--seconds", type=float, default=40.0, help="a slice")
    parser.add_argument("--bursts", type=int, default=4)
    parser.add_argument("--at-once", type=int, default=48, help="requests of a burst")
    parser.add_argument("--calibration", type=int, default=160, help="requests for the step times")
    parser.add_argument("--query-step", type=int, help="of the tuned table [default: a block]")
    parser.add_argument("--stop-before", choices=("measuring", "tuning", "serving"))
    return parser.parse_args()


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10"]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip() or "unknown"


# What is served


def _scaled(trace: Trace, divisor: int) -> Trace:
    prompts, answers = (
        tuple(-(-num // divisor) for num in column)
        for column in (trace.prompt_tokens, trace.generated_tokens)
    )
    return Trace(trace.arrivals, prompts, tuple(max(1, num) for num in answers))


def _fitting(trace: Trace, limits: ServingLimits) -> Trace:
    """Those requests that a server with these limits answers in full."""
    longest = min(limits.max_model_len, limits.num_blocks * limits.block_size)
    rows = zip(trace.arrivals, trace.prompt_tokens, trace.generated_tokens, strict=True)
    kept = [row for row in rows if row[1] + row[2] <= longest]
    return Trace(*map(tuple, zip(*kept, strict=True)))  # type: ignore[arg-type]


def _stretched(trace: Trace, factor: float) -> Trace:
    return trace.faster(1 / factor)


def _slices(trace: Trace, args: argparse.Namespace) -> list[Trace]:
    """As many slices as rounds, each as long, spread evenly over a trace."""
    every = trace.seconds / args.rounds
    found = []
    for number in range(args.rounds):
        begin = number * every
        inside = [i for i, at in enumerate(trace.arrivals) if begin <= at < begin + min(every, args.seconds)]
        if inside:
            found.append(trace.part(inside[0], inside[-1] + 1))
    return found


def _bursts(trace: Trace, args: argparse.Namespace) -> list[Trace]:
    """The first requests of a trace, some at a time, all of which come at once."""
    parts = (trace.part(args.at_once * number, args.at_once * (number + 1)) for number in range(args.bursts))
    return [Trace((0.0,) * len(part), part.prompt_tokens, part.generated_tokens) for part in parts]


def _kept_stretch(path: Path, find: Callable[[], float]) -> float:
    """What `find` found the first time: finding it takes a minute of the processor, before a measurement."""
    if not path.exists():
        path.write_text(repr(find()), encoding="utf-8")
    return float(path.read_text(encoding="utf-8"))


def _stretch(
    spec: BuildSpec, model: WorkModel, slices_of: Callable[[float], Sequence[Trace]], busy: float
) -> float:
    """The least stretch of arrivals with which the spec's table is busy for no more than that part of the time."""
    low, high = 1 / MOST_STRETCH, MOST_STRETCH
    manifest = Manifest.of(spec)
    for _ in range(STRETCHES):
        middle = (low * high) ** 0.5
        if _replayed(manifest, model, slices_of(middle))["busy"] > busy:
            low = middle
        else:
            high = middle
    return high


def _replayed(manifest: Manifest, model: WorkModel, slices: Sequence[Trace]) -> dict[str, float]:
    """What the table of a manifest does with slices, by step times alone."""
    table, limits = BucketTable.from_entries(manifest.entries), manifest.spec.limits
    seconds = steps = span = needed = 0.0
    for one in slices:
        found = replay(one, limits, table, model.seconds, manifest.spec.scheduler.policy)
        seconds += sum(model.seconds(entry) * count for (_, entry), count in found.steps.items())
        needed += sum(model.seconds(needs) * count for (needs, _), count in found.steps.items())
        steps, span = steps + found.num_steps, span + found.seconds
    return {
        "busy": seconds / max(span, 1e-9),
        "step_seconds": seconds,
        "steps": steps,
        "padding": 1 - needed / max(seconds, 1e-9),
    }


def _described(manifest: Manifest) -> dict[str, Any]:
    return {
        "prompts": [list(entry.row()) for entry in manifest.of_kind("prompt")],
        "decodes": [list(entry.row()) for entry in manifest.of_kind("decode")],
        "closed": coverage_of(manifest).is_closed,
    }


# What is lacking


def _build(bundle: Path, spec: Path, args: argparse.Namespace) -> None:
    if not bundle.exists():
        harness.run(harness.command("build", spec, "-o", bundle, "--model", args.model.resolve()))


def _measure_steps(path: Path, bundle: Path, trace: Trace, args: argparse.Namespace) -> None:
    """Serves some of a trace at several rates, so that steps of many sizes are formed; keeps what /metrics says then."""
    if path.exists():
        return
    part = trace.part(0, args.calibration)
    with harness.serving(bundle, args.model, args.threads, name=MODEL_NAME) as server:
        for number, at_once in enumerate((1, 4, 16, len(part))):
            lanes = [[] for _ in range(min(at_once, len(part)))]  # type: list[list[Mapping[str, Any]]]
            bodies = _bodies(part.part(0, len(part) // (4 if at_once == 1 else 1)), f"steps {number}", args)
            for index, body in enumerate(bodies):
                lanes[index % len(lanes)].append(body)
            stream_all(server.port, [Turn(tuple(lane)) for lane in lanes])
        text = server.get("/metrics")
    path.write_text(text, encoding="utf-8")


def _tune(work: Path, spec: BuildSpec, trace: Trace, args: argparse.Namespace) -> None:
    output = work / "tuned.toml"
    if output.exists():
        return
    path = work / "first-half.csv"
    rows = zip(trace.arrivals, trace.prompt_tokens, trace.generated_tokens, strict=True)
    path.write_text("time,prompt_tokens,generated_tokens\n" + "".join(f"{a!r},{b},{c}\n" for a, b, c in rows))
    today = _described(Manifest.of(spec))
    entries = len(today["prompts"]) + len(today["decodes"])
    command = harness.command("tune", path, "--from", args.spec, "--step-times", work / "metrics.txt")
    step = [] if args.query_step is None else ["--query-step", str(args.query_step)]
    _, text = harness.run([*command, *step, "--entries", str(entries), "-o", str(output)])
    print(text)


# Serving


def _serve(
    bundles: Mapping[str, Path], slices: Sequence[Trace], args: argparse.Namespace
) -> dict[str, list[Any]]:
    """Every slice by each bundle, the one that begins taking turns."""
    found: dict[str, list[Any]] = {name: [] for name in NAMES}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(harness.serving(path, args.model, args.threads, name=MODEL_NAME))
            for name, path in bundles.items()
        }
        for server in servers.values():
            _run(server, slices[0].part(0, min(WARM_UP_REQUESTS, len(slices[0]))), "warm up", args)
        for number, one in enumerate(slices):
            for name in NAMES if number % 2 == 0 else NAMES[::-1]:
                row = _run(servers[name], one, f"slice {number}", args)
                found[name].append(row)
                print(number, name, {key: row[key] for key in ("requests", "seconds", "tokens")}, flush=True)
    return found


def _run(server: Server, trace: Trace, seed: str, args: argparse.Namespace) -> dict[str, Any]:
    """One slice, whole."""
    before = _counters(server)
    bodies = _bodies(trace, seed, args)
    clients = stream_all(
        server.port, [Turn((body,), at) for body, at in zip(bodies, trace.arrivals, strict=True)]
    )
    after = _counters(server)
    answers: list[Answer] = [answer for client in clients for answer in client]
    seconds = max(answer.token_times[-1] for answer in answers) - min(answer.sent_at for answer in answers)
    return {
        "requests": len(answers),
        "seconds": seconds,
        "tokens": sum(answer.num_tokens for answer in answers),
        "prompt_tokens": sum(trace.prompt_tokens),
        "first_token_seconds": [round(answer.first_token_seconds, 6) for answer in answers],
        "gaps": [round(gap, 6) for answer in answers for gap in answer.gaps],
        "counters": {name: value - before.get(name, 0.0) for name, value in after.items()},
        "load": os.getloadavg()[0],
    }


def _bodies(trace: Trace, seed: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Random prompts, the same for both bundles."""
    from tokenizers import Tokenizer

    random = Random(seed)
    size = Tokenizer.from_file(str(args.model / "tokenizer.json")).get_vocab_size()
    return [
        {
            "model": MODEL_NAME,
            "prompt": [random.randrange(size) for _ in range(prompt)],
            "max_tokens": answer,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for prompt, answer in zip(trace.prompt_tokens, trace.generated_tokens, strict=True)
    ]


def _counters(server: Server) -> dict[str, float]:
    """What steps did: tokens needed and padding, and their seconds, by kind."""
    wanted = ("aotgaudi_step_tokens_total{", "aotgaudi_step_seconds_sum{", "aotgaudi_step_seconds_count{")
    lines = (line.rpartition(" ") for line in server.get("/metrics").splitlines() if line.startswith(wanted))
    return {name.removeprefix("aotgaudi_"): float(value) for name, _, value in lines}


# Tables


@dataclass(frozen=True)
class Served:
    """Some slices that one bundle served, together."""

    rows: Sequence[Mapping[str, Any]]

    @property
    def seconds(self) -> float:
        return float(sum(row["seconds"] for row in self.rows))

    @property
    def step_seconds(self) -> float:
        return self._sum("step_seconds_sum")

    def tokens_per_second(self) -> float:
        return float(sum(row["tokens"] for row in self.rows)) / self.seconds

    def pooled(self, name: str) -> list[float]:
        return [value for row in self.rows for value in row[name]]

    def padding(self, kind: str = "") -> float:
        """Which part of the tokens that steps computed nobody asked for."""
        padding, needed = (
            self._sum("step_tokens_total", kind, f'work="{work}"') for work in ("padding", "needed")
        )
        return padding / (padding + needed)

    def _sum(self, *parts: str) -> float:
        return float(
            sum(
                value
                for row in self.rows
                for name, value in row["counters"].items()
                if all(p in name for p in parts)
            )
        )


def _tables(found: Mapping[str, Any], args: argparse.Namespace) -> list[Table]:
    cut, num = len(found["slices"]), sum(found["slices"])
    served = {name: Served(rows[:cut]) for name, rows in found["served"].items()}
    bursts = {name: Served(rows[cut:]) for name, rows in found["served"].items()}
    note = (
        f"{num} requests in {len(found['slices'])} slices of {args.seconds:g} s of the trace's second half; lengths are"
        f" divided by {args.divisor}, and arrivals are {found['stretch']:.3g} times as far apart, so that the default table"
        f" is busy for {100 * args.busy:.0f} % of the time as replayed. {args.threads} threads, on the cores of the client."
    )
    ratios = [
        tuned["seconds"] / default["seconds"]
        for default, tuned in zip(*(found["served"][name][cut:] for name in NAMES), strict=True)
    ]
    at_once = (
        f"{len(ratios)} times {found['at_once']} requests of the second half, all at once. Seconds of the tuned one beside"
        f" the default one, each time: {', '.join(f'x {ratio:.2f}' for ratio in ratios)}."
    )
    return [
        Table(
            "The same trace, served by the default bundle and by a tuned one", *_compared(served, _rows), note
        ),
        Table("The same requests at once", *_compared(bursts, _burst_rows), at_once),
        _table_of_tables(found),
    ]


Rows = Iterator[tuple[str, Callable[[Served], float], str, bool]]


def _compared(
    served: Mapping[str, Served], rows: Callable[[], Rows]
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    lines = []
    for title, of, unit, is_ratio in rows():
        default, tuned = of(served["default"]), of(served["tuned"])
        beside = f"{100 * (tuned / default - 1):+.1f} %" if is_ratio and default else ""
        lines.append((title, *(_cell(value, unit) for value in (default, tuned)), beside))
    return ("", "default", "tuned", "tuned beside default"), tuple(lines)


def _cell(value: float, unit: str) -> str:
    if unit == "count":
        return f"{value:,.0f}"
    return f"{100 * value:.1f} %" if unit == "%" else f"{value:,.1f}{unit and f' {unit}'}"


def _rows() -> Rows:
    yield from _burst_rows()
    yield "first token, p50", lambda one: 1e3 * percentile(one.pooled("first_token_seconds"), 0.5), "ms", True
    yield (
        "first token, p99",
        lambda one: 1e3 * percentile(one.pooled("first_token_seconds"), 0.99),
        "ms",
        True,
    )
    yield "between tokens, p50", lambda one: 1e3 * percentile(one.pooled("gaps"), 0.5), "ms", True
    yield "between tokens, p99", lambda one: 1e3 * percentile(one.pooled("gaps"), 0.99), "ms", True
    yield "engine busy", lambda one: one.step_seconds / one.seconds, "%", False


def _burst_rows() -> Rows:
    yield "generated tokens/s", Served.tokens_per_second, "", True
    yield "seconds of steps", lambda one: one.step_seconds, "s", True
    yield "steps", lambda one: one._sum("step_seconds_count"), "count", True
    yield "padded share of tokens", Served.padding, "%", False
    yield "padded share, prompts", lambda one: one.padding('kind="prompt"'), "%", False
    yield "padded share, decodes", lambda one: one.padding('kind="decode"'), "%", False


def _table_of_tables(found: Mapping[str, Any]) -> Table:
    rows = []
    for name in NAMES:
        bundle, replayed = found["bundles"][name], found["replayed"][name]
        rows.append(
            (
                name,
                str(len(bundle["prompts"])),
                str(len(bundle["decodes"])),
                "closed" if bundle["closed"] else "has holes",
                f"{replayed['step_seconds']:.1f} s",
                f"{replayed['steps']:,.0f}",
                f"{100 * replayed['padding']:.1f} %",
            )
        )
    columns = (
        "bundle",
        "prompts",
        "decodes",
        "proved",
        "step seconds, replayed",
        "steps, replayed",
        "of them padding",
    )
    note = "Replayed: the slices through the scheduler, with the step times that the default bundle's /metrics gave before."
    return Table("The tables of both", columns, tuple(rows), note)


if __name__ == "__main__":
    main()
