"""``aotgaudi build SPEC``: manifest, missing artifacts and bundle in one run; and ``build plan``, ``cache``, ``bundle``."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from aotgaudi.backends.base import Target
from aotgaudi.backends.offline import build_target
from aotgaudi.bundle.bundle import Bundle, open_bundle
from aotgaudi.bundle.signing import Signing
from aotgaudi.bundle.staging import refuse_foreign
from aotgaudi.cli.build_manifest import default_manifest_path
from aotgaudi.cli.build_options import remote_line, remote_options, signing_options, worker_options
from aotgaudi.cli.cache import collect_after_build, collection_line
from aotgaudi.cli.manifests import entry_option, find_entries, planned_target_option, refused_target_option
from aotgaudi.cli.options import (
    StorePlace,
    find_model,
    jobs_option,
    json_option,
    option,
    options_of,
    path_argument,
    path_option,
    store_limit_option,
    store_options,
)
from aotgaudi.cli.progress import BuildDisplay, interrupted_by_sigterm
from aotgaudi.cli.show import emit, refuse_unwritable
from aotgaudi.compile.cards import require_proof
from aotgaudi.compile.pipeline import Workers, build, compile_missing, make_receipt, plan_manifest, seal
from aotgaudi.compile.plan import Plan
from aotgaudi.compile.recheck import Difference, recheck
from aotgaudi.compile.run import BuildOutcome
from aotgaudi.entries import Entry
from aotgaudi.errors import AotGaudiError, NotReproducibleError, counted
from aotgaudi.files import write_atomic
from aotgaudi.manifest.manifest import Manifest, dumps, load_manifest_or_spec, write_manifest
from aotgaudi.phases import Phase, Phases
from aotgaudi.share.remote_cache import Sharing
from aotgaudi.store.store import Store

DEFAULT_SAMPLE = 3
ALL = sys.maxsize
"""The number for ``--sample all``."""
_WORK = {"check": "comparing with transformers", "trace": "tracing", "compile": "compiling"}


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
    lines = [*outcome_lines(outcome), build_time_line(phases.done, outcome)]
    if store_limit is not None:
        document["gc"] = collect_after_build(store, store_limit, plan_manifest(manifest, store, entries))
        lines.append(collection_line(document["gc"]))
    emit(document, as_json, lines)


def _check(
    manifest: Manifest, store: Store, jobs: int, entries: tuple[Entry, ...], sample: int, as_json: bool
) -> None:
    with store.in_use():
        found = recheck(plan_manifest(manifest, store, entries), store, sample, jobs)
    document = {
        "same": not found.differences,
        "units": list(found.labels),
        "seconds": found.seconds,
        "differences": [dataclasses.asdict(difference) for difference in found.differences],
    }
    if as_json or not found.differences:
        line = f"{len(found.labels)} units compiled again in {found.seconds:.1f} s, all to the same {found.compared}"
        emit(document, as_json, f"check: {line}")
    if found.differences:
        num_units = len({difference.unit for difference in found.differences})
        head = f"{num_units} of {counted(len(found.labels), 'recompiled unit')} differ from the stored ones"
        raise NotReproducibleError("\n".join([head, *map(_row, found.differences)]))


def outcome_lines(outcome: BuildOutcome) -> Iterator[str]:
    """Yields what a build did, for people: the comparison with the model, the work, the proof, the remote."""
    check, proof = outcome.model_check, outcome.proof
    if check is not None:
        yield f"model: {check.check.describe()}: compared in {check.seconds:.1f} s"
    yield _work_line(outcome)
    if proof is not None:
        late = f", {len(proof.recipes) // 2} of which only whole programs need" if proof.recipes else ""
        rounds = f"and compiled 0 (round {proof.num_rounds})"
        yield f"proof: a new process found all {proof.num_recipes} recipes{late}, {rounds}"
    if outcome.remote is not None:
        yield f"remote: {remote_line(outcome.remote, f'{len(outcome.compiled)} units compiled')}"


def _work_line(outcome: BuildOutcome) -> str:
    if not outcome.compiled and not outcome.num_traced:
        return "cache: nothing to do"
    cpu = sum(row.cpu_seconds for row in outcome.compiled)
    return (
        f"cache: {len(outcome.compiled)} units compiled and checked, {outcome.num_traced} programs traced "
        f"in {outcome.seconds:.1f} s ({cpu:.0f} CPU seconds of compiling)"
    )


_OF_A_UNIT = ("label", "compile_seconds", "cpu_seconds", "max_abs_error", "tolerance")


def outcome_document(outcome: BuildOutcome) -> dict[str, Any]:
    """Returns the outcome as a JSON value. Seconds are wall-clock."""
    check, proof, remote = outcome.model_check, outcome.proof, outcome.remote
    parts = {
        "model_check": check and check.model_dump(mode="json", exclude={"components"}),
        "proof": proof and proof.model_dump(mode="json", exclude={"label"}),
        "remote": remote and dataclasses.asdict(remote),
    }
    return {
        "num_traced": outcome.num_traced,
        "num_compiled": len(outcome.compiled),
        "seconds": outcome.seconds,
        "num_workers": outcome.num_workers,
        "worker_seconds": dict(outcome.worker_seconds),
        **{name: part for name, part in parts.items() if part is not None},
        "units": [{name: getattr(row, name) for name in _OF_A_UNIT} for row in outcome.compiled],
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


bound_model_option = click.option(
    "--model",
    metavar="DIR",
    help="Bind the bundle to this model directory (or hub id): what signs the bundle signs its files, too.",
)


@click.command("bundle")
@path_argument("manifest_path", metavar="MANIFEST")
@path_option("-o", "--output", required=True, metavar="DIR", help="The bundle.")
@bound_model_option
@signing_options
@store_options
@json_option("Print what was sealed as JSON.")
def build_bundle(
    manifest_path: Path,
    output: Path,
    model: str | None,
    signing: Signing | None,
    place: StorePlace,
    as_json: bool,
) -> None:
    """Seal what the store has for MANIFEST (or a spec) into DIR."""
    manifest = load_manifest_or_spec(manifest_path)
    refuse_foreign(output)
    directory = None if model is None else find_model(model)
    _note_unbound(output, directory)
    store = place.open()
    with store.in_use():
        seal(manifest, store, output, signing=signing, model=directory)
    document = bundle_document(open_bundle(output), len(manifest.entries))
    emit(document, as_json, bundle_line(document))


def _note_unbound(output: Path, model: Path | None) -> None:
    """Says on standard error that a bundle that is bound to a model will be replaced by one that is not."""
    with contextlib.suppress(AotGaudiError):  # It may be absent or damaged.
        if model is None and open_bundle(output).require_programs().model:
            click.echo(f"note: {output} is bound to its model; its successor is not (--model)", err=True)


def bundle_document(bundle: Bundle, num_entries: int) -> dict[str, Any]:
    """Returns what was sealed as a JSON value. Calls are counted over all distinct programs, each run once."""
    counts, receipt = bundle.index.counts, bundle.require_programs()
    distinct = {digest: entry_id for entry_id, digest in receipt.programs.items()}
    return {
        "path": str(bundle.path),
        "manifest_id": bundle.index.manifest_id,
        "num_entries": num_entries,
        "num_entries_built": len(receipt.programs),
        "num_programs": counts.programs,
        "num_units": counts.units,
        "num_calls": sum(len(bundle.program(entry_id).calls) for entry_id in distinct.values()),
        "object_bytes": counts.object_bytes,
        "num_model_files": len(receipt.model or ()),
    }


def bundle_line(document: dict[str, Any]) -> str:
    """Returns the same for people."""
    num_bound = document["num_model_files"]
    bound = f", bound to {num_bound} files of its model" if num_bound else ""
    return (
        f"bundle: {document['path']}: {document['num_entries']} entries run on {document['num_units']} units "
        f"({document['num_programs']} programs, {document['num_calls']} calls, {document['object_bytes'] / 1e6:.1f} MB)"
        + bound
    )


@click.command("all")
@path_argument("spec_path", metavar="SPEC")
@path_option("-o", "--output", metavar="DIR", help="The bundle  [default: SPEC's name with .bundle]")
@bound_model_option
@signing_options
@store_options
@worker_options
@remote_options
@store_limit_option
@json_option("Print the outcome as JSON.")
def build_all(  # noqa: PLR0913 - one argument for each group of options
    *,
    spec_path: Path,
    output: Path | None,
    model: str | None,
    signing: Signing | None,
    place: StorePlace,
    workers: Workers,
    sharing: Sharing | None,
    store_limit: int | None,
    as_json: bool,
) -> None:
    """Enumerate SPEC (or take a manifest), compile what is missing, and seal a bundle. Does nothing twice."""
    click.get_current_context().with_resource(interrupted_by_sigterm())
    phases = Phases()
    with phases.time("enumerate"):
        manifest = load_manifest_or_spec(spec_path)
    bundle = output or default_bundle_path(spec_path)
    refuse_foreign(bundle)
    directory = None if model is None else find_model(model)
    _note_unbound(bundle, directory)
    store = place.open()
    build_target(manifest.spec)  # A spec that cannot be built here leaves no manifest.
    manifest_path = _write_manifest(manifest, spec_path)
    if not as_json:
        click.echo(f"manifest: {manifest_path}: {len(manifest.entries)} entries, id {manifest.id[:16]}")
    result = build(
        manifest,
        bundle,
        store=store,
        remote=sharing,
        jobs=workers,
        sign_key=signing,
        model=directory,
        on_progress=BuildDisplay(),
        phases=phases,
    )
    outcome, sealed = result.outcome, open_bundle(bundle)
    document: dict[str, Any] = {
        "manifest": {"path": str(manifest_path), "id": manifest.id, "num_entries": len(manifest.entries)},
        "cache": outcome_document(outcome),
        "bundle": bundle_document(sealed, len(manifest.entries)),
        "phases": phase_rows(result.phases),
    }
    lines = [
        *outcome_lines(outcome),
        bundle_line(document["bundle"]),
        build_time_line(result.phases, outcome),
    ]
    if store_limit is not None:
        document["gc"] = collect_after_build(store, store_limit, plan_manifest(manifest, store))
        lines.append(collection_line(document["gc"]))
    emit(document, as_json, lines)


def default_bundle_path(spec_path: Path) -> Path:
    """Returns the path for the bundle of a spec or a manifest: in the current folder, ``x.toml`` -> ``x.bundle``."""
    name = spec_path.name.removesuffix(".toml").removesuffix(".json").removesuffix(".manifest")
    return Path(f"{name}.bundle")


def _write_manifest(manifest: Manifest, spec_path: Path) -> Path:
    """Returns the manifest's path. Writes the manifest of a spec next to the spec unless it is up to date."""
    if spec_path.suffix != ".toml":
        return spec_path
    path = default_manifest_path(spec_path)
    if not (path.is_file() and path.read_bytes() == dumps(manifest)):
        write_manifest(path, manifest)
    return path


