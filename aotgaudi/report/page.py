"""Makes the pages of reports and differences, with sections, tables and drawings. Computes nothing and needs no network.

Every number is a ``<data>`` element with its value and its place in the JSON form (`Numbers`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from aotgaudi.report.drawing import padding_figure, steps_figure
from aotgaudi.report.html import NONE, Html, Numbers, code, details, element, page, shown, table
from aotgaudi.report.values import (
    BuildTime,
    Component,
    Plane,
    Report,
    ReportedCoverage,
    ReportedTrace,
    Upgrade,
)

_MOST_UNITS = 25
_CHARACTERS_OF_ID = 16
_CHARACTERS_OF_KEY = 12
_UNKNOWN = element("span", "not known", class_="none")


def report_page(report: Report) -> str:
    """Returns the page of a report."""
    num = Numbers(report.model_dump(mode="json", by_alias=True))
    return page(
        f"{report.subject.model} \u00b7 aotgaudi report",
        _header(report),
        _tiles(report, num),
        _warnings(report),
        _section("Steps and entries", *_steps(report, num)),
        _section("Where a build's time went", *_build_time(report.build_time, num))
        if report.build_time
        else NONE,
        _section("Units and the build", *_built(report.built.num_timed, num)) if report.built else NONE,
        _section("Memory", *_memory(report, num)),
        _section("What an upgrade would cost", *_upgrades(report.upgrades, num)) if report.upgrades else NONE,
        _section("Keys and provenance", *_keys(report)),
    )


def difference_page(document: Mapping[str, Any]) -> str:
    """Returns the page for the output of ``aotgaudi diff --json`` about two manifests."""
    num, causes = Numbers(document), document["causes"]
    entries = [
        (kind, num(f"entries.{kind}.added"), num(f"entries.{kind}.removed"), _examples(change))
        for kind, change in document["entries"].items()
    ]
    effects = [
        (cause["where"], kind, *(num(f"causes.{i}.entries.{kind}.{what}") for what in ("added", "removed")))
        for i, cause in enumerate(causes)
        for kind in cause["entries"]
    ]
    problems = [
        f"{one['where']} cannot be changed alone: {one['problem']}" for one in causes if one["problem"]
    ]
    values = [(one["where"], code(one["old"]), code(one["new"])) for one in document["values"]]
    return page(
        f"{document['a']['path']} and {document['b']['path']} \u00b7 aotgaudi diff",
        element("h1", "What differs" if document["different"] else "No difference"),
        *(_side(name, document[name], num) for name in "ab"),
        _section("Values of the spec", table(("*value", "*A", "*B"), values)) if values else NONE,
        _section("Entries", table(("kind", "#came", "#went", "the first of them"), entries))
        if entries
        else NONE,
        *(element("p", f"{kind} entries are the same, in another order.") for kind in document["reordered"]),
        _section(
            "Which value caused what",
            _soft("Each changed value was tried alone on A's spec."),
            table(("*value", "kind", "#came", "#went"), effects),
            *(element("p", problem) for problem in problems),
        )
        if causes
        else NONE,
    )


def _side(name: str, side: Mapping[str, Any], num: Numbers) -> Html:
    words = {"side": name.upper(), "path": code(side["path"]), "id": code(side["id"][:_CHARACTERS_OF_ID])}
    return _soft(num.text("{side}: {path}, {num_entries} entries, {id}", name, **words))


def _examples(change: Mapping[str, Any]) -> str:
    return " ".join(
        [*(f"+{one}" for one in change["added_examples"]), *(f"-{one}" for one in change["removed_examples"])]
    )


def _section(title: str, *children: object) -> Html:
    return element("section", element("h2", title), *children)


def _soft(*children: object) -> Html:
    return element("p", *children, class_="soft")


def _header(report: Report) -> Html:
    subject, coverage = report.subject, report.coverage
    state, colour = ("Closed:", "good") if coverage.is_closed else ("Not closed:", "bad")
    where = f" \u00b7 {subject.backend} \u00b7 {subject.strategy} buckets of {subject.version}"
    return element(
        "header",
        element("h1", subject.model),
        _soft(subject.kind, " ", code(subject.path), where),
        element("p", element("strong", state, class_=colour), f" {coverage.result}."),
    )


def _tiles(report: Report, num: Numbers) -> Html:
    memory = report.memory
    tiles = [
        _tile(num("entries.num_entries"), "entries"),
        _tile(num("entries.num_warm"), "of them built"),
        _tile(num("entries.num_closing"), "of them close the public table"),
        _tile(num("coverage.num_holes"), "holes", class_="bad" if report.coverage.num_holes else None),
    ]
    if report.built:
        tiles.append(_tile(num("built.num_units"), num.text("compiled units, {built.size_bytes:size}")))
    if memory.unknown is None:
        each = ", on each of {memory.num_devices} devices" if memory.num_devices > 1 else ""
        text = num.text(f"of memory besides weights{each}")
        tiles.append(_tile(num("memory.total_bytes", "size"), text))
    return element("div", *tiles, class_="tiles")


def _tile(number: Html, text: object, class_: str | None = None) -> Html:
    return element("div", element("b", number, class_=class_), element("span", text), class_="tile")


def _warnings(report: Report) -> Html:
    if not report.warnings and not report.notes:
        return NONE
    sign = element("strong", "Warning:", class_="bad")
    warnings = (element("li", sign, " ", text) for text in report.warnings)
    notes = (element("li", text) for text in report.notes)
    return _section("Warnings and notes", element("ul", *warnings, *notes, class_="plain"))


# Steps and entries


def _steps(report: Report, num: Numbers) -> Iterator[Html]:
    name = report.coverage.scheduler
    yield _soft(
        f"Every step that {'the scheduler' if name == 'aotgaudi' else name} can form, and the entry that runs it. An entry"
        " covers all steps that are as large or smaller: those below it and to its left."
    )
    for index, plane in enumerate(report.planes):
        yield from _plane(plane, f"planes.{index}", num)
    if report.trace:
        yield from _trace(report.trace, num)
    yield element("h3", "By kind")
    columns = {
        "kind": "kind",
        "#entries": "{num_entries}",
        "#built": "{num_warm}",
        "#closing": "{num_closing}",
        "largest": "largest",
    }
    yield num.table("entries.kinds", columns)
    yield from _coverage(report.coverage, num)


def _plane(plane: Plane, at: str, num: Numbers) -> Iterator[Html]:
    if plane.phase == "prompt":
        title, axes = "Prompts", "Query tokens after blocks of context"
    else:
        title, axes = "Decodes", "Blocks in all, by the number of sequences"
    if plane.traffic:
        padded = "Padding of the trace: each cell's share of all the work that was done in vain"
    else:
        padded = (
            "Padding: what the entry computes and reads, by what the step needs. Every step that can be formed counts"
            " once; no trace was given"
        )
    yield element("h3", title)
    yield element("div", steps_figure(plane, at, axes), padding_figure(plane, at, padded), class_="charts")
    if plane.padding:
        sampled = " (of a sample, within {padding.error:factor})" if plane.padding.is_sampled else ""
        text = (
            "Over every step that can be formed, each counted once, padding is {padding.mean:factor} in the mean"
            f"{sampled}, {{padding.worst:factor}} at worst, for ({{step}})."
        )
        yield element("p", num.text(text, at, step=", ".join(map(str, plane.padding.worst_step))))
    if plane.traffic:
        text = "The trace formed {traffic.num_steps} of these steps; {traffic.share:share} of what it did in vain was here."
        yield element("p", num.text(text, at))


def _trace(trace: ReportedTrace, num: Numbers) -> Iterator[Html]:
    refused = "; {num_refused} requests do not fit the limits" if trace.num_refused else ""
    shortened = "; {num_shortened} answers were shortened to fit" if trace.num_shortened else ""
    text = (
        "{path}: {num_requests} requests, {num_steps} steps in {seconds:time} of simulated time, {num_preemptions}"
        f" preemptions{refused}{shortened}. The device did {{factor:factor}} of the work that the steps needed"
        " ({padded:work} for {useful:work} {unit}), in {num_entries_used} of {num_entries} entries. What steps cost is"
        " {basis}."
    )
    yield element("h3", "The trace")
    yield element("p", num.text(text, "trace", path=code(trace.path), unit=trace.unit, basis=trace.basis))
    columns = {
        "entry": "entry",
        "#steps": "{traffic.num_steps}",
        "#needed": "{traffic.useful:work}",
        "#done": "{traffic.padded:work}",
        "#share of what was in vain": "{traffic.share:share}",
    }
    yield details("Where most was done in vain", num.table("trace.wasteful", columns))


def _coverage(coverage: ReportedCoverage, num: Numbers) -> Iterator[Html]:
    if coverage.phases:
        yield element("h3", "What is proved")
        columns = {
            "steps": lambda phase: f"{phase['kind']} {phase['unit']}",
            "#can be formed": "{num_reachable}",
            "#without an entry": "{num_uncovered}",
        }
        yield num.table("coverage.phases", columns)
    if coverage.holes:
        yield element("h3", "Holes")
        columns = {"where": "text", "#steps": "{num_uncovered}", "witness: the smallest of them": "witness"}
        yield num.table("coverage.holes", columns)
        yield _more(coverage.num_holes - len(coverage.holes))
    if coverage.closing:
        entries = "entry" if coverage.num_closing == 1 else "entries"
        columns = {
            "entry": "entry",
            "a step that only it is for": lambda one: (
                f"({', '.join(map(str, one['witness']))})" if one["witness"] else _UNKNOWN
            ),
        }
        yield details(
            num.text(f"What closes the public table: {{coverage.num_closing}} {entries}"),
            num.table("coverage.closing", columns),
            _more(coverage.num_closing - len(coverage.closing)),
        )
    if coverage.unproved:
        yield element("p", f"Of {', '.join(coverage.unproved)} entries nothing is proved.")
    for text in coverage.left_out:
        yield element("p", f"Left out of the proof: {text}.")


def _more(number: int) -> Html:
    return _soft(f"and {shown(number, 'count')} more") if number > 0 else NONE


# The build


def _build_time(time: BuildTime, num: Numbers) -> Iterator[Html]:
    text = (
        "{path}: {seconds:time} in all, {num_traced} programs traced and {num_compiled} units compiled by {num_workers}"
        " workers."
    )
    yield element("p", num.text(text, "build_time", path=code(time.path)))
    yield num.table(
        "build_time.phases", {"phase": "name", "#after": "{begin:time}", "#took": "{seconds:time}"}
    )
    at = "build_time.worker_seconds"
    workers = ((name, num(f"{at}.{name}", "time")) for name in time.worker_seconds)
    yield table(("workers, together", "#took"), workers)


def _built(num_timed: int, num: Numbers) -> Iterator[Html]:
    timed = (
        "; {built.num_timed} of them on record took {built.compile_seconds:time} of one worker,"
        " {built.cpu_seconds:time} of processors"
    )
    text = "{entries.num_programs} programs on {built.num_units} distinct units of {built.size_bytes:size}"
    yield element("p", num.text(f"{text}{timed if num_timed else ''}."))
    yield num.table(
        "built.pieces",
        {
            "piece": "piece",
            "#units": "{num_units}",
            "#on record": "{num_timed}",
            "#compiling": "{compile_seconds:time}",
            "#processors": "{cpu_seconds:time}",
        },
    )
    columns = {
        "unit": "label",
        "#size": "{size_bytes:size}",
        "#programs": "{num_programs}",
        "#entries": "{num_entries}",
        "#compiling": "{compile_seconds:time}",
        "key": lambda unit: code(unit["key"][:_CHARACTERS_OF_KEY]),
    }
    yield details("The largest units", num.table("built.units", columns, _MOST_UNITS))


def _memory(report: Report, num: Numbers) -> Iterator[Html]:
    memory = report.memory
    if memory.unknown is not None:
        yield element("p", f"Not known: {memory.unknown}")
        return
    text = (
        f"An estimate from shapes, for {'one device' if memory.num_devices == 1 else 'each device'}: the KV cache of"
        " {memory.kv_cache_bytes:size}, and the buffers of the largest step. Weights are not counted."
    )
    budget = "" if memory.budget_bytes is None else " The budget is {memory.budget_bytes:size}."
    yield element("p", num.text(text + budget))
    columns = {
        "largest step": "entry",
        "#activations": "{activation_bytes:size}",
        "#keys, values": "{kv_bytes:size}",
        "#masks": "{mask_bytes:size}",
        "#logits": "{logit_bytes:size}",
        "#in all": "{total_bytes:size}",
    }
    yield num.table("memory.steps", columns)


def _upgrades(upgrades: Iterable[Upgrade], num: Numbers) -> Iterator[Html]:
    yield _soft(
        "If any of these had another value. A program's key holds all of them; a unit's holds the target and the text of"
        " its graph."
    )
    rows, components = [], []
    for index, upgrade in enumerate(upgrades):
        at = f"upgrades.{index}"
        took = element("span", "not on record", class_="none")
        if upgrade.num_untimed < upgrade.num_units or not upgrade.num_units:
            untimed = " ({num_untimed} not on record)" if upgrade.num_untimed else ""
            took = num.text(f"{{compile_seconds:time}}{untimed}", at)
        at_most = "" if upgrade.is_certain else "at most "
        traced = num.text("{num_programs} programs, {num_entries} entries", at)
        rows.append((upgrade.what, traced, num.text(f"{at_most}{{num_units}}", at), took))
        title = f"{upgrade.what}: {len(upgrade.components)} components"
        components.append(details(title, _components(upgrade.components)))
    yield table(("another value of", "#traced again", "#units compiled again", "#which took"), rows)
    yield from components


def _keys(report: Report) -> Iterator[Html]:
    yield table(("", "*"), ((one.name, code(one.value)) for one in report.provenance))
    if report.keys:
        title = f"What the keys of all programs have in common: {len(report.keys)} components"
        yield details(title, _components(report.keys))


def _components(components: Iterable[Component]) -> Html:
    return table(("", "*"), ((code(one.name), code(one.value)) for one in components))
