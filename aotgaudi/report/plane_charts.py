"""Planes as plots: which steps have an entry, and how much is padded."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from types import MappingProxyType

from aotgaudi.report.difference import ChangedCell, ChangedPlane
from aotgaudi.report.drawing import (
    INK,
    MOST_MARKS,
    PATH,
    SURFACE,
    Chart,
    Key,
    Row,
    drawn,
    nominal,
    titles_of,
    untitled,
    xy,
)
from aotgaudi.report.report import Axis, Plane, PlaneCell

FACTORS = (1.1, 1.25, 1.5, 2.0, 4.0)
"""Where the classes of padding factors change."""

SHARES = (0.001, 0.003, 0.01, 0.03, 0.1)
"""Where the classes of a cell's share of what a trace's steps did in vain change."""


_STATES = MappingProxyType(
    {
        "covered": ("--covered", "has an entry"),
        "lukewarm": ("--lukewarm", "of some steps no entry is built"),
        "cold": ("--cold", "has an entry, none of which is built"),
        "partly": ("--partly", "some steps have none"),
        "hole": ("--hole", "no entry"),
    }
)
"""What may be said of a cell's steps: its colour, and the legend's text."""


def steps_chart(plane: Plane, place: str) -> Chart:
    """Draws which steps have an entry, and the entries; `place` is the plane's in the report."""
    cells = [
        _cell_row(cell, f"{place}.cells.{index}", _state(cell), cell_text(plane, cell))
        for index, cell in enumerate(plane.cells)
        if cell.num_steps
    ]
    layers = [_cell_layer(cells, list(_STATES), [colour for colour, _ in _STATES.values()])]
    if plane.points:
        layers += _point_layers(plane, place)
    else:
        layers.append(_counts_layer(plane))
    layers.append(_witness_layer(plane, place))
    is_cold = any(point.is_warm is False for point in plane.points)
    closes = any(point.origin == "closing" for point in plane.points)
    is_short = any(point.origin == "short" for point in plane.points)
    legend = [
        *(Key(*key) for name, key in _STATES.items() if any(row["class"] == name for row in cells)),
        *([Key("--ink", "witness: the smallest step of a hole", "cross")] if plane.witnesses else []),
    ]
    if plane.points:
        legend += [
            Key("--ink", "entry of the public table", "dot"),
            *([Key("--closing", "entry that closes it", "dot")] if closes else []),
            *([Key("--short", "short query of the spec", "dot")] if is_short else []),
            *([Key("--surface", "not built", "ring")] if is_cold else []),
        ]
    else:
        legend.append(Key("--ink", "the darker its dot, the more entries a cell has", "dot"))
    return Chart(drawn(_plane_spec(plane, layers), titles_of(cells, layers)), tuple(legend))


def padding_chart(plane: Plane, place: str) -> Chart:
    """Draws each cell's share of what a trace's steps did in vain; without a trace its mean padding."""
    of_trace = plane.traffic is not None
    bounds = SHARES if of_trace else FACTORS
    names = [str(index) for index in range(len(bounds) + 1)]
    cells = []
    for index, cell in enumerate(plane.cells):
        heat = _heat(cell, of_trace=of_trace)
        if heat is not None:
            name = str(sum(heat >= bound for bound in bounds))
            cells.append(_cell_row(cell, f"{place}.cells.{index}", name, cell_text(plane, cell)))
    layers = [_cell_layer(cells, names, [f"--heat{name}" for name in names])]
    texts = (
        [f"{100 * bound:g} %" for bound in (0, *bounds)] if of_trace else [f"x {b:g}" for b in (1, *bounds)]
    )
    legend = tuple(_heat_keys(texts, {int(row["class"]) for row in cells}))
    return Chart(drawn(_plane_spec(plane, layers), titles_of(cells)), legend)


CHANGES = ("kept", "added", "removed", "both")


