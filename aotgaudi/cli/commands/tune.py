"""``aotgaudi tune``: buckets chosen from a trace of requests, closed and proved."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from aotgaudi.cli.options.common import FiniteRange, refuse_unwritable
from aotgaudi.cli.options.entry_budget import EntryBudget, entry_budget_options
from aotgaudi.cli.show.tuned import tuned_lines
from aotgaudi.errors import CoverageError, SpecError
from aotgaudi.files import write_atomic
from aotgaudi.manifest.bucket_file import BucketFile, bucket_file_of
from aotgaudi.manifest.coverage import coverage_of
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.work import DEVICES, WorkModel, device_of
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.parse import load_spec
from aotgaudi.spec.write import write_spec
from aotgaudi.traffic.bound import GAP_COVERS, GAP_LEAVES_OUT
from aotgaudi.traffic.reading import read_trace
from aotgaudi.traffic.step_times import StepTimes, read_step_times
from aotgaudi.traffic.trace import Drawing
from aotgaudi.traffic.tune import (
    FEWEST_ENTRIES,
    MOST_ENTRIES,
    Padding,
    Tuner,
)

_STRATEGIES = ("exponential", "linear", "padding_aware")
_NEAR = ((1, 2), (3, 4), (1, 1), (5, 4), (3, 2))
"""The nearest alternatives: parts of the budget."""


@click.command("tune")
@click.argument("trace_path", metavar="TRACE", type=click.Path(path_type=Path))
@click.option(
    "--from",
    "spec_path",
    metavar="SPEC",
    required=True,
    type=click.Path(path_type=Path),
    help="The spec: model, limits, policy.",
)
@click.option(
    "-o",
    "--output",
    metavar="SPEC",
    type=click.Path(path_type=Path),
    help="Write the spec with the chosen buckets (.toml), and its config beside it.",
)
@click.option(
    "--bucket-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write the buckets for VLLM_BUCKETING_FROM_FILE, proved for such a server.",
)
@entry_budget_options
@click.option(
    "--step-times",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Measured seconds of entries, in the place of the estimate: JSON, or the text of our server's /metrics.",
)
@click.option(
    "--device",
    type=click.Choice(list(DEVICES)),
    help="What is served on, for the estimate  [default: by the spec's target]",
)
@click.option(
    "--query-step",
    type=click.IntRange(min=1),
    metavar="N",
    help="Query lengths are multiples of it  [default: a block]",
)
@click.option(
    "--load",
    type=FiniteRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    metavar="X",
    help="Requests come so many times as fast as in the trace.",
)
@click.option(
    "--requests-per-second",
    type=FiniteRange(min=0, min_open=True),
    metavar="R",
    help="How many requests came, where TRACE is the text of /metrics.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def tune(
    trace_path: Path,
    spec_path: Path,
    output: Path | None,
    bucket_file: Path | None,
    as_json: bool,
    budget: EntryBudget,
    **options: Any,
) -> None:
    """Choose buckets from traffic: those that pad least, for as many entries as there may be. Compiles nothing.

    TRACE is a CSV or JSONL of request times and token counts, or the text of /metrics of a vLLM server or ours. It is
    replayed through the scheduler; of what its steps need the cheapest table is made, closed, and proved.
    """
    _check_outputs(output, bucket_file, trace_path, spec_path)
    spec = load_spec(spec_path)
    rate = options.pop("requests_per_second")
    trace = read_trace(trace_path, None if rate is None else Drawing(rate, spec.limits.max_model_len))
    trace = trace.faster(options.pop("load"))
    device = options.pop("device")
    times = _step_times(options.pop("step_times"), device)
    work = times.work(spec.limits.block_size) if times else WorkModel.of(spec, device_of(spec, device))
    tuner = Tuner(spec, trace, work, options.pop("query_step"))
    num_entries = budget.num_entries(_num_steps(spec), tuner.split)
    tuned = tuner.tuned(num_entries)
    document = {
        **_document(tuner, tuned, num_entries),
        "budgets": _budgets(tuner, budget, num_entries),
        "step_times": None if times is None else _measured(times, work, spec),
    }
    if bucket_file is not None:
        write_atomic(bucket_file, _file_of(spec, tuned).text.encode())
    if output is not None:
        write_spec(output, tuned if spec.scheduler.engine == "aotgaudi" else _file_of(spec, tuned).spec)
    click.echo(json.dumps(document, indent=2) if as_json else "\n".join(tuned_lines(document)))


def _check_outputs(output: Path | None, bucket_file: Path | None, trace_path: Path, spec_path: Path) -> None:
    """A spec may be written over by what becomes of it; nothing else that is read may be."""
    if output is not None and output.suffix != ".toml":
        raise click.UsageError("-o takes a file that ends in .toml.")
    if output is not None:
        refuse_unwritable(output, trace_path)
    if bucket_file is not None:
        refuse_unwritable(bucket_file, trace_path, spec_path, output)


def _step_times(path: Path | None, device: str | None) -> StepTimes | None:
    if path is None:
        return None
    if device is not None:
        raise click.UsageError("--device is for the estimate, which --step-times takes the place of.")
    return read_step_times(path)


def _num_steps(spec: BuildSpec) -> int:
    manifest = Manifest.of(spec)
    return len(manifest.of_kind("prompt")) + len(manifest.of_kind("decode"))


def _file_of(spec: BuildSpec, tuned: BuildSpec) -> BucketFile:
    """The buckets as a file. A vLLM server has no other way to be given them, so that is what its spec gets as well."""
    if spec.scheduler.engine == "vllm":
        tuned = tuned.model_copy(update={"scheduler": spec.scheduler})
    return bucket_file_of(tuned)


def _document(tuner: Tuner, tuned: BuildSpec, num_entries: int) -> dict[str, Any]:
    manifest = Manifest.of(tuned)
    coverage = coverage_of(manifest)
    if not coverage.is_closed:  # A mistake of ours: its largest entry covers every step.
        raise CoverageError(f"the tuned table has holes: {coverage}")
    judged, replayed = tuner.replayed(tuned, "tuned, replayed")
    return {
        "requests": replayed.num_requests,
        "refused": replayed.num_refused,
        "shortened": replayed.num_shortened,
        "steps": replayed.num_steps,
        "seconds": round(replayed.seconds, 3),
        "preemptions": replayed.num_preemptions,
        "scheduler": tuner.spec.scheduler.engine,
        "unit": tuner.work.unit,
        "budget": num_entries,
        "prompts": len(manifest.of_kind("prompt")),
        "decodes": len(manifest.of_kind("decode")),
        "closed": coverage.is_closed,
        "gap": _rounded_up(tuner.gap(num_entries)),
        "gap_covers": GAP_COVERS,
        "gap_leaves_out": list(GAP_LEAVES_OUT),
        "tuned": _shown(tuner.predicted(tuned, "tuned")),
        "replayed": _shown(judged),
        "strategies": list(map(_shown, _strategies(tuner))),
        "nearest": list(map(_shown, _nearest(tuner, num_entries))),
    }


def _rounded_up(gap: float) -> float:
    """To four digits; a bound from above must not become less."""
    return math.ceil(gap * 10_000) / 10_000


def _budgets(tuner: Tuner, budget: EntryBudget, num_entries: int) -> list[dict[str, Any]]:
    split = tuner.split(num_entries)
    return [
        {"name": one.name, "most": one.most, "takes": one.price.of(*split), **dataclasses.asdict(one.price)}
        for one in budget.shares
    ]


def _measured(times: StepTimes, work: WorkModel, spec: BuildSpec) -> dict[str, Any]:
    """What is measured of today's entries, and how well the fit says it, by which all others go."""
    manifest = Manifest.of(spec)
    today = (*manifest.of_kind("prompt"), *manifest.of_kind("decode"))
    median, most = times.misses(work)
    return {
        "entries": len(times.entries),
        "steps": times.num_steps,
        "today": len(today),
        "of_today": sum(entry in times.entries for entry in today),
        "median_miss": round(median, 4),
        "largest_miss": round(most, 4),
    }


def _strategies(tuner: Tuner) -> Iterator[Padding]:
    """Today's table, and those of the public strategies: on the very steps for which the tuned one was chosen."""
    own = tuner.spec.bucketing.strategy
    yield tuner.predicted(tuner.spec, f"{own} (today's)")
    for name in _STRATEGIES:
        if name == own:
            continue
        update = {"strategy": name, "file_text": None, "tuned": None}
        spec = tuner.spec.model_copy(update={"bucketing": tuner.spec.bucketing.model_copy(update=update)})
        try:
            yield tuner.predicted(spec, name)
        except SpecError:  # Not of this version, or too many.
            continue


def _nearest(tuner: Tuner, num_entries: int) -> Iterator[Padding]:
    nums = {num_entries * part // whole for part, whole in _NEAR}
    for num in sorted(num for num in nums if FEWEST_ENTRIES <= num <= MOST_ENTRIES):
        yield tuner.predicted(tuner.tuned(num), f"tuned, {num} entries")


def _shown(padding: Padding) -> dict[str, Any]:
    return {**dataclasses.asdict(padding), "share": round(padding.share, 4)}
