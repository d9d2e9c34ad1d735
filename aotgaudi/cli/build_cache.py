"""``aotgaudi build cache``: compiles what is missing. With ``--check`` it compiles some of it again, and compares."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from aotgaudi.cli.build_options import entry_option, find_entries, remote_line, remote_options, worker_options
from aotgaudi.cli.cache import collect_after_build, collection_line
from aotgaudi.cli.options import json_option, option, options_of, path_argument, path_option
from aotgaudi.cli.progress import BuildDisplay, interrupted_by_sigterm
from aotgaudi.cli.show import emit, refuse_unwritable
from aotgaudi.cli.store_options import StorePlace, store_limit_option, store_options
from aotgaudi.cli.target_option import refused_target_option
from aotgaudi.compile.cards import require_proof
from aotgaudi.compile.pipeline import Workers, compile_missing, make_receipt, plan_manifest
from aotgaudi.compile.recheck import Difference, Recheck, recheck
from aotgaudi.compile.run import BuildOutcome
from aotgaudi.entries import Entry
from aotgaudi.errors import NotReproducibleError, counted
from aotgaudi.files import write_atomic
from aotgaudi.manifest.manifest import Manifest, load_manifest_or_spec
from aotgaudi.phases import Phase, Phases
from aotgaudi.share.remote_cache import Sharing
from aotgaudi.store.store import Store

DEFAULT_SAMPLE = 3
ALL = sys.maxsize
"""The number for ``--sample all``."""
_WORK = {"check": "comparing with transformers", "trace": "tracing", "compile": "compiling"}


def describe_check(found: Recheck) -> str:
    """Returns one line for people about a check that found no difference."""
    return f"check: {len(found.labels)} units compiled again in {found.seconds:.1f} s, all to the same {found.compared}"


def check_document(found: Recheck) -> dict[str, Any]:
    """Returns the outcome as a JSON value. Seconds are wall-clock."""
    return {
        "same": not found.differences,
        "units": list(found.labels),
        "seconds": found.seconds,
        "differences": [dataclasses.asdict(difference) for difference in found.differences],
    }


def failure_of(found: Recheck) -> NotReproducibleError | None:
    """Returns the error that names every difference, or None."""
    if not found.differences:
        return None
    units = {difference.unit for difference in found.differences}
    head = f"{len(units)} of {counted(len(found.labels), 'recompiled unit')} differ from the stored ones"
    return NotReproducibleError("\n".join([head, *map(_row, found.differences)]))


def _row(difference: Difference) -> str:
    stored, rebuilt = difference.stored or "no such file", difference.rebuilt or "no such file"
    return (
        f"  {difference.label} (unit {difference.unit[:12]}): {difference.file} differs from byte"
        f" {difference.offset}\n    stored:  {stored}\n    rebuilt: {rebuilt}"
    )


def _to_sample(text: str) -> int:
    if text == "all":
        return ALL
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a sample: a number from 1, or 'all'")
    return min(int(text), ALL)


@dataclass(frozen=True)
class _CheckOptions:
    """Whether stored units are compiled again, and how many."""

    check: bool = option(
        "Compile nothing new; compile some stored units again, and compare the bytes.", default=False
    )
    sample: int | None = option(
        f"How many units --check compiles again  [default: {DEFAULT_SAMPLE}]",
        default=None,
        parse=_to_sample,
        metavar="N|all",
    )

    def num_units(self) -> int | None:
        """Returns how many units to compile again; None without ``--check``."""
        if self.sample is not None and not self.check:
            raise click.UsageError("--sample says how many units --check compiles again: give --check, too")
        return (self.sample or DEFAULT_SAMPLE) if self.check else None


@click.command("cache")
@path_argument("manifest_path", metavar="MANIFEST")
@store_options
@worker_options
@remote_options
@entry_option
@store_limit_option
@path_option("--receipt", metavar="FILE", help="Write the receipt there.")
@options_of(_CheckOptions, "sample", made=_CheckOptions.num_units)
@refused_target_option
@json_option("Print the outcome as JSON.")
def build_cache(  # noqa: PLR0913 - one argument for each group of options
    *,
    manifest_path: Path,
    place: StorePlace,
    workers: Workers,
    sharing: Sharing | None,
    entry_texts: tuple[str, ...],
    receipt: Path | None,
    sample: int | None,
    store_limit: int | None,
    as_json: bool,
) -> None:
    """Compile into the store what MANIFEST (or a spec) lacks. Stops cleanly; run again, it goes on where it stopped.

    With --check it compiles some stored units again, elsewhere, and exits with 4 if the bytes differ.
    """
    click.get_current_context().with_resource(interrupted_by_sigterm())
    phases = Phases()
    with phases.time("enumerate"):
        manifest = load_manifest_or_spec(manifest_path)
    if receipt and sample is not None:
        raise click.UsageError("--check builds nothing, so there is no --receipt to write")
    if sharing is not None and sharing.push and sample is not None:
        raise click.UsageError("--check builds nothing, so there is nothing to --push")
    if receipt:
        refuse_unwritable(receipt)
    entries = find_entries(manifest, entry_texts)
    store = place.open()
    if sample is not None:
        _check(manifest, store, workers.num_local, entries, sample, as_json)
        return
    with store.in_use():
        outcome = compile_missing(manifest, store, entries, workers, BuildDisplay(), phases, sharing)
        if receipt:
            plan = plan_manifest(manifest, store, entries)
            write_atomic(receipt, make_receipt(manifest, plan, require_proof(plan, store)).dumps())
    document = {**outcome_document(outcome), "phases": phase_rows(phases.done)}
    lines = [outcome_line(outcome), *remote_lines(outcome), build_time_line(phases.done, outcome)]
    if store_limit is not None:
        document["gc"] = collect_after_build(store, store_limit, plan_manifest(manifest, store, entries))
        lines.append(collection_line(document["gc"]))
    emit(document, as_json, lines)


def _check(
    manifest: Manifest, store: Store, jobs: int, entries: tuple[Entry, ...], sample: int, as_json: bool
) -> None:
    with store.in_use():
        found = recheck(plan_manifest(manifest, store, entries), store, sample, jobs)
    failure = failure_of(found)
    if as_json or failure is None:
        emit(check_document(found), as_json, describe_check(found))
    if failure is not None:
        raise failure


def outcome_line(outcome: BuildOutcome) -> str:
    """Returns one line for people, one before it about a comparison with the model, and one after it about a proof."""
    check, proof = outcome.model_check, outcome.proof
    head = "" if check is None else f"model: {check.check.describe()}: compared in {check.seconds:.1f} s\n"
    if proof is None:
        return f"{head}{_work_line(outcome)}"
    late = f", {len(proof.recipes) // 2} of which only whole programs need" if proof.recipes else ""
    return (
        f"{head}{_work_line(outcome)}\n"
        f"proof: a new process found all {proof.num_recipes} recipes{late}, and compiled 0 (round {proof.num_rounds})"
    )


def _work_line(outcome: BuildOutcome) -> str:
    if not outcome.compiled and not outcome.num_traced:
        return "cache: nothing to do"
    cpu = sum(row.cpu_seconds for row in outcome.compiled)
    return (
        f"cache: {len(outcome.compiled)} units compiled and checked, {outcome.num_traced} programs traced "
        f"in {outcome.seconds:.1f} s ({cpu:.0f} CPU seconds of compiling)"
    )


def remote_lines(outcome: BuildOutcome) -> list[str]:
    """Returns the line about the remote, if one was asked."""
    found = outcome.remote
    return [f"remote: {remote_line(found, f'{len(outcome.compiled)} units compiled')}"] if found else []


def outcome_document(outcome: BuildOutcome) -> dict[str, Any]:
    """Returns the outcome as a JSON value. Seconds are wall-clock."""
    return {
        "num_traced": outcome.num_traced,
        "num_compiled": len(outcome.compiled),
        "seconds": outcome.seconds,
        "num_workers": outcome.num_workers,
        "worker_seconds": dict(outcome.worker_seconds),
        **(
            {}
            if outcome.model_check is None
            else {"model_check": outcome.model_check.model_dump(mode="json", exclude={"components"})}
        ),
        **(
            {}
            if outcome.proof is None
            else {"proof": outcome.proof.model_dump(mode="json", exclude={"label"})}
        ),
        **({} if outcome.remote is None else {"remote": dataclasses.asdict(outcome.remote)}),
        "units": [
            {
                "label": row.label,
                "compile_seconds": row.compile_seconds,
                "cpu_seconds": row.cpu_seconds,
                "max_abs_error": row.max_abs_error,
                "tolerance": row.tolerance,
            }
            for row in outcome.compiled
        ],
    }


def phase_rows(phases: Iterable[Phase]) -> list[dict[str, Any]]:
    """Returns phases as JSON values, in seconds since the whole began."""
    return [
        {"phase": phase.name, "begin": round(phase.begin, 4), "end": round(phase.end, 4)} for phase in phases
    ]


def build_time_line(phases: Sequence[Phase], outcome: BuildOutcome) -> str:
    """Returns one line with each phase, and for the run the work of the workers.

    ``time: 12.4 s: enumerate 0.1, plan 0.2, run 11.9 (2 workers: tracing 3.1, compiling 19.8, idle 0.9), seal 0.2``
    """
    texts = [
        f"{phase.name} {phase.seconds:.1f}" + (_workers(outcome) if phase.name == "run" else "")
        for phase in phases
    ]
    total = max((phase.end for phase in phases), default=0.0)
    return f"time: {total:.1f} s: {', '.join(texts)}"


def _workers(outcome: BuildOutcome) -> str:
    work = [f"{_WORK[kind]} {seconds:.1f}" for kind, seconds in outcome.worker_seconds.items()]
    idle = outcome.num_workers * outcome.seconds - sum(outcome.worker_seconds.values())
    return f" ({outcome.num_workers} workers: {', '.join([*work, f'idle {max(0.0, idle):.1f}'])})"