def changes_chart(plane: ChangedPlane, place: str) -> Chart:
    """Draws where entries came and went; `place` is the plane's in the report."""
    cells = [
        _cell_row(cell, f"{place}.cells.{index}", _change(cell), changes_text(plane, cell))
        for index, cell in enumerate(plane.cells)
    ]
    colours = ("--covered", "--added", "--hole", "--partly")
    drawing = drawn(_plane_spec(plane, [_cell_layer(cells, CHANGES, colours)]), titles_of(cells))
    texts = ("the same entries", "entries that came", "entries that went", "some came, some went")
    return Chart(drawing, tuple(Key(colour, text) for colour, text in zip(colours, texts, strict=True)))


def changes_text(plane: ChangedPlane, cell: ChangedCell) -> str:
    """Returns a cell in words."""
    counts = f"{cell.num_kept:,} kept, {cell.num_added:,} added, {cell.num_removed:,} removed"
    return f"{_range(plane.x, cell.x)}, {_range(plane.y, cell.y)}: {counts}"


def _change(cell: ChangedCell) -> str:
    if cell.num_added and cell.num_removed:
        return "both"
    return "added" if cell.num_added else "removed" if cell.num_removed else "kept"


def _heat_keys(texts: Sequence[str], used: Collection[int]) -> Iterable[Key]:
    for index, low in enumerate(texts):
        if index in used:
            high = f" to {texts[index + 1].removeprefix('x ')}" if index + 1 < len(texts) else " and more"
            yield Key(f"--heat{index}", f"{low}{high}")


def _heat(cell: PlaneCell, *, of_trace: bool) -> float | None:
    if not of_trace:
        return cell.padding
    return None if cell.traffic is None else cell.traffic.share


def _state(cell: PlaneCell) -> str:
    if cell.num_uncovered:
        return "hole" if cell.num_uncovered == cell.num_steps else "partly"
    if cell.num_cold:
        return "cold" if cell.num_cold == cell.num_steps else "lukewarm"
    return "covered"


def cell_text(plane: Plane, cell: PlaneCell) -> str:
    """Returns a cell in words."""
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


def _range(axis: Axis, index: int) -> str:
    first, last = axis.bounds(index)
    low, high = (first - 1) * axis.scale + 1 if axis.scale > 1 else first, last * axis.scale
    span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    return f"{span} {axis.noun}" + ("" if span == "1" else "s")


def _cell_row(cell: PlaneCell | ChangedCell, path: str, name: str, title: str) -> Row:
    return {
        "x": cell.x,
        "x2": cell.x + 1,
        "y": cell.y,
        "y2": cell.y + 1,
        "class": name,
        "path": path,
        "title": title,
    }


def _cell_layer(rows: Sequence[Row], names: Sequence[str], colours: Sequence[str]) -> Row:
    colour = {
        "field": "class",
        "type": "nominal",
        "scale": {"domain": list(names), "range": [f"var({one})" for one in colours]},
        "legend": None,
    }
    return {
        "data": {"values": [untitled(row) for row in rows]},
        "mark": {"type": "rect", "stroke": SURFACE, "strokeWidth": 0.6},
        "encoding": {**xy(), "x2": {"field": "x2"}, "y2": {"field": "y2"}, "color": colour, **PATH},
    }


def _point_layers(plane: Plane, place: str) -> list[Row]:
    rows = [
        {
            "x": _position(plane.x, point.x),
            "y": _position(plane.y, point.y),
            "origin": point.origin,
            "fill": "cold" if point.is_warm is False else point.origin,
            "path": f"{place}.points.{index}",
            "title": _point_text(plane, index),
        }
        for index, point in enumerate(plane.points)
    ]
    origins = {"public": INK, "short": "var(--short)", "closing": "var(--closing)"}
    fills = {**origins, "cold": SURFACE}
    return [
        {
            "data": {"values": rows},
            "mark": {"type": "point", "strokeWidth": 1.2, "opacity": 1},
            "encoding": {
                **xy(),
                "stroke": nominal("origin", origins),
                "fill": nominal("fill", fills),
                "size": {"condition": {"test": "datum.origin === 'closing'", "value": 42}, "value": 16},
                **PATH,
            },
        }
    ]


