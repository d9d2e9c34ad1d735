"""``aotgaudi tune``: chooses buckets from a trace of requests, closes them and proves the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from aotgaudi.cli.options import (
    ABOVE_ZERO,
    POSITIVE,
    json_option,
    option,
    options_of,
    parse_byte_count,
    path_argument,
    path_option,
)
from aotgaudi.cli.show import emit, refuse_unwritable
from aotgaudi.errors import CoverageError, SpecError
from aotgaudi.files import write_atomic
from aotgaudi.manifest.bucket_file import BucketFile, bucket_file_of
from aotgaudi.manifest.cost import SECONDS_A_STEP
from aotgaudi.manifest.coverage import coverage_of
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.parse import load_spec
from aotgaudi.spec.write import write_spec
from aotgaudi.traffic.cost import DEVICES, StepTimes, WorkModel, device_of, read_step_times
from aotgaudi.traffic.trace import Drawing, read_trace
from aotgaudi.traffic.tune import FEWEST_ENTRIES, MOST_ENTRIES, Padding, Tuner

Command = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What an average prompt or decode entry takes of one budget, in its unit. `source` says where the figures are from."""

    prompt: float
    decode: float
    source: str

    def of(self, num_prompts: int, num_decodes: int) -> float:
        """Returns what these numbers of entries take."""
        return self.prompt * num_prompts + self.decode * num_decodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One budget, and what entries take of it."""

    name: str
    most: float
    price: Price


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryBudget:
    """The smallest of the given budgets. Without one, as many entries as today."""

    entries: int | None = None
    shares: tuple[Share, ...] = ()

    def num_entries(self, today: int, split: Callable[[int], tuple[int, int]]) -> int:
        """Returns how many entries fit. `split` returns how many of a number are prompts and decodes.

        Raises:
            SpecError: not even the fewest fit.
        """
        is_given = self.entries is not None or self.shares
        most = MOST_ENTRIES if self.entries is None and is_given else self.entries or today
        for num in range(min(most, MOST_ENTRIES), FEWEST_ENTRIES - 1, -1):
            if all(share.price.of(*split(num)) <= share.most for share in self.shares):
                return num
        one = self.shares[0] if self.shares else None
        problem = f"is {most:,} entries" if one is None else f"is less than {FEWEST_ENTRIES} entries take"
        raise SpecError("the budget", problem, f"{FEWEST_ENTRIES} to {MOST_ENTRIES} entries")


@dataclass(frozen=True, kw_only=True)
class _BudgetOptions:
    """How many entries are allowed: a number, or build seconds and graph memory with what one entry takes of them."""

    entries: int | None = option(
        "The most prompt and decode entries  [default: as many as SPEC has, 400 at most]",
        default=None,
        type=click.IntRange(FEWEST_ENTRIES, MOST_ENTRIES),
        metavar="N",
    )
    build_seconds: float | None = option(
        "The longest a build may take, one entry after the other.", default=None, type=ABOVE_ZERO, metavar="S"
    )
    seconds_per_entry: float | None = option(
        f"What building one takes, for --build-seconds  [default: by --built, or {SECONDS_A_STEP}]",
        default=None,
        type=ABOVE_ZERO,
        metavar="S",
    )
    graph_memory: int | None = option(
        "The most memory that graphs may take, e.g. 4GiB.",
        default=None,
        parse=parse_byte_count,
        metavar="SIZE",
    )
    bytes_per_entry: int | None = option(
        "What the graphs of one entry take, for --graph-memory  [default: by --built]",
        default=None,
        parse=parse_byte_count,
        metavar="SIZE",
    )
    built: Path | None = option(
        "A bundle of such a spec: how large its prompt and decode entries are, and with --store how long they took.",
        default=None,
        metavar="BUNDLE",
    )
    store_root: Path | None = option(
        "The store that built BUNDLE: its records have the seconds.", "--store", default=None, metavar="DIR"
    )

    def budget(self) -> EntryBudget:
        """Returns the budget. Raises UsageError, SpecError, and like opening a bundle and a store."""
        if self.store_root is not None and self.built is None:
            raise click.UsageError("--store is about --built BUNDLE: it says how long its entries took.")
        if self.seconds_per_entry is not None and self.build_seconds is None:
            problem = "is about a build whose time has no limit"
            raise SpecError("--seconds-per-entry", problem, "--build-seconds as well")
        if self.bytes_per_entry is not None and self.graph_memory is None:
            problem = "is about memory that has no limit"
            raise SpecError("--bytes-per-entry", problem, "--graph-memory as well")
        means = None if self.built is None else _Means.of(self.built, self.store_root)
        shares = []
        if self.build_seconds is not None:
            price = _seconds_price(self.seconds_per_entry, means)
            shares.append(Share(name="--build-seconds", most=self.build_seconds, price=price))
        if self.graph_memory is not None:
            price = _bytes_price(self.bytes_per_entry, means)
            shares.append(Share(name="--graph-memory", most=self.graph_memory, price=price))
        return EntryBudget(entries=self.entries, shares=tuple(shares))


@dataclass(frozen=True, slots=True)
class _Means:
    """What the entries of a bundle take: bytes, and seconds if a store knows them."""

    where: Path
    store: Path | None
    seconds: tuple[float, float] | None
    sizes: tuple[float, float]

    @classmethod
    def of(cls, built: Path, store_root: Path | None) -> _Means:
        """Reads a bundle, and the records of a store. Raises like `open_bundle` and `Store.open`."""
        from aotgaudi.bundle.bundle import open_bundle
        from aotgaudi.cli.store_options import StorePlace
        from aotgaudi.report.holdings import entry_mean, holdings_of_bundle

        store = None if store_root is None else StorePlace(store_root).open(create=False)
        held = holdings_of_bundle(open_bundle(built), store)
        prompt, decode = (entry_mean(held, kind) for kind in ("prompt", "decode"))
        if prompt is None or decode is None:
            raise SpecError(
                str(built), "has no built prompt or no built decode entry", "a bundle of such a spec"
            )
        known = prompt.compile_seconds is not None and decode.compile_seconds is not None
        seconds = (prompt.compile_seconds or 0.0, decode.compile_seconds or 0.0) if known else None
        return cls(built, store_root, seconds, (prompt.size_bytes, decode.size_bytes))


def _seconds_price(given: float | None, means: _Means | None) -> Price:
    if given is not None:
        return Price(prompt=given, decode=given, source="--seconds-per-entry: the same for every entry")
    if means is None:
        source = (
            "a per-entry average of another machine's (vllm-gaudi#1160); --built BUNDLE --store DIR has yours"
        )
        return Price(prompt=SECONDS_A_STEP, decode=SECONDS_A_STEP, source=source)
    if means.seconds is None:
        where = "a bundle has no times, which are in the records of the store that built it"
        raise SpecError("--build-seconds", where, "--store DIR beside --built, or --seconds-per-entry")
    source = (
        f"averages of each kind in {means.where}, by the records of {means.store}; tracing is not in them"
    )
    return Price(prompt=means.seconds[0], decode=means.seconds[1], source=source)


def _bytes_price(given: int | None, means: _Means | None) -> Price:
    if given is not None:
        return Price(prompt=given, decode=given, source="--bytes-per-entry: the same for every entry")
    if means is None:
        raise SpecError(
            "--graph-memory",
            "does not say what one graph takes",
            "--bytes-per-entry or --built BUNDLE as well",
        )
    source = (
        f"averages of each kind in {means.where}: the sizes of compiled files, not what a device adds to them"
    )
    return Price(prompt=means.sizes[0], decode=means.sizes[1], source=source)


def tuned_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines for people."""
    yield (
        f"{document['requests']:,} requests, {document['steps']:,} steps in {document['seconds']:,.0f} s of simulated time"
        f" ({document['refused']:,} requests do not fit the limits, {document['shortened']:,} answers are cut)"
    )
    if document["scheduler"] != "aotgaudi":
        yield "the steps are those that our scheduler forms; a vLLM server cuts prompts otherwise beside decodes"
    if document["step_times"] is not None:
        yield from _step_time_lines(document["step_times"])
    for budget in document["budgets"]:
        yield (
            f"{budget['name']} {budget['most']:,.6g}: {budget['takes']:,.6g} by {budget['prompt']:,.6g} a prompt entry and"
            f" {budget['decode']:,.6g} a decode entry ({budget['source']})"
        )
    yield f"tuned: {document['prompts']} prompt and {document['decodes']} decode entries, closed"
    yield f"  {'':<28}{'entries':>8}{'work, ' + document['unit']:>14}{'of it padding':>15}{'beside tuned':>14}"
    for one in (document["tuned"], *document["strategies"], *document["nearest"]):
        yield _line(one, document["tuned"])
    yield "the same trace, replayed in the tuned buckets:"
    yield _line(document["replayed"], document["tuned"])


