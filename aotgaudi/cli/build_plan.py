"""``aotgaudi build plan``: what would be compiled, and why; or what an upgrade would invalidate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from aotgaudi.backends.base import Target
from aotgaudi.bundle.kind import is_capture
from aotgaudi.cli.build_options import AskedExtent, extent_options
from aotgaudi.cli.captures import built_captures, captures_what_if
from aotgaudi.cli.explain import change_text, changes_document, cost_document, time_text
from aotgaudi.cli.options import jobs_option, json_option, path_argument
from aotgaudi.cli.show import emit
from aotgaudi.cli.store_options import StorePlace, store_options
from aotgaudi.cli.target_option import planned_target_option
from aotgaudi.compile.keys import ProgramKeys
from aotgaudi.compile.pipeline import plan_manifest
from aotgaudi.compile.plan import Plan
from aotgaudi.compile.what_if import WhatIf, parse_changes, what_if
from aotgaudi.errors import counted
from aotgaudi.manifest.manifest import load_manifest_or_spec
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.store.store import Store

Command = Callable[..., Any]

_UNMEASURED = "how long that takes is not known: no record of this store is of units compiled on a Gaudi"


def _can_estimate(plan: Plan) -> bool:
    """Whether compile times are known. Those of the table were measured on CPUs."""
    return plan.target.backend != "hpu" or plan.is_complete or bool(plan.estimates.seen)


def what_if_option(function: Command) -> Command:
    """``--what-if``, repeatable."""
    return click.option(
        "--what-if",
        "settings",
        multiple=True,
        metavar="NAME=VALUE",
        help="What this change would invalidate: torch=2.14, transformers=..., isa=avx2, any key component (repeatable).",
    )(function)


def ask(settings: tuple[str, ...], plan: Plan, spec: BuildSpec, store: Store) -> WhatIf:
    """Returns what `settings` would invalidate. Raises SpecError for a name that is in no key, and StoreError."""
    changes = parse_changes(settings, ProgramKeys(spec, plan.target), plan.target)
    return what_if(changes, plan, spec, store)


def what_if_document(answer: WhatIf) -> dict[str, Any]:
    """Returns the answer as a JSON value."""
    return {
        "changes": changes_document(answer.changes),
        "num_entries_invalidated": answer.num_entries,
        "num_programs_invalidated": answer.num_programs,
        "num_programs_built_already": answer.already,
        "num_programs_not_built_now": answer.num_cold,
        "units": cost_document(answer.units, is_certain=answer.is_certain),
    }


def what_if_lines(answer: WhatIf) -> list[str]:
    """Returns the answer in lines for people."""
    if not answer.changes:
        return ["what if: that is what there is now; nothing changes"]
    lines = ["what if:", *(f"    {change_text(change)}" for change in answer.changes)]
    if not answer.num_programs:
        lines.append("nothing that is built now would be invalidated")
    else:
        entries, programs = counted(answer.num_entries, "entry"), counted(answer.num_programs, "program")
        lines += [f"{entries}, {programs} would be traced again", _units_line(answer)]
    if answer.already:
        lines.append(f"{counted(answer.already, 'program')} built already under these values: found again")
    if answer.num_cold:
        lines.append(f"{counted(answer.num_cold, 'program')} not built now either (aotgaudi explain)")
    return lines


def _units_line(answer: WhatIf) -> str:
    units, took = counted(answer.units.num_units, "unit"), time_text(answer.units)
    if answer.is_certain:
        return f"{units} would be compiled again, {took}: the target is in the key of every unit"
    return (
        f"{units} at most would be compiled again, {took}: those whose graphs come out differently,"
        " which only tracing can tell"
    )


@click.command("plan")
@path_argument("manifest_path", metavar="[MANIFEST|BUNDLE]", required=False)
@store_options
@jobs_option
@extent_options
@planned_target_option
@what_if_option
@json_option("Print the plan as JSON.")
def build_plan(
    *,
    manifest_path: Path | None,
    place: StorePlace,
    jobs: int,
    asked: AskedExtent,
    described: Target | None,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Show what `build cache` would do for MANIFEST (or a spec), with --tier or --budget of its most important entries.

    With --what-if: show what would be invalidated if a component of the keys had another value. With --target: the programs
    and keys for a machine that FILE describes, such as one with a Gaudi; this machine need not be able to compile them.

    With --what-if and the BUNDLE of a wrapped server, or nothing: whether that capture, or which of all captures in the
    store, would be built anew (vllm=0.33.0, flag.max-model-len=1024).
    """
    if manifest_path is None or is_capture(manifest_path):
        _plan_captures(manifest_path, place, settings, as_json=as_json)
        return
    manifest, store = load_manifest_or_spec(manifest_path), place.read()
    extent = asked.of(manifest)
    plan = plan_manifest(manifest, store, None if extent is None else extent.entries, described)
    if settings:
        answer = ask(settings, plan, manifest.spec, store)
        told = what_if_document(answer)
        emit(told, as_json, what_if_lines(answer))
        return
    document = _document(plan, jobs)
    emit(document, as_json, _lines(document))


def _plan_captures(
    bundle_path: Path | None, place: StorePlace, settings: tuple[str, ...], *, as_json: bool
) -> None:
    if not settings:
        raise click.UsageError(
            "Missing argument 'MANIFEST', or option '--what-if', which captures are asked for."
        )
    store = place.read()
    document, lines = captures_what_if(settings, built_captures(bundle_path, store))
    emit(document, as_json, lines)


def _document(plan: Plan, jobs: int) -> dict[str, Any]:
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
        "estimate_seconds": plan.estimate_seconds(jobs) if _can_estimate(plan) else None,
    }


def _lines(document: dict[str, Any]) -> list[str]:
    lines = [
        f"{document['num_entries']} entries are {document['num_programs']} programs; "
        f"{document['num_units_ready']} units are in the store"
    ]
    if document["compare_model"]:
        lines.append(
            "  compare  the graphs with transformers' model: no comparison with this key in the store"
        )
    for row in document["trace"]:
        others = f" (and {row['num_entries'] - 1} entries like it)" if row["num_entries"] > 1 else ""
        lines.append(f"  trace    {row['entry']}{others}: {row['why']}")
    lines += [f"  compile  {row['label']}: {row['why']}" for row in document["compile"]]
    if len(lines) == 1:
        return [*lines, "nothing to do"]
    if document["estimate_seconds"] is None:
        return [*lines, _UNMEASURED]
    later = ", and then the units that tracing finds" if document["trace"] else ""
    return [*lines, f"about {document['estimate_seconds']:.0f} s on {document['num_jobs']} workers{later}"]
