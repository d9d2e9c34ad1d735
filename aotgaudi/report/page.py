"""A report as one HTML page: no script, no network, no other file. Computes nothing; escapes everything.

The page forbids itself scripts and all loading (Content-Security-Policy), so that not even a name that escaped would do
anything. Every number is a ``<data>`` element with its place in the JSON form and its value.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from aotgaudi.errors import MissingPackageError
from aotgaudi.report.difference import DifferenceReport
from aotgaudi.report.report import Report

if TYPE_CHECKING:
    from jinja2 import Environment

_NEEDED = ("vl_convert", "jinja2")
_SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_LEAST_MINUTES = 120.0


def require_report() -> None:
    """Raises MissingPackageError where what draws pages is not installed."""
    for package in _NEEDED:
        if importlib.util.find_spec(package) is None:
            raise MissingPackageError(package, "report")


def report_page(report: Report) -> str:
    """Returns the page. Raises MissingPackageError."""
    require_report()
    from aotgaudi.report import charts, plane_charts

    planes = [
        {
            "plane": plane,
            "place": f"planes.{index}",
            "steps": plane_charts.steps_chart(plane, f"planes.{index}"),
            "padding": plane_charts.padding_chart(plane, f"planes.{index}"),
        }
        for index, plane in enumerate(report.planes)
    ]
    built = report.built
    drawn = {
        "planes": planes,
        "units": charts.units_chart(built) if built and built.units else None,
        "time": charts.time_chart(built) if built and built.num_timed else None,
        "build": charts.build_chart(report.build_time)
        if report.build_time and report.build_time.phases
        else None,
        "memory": charts.memory_chart(report.memory) if report.memory.steps else None,
    }
    return render("report.html", report.model_dump(mode="json", by_alias=True), report=report, charts=drawn)


def difference_page(report: DifferenceReport) -> str:
    """Returns the page of what differs. Raises MissingPackageError."""
    require_report()
    from aotgaudi.report import plane_charts

    planes = [plane_charts.changes_chart(plane, f"planes.{i}") for i, plane in enumerate(report.planes)]
    return render("difference.html", report.model_dump(mode="json"), report=report, planes=planes)


def render(template: str, document: Mapping[str, Any], **values: Any) -> str:
    """Returns a template as a page; its ``num(PLACE, FORM)`` shows the number at a place of `document`."""
    return _environment(document).get_template(template).render(**values)


def _environment(document: Mapping[str, Any]) -> Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("aotgaudi.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(number_at=partial(number_at, document), shown=shown)
    return environment


# Numbers


def number_at(document: Mapping[str, Any], place: str) -> Any:
    """Returns the value at a dotted place of a JSON value. Raises KeyError or IndexError."""
    value: Any = document
    for part in place.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


def shown(value: float, form: str) -> str:
    """Returns a number for people.

    `form`: ``count``, ``size`` in bytes, ``time`` in seconds, ``work``, ``factor``, or ``share``, a part of 1.
    """
    return _FORMS[form](value)


def _size(num_bytes: float) -> str:
    unit, name = next((pair for pair in _SIZES if num_bytes >= pair[0]), (1, "B"))
    return f"{num_bytes / unit:,.{0 if unit == 1 else 1}f} {name}"


def _time(seconds: float) -> str:
    if seconds < _LEAST_MINUTES:
        return f"{seconds:,.1f} s"
    if seconds < 60 * _LEAST_MINUTES:
        return f"{seconds / 60:,.1f} min"
    return f"{seconds / 3600:,.1f} h"


def _work(work: float) -> str:
    return f"{work:,.0f}" if work >= 100 else f"{work:,.3g}"


_FORMS: Mapping[str, Callable[[float], str]] = MappingProxyType(
    {
        "count": "{:,}".format,
        "size": _size,
        "time": _time,
        "work": _work,
        "factor": "x {:,.2f}".format,
        "share": "{:.1%}".format,
    }
)