def _point_text(plane: Plane, index: int) -> str:
    point = plane.points[index]
    number = f"{point.num_entries:,} entries" if point.num_entries > 1 else "entry"
    y = point.y * plane.y.scale
    origin = {"public": "public table", "closing": "closes the table", "short": "a short query"}[point.origin]
    state = {None: "", True: ", built", False: ", not built"}[point.is_warm]
    return f"{number}: {point.x:,} {plane.x.noun}s, {y:,.0f} {plane.y.noun}s ({origin}{state})"


def _counts_layer(plane: Plane) -> Row:
    """A dot a cell, the darker the more entries it has: where there are too many to be drawn."""
    most = max((cell.num_entries for cell in plane.cells), default=1)
    rows = [
        {"x": cell.x + 0.5, "y": cell.y + 0.5, "share": 0.15 + 0.85 * cell.num_entries / max(1, most)}
        for cell in plane.cells
        if cell.num_entries
    ]
    opacity = {"field": "share", "type": "quantitative", "scale": None, "legend": None}
    return {
        "data": {"values": rows},
        "mark": {"type": "point", "filled": True, "size": 18, "color": INK, "aria": False},
        "encoding": {**xy(), "opacity": opacity},
    }


def _witness_layer(plane: Plane, place: str) -> Row:
    rows = [
        {
            "x": _position(plane.x, x) - 0.5 / _width(plane.x, x),
            "y": _position(plane.y, y),
            "path": f"{place}.witnesses.{index}",
            "title": f"witness: {x:,} {plane.x.noun}s, {y * plane.y.scale:,.0f} {plane.y.noun}s",
        }
        for index, (x, y) in enumerate(plane.witnesses[:MOST_MARKS])
    ]
    return {
        "data": {"values": rows},
        "mark": {"type": "point", "shape": "cross", "angle": 45, "size": 60, "filled": True, "color": INK},
        "encoding": {**xy(), **PATH},
    }


def _plane_spec(plane: Plane | ChangedPlane, layers: list[Row]) -> Row:
    x, y = plane.x, plane.y
    scaled = {"x": _scale(x, f"{x.noun}s"), "y": _scale(y, f"{y.noun}s")}
    for layer in layers:
        for name, channel in scaled.items():
            layer["encoding"][name] |= channel
    return {"layer": layers}


def _scale(axis: Axis, title: str) -> Row:
    """A linear scale of bins, whose ticks name the last value of a bin: powers of two, or every few."""
    lasts = [axis.bounds(index)[1] for index in range(len(axis.firsts))]
    chosen = [index for index, last in enumerate(lasts) if last & (last - 1) == 0]
    if len(lasts) > 1 and len(lasts) - 1 - chosen[-1] > 1:
        chosen.append(len(lasts) - 1)
    names = {str(index + 1): f"{lasts[index] * axis.scale:,}" for index in chosen}
    return {
        "scale": {"domain": [0, len(lasts)], "nice": False},
        "title": title,
        "axis": {
            "values": [index + 1 for index in chosen],
            "labelExpr": f"{json.dumps(names)}[datum.value]",
            "grid": False,
        },
    }


def _position(axis: Axis, value: float) -> float:
    """Where a value's far edge is, in bins: an entry covers what is at most as large."""
    index = max(i for i, first in enumerate(axis.firsts) if first - 1 < value or i == 0)
    first, last = axis.bounds(index)
    return index + (value - first + 1) / (last - first + 1)


def _width(axis: Axis, value: float) -> int:
    index = max(i for i, first in enumerate(axis.firsts) if first <= value or i == 0)
    first, last = axis.bounds(index)
    return last - first + 1
