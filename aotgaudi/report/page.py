"""Makes the page of a report: coverage, buckets, and units. Computes nothing and needs no network.

Every number is a ``<data>`` element with its value and its place in the JSON form (`Numbers`). Heat maps are inline SVG:
which steps have an entry, how much they are padded, and the buckets. Bins have equal widths. A mark carries the place of its
value in the report (``heat_maps.0.cells.17``) as ``data-path``, and has a ``<title>`` for tooltips and screen readers.
Colours are CSS variables of the page (style.css), so that one drawing serves light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from aotgaudi.report.compute import Report
from aotgaudi.report.heat_map import Axis, Bucket, Cell, HeatMap
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
        drawing = _figure(heat_map, f"heat_maps.{index}", f"{axes} Padding of {of}.{many}")
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


# Heat maps


FACTORS = (1.1, 1.25, 1.5, 2.0, 4.0)
"""The bounds between the classes of padding factors."""

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BELOW, _PAD = 420, 300, 62, 18, 40, 8
_LEAST_X, _LEAST_Y = 44, 14
"""The smallest distance between two labels of an axis."""


def _figure(heat_map: HeatMap, place: str, caption: str) -> Html:
    """Draws a heat map, which is at `place` in the report."""
    right, bottom = _LEFT + _WIDTH, _PAD + _HEIGHT
    x_title = element(
        "text", f"{heat_map.x.noun}s", x=_LEFT + _WIDTH / 2, y=bottom + 34, text_anchor="middle"
    )
    y_title = element(
        "text",
        f"{heat_map.y.noun}s",
        transform=f"translate(12,{_PAD + _HEIGHT / 2}) rotate(-90)",
        text_anchor="middle",
    )
    svg = element(
        "svg",
        *(_cell(heat_map, cell, f"{place}.cells.{i}") for i, cell in enumerate(heat_map.cells)),
        *(_bucket(heat_map, bucket, f"{place}.buckets.{i}") for i, bucket in enumerate(heat_map.buckets)),
        element("path", class_="axis", d=f"M{_LEFT},{_PAD}V{bottom}H{right}"),
        *_ticks(heat_map),
        x_title,
        y_title,
        viewBox=f"0 0 {right + _RIGHT} {bottom + _BELOW}",
        role="img",
        style=f"max-width:{right + _RIGHT}px",
    )
    return element(
        "figure", svg, element("ul", *_legend(heat_map), class_="legend"), element("figcaption", caption)
    )


def _cell_text(heat_map: HeatMap, cell: Cell) -> str:
    """Describes a cell in words."""
    parts = [
        f"{_range(heat_map.x, cell.x)}, {_range(heat_map.y, cell.y)}: {cell.num_steps:,} kinds of steps",
        f"{cell.num_uncovered:,} without an entry" if cell.num_uncovered else "all with an entry",
        f"{cell.num_traced:,} steps of the trace" if cell.num_traced is not None else "",
        f"padding x {cell.padding:.2f}" if cell.padding is not None else "",
    ]
    return ", ".join(part for part in parts if part)


def _x(heat_map: HeatMap, bins: float) -> float:
    return round(_LEFT + _WIDTH * bins / len(heat_map.x.firsts), 1)


def _y(heat_map: HeatMap, bins: float) -> float:
    return round(_PAD + _HEIGHT * (1 - bins / len(heat_map.y.firsts)), 1)


def _ticks(heat_map: HeatMap) -> Iterator[Html]:
    bottom, end = _PAD + _HEIGHT, -math.inf
    for bins, text in _labels(heat_map.x):
        x = _x(heat_map, bins)
        yield element("path", class_="axis", d=f"M{x},{bottom}v5")
        if x >= end + _LEAST_X:
            end = x
            yield element("text", text, x=x, y=bottom + 17, text_anchor="middle")
    end = math.inf
    for bins, text in _labels(heat_map.y):
        y = _y(heat_map, bins)
        yield element("path", class_="axis", d=f"M{_LEFT},{y}h-5")
        if y <= end - _LEAST_Y:
            end = y
            yield element("text", text, x=_LEFT - 8, y=y + 4, text_anchor="end")


def _labels(axis: Axis) -> Iterator[tuple[int, str]]:
    """Returns the ends of bins at powers of two, and the last end unless it is close to one of these, with their labels."""
    lasts = [axis.bounds(index)[1] for index in range(len(axis.firsts))]
    chosen = [index for index, last in enumerate(lasts) if last & (last - 1) == 0]
    if len(lasts) > 1 and len(lasts) - 1 - chosen[-1] > 1:
        chosen.append(len(lasts) - 1)
    return ((index + 1, f"{lasts[index] * axis.scale:,}") for index in chosen)


def _cell(heat_map: HeatMap, cell: Cell, place: str) -> Html:
    x, y = _x(heat_map, cell.x), _y(heat_map, cell.y + 1)
    return element(
        "rect",
        element("title", _cell_text(heat_map, cell)),
        x=x,
        y=y,
        width=round(_x(heat_map, cell.x + 1) - x, 1),
        height=round(_y(heat_map, cell.y) - y, 1),
        fill=f"var(--{_colour(cell)})",
        data_path=place,
    )


def _bucket(heat_map: HeatMap, bucket: Bucket, place: str) -> Html:
    state = {None: "", True: ", built", False: ", not built"}[bucket.is_built]
    number = f"{bucket.num_entries:,} entries" if bucket.num_entries > 1 else "entry"
    size = f"{bucket.x:,} {heat_map.x.noun}s, {bucket.y * heat_map.y.scale:,.0f} {heat_map.y.noun}s"
    return element(
        "circle",
        element("title", f"{number}: {size}{state}"),
        class_="ring" if bucket.is_built is False else None,
        cx=_x(heat_map, _position(heat_map.x, bucket.x)),
        cy=_y(heat_map, _position(heat_map.y, bucket.y)),
        r=2.6,
        data_path=place,
    )


def _position(axis: Axis, value: float) -> float:
    """Returns the place of a value's far edge, in bins, since a bucket covers all values up to its own."""
    index = axis.bin_of(math.ceil(value))
    first, last = axis.bounds(index)
    return index + (value - first + 1) / (last - first + 1)


