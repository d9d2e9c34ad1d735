"""Settings of all tests, and how they run in several processes; see `tests.parallel`."""

from __future__ import annotations

import atexit
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from aotgaudi.machine import available_cores
from tests.parallel import ProcessWatch, escaped, turn

settings.register_profile("aotgaudi", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=20)
settings.load_profile("aotgaudi")
platform.processor()  # Starts uname, once a process: the openai client asks for it.

_TURNS = "aotgaudi_turns"
_TURNS_KEY = pytest.StashKey[str]()
_TESTS = Path(__file__).parent
_WITHOUT_PROCESSES = frozenset({"unit", "property", "golden", "transcripts"})
"""Folders whose tests start no process, unless they are marked `process`; all tests of other folders are."""
_MARKS = frozenset({"process", "smoke", "slow", "hostile", "nightly"})
"""Of tests that may start processes: `ci/test` without arguments runs none of them except `smoke`."""
_LONGEST_FIRST = ("guests", "integration", "e2e", "services", "property")


@pytest.fixture(autouse=True, scope="module")
def _this_process_is_left_alone() -> Iterator[None]:
    """A module that ignores or catches a signal for good, or gives rights away, would fail others, which inherit that."""
    before = _inherited()
    yield
    assert _inherited() == before


def _inherited() -> tuple[object, ...]:
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD)
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    rights = [line for line in status.splitlines() if line.startswith(("NoNewPrivs:", "Seccomp:"))]
    return *map(signal.getsignal, numbers), *rights


def pytest_addoption(parser: pytest.Parser) -> None:
    """``pytest tests/transcripts --rewrite``: writes what the commands print now."""
    parser.addoption(
        "--rewrite", action="store_true", help="write into each transcript what its commands print"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, for ``-n auto``: many tests wait for a process that they have started."""
    return available_cores() + 1


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tells a worker where the locks are; see `turn`."""
    stash = node.config.stash
    if _TURNS_KEY not in stash:
        stash[_TURNS_KEY] = tempfile.mkdtemp(prefix="aotgaudi-turns-")
    node.workerinput[_TURNS] = stash[_TURNS_KEY]


def pytest_internalerror(excrepr: object) -> None:
    """Says at the very end, too, what ended a worker: much is printed after it, and of a long log maybe only the end kept.

    What ended the first one is said last.
    """
    atexit.register(
        print, "An internal error of pytest or of a worker:", str(excrepr)[-3000:], sep="\n", file=sys.stderr
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes the locks."""
    if folder := config.stash.get(_TURNS_KEY, ""):
        shutil.rmtree(folder)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, object, object]:
    """Writes lone surrogates as escapes: pytest-xdist ends a worker whose report is not UTF-8, and says no test's name."""
    return escaped((yield))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks the tests of folders whose tests start processes."""
    if item.path.relative_to(_TESTS).parts[0] not in _WITHOUT_PROCESSES:
        item.add_marker("process")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Among several processes the files with the longest tests come first, so that none is left with one at the end.

    Raises:
        pytest.UsageError: a test's name holds an address, by which processes would not agree on what there is.
    """
    named = next((item.nodeid for item in items if " object at 0x" in item.nodeid), None)
    if named is not None:
        raise pytest.UsageError(f"{named}: give its parameters ids")
    if _turns(config):
        # Where all tests start processes, the slow ones come first; elsewhere those that start any.
        slow = {item.path for item in items if "slow" in item.keywords or _starts_some(item)}
        items.sort(key=lambda item: (_place(item), item.path not in slow))


def _starts_some(item: pytest.Item) -> bool:
    return "process" in item.keywords and item.path.relative_to(_TESTS).parts[0] in _WITHOUT_PROCESSES


_processes = ProcessWatch()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Forgets what was started before this test and the fixtures that are made for it."""
    _processes.forget()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fails a test that started a process and has no mark that says so."""
    result = yield
    if _processes.started and not _MARKS.intersection(mark.name for mark in item.iter_markers()):
        pytest.fail(f"it starts a process ({_processes.started}): mark it `process`", pytrace=False)
    return result


def _place(item: pytest.Item) -> int:
    folder = item.nodeid.split("/")[1] if "/" in item.nodeid else ""
    return _LONGEST_FIRST.index(folder) if folder in _LONGEST_FIRST else len(_LONGEST_FIRST)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Has a test that is marked `alone` run beside none of the other processes' tests; its time begins with its turn."""
    folder = _turns(item.config)
    if not folder:
        return (yield)
    with turn(Path(folder), alone=item.get_closest_marker("alone") is not None):
        return (yield)


def _turns(config: pytest.Config) -> str:
    """Where the locks are; empty where this process runs all tests."""
    return str(getattr(config, "workerinput", {}).get(_TURNS, ""))