def _step_time_lines(times: Mapping[str, Any]) -> Iterator[str]:
    steps = "" if times["steps"] is None else f" in {times['steps']:,} steps"
    yield (
        f"step times: {times['entries']} entries measured{steps}; of today's {times['today']} entries {times['of_today']}"
        f" are among them, and {times['today'] - times['of_today']} are not"
    )
    yield (
        "  all work is by a fit to these, of entries that were not measured as well; it misses the measured times by"
        f" {100 * times['median_miss']:.1f} % in the median, by {100 * times['largest_miss']:.1f} % at most"
    )


def _line(one: Mapping[str, Any], tuned: Mapping[str, Any]) -> str:
    beside = 100 * (one["work"] / tuned["work"] - 1)
    return f"  {one['name']:<28}{one['num_entries']:>8,}{one['work']:>14.4g}{100 * one['share']:>13.1f} %{beside:>+12.1f} %"


_STRATEGIES = ("exponential", "linear", "padding_aware")
_NEAR = ((1, 2), (3, 4), (1, 1), (5, 4), (3, 2))
"""The alternatives to show, as fractions of the budget."""


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
@options_of(_BudgetOptions, "budget", made=_BudgetOptions.budget)
@path_option(
    "--step-times",
    metavar="FILE",
    help="Measured seconds of entries, in the place of the estimate: JSON, or the text of our server's /metrics.",
)
@click.option(
    "--device",
    type=click.Choice(list(DEVICES)),
    help="What is served on, for the estimate  [default: by the spec's target]",
)
@click.option(
    "--query-step",
    type=POSITIVE,
    metavar="N",
    help="Query lengths are multiples of it  [default: a block]",
)
@click.option(
    "--load",
    type=ABOVE_ZERO,
    default=1.0,
    show_default=True,
    metavar="X",
    help="How many times as fast as in the trace requests come.",
)
@click.option(
    "--requests-per-second",
    type=ABOVE_ZERO,
    metavar="R",
    help="How many requests came, where TRACE is the text of /metrics.",
)
@json_option("Print the result as JSON.")
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
    emit(document, as_json, tuned_lines(document))


