"""``--what-if NAME=VALUE``: what an upgrade would invalidate, as lines and as a JSON value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from aotgaudi.build.keys import ProgramKeys
from aotgaudi.build.plan import Plan
from aotgaudi.cli.show.explanation import change_text, changes_document, cost_document, counted, time_text
from aotgaudi.explain.what_if import WhatIf, parse_changes, what_if
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.store.store import Store

Command = Callable[..., Any]


def what_if_option(function: Command) -> Command:
    """``--what-if``, repeatable."""
    return click.option(
        "--what-if",
        "settings",
        multiple=True,
        metavar="NAME=VALUE",
        help="What this would invalidate: torch=2.14, transformers=..., isa=avx2, any component of a key (repeatable).",
    )(function)


def ask(settings: tuple[str, ...], plan: Plan, spec: BuildSpec, store: Store) -> WhatIf:
    """Returns what `settings` would invalidate. Raises SpecError for a name that no key has, and StoreError."""
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
