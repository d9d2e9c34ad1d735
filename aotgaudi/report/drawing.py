"""Plots as SVG, by Vega-Lite: drawn here, so that a page needs no script and no network.

A mark is described by the place of its value in the report (``planes.0.cells.17``), which becomes its ``data-path``, and
its text becomes its ``<title>``: what a pointer shows, and a screen reader reads. Colours are CSS variables of the page
(templates/style.css), so that one drawing serves light and dark. Numbers alone reach Vega's expressions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from xml.etree import ElementTree as ET

WIDTH, HEIGHT = 420, 300
"""Of a plot without its axes, in CSS pixels: two stand side by side, and one fits a phone."""

MOST_MARKS = 600
"""So many units or witnesses are drawn, the first of them."""

INK, FAINT, SURFACE = "var(--ink)", "var(--faint)", "var(--surface)"

_SVG = "http://www.w3.org/2000/svg"
_VEGA_LITE = "6.4"
_DROPPED = ("role", "aria-roledescription", "aria-hidden")

Row = dict[str, Any]
"""A datum, or a part of a Vega-Lite specification. A datum's `path` is its place, its `title` its text."""


@dataclass(frozen=True, slots=True)
class Key:
    """A line of a legend: the CSS variable of a colour, its text, and the shape of its mark."""

    colour: str
    text: str
    shape: str = "square"


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing, and the legend that the page writes below it."""

    svg: str
    legend: tuple[Key, ...] = ()


PATH: Mapping[str, Row] = MappingProxyType({"description": {"field": "path", "type": "nominal"}})
"""The channel that gives a mark its place."""


def xy() -> dict[str, Row]:
    """Returns channels of two numbers, `x` and `y`."""
    return {name: {"field": name, "type": "quantitative"} for name in ("x", "y")}


def nominal(field: str, colours: Mapping[str, str]) -> Row:
    """Returns a channel whose values have these colours, with no legend: the page writes one."""
    scale = {"domain": list(colours), "range": list(colours.values())}
    return {"field": field, "type": "nominal", "scale": scale, "legend": None}


def untitled(row: Row) -> Row:
    """Returns a datum as Vega is given it."""
    return {name: value for name, value in row.items() if name != "title"}


def titles_of(rows: Iterable[Row], layers: Iterable[Row] = ()) -> dict[str, str]:
    """Texts by place; those of `layers` are taken out of their data, which Vega is not to be given."""
    titles = {row["path"]: row["title"] for row in rows}
    for layer in layers:
        for row in layer["data"]["values"]:
            if "title" in row:
                titles[row["path"]] = row.pop("title")
    return titles


def drawn(spec: Row, titles: Mapping[str, str]) -> str:
    """Draws a Vega-Lite specification as an SVG element for a page, its marks with their places and texts."""
    import vl_convert

    whole = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": WIDTH,
        "height": HEIGHT,
        "background": None,
        "config": _CONFIG,
        **spec,
    }
    drawing = vl_convert.vegalite_to_svg(whole, vl_version=_VEGA_LITE, allowed_base_urls=[])
    root = ET.fromstring(drawing)  # noqa: S314 - Vega's own output
    for element in root.iter():
        element.tag = element.tag.removeprefix(f"{{{_SVG}}}")
        _finish(element, titles)
    root.attrib = {
        "viewBox": root.get("viewBox", ""),
        "role": "img",
        "style": f"max-width:{root.get('width', '0')}px",
    }
    return ET.tostring(root, encoding="unicode")


def _finish(element: ET.Element, titles: Mapping[str, str]) -> None:
    label = element.attrib.pop("aria-label", None)
    for name in _DROPPED:
        element.attrib.pop(name, None)
    if label is not None and label in titles:
        element.set("data-path", label)
        ET.SubElement(element, "title").text = titles[label]


_CONFIG: Mapping[str, Any] = {
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "domainColor": FAINT,
        "tickColor": FAINT,
        "gridColor": FAINT,
        "gridOpacity": 0.5,
        "labelColor": INK,
        "titleColor": INK,
        "labelFontSize": 11,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "labelOverlap": "greedy",
    },
}