def _check_outputs(output: Path | None, bucket_file: Path | None, trace_path: Path, spec_path: Path) -> None:
    """Refuses to overwrite what is read, except a spec, which its tuned version may replace."""
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
    """Returns the buckets as a file. A vLLM server's spec contains it too: the server takes buckets in no other form."""
    if spec.scheduler.engine == "vllm":
        tuned = tuned.model_copy(update={"scheduler": spec.scheduler})
    return bucket_file_of(tuned)


def _document(tuner: Tuner, tuned: BuildSpec, num_entries: int) -> dict[str, Any]:
    manifest = Manifest.of(tuned)
    coverage = coverage_of(manifest)
    if not coverage.is_closed:  # A bug: the largest entry covers every step.
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
        "tuned": _shown(tuner.predicted(tuned, "tuned")),
        "replayed": _shown(judged),
        "strategies": list(map(_shown, _strategies(tuner))),
        "nearest": list(map(_shown, _nearest(tuner, num_entries))),
    }


def _budgets(tuner: Tuner, budget: EntryBudget, num_entries: int) -> list[dict[str, Any]]:
    split = tuner.split(num_entries)
    return [
        {"name": one.name, "most": one.most, "takes": one.price.of(*split), **dataclasses.asdict(one.price)}
        for one in budget.shares
    ]


def _measured(times: StepTimes, work: WorkModel, spec: BuildSpec) -> dict[str, Any]:
    """Returns what was measured of today's entries, and the error of the fit that estimates all other entries."""
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
    """Yields today's table, and those of the public strategies, for the same steps as the tuned one."""
    own = tuner.spec.bucketing.strategy
    yield tuner.predicted(tuner.spec, f"{own} (today's)")
    for name in _STRATEGIES:
        if name == own:
            continue
        update = {"strategy": name, "file_text": None, "tuned": None}
        spec = tuner.spec.model_copy(update={"bucketing": tuner.spec.bucketing.model_copy(update=update)})
        try:
            yield tuner.predicted(spec, name)
        except SpecError:  # Not in this version, or too many buckets.
            continue


def _nearest(tuner: Tuner, num_entries: int) -> Iterator[Padding]:
    nums = {num_entries * part // whole for part, whole in _NEAR}
    for num in sorted(num for num in nums if FEWEST_ENTRIES <= num <= MOST_ENTRIES):
        yield tuner.predicted(tuner.tuned(num), f"tuned, {num} entries")


def _shown(padding: Padding) -> dict[str, Any]:
    return {**dataclasses.asdict(padding), "share": round(padding.share, 4)}