def _colour(cell: Cell) -> str:
    """Returns the CSS variable of a cell's colour: that of holes, or of its class of padding."""
    if cell.num_uncovered:
        return "hole" if cell.num_uncovered == cell.num_steps else "partly"
    return "untraced" if cell.padding is None else f"heat{sum(cell.padding >= bound for bound in FACTORS)}"


def _range(axis: Axis, index: int) -> str:
    first, last = axis.bounds(index)
    low, high = (first - 1) * axis.scale + 1 if axis.scale > 1 else first, last * axis.scale
    span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    return f"{span} {axis.noun}" + ("" if span == "1" else "s")


def _legend(heat_map: HeatMap) -> Iterator[Html]:
    bounds = (1.0, *FACTORS)
    texts = {
        f"heat{index}": f"x {low:g}" + (f" to {high:g}" if high else " and more")
        for index, (low, high) in enumerate(zip(bounds, (*FACTORS, None), strict=True))
    }
    texts["untraced"] = "no step of the trace"
    texts |= {"partly": "some steps have no entry", "hole": "no entry"}
    used = {_colour(cell) for cell in heat_map.cells}
    for name, text in texts.items():
        if name in used:
            yield element("li", element("i", style=f"--of: var(--{name})"), text)
    states = {bucket.is_built for bucket in heat_map.buckets}
    if states - {False}:
        yield element("li", element("i", class_="dot"), "bucket")
    if False in states:
        yield element("li", element("i", class_="dot ring"), "bucket that is not built")
