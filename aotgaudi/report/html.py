"""Builds HTML from values. Only `element` turns text into HTML, and escapes it, so that names are never more than text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from html import escape
from importlib import resources
from string import Formatter
from types import MappingProxyType
from typing import Any

from aotgaudi.manifest.memory import sized

_LEAST_MINUTES = 120.0
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_VOID = frozenset({"meta", "link"})


class Html(str):
    """Text that is already HTML."""

    __slots__ = ()


NONE = Html()


def element(tag: str, *children: object, **attributes: object) -> Html:
    """Returns an element. Children that are not `Html`, and all values of attributes, are escaped.

    ``class_`` is the attribute ``class``, ``data_path`` is ``data-path``. Attributes of None are left out.
    """
    words = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _VOID:
        return Html(f"<{tag}{words}>")
    return Html(f"<{tag}{words}>{join(*children)}</{tag}>")


def join(*children: object) -> Html:
    """Returns the concatenated children, escaped unless they are `Html`."""
    return Html("".join(child if isinstance(child, Html) else escape(str(child)) for child in children))


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> Html:
    """Returns a table. A head with the prefix ``#`` marks a column of numbers."""
    kinds = ["n" if head.startswith("#") else None for head in heads]
    titles = (element("th", head.lstrip("#"), class_=kind) for head, kind in zip(heads, kinds, strict=True))
    lines = [element("tr", *titles)]
    for row in rows:
        cells = (element("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True))
        lines.append(element("tr", *cells))
    return element("div", element("table", *lines), class_="scroll")


def page(title: str, *main: object) -> str:
    """Returns a whole page."""
    style = resources.files("aotgaudi.report").joinpath("style.css").read_text(encoding="utf-8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", title),
        element("link", rel="icon", href="data:,"),
        element("style", Html(style)),
    )
    return f"<!doctype html>\n{element('html', head, element('body', element('main', *main)), lang='en')}\n"


class Numbers:
    """The numbers of a JSON value, as elements that carry their place in it as a dotted path."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document

    def __call__(self, place: str, form: str = "count") -> Html:
        """Returns the number at a place. None becomes "not known"."""
        value = number_at(self._document, place)
        if value is None:
            return element("span", "not known", class_="none")
        return element("data", shown(value, form), data_path=place, value=value)

    def text(self, text: str, at: str = "", **words: object) -> Html:
        """Returns prose in which ``{place:form}`` is a number below `at`, and ``{name}`` is one of `words`, escaped."""
        parts: list[object] = []
        for literal, name, form, _ in Formatter().parse(text):
            parts.append(literal)
            if name is not None:
                parts.append(
                    words[name] if name in words else self(f"{at}.{name}".lstrip("."), form or "count")
                )
        return join(*parts)

    def table(self, at: str, columns: Mapping[str, str], most: int | None = None) -> Html:
        """Returns a table of the first rows of the list at `at`. For the prefix of heads, see `table`.

        A column is the name of a text in the row, or a text with places of numbers in it.
        """
        rows = number_at(self._document, at)[:most]
        return table(
            columns,
            (
                [self.text(cell, f"{at}.{i}") if "{" in cell else row[cell] for cell in columns.values()]
                for i, row in enumerate(rows)
            ),
        )


def number_at(document: Mapping[str, Any], place: str) -> Any:
    """Returns the value at a dotted place of a JSON value. Raises KeyError or IndexError."""
    value: Any = document
    for part in place.split("."):
        value = value[int(part)] if isinstance(value, (list, tuple)) else value[part]
    return value


def shown(value: float, form: str) -> str:
    """Returns a number in a readable form.

    `form` is ``count``, ``size`` in bytes, ``time`` in seconds, or ``factor``.
    """
    return _FORMS[form](value)


def _time(seconds: float) -> str:
    if seconds < _LEAST_MINUTES:
        return f"{seconds:,.1f} s"
    if seconds < 60 * _LEAST_MINUTES:
        return f"{seconds / 60:,.1f} min"
    return f"{seconds / 3600:,.1f} h"


_FORMS: Mapping[str, Callable[[float], str]] = MappingProxyType(
    {
        "count": "{:,}".format,
        "size": sized,
        "time": _time,
        "factor": "x {:,.2f}".format,
    }
)
