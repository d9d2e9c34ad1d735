"""``aotgaudi build plan``: what would be compiled, why, and how long it may take. Compiles nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from aotgaudi.build.plan import Plan
from aotgaudi.cli.options.common import jobs_option
from aotgaudi.cli.options.store import StorePlace, store_options
from aotgaudi.cli.options.what_if import ask, what_if_document, what_if_lines, what_if_option
from aotgaudi.manifest.codec import load_manifest_or_spec
from aotgaudi.pipeline import plan_manifest


@click.command("plan")
@click.argument("manifest_path", metavar="MANIFEST", type=click.Path(path_type=Path))
@store_options
@jobs_option
@what_if_option
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def build_plan(
    manifest_path: Path, place: StorePlace, jobs: int, settings: tuple[str, ...], as_json: bool
) -> None:
    """Show what `build cache` would do for MANIFEST (or a spec).

    With --what-if: what of it would be invalidated if a component of the keys were another.
    """
    manifest, store = load_manifest_or_spec(manifest_path), place.open()
    plan = plan_manifest(manifest, store)
    if settings:
        answer = ask(settings, plan, manifest.spec, store)
        told = what_if_document(answer)
        click.echo(json.dumps(told, indent=2) if as_json else "\n".join(what_if_lines(answer)))
        return
    document = _document(plan, jobs)
    click.echo(json.dumps(document, indent=2) if as_json else "\n".join(_lines(document)))


def _document(plan: Plan, jobs: int) -> dict[str, Any]:
    return {
        "target": plan.target.model_dump(mode="json"),
        "num_entries": sum(len(state.entries) for state in plan.programs),
        "num_programs": len(plan.programs),
        "num_units_ready": len(plan.units),
        "trace": [
            {
                "entry": str(state.entries[0]),
                "num_entries": len(state.entries),
                "why": "no program with this key in the store",
            }
            for state in plan.untraced
        ],
        "compile": [
            {"unit": key, "label": label, "why": "no artifact with this key in the store"}
            for key, label in plan.missing_units.items()
        ],
        "num_jobs": jobs,
        "estimate_seconds": plan.estimate_seconds(jobs),
    }


def _lines(document: dict[str, Any]) -> list[str]:
    lines = [
        f"{document['num_entries']} entries are {document['num_programs']} programs; "
        f"{document['num_units_ready']} units are in the store"
    ]
    for row in document["trace"]:
        others = f" (and {row['num_entries'] - 1} entries like it)" if row["num_entries"] > 1 else ""
        lines.append(f"  trace    {row['entry']}{others}: {row['why']}")
    lines += [f"  compile  {row['label']}: {row['why']}" for row in document["compile"]]
    if len(lines) == 1:
        return [*lines, "nothing to do"]
    later = ", and then the units that tracing finds" if document["trace"] else ""
    return [*lines, f"about {document['estimate_seconds']:.0f} s on {document['num_jobs']} workers{later}"]
