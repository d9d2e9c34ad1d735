"""``aotgaudi tune``: chooses buckets from a trace of requests, closes them and proves the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.cli.options import ABOVE_ZERO, POSITIVE, json_option, path_argument, path_option
from aotgaudi.cli.show import emit, refuse_unwritable
from aotgaudi.errors import CoverageError, SpecError
from aotgaudi.files import write_atomic
from aotgaudi.manifest.bucket_file import BucketFile, bucket_file_of
from aotgaudi.manifest.coverage import coverage_of
from aotgaudi.manifest.enumerate import enumerate_entries
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.parse import load_spec, write_spec
from aotgaudi.traffic.cost import DEVICES, WorkModel, device_of
from aotgaudi.traffic.trace import read_trace
from aotgaudi.traffic.tune import FEWEST_ENTRIES, MOST_ENTRIES, Padding, Tuner


def tuned_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines for people."""
    yield (
        f"{document['requests']:,} requests, {document['steps']:,} steps in {document['seconds']:,.0f} s of simulated time"
        f" ({document['refused']:,} requests do not fit the limits, {document['shortened']:,} answers are cut)"
    )
    if document["scheduler"] != "aotgaudi":
        yield "the steps are those that our scheduler forms; a vLLM server cuts prompts otherwise beside decodes"
    yield f"tuned: {document['prompts']} prompt and {document['decodes']} decode entries, closed"
    yield f"  {'':<28}{'entries':>8}{'work, ' + document['unit']:>14}{'of it padding':>15}{'beside tuned':>14}"
    for one in (document["tuned"], *document["strategies"]):
        yield _line(one, document["tuned"])
    yield "the same trace, replayed in the tuned buckets:"
    yield _line(document["replayed"], document["tuned"])


def _line(one: Mapping[str, Any], tuned: Mapping[str, Any]) -> str:
    beside = 100 * (one["work"] / tuned["work"] - 1)
    return f"  {one['name']:<28}{one['num_entries']:>8,}{one['work']:>14.4g}{100 * one['share']:>13.1f} %{beside:>+12.1f} %"


_STRATEGIES = ("exponential", "linear", "padding_aware")


@click.command("tune")
@path_argument("trace_path", metavar="TRACE")
@path_option("--from", "spec_path", metavar="SPEC", required=True, help="The spec: model, limits, policy.")
@path_option(
    "-o",
    "--output",
    metavar="SPEC",
    help="Write the spec with the chosen buckets (.toml), and its config beside it.",
)
@path_option(
    "--bucket-file",
    metavar="FILE",
    help="Write the buckets for VLLM_BUCKETING_FROM_FILE, proved for such a server.",
)
@click.option(
    "--entries",
    "num_entries",
    type=click.IntRange(FEWEST_ENTRIES, MOST_ENTRIES),
    metavar="N",
    help=f"The most prompt and decode entries  [default: as many as SPEC has, {MOST_ENTRIES} at most]",
)
@click.option(
    "--device",
    type=click.Choice(list(DEVICES)),
    help="The device to estimate work for  [default: that of the spec's target]",
)
@click.option(
    "--query-step",
    type=POSITIVE,
    metavar="N",
    help="Query lengths are multiples of N  [default: a block]",
)
@click.option(
    "--load",
    type=ABOVE_ZERO,
    default=1.0,
    show_default=True,
    metavar="X",
    help="Send requests X times as fast as in the trace.",
)
@json_option("Print the result as JSON.")
def tune(
    trace_path: Path,
    spec_path: Path,
    output: Path | None,
    bucket_file: Path | None,
    num_entries: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Choose the buckets that pad real traffic least, for a given number of entries. Compiles nothing.

    TRACE is a CSV or JSONL of request times and token counts. It is replayed through the scheduler, and the cheapest
    table that covers its steps is chosen and proved.
    """
    _check_outputs(output, bucket_file, trace_path, spec_path)
    spec = load_spec(spec_path)
    trace = read_trace(trace_path).faster(options["load"])
    tuner = Tuner(spec, trace, WorkModel.of(spec, device_of(spec, options["device"])), options["query_step"])
    num_entries = num_entries or min(_num_steps(spec), MOST_ENTRIES)
    tuned = tuner.tuned(num_entries)
    document = _document(tuner, tuned, num_entries)
    if bucket_file is not None:
        write_atomic(bucket_file, _file_of(spec, tuned).text.encode())
    if output is not None:
        write_spec(output, tuned if spec.scheduler.engine == "aotgaudi" else _file_of(spec, tuned).spec)
    emit(document, as_json, tuned_lines(document))


def _check_outputs(output: Path | None, bucket_file: Path | None, trace_path: Path, spec_path: Path) -> None:
    """Refuses to overwrite what is read, except a spec, which its tuned version may replace."""
    if output is not None and output.suffix != ".toml":
        raise click.UsageError("-o takes a file that ends in .toml.")
    if output is not None:
        refuse_unwritable(output, trace_path)
    if bucket_file is not None:
        refuse_unwritable(bucket_file, trace_path, spec_path, output)


def _num_steps(spec: BuildSpec) -> int:
    manifest = Manifest.of(spec)
    return len(manifest.of_kind("prompt")) + len(manifest.of_kind("decode"))


def _file_of(spec: BuildSpec, tuned: BuildSpec) -> BucketFile:
    """Returns the buckets as a file. A vLLM server's spec contains it too: the server takes buckets in no other form."""
    if spec.scheduler.engine == "vllm":
        tuned = tuned.model_copy(update={"scheduler": spec.scheduler})
    return bucket_file_of(tuned)


def _document(tuner: Tuner, tuned: BuildSpec, num_entries: int) -> dict[str, Any]:
    manifest = Manifest.of(tuned)
    coverage = coverage_of(manifest)
    if not coverage.is_closed:  # A bug: the largest entry covers every step.
        raise CoverageError(f"the tuned table has holes: {coverage}")
    table = BucketTable.from_entries(manifest.entries)
    judged, replayed = tuner.replayed(table, "tuned, replayed")
    return {
        "requests": replayed.num_requests,
        "refused": replayed.num_refused,
        "shortened": replayed.num_shortened,
        "steps": replayed.num_steps,
        "seconds": round(replayed.seconds, 3),
        "preemptions": replayed.num_preemptions,
        "scheduler": tuner.spec.scheduler.engine,
        "unit": "FLOP",
        "max_entries": num_entries,
        "prompts": len(manifest.of_kind("prompt")),
        "decodes": len(manifest.of_kind("decode")),
        "closed": coverage.is_closed,
        "tuned": _shown(tuner.predicted(table, "tuned")),
        "replayed": _shown(judged),
        "strategies": list(map(_shown, _strategies(tuner))),
    }


def _strategies(tuner: Tuner) -> Iterator[Padding]:
    """Yields today's table, and those of the public strategies, for the same steps as the tuned one."""
    own = tuner.spec.bucketing.strategy
    yield tuner.predicted(_table_of(tuner.spec), f"{own} (today's)")
    for name in _STRATEGIES:
        if name == own:
            continue
        update = {"strategy": name, "file_text": None, "tuned": None}
        spec = tuner.spec.model_copy(update={"bucketing": tuner.spec.bucketing.model_copy(update=update)})
        try:
            yield tuner.predicted(_table_of(spec), name)
        except SpecError:  # Not in this version, or too many buckets.
            continue


def _table_of(spec: BuildSpec) -> BucketTable:
    return BucketTable.from_entries(enumerate_entries(spec))


def _shown(padding: Padding) -> dict[str, Any]:
    return {**dataclasses.asdict(padding), "share": round(padding.share, 4)}
