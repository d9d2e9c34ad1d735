"""How a build is shown, and how it is asked to stop."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys

import pytest

from aotgaudi.build.executor import Progress
from aotgaudi.cli.show.progress import StopRequest, progress_display

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_asks_for_a_stop_and_the_second_interrupts(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    with StopRequest().listening() as stop:
        assert not stop()
        os.kill(os.getpid(), number)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)

    assert capfd.readouterr().err == "stopping after the units under way (again to stop at once)...\n"


def test_the_handlers_before_are_put_back_also_after_an_error() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]

    with contextlib.suppress(KeyError), StopRequest().listening():
        assert signal.getsignal(signal.SIGTERM) != before[1]
        raise KeyError

    assert [signal.getsignal(number) for number in SIGNALS] == before


STEPS = (
    Progress(0, 2, 14.4, ("layer a", "head b")),
    Progress(0, 2, 14.2, ("layer a", "head b")),
    Progress(1, 2, 7.0, ("head b",)),
    Progress(2, 2, 0.0, ()),
)


def test_without_a_terminal_it_prints_a_line_now_and_then_and_always_the_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr("aotgaudi.cli.show.progress.time.monotonic", lambda: now[0])

    with progress_display() as show:
        for step in STEPS:
            show(step)
            now[0] += 2.0

    assert capsys.readouterr().err.splitlines() == [
        "[0/2] about 14 s left: layer a",
        "[2/2] about 0 s left: done",
    ]


def test_on_a_terminal_it_draws_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "stderr", Terminal())

    with progress_display() as show:
        for step in STEPS:
            show(step)

    text = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "2/2" in text
    assert "done" in text
