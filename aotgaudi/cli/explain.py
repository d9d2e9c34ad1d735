"""``aotgaudi explain``: why something is not warm, by the component of a key that differs. Builds and starts nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from aotgaudi.backends.base import Target
from aotgaudi.backends.offline import find_target
from aotgaudi.bundle.kind import is_capture
from aotgaudi.cli.manifests import find_entries, load_manifest_of, planned_target_option
from aotgaudi.cli.options import (
    CommandWithWords,
    StorePlace,
    json_option,
    path_argument,
    path_option,
    store_options,
)
from aotgaudi.cli.show import emit
from aotgaudi.compile.keys import ProgramKeys
from aotgaudi.compile.pipeline import plan_manifest
from aotgaudi.compile.plan import Plan
from aotgaudi.compile.why import (
    ENTRY,
    BuiltProgram,
    BuiltUnit,
    Change,
    Cost,
    Finding,
    History,
    Reason,
    Sealed,
    explain_against,
    explain_plan,
    read_sealed,
    reasons,
)
from aotgaudi.entries import Entry
from aotgaudi.errors import counted, shortened
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.store.store import Store


def _list_repairs(context: click.Context, parameter: click.Parameter, is_asked: bool) -> None:
    from aotgaudi.wrap.adapters.vllm import REPAIRS

    if is_asked:
        for one in REPAIRS:
            click.echo(
                f"{one.id}\n    {one.defect}\n    found by: {one.feature}\n    {one.action}\n    {one.upstream}"
            )
        context.exit()


@click.command(cls=CommandWithWords)
@path_argument("path", metavar="MANIFEST|BUNDLE|FOLDER")
@click.argument("entry_text", metavar="[ENTRY]", required=False)
@path_option(
    "--against",
    "--run",
    "against",
    metavar="PATH",
    help="Compare with this bundle, receipt or folder; a wrapped server, with its last run at this --root.",
)
@store_options
@planned_target_option
@click.option(
    "--exit-code", is_flag=True, help="Of a vLLM or wrapped server: exit with 3 or 5 if it is not warm."
)
@click.option(
    "--repairs",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_repairs,
    help="List the defects of servers that aotgaudi mends, and exit.",
)
@json_option("Print it as JSON.")
def explain(
    path: Path,
    entry_text: str | None,
    words: tuple[str, ...],
    against: Path | None,
    place: StorePlace,
    described: Target | None,
    exit_code: bool,
    as_json: bool,
) -> None:
    """Say why something is not warm. Exits with 0 whatever it finds.

    MANIFEST, a spec or a bundle of programs: which
    component of the keys of its entries differs from what was built. ENTRY is an entry as
    printed, "(prompt, 1, 64, 0)", a pattern for such text, "(prompt, *, 64, *)", or the first digits of an id. With
    --against, what a bundle or a receipt holds is compared with what would be built here and now, or, with --target, on the
    Gaudi that FILE describes.

    BUNDLE of a wrapped server, and the server's command after --: which components of the launch differ, and which
    conditions. Without a command, the sealed one is taken. With --run, after `aotgaudi run` has refused it: what the server
    hashed there otherwise than in the build, and what it compiled.

    FOLDER of a plain vLLM, ~/.cache/vllm/torch_compile_cache or a part of it: which of the factors that vLLM hashed differs
    between each cache and the one before it, or with --against from the newest in another folder.
    """
    from aotgaudi.cli.captures import explain_compile_caches, explain_launch
    from aotgaudi.wrap.compile_cache import find_compile_caches

    code, is_launch = 0, bool(words) or is_capture(path)
    caches = () if is_launch else find_compile_caches(path)
    if entry_text is not None and (is_launch or caches):
        raise click.UsageError(f"ENTRY {entry_text!r} goes with a MANIFEST or a BUNDLE of programs.")
    if is_launch:
        document, lines, code = explain_launch(path, words, dict(os.environ), place, against)
    elif caches:
        document, lines, code = explain_compile_caches(caches, against)
    else:
        document, lines = explain_programs(path, entry_text, against, place, described)
    emit(document, as_json, lines)
    if exit_code:
        click.get_current_context().exit(code)


def explain_programs(
    manifest_path: Path,
    entry_text: str | None,
    against: Path | None,
    place: StorePlace,
    described: Target | None,
) -> tuple[dict[str, Any], list[str]]:
    """Returns the explanation as a JSON value and in lines for people. Raises like opening any of these."""
    manifest = load_manifest_of(manifest_path)
    entries = find_entries(manifest, () if entry_text is None else (entry_text,))
    if against is not None:
        target = find_target(manifest.spec.target, described)
        return _against(manifest, entries, target, against, place)
    store = place.read()
    plan = plan_manifest(manifest, store, entries, described)
    is_one = entry_text is not None and len(entries) == 1
    return _with_store(manifest, entries, plan, store, is_one=is_one)


def _with_store(
    manifest: Manifest, entries: tuple[Entry, ...], plan: Plan, store: Store, *, is_one: bool
) -> tuple[dict[str, Any], list[str]]:
    history = History() if plan.is_complete and not is_one else History.of_store(store)
    findings = explain_plan(plan, store, history)
    document = _document(manifest, entries, plan, findings, history)
    lines = [_summary(document), *_reason_lines(reasons(findings), history)]
    if is_one:
        document["entry"] = _entry_document(entries[0], plan, findings)
        lines += _entry_lines(document["entry"])
    return document, lines


def _document(
    manifest: Manifest,
    entries: tuple[Entry, ...],
    plan: Plan,
    findings: tuple[Finding, ...],
    history: History,
) -> dict[str, Any]:
    whole = [s for s in plan.programs if s.row and all(key in plan.units for key in s.row.units)]
    return {
        "manifest_id": manifest.id,
        "num_entries": len(entries),
        "num_programs": len(plan.programs),
        "num_warm_entries": sum(len(state.entries) for state in whole),
        "num_warm_programs": len(whole),
        "reasons": [reason_document(reason, history) for reason in reasons(findings)],
    }


def _numbers(document: dict[str, Any]) -> str:
    return f"{counted(document['num_entries'], 'entry')}, {counted(document['num_programs'], 'program')}"


def _summary(document: dict[str, Any]) -> str:
    if document["num_warm_entries"] == document["num_entries"]:
        return f"{_numbers(document)}: all warm"
    warm = counted(document["num_warm_entries"], "entry")
    return f"{_numbers(document)}: {warm} ({counted(document['num_warm_programs'], 'program')}) warm"


def _reason_lines(found: tuple[Reason, ...], history: History) -> Iterator[str]:
    for reason in found:
        yield ""
        yield from reason_lines(reason, history)


def _entry_document(entry: Entry, plan: Plan, findings: tuple[Finding, ...]) -> dict[str, Any]:
    (state,) = plan.programs
    sources = state.row.units if state.row else {}
    return {
        "entry": str(entry),
        "id": entry.id,
        "state": findings[0].state if not plan.missing_units else "not compiled",
        "key": state.key.hex,
        "components": dict(state.key.components),
        "units": [
            {
                "key": key,
                "label": source.label,
                "warm": key in plan.units,
                "compile_seconds": plan.units[key].compile_seconds if key in plan.units else None,
            }
            for key, source in sources.items()
        ],
    }


def _entry_lines(document: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield f"{document['entry']}: {document['state']}"
    yield f"    id   {document['id']}"
    yield f"    key  {document['key']}, of"
    width = max(map(len, document["components"]))
    for name, value in document["components"].items():
        yield f"         {name:<{width}}  {value}"
    for unit in document["units"]:
        took = f"compiled in {unit['compile_seconds']:.1f} s" if unit["warm"] else "not compiled"
        yield f"    unit {unit['key'][:12]}  {unit['label']}: {took}"


def _against(
    manifest: Manifest, entries: tuple[Entry, ...], target: Target, path: Path, place: StorePlace
) -> tuple[dict[str, Any], list[str]]:
    store = place.read()
    history = History.of_store(store)
    sealed = read_sealed(path, manifest, store, history)
    keys = ProgramKeys(manifest.spec, target)
    found = reasons(findings := explain_against(entries, keys, sealed.programs))
    same = [finding for finding in findings if finding.state == "warm"]
    document = {
        "manifest_id": manifest.id,
        "against": str(path),
        "against_manifest_id": sealed.manifest_id,
        "assumed": list(sealed.assumed),
        "num_entries": len(entries),
        "num_programs": len(findings),
        "num_same_entries": sum(len(finding.entries) for finding in same),
        "num_same_programs": len(same),
        "reasons": [reason_document(reason, history) for reason in found],
    }
    return document, [*_against_lines(document, sealed), *_reason_lines(found, history)]


def _against_lines(document: dict[str, Any], sealed: Sealed) -> Iterator[str]:
    is_same = document["manifest_id"] == sealed.manifest_id
    held = f"{counted(sealed.num_entries, 'entry')}, {counted(len(sealed.unit_keys), 'unit')}"
    yield f"{sealed.path}: {held}, of {'this manifest' if is_same else 'manifest ' + sealed.manifest_id}"
    yield from (f"note: {text}" for text in sealed.assumed)
    is_whole = document["num_same_programs"] == document["num_programs"]
    same = "all" if is_whole else counted(document["num_same_entries"], "entry")
    so_far = ", as far as it says" if is_whole and sealed.assumed else ""
    yield f"{_numbers(document)}: {same} with the same key here{so_far}"


# Findings in lines for people, and as JSON values

_SHOWN_CHARACTERS = 72
_EXAMPLES = 3
_INDENT = "    "
_LISTS = frozenset({"target.isa"})
"""Components that are lists of words. Only the words that differ are shown."""

NOT_COMPILED = "traced, and not compiled yet"


def reason_lines(reason: Reason, history: History) -> Iterator[str]:
    """Yields a headline, then, indented, what differs and what that costs."""
    first = reason.findings[0]
    yield f"{_counted(reason)}, e.g. {first.label}: {_state(first)}"
    for change in first.changes:
        yield f"{_INDENT}{change_text(change)}"
    if first.lines is not None:
        yield f"{_INDENT}first line that differs: {_shortened(first.lines[0] or '(none)')}"
        yield f"{_INDENT}{'now:':>24} {_shortened(first.lines[1] or '(none)')}"
    cost = reason.cost(history)
    if cost.num_units:
        yield f"{_INDENT}{_cost_text(reason, cost)}"


def reason_document(reason: Reason, history: History) -> dict[str, Any]:
    """Returns the same as a JSON value, unabridged."""
    first, cost = reason.findings[0], reason.cost(history)
    return {
        "of": "program" if first.is_program else "unit",
        "state": first.state,
        "num_programs": len(reason.findings) if first.is_program else 0,
        "num_entries": reason.num_entries,
        "num_units": 0 if first.is_program else len(reason.findings),
        "examples": [finding.label for finding in reason.findings[:_EXAMPLES]],
        "keys": [finding.key.hex for finding in reason.findings],
        "nearest": _nearest(first),
        "changes": [{"component": one.name, "old": one.old, "new": one.new} for one in first.changes],
        "graph_lines": first.lines,
        "invalidated": {
            "num_units": cost.num_units,
            "seconds": cost.seconds,
            "num_units_without_time": cost.num_untimed,
            "certain": reason.is_certain,  # The units are compiled again, whatever tracing finds.
        },
    }


def change_text(change: Change) -> str:
    """Returns ``name: old -> new``; for a list of words, the removed words and the added ones."""
    if change.name in _LISTS and change.old is not None and change.new is not None:
        old, new = change.old.split(), change.new.split()
        words = [*(f"-{w}" for w in old if w not in new), *(f"+{w}" for w in new if w not in old)]
        return f"{change.name}: {' '.join(words)}"
    return f"{change.name}: {_shortened(change.old)} -> {_shortened(change.new)}"


def time_text(cost: Cost) -> str:
    """Returns how long compiling took, in words."""
    if cost.num_untimed == cost.num_units:
        return "how long they took is not on record"
    others = f" ({cost.num_untimed} of them not on record)" if cost.num_untimed else ""
    return f"which took {cost.seconds:.1f} s{others}"


def _counted(reason: Reason) -> str:
    if not reason.findings[0].is_program:
        return counted(len(reason.findings), "unit")
    return f"{counted(len(reason.findings), 'program')} ({counted(reason.num_entries, 'entry')})"


def _state(finding: Finding) -> str:
    if finding.state == "lost":
        return "built before, but what its record names is gone (aotgaudi cache fsck)"
    if finding.state == "never built":
        return f"never built{'' if finding.is_program else ' (' + NOT_COMPILED + ')'}"
    return "not built since these changed" if finding.is_program else f"{NOT_COMPILED} since these changed"


def _cost_text(reason: Reason, cost: Cost) -> str:
    units, took = counted(cost.num_units, "unit"), time_text(cost)
    if not reason.findings[0].is_program:
        return f"{units} to compile; the nearest took {cost.seconds:.1f} s"
    if reason.is_certain or reason.state == "lost":
        return f"{units} to compile again, {took}"
    return f"{units} at most, compiled again where their graphs come out differently, {took}"


def _nearest(finding: Finding) -> str | None:
    if isinstance(finding.nearest, BuiltUnit):
        return finding.nearest.label
    if isinstance(finding.nearest, BuiltProgram):
        names = [name for name, _ in finding.key.components if name.startswith(ENTRY)]
        return f"({', '.join(finding.nearest.components.get(name, '?') for name in names)})"
    return None


def _shortened(text: str | None) -> str:
    return "(absent)" if text is None else shortened(" ".join(text.split()), _SHOWN_CHARACTERS)
