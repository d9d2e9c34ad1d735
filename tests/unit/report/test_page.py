"""The page: whole in itself, every number in its place, and nothing of a name that is more than text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from typing import Any

import pytest

from aotgaudi.report.html import element, join, number_at, shown, table
from aotgaudi.report.page import report_page
from aotgaudi.report.values import Component, Report
from aotgaudi.spec.parse import load_spec
from aotgaudi.store.store import Store
from tests.unit.compile.conftest import store
from tests.unit.report.reports import HOSTILE, report_on, report_on_store
from tests.unit.report.test_compute import LLAMA, UPSTREAM

__all__ = ["store"]

MARKS = ("rect", "circle", "path")
_VOID = ("meta", "link", "br", "hr", "img", "input")


class Elements(HTMLParser):
    """Every element of a page with its attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[list[str]] = []
        self.tags: list[str] = []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        text: list[str] = []
        self.tags.append(tag)
        self.found.append((tag, dict(attrs), text))
        if tag not in _VOID:
            self._open.append(text)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found.append((tag, dict(attrs), []))

    def handle_endtag(self, tag: str) -> None:
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for text in self._open:
            text.append(data)


def numbers(page: str) -> Iterator[tuple[str, str, str]]:
    """(place, value, text) of every number that is written as such."""
    for tag, attributes, text in Elements(page).found:
        if tag == "data":
            yield str(attributes["data-path"]), str(attributes["value"]), "".join(text)


def document_of(report: Report) -> dict[str, Any]:
    return json.loads(report.model_dump_json(by_alias=True))


@pytest.fixture
def upstream() -> Report:
    spec = load_spec(LLAMA)
    return report_on(spec.model_copy(update={"bucketing": spec.bucketing.model_copy(update=UPSTREAM)}))


def test_every_number_on_the_page_is_that_of_the_json(store: Store, upstream: Report) -> None:
    for report in (upstream, report_on_store(store)):
        document = document_of(report)

        found = list(numbers(report_page(report)))

        assert len(found) > 30
        for place, value, _ in found:
            assert json.loads(value) == number_at(document, place), place
        places = {place for place, _, _ in found}
        assert {"entries.num_entries", "coverage.num_holes", "coverage.phases.0.num_reachable"} <= places
        holes = {f"coverage.holes.{index}.num_uncovered" for index in range(len(report.coverage.holes))}
        assert holes <= places


def test_every_cell_and_entry_is_a_mark_with_its_place(upstream: Report) -> None:
    page = report_page(upstream)

    marks = [str(a["data-path"]) for tag, a, _ in Elements(page).found if tag in MARKS and "data-path" in a]

    for index, plane in enumerate(upstream.planes):
        cells = {f"planes.{index}.cells.{i}" for i, cell in enumerate(plane.cells) if cell.num_steps}
        padded = {f"planes.{index}.cells.{i}" for i, cell in enumerate(plane.cells) if cell.padding}
        drawn = [mark for mark in marks if mark.startswith(f"planes.{index}.cells.")]
        assert set(drawn) == cells
        assert len(drawn) == len(cells) + len(padded)
        points = [mark for mark in marks if mark.startswith(f"planes.{index}.points.")]
        assert sorted(points) == sorted(f"planes.{index}.points.{i}" for i in range(len(plane.points)))
        witnesses = [mark for mark in marks if mark.startswith(f"planes.{index}.witnesses.")]
        assert len(witnesses) == len(plane.witnesses)


def test_the_page_is_whole_in_itself(upstream: Report) -> None:
    page = report_page(upstream)
    elements = Elements(page)

    assert set(elements.tags).isdisjoint({"script", "iframe", "object", "embed", "img", "form"})
    for _, attributes, _ in elements.found:
        assert attributes.keys().isdisjoint({"src", "srcset", "action", "xlink:href"})
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("href", "data:,") == "data:,"
    assert "default-src 'none'" in unescape(page)
    assert "@import" not in page
    assert "url(" not in page.split("</style>")[0]
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page


def test_the_same_report_is_the_same_page(upstream: Report) -> None:
    assert report_page(upstream) == report_page(upstream)


def test_no_name_is_more_than_text(store: Store) -> None:
    report = report_on_store(store, path=HOSTILE)
    assert report.built is not None
    units = tuple(unit.model_copy(update={"label": HOSTILE}) for unit in report.built.units)
    pieces = tuple(piece.model_copy(update={"piece": HOSTILE}) for piece in report.built.pieces)
    hostile = Component(name=HOSTILE, value=HOSTILE)
    report = report.model_copy(
        update={
            "subject": report.subject.model_copy(update={"model": HOSTILE, "backend": HOSTILE}),
            "built": report.built.model_copy(update={"units": units, "pieces": pieces}),
            "provenance": (hostile,),
            "keys": (hostile,),
            "warnings": (HOSTILE,),
            "notes": (HOSTILE,),
        }
    )
    plain = Elements(report_page(report_on_store(store)))

    page = report_page(report)

    elements = Elements(page)
    assert set(elements.tags) <= set(plain.tags) | {"strong", "li", "ul", "section"}
    assert "script" not in elements.tags
    assert "img" not in elements.tags
    assert "<script" not in page
    assert "49" not in page.partition("<main>")[2].partition("</h1>")[0]
    titles = ["".join(text) for tag, _, text in elements.found if tag == "h1"]
    assert titles == [HOSTILE]


def test_text_is_escaped_wherever_it_goes_and_html_is_kept() -> None:
    quoted = HOSTILE.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    quoted = quoted.replace('"', "&quot;").replace("'", "&#x27;")

    made = element("p", HOSTILE, element("b", HOSTILE), data_path=HOSTILE, class_=None)

    assert made == f'<p data-path="{quoted}">{quoted}<b>{quoted}</b></p>'
    assert join(HOSTILE, made) == f"{quoted}{made}"
    assert f'<td class="n">{quoted}</td>' in table(("#a",), [(HOSTILE,)])


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (1234567, "count", "1,234,567"),
        (512, "size", "512 B"),
        (1536, "size", "1.5 KiB"),
        (34 * 2**30, "size", "34.0 GiB"),
        (0, "size", "0 B"),
        (3.25, "time", "3.2 s"),
        (600, "time", "10.0 min"),
        (36000, "time", "10.0 h"),
        (1.257, "factor", "x 1.26"),
        (0.1234, "share", "12.3%"),
        (1234.4, "work", "1,234"),
        (0.01234, "work", "0.0123"),
    ],
)
def test_numbers_are_shown_for_people(value: float, form: str, text: str) -> None:
    assert shown(value, form) == text
