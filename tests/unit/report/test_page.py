"""The page: whole in itself, every number in its place, and nothing of a name that is more than text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser

import pytest

from aotgaudi.report.compute import Report
from aotgaudi.report.html import element, join, number_at, shown, table
from aotgaudi.report.page import report_page
from aotgaudi.spec.parse import load_spec
from aotgaudi.store.store import Store
from tests.unit.compile.conftest import store
from tests.unit.report.reports import HOSTILE, report_on, report_on_store
from tests.unit.report.test_compute import LLAMA, UPSTREAM

__all__ = ["store"]

MARKS = ("rect", "circle", "path")
_VOID = ("meta", "link")


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


@pytest.fixture
def upstream() -> Report:
    spec = load_spec(LLAMA)
    return report_on(spec.model_copy(update={"bucketing": spec.bucketing.model_copy(update=UPSTREAM)}))


def test_every_number_on_the_page_is_that_of_the_json(store: Store, upstream: Report) -> None:
    for report in (upstream, report_on_store(store)):
        document = json.loads(json.dumps(report.document))

        found = list(numbers(report_page(report)))

        assert len(found) > 15
        for place, value, _ in found:
            assert json.loads(value) == number_at(document, place), place
        places = {place for place, _, _ in found}
        assert {"num_entries", "num_holes", "coverage.phases.0.num_reachable"} <= places
        assert "coverage.phases.0.padding.mean" in places


def test_holes_are_listed(upstream: Report) -> None:
    listed = {"".join(text) for tag, _, text in Elements(report_page(upstream)).found if tag == "li"}

    assert set(upstream.document["coverage"]["holes"]) <= listed


def test_every_cell_and_bucket_is_a_mark_with_its_place(upstream: Report) -> None:
    page = report_page(upstream)

    marks = [str(a["data-path"]) for tag, a, _ in Elements(page).found if tag in MARKS and "data-path" in a]

    assert sorted(marks) == sorted(
        f"heat_maps.{index}.{name}.{number}"
        for index, heat_map in enumerate(upstream.document["heat_maps"])
        for name in ("cells", "buckets")
        for number in range(len(heat_map[name]))
    )


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


def test_no_name_is_more_than_text(store: Store) -> None:
    report = report_on_store(store, path=HOSTILE)
    document = report.document
    document["subject"].update(model=HOSTILE, backend=HOSTILE)
    document["coverage"].update(holes=[HOSTILE], left_out=[HOSTILE], mend=HOSTILE)
    document["warnings"] = document["notes"] = [HOSTILE]
    for unit in document["built"]["units"]:
        unit.update(label=HOSTILE)
    plain = Elements(report_page(report_on_store(store)))

    page = report_page(report)

    elements = Elements(page)
    assert set(elements.tags) <= set(plain.tags) | {"strong", "li", "ul", "section", "h3"}
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
        (1536, "size", "1.50 KiB"),
        (34 * 2**30, "size", "34.00 GiB"),
        (0, "size", "0 B"),
        (3.25, "time", "3.2 s"),
        (600, "time", "10.0 min"),
        (36000, "time", "10.0 h"),
        (1.257, "factor", "x 1.26"),
    ],
)
def test_numbers_are_shown_for_people(value: float, form: str, text: str) -> None:
    assert shown(value, form) == text
