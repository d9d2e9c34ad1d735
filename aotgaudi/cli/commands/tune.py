"""``aotgaudi tune``: buckets chosen from a trace of requests, closed and proved."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from aotgaudi.atomicfile import write_atomic
from aotgaudi.cli.options.common import parse_byte_count, refuse_unwritable
from aotgaudi.errors import CoverageError, SpecError
from aotgaudi.manifest.bucket_file import BucketFile, bucket_file_of
from aotgaudi.manifest.cost import SECONDS_A_STEP
from aotgaudi.manifest.coverage import coverage_of
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.work import DEVICES, WorkModel, device_of
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.parse import load_spec
from aotgaudi.spec.write import write_spec
from aotgaudi.traffic.reading import read_trace
from aotgaudi.traffic.step_times import measured_work
from aotgaudi.traffic.trace import Drawing
from aotgaudi.traffic.tune import FEWEST_ENTRIES, MOST_ENTRIES, Padding, Tuner

_STRATEGIES = ("exponential", "linear", "padding_aware")
_NEAR = ((1, 2), (3, 4), (1, 1), (5, 4), (3, 2))
"""The nearest alternatives: parts of the budget."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Budget:
    """How many entries there may be, and why."""

    entries: int | None
    build_seconds: float | None
    seconds_per_entry: float
    graph_memory: str | None
    bytes_per_entry: str | None

    def num_entries(self, today: int) -> int:
        """The least that the budgets allow; as many as today where none is given."""
        nums = [] if self.entries is None else [self.entries]
        if self.build_seconds is not None:
            nums.append(int(self.build_seconds / self.seconds_per_entry))
        if self.graph_memory is not None:
            if self.bytes_per_entry is None:
                raise SpecError(
                    "--graph-memory", "does not say what one graph takes", "--bytes-per-entry as well"
                )
            nums.append(
                _bytes("--graph-memory", self.graph_memory)
                // _bytes("--bytes-per-entry", self.bytes_per_entry)
            )
        num = min(nums, default=min(today, MOST_ENTRIES))
        if not FEWEST_ENTRIES <= num <= MOST_ENTRIES:
            raise SpecError("the budget", f"is {num:,} entries", f"{FEWEST_ENTRIES} to {MOST_ENTRIES}")
        return num


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
@click.option(
    "--entries",
    type=click.IntRange(FEWEST_ENTRIES, MOST_ENTRIES),
    metavar="N",
    help="At most so many prompt and decode entries  [default: as many as SPEC has, 400 at most]",
)
@click.option(
    "--build-seconds",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="At most so long a build, one entry after the other.",
)
@click.option(
    "--seconds-per-entry",
    type=click.FloatRange(min=0, min_open=True),
    default=SECONDS_A_STEP,
    show_default=True,
    metavar="S",
    help="What building one takes, for --build-seconds.",
)
@click.option("--graph-memory", metavar="SIZE", help="At most so much memory for graphs, e.g. 4GiB.")
@click.option(
    "--bytes-per-entry", metavar="SIZE", help="What the graphs of one entry take, for --graph-memory."
)
@click.option(
    "--step-times",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Measured seconds of entries (JSON), in the place of the estimate.",
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
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    metavar="X",
    help="Requests come so many times as fast as in the trace.",
)
@click.option(
    "--requests-per-second",
    type=click.FloatRange(min=0, min_open=True),
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
    **options: Any,
) -> None:
    """Choose buckets from traffic: those that pad least, for as many entries as there may be. Compiles nothing.

    TRACE is a CSV or JSONL of request times and token counts, or the text of /metrics of a vLLM server or ours. It is
    replayed through the scheduler; of what its steps need the cheapest table is made, closed, and proved.
    """
    _check_outputs(output, bucket_file)
    spec = load_spec(spec_path)
    rate = options.pop("requests_per_second")
    trace = read_trace(trace_path, None if rate is None else Drawing(rate, spec.limits.max_model_len))
    trace = trace.faster(options.pop("load"))
    work = _work(spec, options.pop("step_times"), options.pop("device"))
    query_step = options.pop("query_step")
    num_entries = _Budget(**options).num_entries(_num_steps(spec))
    tuner = Tuner(spec, trace, work, query_step)
    tuned = tuner.tuned(num_entries)
    document = _document(tuner, tuned, num_entries)
    if bucket_file is not None:
        write_atomic(bucket_file, _file_of(spec, tuned).text.encode())
    if output is not None:
        write_spec(output, tuned if spec.scheduler.engine == "aotgaudi" else _file_of(spec, tuned).spec)
    click.echo(json.dumps(document, indent=2) if as_json else "\n".join(_lines(document)))


def _check_outputs(output: Path | None, bucket_file: Path | None) -> None:
    if output is not None and output.suffix != ".toml":
        raise click.UsageError("-o takes a file that ends in .toml.")
    for path in (output, bucket_file):
        if path is not None:
            refuse_unwritable(path)


def _work(spec: BuildSpec, step_times: Path | None, device: str | None) -> WorkModel:
    if step_times is None:
        return WorkModel.of(spec, device_of(spec, device))
    if device is not None:
        raise click.UsageError("--device is for the estimate, which --step-times takes the place of.")
    return measured_work(step_times, spec.limits.block_size)


def _bytes(option: str, text: str) -> int:
    try:
        return parse_byte_count(text)
    except ValueError as error:
        raise SpecError(option, str(error), "such as 4GiB") from error


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
        "gap": round(tuner.gap(num_entries), 4),
        "tuned": _shown(tuner.predicted(tuned, "tuned")),
        "replayed": _shown(judged),
        "strategies": list(map(_shown, _strategies(tuner))),
        "nearest": list(map(_shown, _nearest(tuner, num_entries))),
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


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{document['requests']:,} requests, {document['steps']:,} steps in {document['seconds']:,.0f} s of simulated time"
        f" ({document['refused']:,} requests do not fit the limits, {document['shortened']:,} answers are cut)"
    )
    if document["scheduler"] != "aotgaudi":
        yield "the steps are those that our scheduler forms; a vLLM server cuts prompts otherwise beside decodes"
    yield (
        f"tuned: {document['prompts']} prompt and {document['decodes']} decode entries, closed; at most"
        f" {100 * document['gap']:.1f} % more work than the best table of as many"
    )
    yield f"  {'':<28}{'entries':>8}{'work, ' + document['unit']:>14}{'of it padding':>15}{'beside tuned':>14}"
    for one in (document["tuned"], *document["strategies"], *document["nearest"]):
        yield _line(one, document["tuned"])
    yield "the same trace, replayed in the tuned buckets:"
    yield _line(document["replayed"], document["tuned"])


def _line(one: Mapping[str, Any], tuned: Mapping[str, Any]) -> str:
    beside = 100 * (one["work"] / tuned["work"] - 1)
    return f"  {one['name']:<28}{one['num_entries']:>8,}{one['work']:>14.4g}{100 * one['share']:>13.1f} %{beside:>+12.1f} %"
