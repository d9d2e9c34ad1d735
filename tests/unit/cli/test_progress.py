"""How builds and transfers are shown, and how a build is asked to stop."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys

import pytest

from aotgaudi.cli.progress import BuildDisplay
from aotgaudi.compile.run import Progress
from aotgaudi.errors import BuildInterruptedError

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STEPS = (
    Progress(0, 2, 14.4, ("layer a", "head b")),
    Progress(0, 2, 14.2, ("layer a", "head b")),
    Progress(1, 2, 7.0, ("head b",)),
    Progress(2, 2, 0.0, ()),
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("aotgaudi.cli.progress.time.monotonic", lambda: made.now)
    return made


def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Makes standard error a terminal; a test calls it, since pytest puts its own there between set-up and test."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    made = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "stderr", made)
    return made


@pytest.mark.parametrize(("number", "within"), [(signal.SIGINT, ""), (signal.SIGTERM, " within 5 s")])
def test_the_first_signal_asks_for_a_stop_and_the_second_interrupts(
    number: signal.Signals, within: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with BuildDisplay() as display:
        assert not display.should_stop()
        os.kill(os.getpid(), number)
        assert display.should_stop()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)

    assert (
        capfd.readouterr().err == f"stopping after the units under way{within} (again to stop at once)...\n"
    )


@pytest.mark.parametrize(("number", "waits"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_what_sends_sigterm_does_not_wait_for_long_units(
    number: signal.Signals, waits: bool, clock: Clock
) -> None:
    with BuildDisplay() as display:
        os.kill(os.getpid(), number)
        clock.now += 4.9
        assert display.should_stop()
        clock.now += 3600.0 if waits else 0.2

        if waits:
            assert display.should_stop()
        else:
            with pytest.raises(BuildInterruptedError, match="units under way; resumable"):
                display.should_stop()


def test_the_handlers_before_are_put_back_also_after_an_error() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]

    with contextlib.suppress(KeyError), BuildDisplay():
        assert signal.getsignal(signal.SIGTERM) != before[1]
        raise KeyError

    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_without_a_terminal_it_prints_a_line_now_and_then_and_always_the_last(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with BuildDisplay() as display:
        for step in STEPS:
            display.show(step)
            clock.now += 2.0

    assert capsys.readouterr().err.splitlines() == [
        "[0/2] about 14 s left: layer a",
        "[2/2] about 0 s left: done",
    ]


def test_a_long_unit_is_a_line_a_minute(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with BuildDisplay() as display:
        for second in range(130):
            display.show(Progress(0, 1, 130.0 - second, ("layer a",)))
            clock.now += 1.0

    assert capsys.readouterr().err.splitlines() == [
        "[0/1] about 130 s left: layer a",
        "[0/1] about 70 s left: layer a",
        "[0/1] about 10 s left: layer a",
    ]


def test_on_a_terminal_it_draws_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    written = terminal(monkeypatch)
    with BuildDisplay() as display:
        for step in STEPS:
            display.show(step)

    text = written.getvalue()
    assert "building" in text
    assert "2/2" in text
    assert "done" in text


def test_warnings_are_above_the_bar_or_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    BuildDisplay().warn("down")
    assert capsys.readouterr().err == "warning: down\n"

    written = terminal(monkeypatch)
    with BuildDisplay() as display:
        display.show(STEPS[0])
        display.warn("[not markup]")
    assert "warning: [not markup]" in written.getvalue()
