"""Draws planes as inline SVG: which steps have an entry, and how much is padded.

Bins have equal widths. A mark carries the place of its value in the report (``planes.0.cells.17``) as ``data-path``, and has
a ``<title>`` for tooltips and screen readers. Colours are CSS variables of the page (style.css), so that one drawing serves
light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from types import MappingProxyType

from aotgaudi.report.html import Html, element
from aotgaudi.report.values import Axis, EntryPoint, Plane, PlaneCell

FACTORS = (1.1, 1.25, 1.5, 2.0, 4.0)
"""The bounds between the classes of padding factors."""

SHARES = (0.001, 0.003, 0.01, 0.03, 0.1)
"""The bounds between the classes of a cell's share of the wasted work of a trace's steps."""

MOST_WITNESSES = 600

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BELOW, _PAD = 420, 300, 62, 18, 40, 8
_LEAST_X, _LEAST_Y = 44, 14
"""The smallest distance between two labels of an axis."""

_STATES = MappingProxyType(
    {
        "covered": "has an entry",
        "lukewarm": "of some steps no entry is built",
        "cold": "has an entry, none of which is built",
        "partly": "some steps have none",
        "hole": "no entry",
    }
)
"""The states of a cell's steps (also the names of CSS variables), with their texts in the legend."""

_ORIGINS = MappingProxyType(
    {
        "public": ("ink", "entry of the public table", "public table"),
        "closing": ("closing", "entry that closes it", "closes the table"),
        "short": ("short", "short query of the spec", "a short query"),
    }
)


def steps_figure(plane: Plane, place: str, caption: str) -> Html:
    """Draws which steps have an entry, and the entries. `place` is the plane's place in the report."""
    marks = [
        _cell(plane, index, f"{place}.cells.{index}", _state(cell))
        for index, cell in enumerate(plane.cells)
        if cell.num_steps
    ]
    states = {_state(cell) for cell in plane.cells if cell.num_steps}
    legend = [_key(name, text) for name, text in _STATES.items() if name in states]
    if plane.points:
        marks += (_point(plane, point, f"{place}.points.{i}") for i, point in enumerate(plane.points))
        origins = {point.origin for point in plane.points}
        legend += (
            _key(colour, text, "dot") for name, (colour, text, _) in _ORIGINS.items() if name in origins
        )
        if any(point.is_warm is False for point in plane.points):
            legend.append(_key("surface", "not built", "ring"))
    else:
        marks += _counts(plane)
        legend.append(_key("ink", "the darker its dot, the more entries a cell has", "dot"))
    marks += (_witness(plane, index, place) for index in range(len(plane.witnesses[:MOST_WITNESSES])))
    if plane.witnesses:
        legend.append(_key("ink", "witness: the smallest step of a hole", "cross"))
    return _figure(plane, marks, legend, caption)


def padding_figure(plane: Plane, place: str, caption: str) -> Html:
    """Draws each cell's share of the wasted work of a trace's steps or, without a trace, its mean padding."""
    of_trace = plane.traffic is not None
    bounds = SHARES if of_trace else FACTORS
    marks, used = [], set()
    for index, cell in enumerate(plane.cells):
        heat = cell.padding
        if of_trace:
            heat = None if cell.traffic is None else cell.traffic.share
        if heat is not None:
            level = sum(heat >= bound for bound in bounds)
            used.add(level)
            marks.append(_cell(plane, index, f"{place}.cells.{index}", f"heat{level}"))
    texts = (
        [f"{100 * bound:g} %" for bound in (0, *bounds)] if of_trace else [f"x {b:g}" for b in (1, *bounds)]
    )
    return _figure(plane, marks, list(_heat_keys(texts, used)), caption)


def cell_text(plane: Plane, cell: PlaneCell) -> str:
    """Describes a cell in words."""
    parts = [
        f"{_range(plane.x, cell.x)}, {_range(plane.y, cell.y)}: {cell.num_steps:,} kinds of steps",
        f"{cell.num_uncovered:,} without an entry" if cell.num_uncovered else "all with an entry",
        f"{cell.num_cold:,} with none that is built" if cell.num_cold else "",
        f"{cell.num_entries:,} entries end here" if cell.num_entries else "",
        f"padding x {cell.padding:.2f}" if cell.padding is not None else "",
    ]
    traffic = cell.traffic
    if traffic is not None and traffic.useful:
        parts.append(
            f"{traffic.num_steps:,} steps of the trace, padding x {traffic.padded / traffic.useful:.2f}"
        )
    return ", ".join(part for part in parts if part)


def _figure(plane: Plane, marks: Sequence[Html], legend: Sequence[Html], caption: str) -> Html:
    right, bottom = _LEFT + _WIDTH, _PAD + _HEIGHT
    frame = element("path", class_="axis", d=f"M{_LEFT},{_PAD}V{bottom}H{right}")
    titles = (
        element("text", f"{plane.x.noun}s", x=_LEFT + _WIDTH / 2, y=bottom + 34, text_anchor="middle"),
        element(
            "text",
            f"{plane.y.noun}s",
            transform=f"translate(12,{_PAD + _HEIGHT / 2}) rotate(-90)",
            text_anchor="middle",
        ),
    )
    svg = element(
        "svg",
        *marks,
        frame,
        *_ticks(plane),
        *titles,
        viewBox=f"0 0 {right + _RIGHT} {bottom + _BELOW}",
        role="img",
        style=f"max-width:{right + _RIGHT}px",
    )
    return element("figure", svg, element("ul", *legend, class_="legend"), element("figcaption", caption))


