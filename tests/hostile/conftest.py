"""Attacks on a real server. The ordinary run leaves them out; ``ci/test --hostile`` runs them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import pytest

from tests.e2e.conftest import workplace
from tests.e2e.harness import Server, Workplace
from tests.hostile.server import Ordeal, ordeal

__all__ = ["workplace"]

_FIGURES = "figures"
Record = Callable[[str], None]
"""Takes a line that is printed at the end of the run."""


class Trial(Protocol):
    """Starts a server with these options of ``serve`` and attacks it; see `ordeal`.

    `proxy` puts something in front of it. `is_timed`: what others wait is judged, where times are judged at all.
    """

    def __call__(
        self,
        *options: str,
        server: Server | None = None,
        proxy: Callable[[str], AbstractContextManager[str]] = nullcontext,
        is_timed: bool = True,
    ) -> AbstractContextManager[Ordeal]: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long the long attacks are, and what is judged."""
    parser.addoption(
        "--judge-times",
        action="store_true",
        help="fail where the others' requests take longer; on a machine that does nothing else",
    )
    parser.addoption("--requests", type=int, default=2000, help="how many requests the soak sends")
    parser.addoption("--soak-seed", type=int, default=9, help="of the soak's random mix")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what is in this folder. A soak has the time that its requests take on a slow machine, ten a second."""
    soak_seconds = 600 + config.getoption("--requests") / 10
    for item in items:
        if "tests/hostile/" in item.path.as_posix():
            item.add_marker(pytest.mark.hostile)
            if item.path.name == "test_soak.py":
                item.add_marker(pytest.mark.timeout(soak_seconds))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints the figures, which docs/reliability.md quotes. They come with the reports, from whatever process."""
    reports = (report for found in terminalreporter.stats.values() for report in found)
    called = [report for report in reports if getattr(report, "when", "") == "call"]
    if rows := [row for report in called for name, row in report.user_properties if name == _FIGURES]:
        terminalreporter.section(_FIGURES)
        terminalreporter.write_line("\n".join(rows))


@pytest.fixture
def record(record_property: Callable[[str, object], None]) -> Record:
    """Prints a figure at the end."""
    return partial(record_property, _FIGURES)


@pytest.fixture
def trial(workplace: Workplace, request: pytest.FixtureRequest, record: Record) -> Trial:
    """Attacks on servers of the shared bundle, named for the test."""

    def start(
        *options: str,
        server: Server | None = None,
        proxy: Callable[[str], AbstractContextManager[str]] = nullcontext,
        is_timed: bool = True,
    ) -> AbstractContextManager[Ordeal]:
        name = request.node.name.removeprefix("test_")
        judges_times = is_timed and request.config.getoption("--judge-times")
        asked = server or workplace.serve(*options)
        return ordeal(name, asked, record, judges_times=judges_times, proxy=proxy)

    return start