_UNMEASURED = "how long that takes is not known: no record of this store is of units compiled on a Gaudi"


@click.command("plan")
@path_argument("manifest_path", metavar="MANIFEST")
@store_options
@jobs_option
@planned_target_option
@json_option("Print the plan as JSON.")
def build_plan(
    *,
    manifest_path: Path,
    place: StorePlace,
    jobs: int,
    described: Target | None,
    as_json: bool,
) -> None:
    """Show what `build cache` would do for MANIFEST (or a spec).

    With --target: the programs and keys for a machine that FILE describes, such as one with a Gaudi. This machine need not
    be able to compile them.
    """
    manifest, store = load_manifest_or_spec(manifest_path), place.read()
    plan = plan_manifest(manifest, store, described=described)
    document = _document(plan, jobs)
    emit(document, as_json, _lines(document))


def _document(plan: Plan, jobs: int) -> dict[str, Any]:
    # The compile times of the table were measured on CPUs.
    is_known = plan.target.backend != "hpu" or plan.is_complete or plan.estimates.by_label
    return {
        "target": plan.target.model_dump(mode="json"),
        "num_entries": sum(len(state.entries) for state in plan.programs),
        "num_programs": len(plan.programs),
        "num_units_ready": len(plan.units),
        "trace": [
            {
                "entry": str(state.entries[0]),
                "key": state.key.hex,
                "num_entries": len(state.entries),
                "why": "no program with this key in the store",
            }
            for state in plan.untraced
        ],
        "compile": [
            {"unit": key, "label": label, "why": "no artifact with this key in the store"}
            for key, label in plan.missing_units.items()
        ],
        "compare_model": not plan.is_checked,
        "num_jobs": jobs,
        "estimate_seconds": plan.estimate_seconds(jobs) if is_known else None,
    }


def _lines(document: dict[str, Any]) -> list[str]:
    lines = [
        f"{document['num_entries']} entries are {document['num_programs']} programs; "
        f"units in the store: {document['num_units_ready']}"
    ]
    if document["compare_model"]:
        lines.append(
            "  compare  the graphs with transformers' model: no comparison with this key in the store"
        )
    for row in document["trace"]:
        others = (
            f" (and {counted(row['num_entries'] - 1, 'more entry')} like it)"
            if row["num_entries"] > 1
            else ""
        )
        lines.append(f"  trace    {row['entry']}{others}: {row['why']}")
    lines += [f"  compile  {row['label']}: {row['why']}" for row in document["compile"]]
    if len(lines) == 1:
        return [*lines, "nothing to do"]
    if document["estimate_seconds"] is None:
        return [*lines, _UNMEASURED]
    later = ", and then the units that tracing finds" if document["trace"] else ""
    return [*lines, f"about {document['estimate_seconds']:.0f} s on {document['num_jobs']} workers{later}"]
