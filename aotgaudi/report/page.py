"""Makes the page of a report: coverage, buckets, and units. Computes nothing and needs no network.

Every number is a ``<data>`` element with its value and its place in the JSON form (`Numbers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from aotgaudi.report.compute import Report
from aotgaudi.report.drawing import figure
from aotgaudi.report.html import NONE, Html, Numbers, element, page, shown

MOST_LISTED = 200
"""The most holes that the page lists. The JSON form has all of them."""

MOST_UNITS = 25

_CAPTIONS = {
    "prompt": ("Prompts", "Query tokens after blocks of context."),
    "decode": ("Decodes", "Blocks in all, by the number of sequences."),
}


def report_page(report: Report) -> str:
    """Returns the page of a report."""
    document = report.document
    num = Numbers(document)
    return page(
        f"{document['subject']['model']} \u00b7 aotgaudi report",
        _header(document),
        _tiles(document, num),
        _notes(document),
        _section("Steps and buckets", *_steps(report, num)),
        _section("Coverage", *_coverage(document, num)),
        _section("Units", *_units(document["built"], num)) if document["built"] else NONE,
    )


def _section(title: str, *children: object) -> Html:
    return element("section", element("h2", title), *children)


def _header(document: Mapping[str, Any]) -> Html:
    subject, is_closed = document["subject"], document["coverage"]["closed"]
    where = f" \u00b7 {subject['backend']} \u00b7 {subject['strategy']} buckets of {subject['version']}"
    state = element(
        "strong", "Closed:" if is_closed else "Not closed:", class_="good" if is_closed else "bad"
    )
    return element(
        "header",
        element("h1", subject["model"]),
        element("p", subject["kind"], " ", element("code", subject["path"]), where, class_="soft"),
        element("p", state, f" {document['result']}."),
    )


def _tiles(document: Mapping[str, Any], num: Numbers) -> Html:
    tiles = [
        _tile(num("num_entries"), "entries"),
        _tile(num("num_built"), "of them built"),
        _tile(num("num_holes"), "holes", class_="bad" if document["num_holes"] else None),
    ]
    if document["built"]:
        tiles.append(_tile(num("built.num_units"), num.text("compiled units, {built.size_bytes:size}")))
    return element("div", *tiles, class_="tiles")


def _tile(number: Html, text: object, class_: str | None = None) -> Html:
    return element("div", element("b", number, class_=class_), element("span", text), class_="tile")


def _notes(document: Mapping[str, Any]) -> Html:
    if not document["warnings"] and not document["notes"]:
        return NONE
    sign = element("strong", "Warning:", class_="bad")
    warnings = (element("li", sign, " ", text) for text in document["warnings"])
    notes = (element("li", text) for text in document["notes"])
    return _section("Warnings and notes", element("ul", *warnings, *notes))


def _steps(report: Report, num: Numbers) -> Iterator[Html]:
    document = report.document
    scheduler, trace = document["coverage"]["scheduler"], document["trace"]
    name = "the scheduler" if scheduler == "aotgaudi" else scheduler
    yield element(
        "p",
        f"Every step that {name} can form. A bucket covers the steps below it and to its left. Padding is what a step"
        " computes and reads in its entry, divided by what it needs.",
        class_="soft",
    )
    if trace:
        refused = "; {num_refused} requests do not fit the limits" if trace["num_refused"] else ""
        cut = "; {num_shortened} answers were shortened to fit" if trace["num_shortened"] else ""
        text = (
            "The trace {path}: {num_requests} requests, {num_steps} steps in {seconds:time} of simulated time,"
            f" {{num_preemptions}} preemptions{refused}{cut}. The device did {{factor:factor}} of the work that the steps"
            " needed, in {num_entries_used} of {num_entries} entries. Work is estimated from a device's peak rates: {basis}."
        )
        yield element("p", num.text(text, "trace", path=element("code", trace["path"]), basis=trace["basis"]))
    of = "the trace's steps" if trace else "all possible steps, each counted once"
    figures = []
    for index, heat_map in enumerate(report.heat_maps):
        title, axes = _CAPTIONS[heat_map.phase]
        many = "" if heat_map.buckets else " There are too many buckets to draw."
        drawing = figure(heat_map, f"heat_maps.{index}", f"{axes} Padding of {of}.{many}")
        figures.append(element("div", element("h3", title), drawing, _mean(document, heat_map.phase, num)))
    yield element("div", *figures, class_="charts")
    columns = {"kind": "kind", "#entries": "{num_entries}", "#built": "{num_built}", "largest": "largest"}
    yield num.table("kinds", columns)


def _mean(document: Mapping[str, Any], kind: str, num: Numbers) -> Html:
    for index, phase in enumerate(document["coverage"]["phases"]):
        if phase["kind"] == kind and phase["padding"]:
            error = " (of a sample, within {error:factor})" if phase["padding"]["error"] else ""
            text = f"Of all possible steps: {{mean:factor}} in the mean{error}, {{worst:factor}} at worst, for {{step}}."
            step = f"({', '.join(map(str, phase['padding']['worst_step']))})"
            return element("p", num.text(text, f"coverage.phases.{index}.padding", step=step))
    return NONE


def _coverage(document: Mapping[str, Any], num: Numbers) -> Iterator[Html]:
    coverage = document["coverage"]
    if coverage["phases"]:
        yield num.table(
            "coverage.phases",
            {
                "steps": "kind",
                "counted in": "unit",
                "#can be formed": "{num_reachable}",
                "#without an entry": "{num_uncovered}",
            },
        )
    if coverage["holes"]:
        yield element("h3", "No entry for")
        more = coverage["holes"][MOST_LISTED:]
        last = [element("li", f"and {shown(len(more), 'count')} more")] if more else []
        yield element("ul", *(element("li", hole) for hole in coverage["holes"][:MOST_LISTED]), *last)
    if coverage["smallest"]:
        yield element("p", f"The smallest of them: {coverage['smallest']['text']}.")
    if coverage["mend"]:
        yield element("p", f"Fix: {coverage['mend']}.")
    left_out = [
        *(f"Nothing is proved of {kind} entries." for kind in coverage["not_proved"]),
        *(f"Left out of the proof: {text}." for text in coverage["left_out"]),
        *(
            f"Not closed: {row['kind']}: {row['text']}."
            for row in coverage["live_graphs"]
            if row["state"] == "open"
        ),
    ]
    if left_out:
        yield element("ul", *(element("li", text) for text in left_out))


def _units(built: Mapping[str, Any], num: Numbers) -> Iterator[Html]:
    timed = "; {built.num_timed} of them on record took {built.compile_seconds:time} to compile"
    text = "{built.num_programs} programs call {built.num_units} distinct units of {built.size_bytes:size}"
    yield element("p", num.text(f"{text}{timed if built['num_timed'] else ''}."))
    if built["num_units"] > MOST_UNITS:
        yield element("p", f"The {MOST_UNITS} largest:")
    columns = {
        "unit": "label",
        "#size": "{size_bytes:size}",
        "#programs": "{num_programs}",
        "#entries": "{num_entries}",
        "#compiling": "{compile_seconds:time}",
    }
    yield num.table("built.units", columns, MOST_UNITS)
