"""The progress of long work on standard error: a bar on a terminal, else occasional lines."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_LINE_SECONDS = 10.0
_SAME_SECONDS = 60.0
"""How long to hold back a line in which only the time has changed."""


class Meter:
    """Shows the progress of one piece of work: how much of a `total` is `completed`. Thread-safe.

    A context manager. `make_bar` is called if standard error is a terminal.
    """

    def __init__(self, make_bar: Callable[[], Bar], *, is_told_at_once: bool) -> None:
        """With `is_told_at_once` the first update writes a line, otherwise only a later one."""
        self._make_bar = make_bar
        self._lock = threading.Lock()
        self._bar: Bar | None = None
        self._last = 0.0 if is_told_at_once else time.monotonic()
        self._shown: object = None

    def __enter__(self) -> Meter:
        if sys.stderr.isatty():
            self._bar = self._make_bar()
            self._bar.start()
            self._task = self._bar.add_task("starting", total=None, eta=0.0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(
        self, line: str, completed: int, total: int | None, *, is_last: bool = False, **fields: Any
    ) -> None:
        """Draws the bar, with the `fields` of its columns, or writes `line` if one is due."""
        with self._lock:
            if self._bar is not None:
                self._bar.update(self._task, completed=completed, total=total, **fields)
            elif self._is_due((completed, total), is_last=is_last):
                click.echo(line, err=True)

    def warn(self, text: str) -> None:
        """Writes a warning, above the bar."""
        if self._bar is not None:
            self._bar.console.print(f"warning: {text}", markup=False, highlight=False, soft_wrap=True)
        else:
            click.echo(f"warning: {text}", err=True)

    def _is_due(self, state: object, *, is_last: bool) -> bool:
        now, is_new = time.monotonic(), state != self._shown
        if (is_last and is_new) or now - self._last >= (_LINE_SECONDS if is_new else _SAME_SECONDS):
            self._last, self._shown = now, state
            return True
        return False


def bar(title: str, *columns: Any) -> Bar:
    """Returns a bar on standard error with the name `title`, followed by `columns`."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(TextColumn(title), BarColumn(bar_width=24), *columns, console=Console(stderr=True))
