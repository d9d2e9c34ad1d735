"""Draws heat maps as inline SVG: which steps have an entry, how much they are padded, and the buckets.

Bins have equal widths. A mark carries the place of its value in the report (``heat_maps.0.cells.17``) as ``data-path``, and
has a ``<title>`` for tooltips and screen readers. Colours are CSS variables of the page (style.css), so that one drawing
serves light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from aotgaudi.report.heat_map import Axis, Bucket, Cell, HeatMap
from aotgaudi.report.html import Html, element

FACTORS = (1.1, 1.25, 1.5, 2.0, 4.0)
"""The bounds between the classes of padding factors."""

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BELOW, _PAD = 420, 300, 62, 18, 40, 8
_LEAST_X, _LEAST_Y = 44, 14
"""The smallest distance between two labels of an axis."""


def figure(heat_map: HeatMap, place: str, caption: str) -> Html:
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


def cell_text(heat_map: HeatMap, cell: Cell) -> str:
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
        element("title", cell_text(heat_map, cell)),
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