def _x(plane: Plane, bins: float) -> float:
    return round(_LEFT + _WIDTH * bins / len(plane.x.firsts), 1)


def _y(plane: Plane, bins: float) -> float:
    return round(_PAD + _HEIGHT * (1 - bins / len(plane.y.firsts)), 1)


def _ticks(plane: Plane) -> Iterator[Html]:
    bottom, end = _PAD + _HEIGHT, -math.inf
    for bins, text in _labels(plane.x):
        x = _x(plane, bins)
        yield element("path", class_="axis", d=f"M{x},{bottom}v5")
        if x >= end + _LEAST_X:
            end = x
            yield element("text", text, x=x, y=bottom + 17, text_anchor="middle")
    end = math.inf
    for bins, text in _labels(plane.y):
        y = _y(plane, bins)
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


# Marks


def _cell(plane: Plane, index: int, place: str, colour: str) -> Html:
    cell = plane.cells[index]
    x, y = _x(plane, cell.x), _y(plane, cell.y + 1)
    return element(
        "rect",
        element("title", cell_text(plane, cell)),
        x=x,
        y=y,
        width=round(_x(plane, cell.x + 1) - x, 1),
        height=round(_y(plane, cell.y) - y, 1),
        fill=f"var(--{colour})",
        data_path=place,
    )


def _point(plane: Plane, point: EntryPoint, place: str) -> Html:
    colour, _, origin = _ORIGINS[point.origin]
    state = {None: "", True: ", built", False: ", not built"}[point.is_warm]
    number = f"{point.num_entries:,} entries" if point.num_entries > 1 else "entry"
    size = f"{point.x:,} {plane.x.noun}s, {point.y * plane.y.scale:,.0f} {plane.y.noun}s"
    return element(
        "circle",
        element("title", f"{number}: {size} ({origin}{state})"),
        cx=_x(plane, _position(plane.x, point.x)),
        cy=_y(plane, _position(plane.y, point.y)),
        r=3.4 if point.origin == "closing" else 2.2,
        fill=f"var(--{'surface' if point.is_warm is False else colour})",
        stroke=f"var(--{colour})",
        data_path=place,
    )


def _counts(plane: Plane) -> Iterator[Html]:
    """Yields a dot for each cell with entries, if there are too many entries to draw. It is darker for more entries."""
    most = max((cell.num_entries for cell in plane.cells), default=1)
    for cell in plane.cells:
        if cell.num_entries:
            share = round(0.15 + 0.85 * cell.num_entries / max(1, most), 2)
            x, y = _x(plane, cell.x + 0.5), _y(plane, cell.y + 0.5)
            yield element("circle", cx=x, cy=y, r=2.4, fill="var(--ink)", opacity=share)


def _witness(plane: Plane, index: int, place: str) -> Html:
    x, y = plane.witnesses[index]
    column = max(i for i, first in enumerate(plane.x.firsts) if first <= x or i == 0)
    first, last = plane.x.bounds(column)
    at = _position(plane.x, x) - 0.5 / (last - first + 1)
    return element(
        "path",
        element("title", f"witness: {x:,} {plane.x.noun}s, {y * plane.y.scale:,.0f} {plane.y.noun}s"),
        class_="witness",
        d=f"M{_x(plane, at) - 3.5:.1f},{_y(plane, _position(plane.y, y)) - 3.5:.1f}l7,7m0,-7l-7,7",
        data_path=f"{place}.witnesses.{index}",
    )


def _position(axis: Axis, value: float) -> float:
    """Returns the place of a value's far edge, in bins, since an entry covers all values up to its own."""
    index = max(i for i, first in enumerate(axis.firsts) if first - 1 < value or i == 0)
    first, last = axis.bounds(index)
    return index + (value - first + 1) / (last - first + 1)


def _state(cell: PlaneCell) -> str:
    if cell.num_uncovered:
        return "hole" if cell.num_uncovered == cell.num_steps else "partly"
    if cell.num_cold:
        return "cold" if cell.num_cold == cell.num_steps else "lukewarm"
    return "covered"


def _range(axis: Axis, index: int) -> str:
    first, last = axis.bounds(index)
    low, high = (first - 1) * axis.scale + 1 if axis.scale > 1 else first, last * axis.scale
    span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    return f"{span} {axis.noun}" + ("" if span == "1" else "s")


# Legends


def _key(colour: str, text: str, shape: str = "square") -> Html:
    return element("li", element("i", class_=shape, style=f"--of: var(--{colour})"), text)


def _heat_keys(texts: Sequence[str], used: Collection[int]) -> Iterator[Html]:
    for index, low in enumerate(texts):
        if index in used:
            high = f" to {texts[index + 1].removeprefix('x ')}" if index + 1 < len(texts) else " and more"
            yield _key(f"heat{index}", f"{low}{high}")
