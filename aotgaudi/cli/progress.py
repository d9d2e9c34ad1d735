"""The progress of builds and captures on standard error, and the signals that stop a build."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from aotgaudi.compile.run import Progress, Watch
from aotgaudi.errors import BuildInterruptedError

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_LINE_SECONDS = 10.0
_SAME_SECONDS = 60.0
"""How long to hold back a line in which only the time has changed."""

_STANDARD_ERROR = 2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_GRACE_SECONDS: Mapping[int, float] = MappingProxyType({signal.SIGINT: math.inf, signal.SIGTERM: 5.0})
"""What the units under way get after a signal. What sends SIGTERM also kills before long: `docker stop` after 10 s."""


class BuildDisplay(Watch):
    """Shows a build, as a bar on a terminal and else in occasional lines, and stops it at a signal.

    `warn` may be called on any thread, the rest on one. After Ctrl-C the running units are finished; after SIGTERM they have
    a few seconds. A second signal stops the build at once. Before and after the jobs run, signals act as usual;
    `interrupted_by_sigterm` makes SIGTERM act as Ctrl-C then.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_stopping, self._most_until = False, math.inf
        self._bar: Bar | None = None
        self._last, self._shown = 0.0, (-1, -1)

    def __enter__(self) -> BuildDisplay:
        self._saved = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        if sys.stderr.isatty():
            self._bar = _build_bar()
            self._bar.start()
            self._task = self._bar.add_task("starting", total=None, eta=0.0)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        for number, handler in self._saved.items():
            signal.signal(number, handler)

    def show(self, progress: Progress) -> None:
        """See `Watch.show`."""
        done, total, eta = progress.num_done, progress.num_total, progress.eta_seconds
        if self._bar is not None:
            text = ", ".join(progress.labels) or "done"
            self._bar.update(self._task, completed=done, total=total, eta=eta, description=text)
        elif self._is_due(done, total):
            first = progress.labels[0] if progress.labels else "done"
            click.echo(f"[{done}/{total}] about {eta:.0f} s left: {first}", err=True)

    def _is_due(self, done: int, total: int) -> bool:
        now, is_new = time.monotonic(), (done, total) != self._shown
        if (is_new and done == total) or now - self._last >= (_LINE_SECONDS if is_new else _SAME_SECONDS):
            self._last, self._shown = now, (done, total)
            return True
        return False

    def warn(self, text: str) -> None:
        """See `Watch.warn`."""
        if self._bar is not None:
            self._bar.console.print(f"warning: {text}", markup=False, highlight=False, soft_wrap=True)
        else:
            click.echo(f"warning: {text}", err=True)

    def should_stop(self) -> bool:
        """See `Watch.should_stop`. Raises BuildInterruptedError once the units under way have had their time."""
        if time.monotonic() > self._most_until:
            raise BuildInterruptedError("stopped with units under way; resumable: run the same command again")
        return self._is_stopping

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._is_stopping:
            raise KeyboardInterrupt
        self._is_stopping, seconds = True, _GRACE_SECONDS[number]
        self._most_until = time.monotonic() + seconds
        within = "" if math.isinf(seconds) else f" within {seconds:g} s"
        text = f"stopping after the units under way{within} (again to stop at once)...\n"
        # Unbuffered: the signal may have interrupted a buffered write.
        os.write(_STANDARD_ERROR, text.encode())


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Lets SIGTERM end the work as Ctrl-C does: processes are killed, directories removed, and the exit code is 130."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _build_bar() -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    return Bar(
        TextColumn("building"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("about {task.fields[eta]:.0f} s left"),
        TextColumn("[dim]{task.description}"),
        console=Console(stderr=True),
    )


_NOTE_SECONDS = 15.0
_HEADING = 11


class CaptureDisplay:
    """Writes lines ``HEADING  TEXT``. Notes of the running step go to standard error; on a terminal each replaces the last.

    With `is_quiet` finished lines go to standard error too, because standard output is for a document. One thread only.
    """

    def __init__(self, *, is_quiet: bool = False) -> None:
        self._is_quiet = is_quiet
        self._heading = ""
        self._last = 0.0
        self._is_noted = False

    def begin(self, heading: str) -> None:
        """A step begins."""
        self._heading, self._last = heading, time.monotonic()

    def note(self, text: str) -> None:
        """The step has come this far."""
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[K{self._heading:<{_HEADING}}{text}", err=True, nl=False)
            self._is_noted = True
        elif time.monotonic() - self._last >= _NOTE_SECONDS:
            click.echo(f"{self._heading:<{_HEADING}}{text}", err=True)
            self._last = time.monotonic()

    def end(self, text: str) -> None:
        """The step is done."""
        self.line(self._heading, text)

    def line(self, heading: str, text: str) -> None:
        """Writes something that is known now."""
        self.clear()
        click.echo(f"{heading:<{_HEADING}}{text}", err=self._is_quiet)

    def warn(self, text: str) -> None:
        """Writes a warning to standard error."""
        self.clear()
        click.echo(f"warning: {text}", err=True)

    def clear(self) -> None:
        """Removes the last note before something else is written."""
        if self._is_noted:
            click.echo("\r\x1b[K", err=True, nl=False)
            self._is_noted = False
