"""``aotgaudi build plan``: what would be compiled, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from aotgaudi.backends.base import Target
from aotgaudi.cli.options import jobs_option, json_option, path_argument
from aotgaudi.cli.show import emit
from aotgaudi.cli.store_options import StorePlace, store_options
from aotgaudi.cli.target_option import planned_target_option
from aotgaudi.compile.pipeline import plan_manifest
from aotgaudi.compile.plan import Plan
from aotgaudi.errors import counted
from aotgaudi.manifest.manifest import load_manifest_or_spec

_UNMEASURED = "how long that takes is not known: no record of this store is of units compiled on a Gaudi"


def _can_estimate(plan: Plan) -> bool:
    """Whether compile times are known. Those of the table were measured on CPUs."""
    return plan.target.backend != "hpu" or plan.is_complete or bool(plan.estimates.by_label)


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
