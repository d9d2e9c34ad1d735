"""How a build looks: a live bar on a terminal, a line now and then elsewhere; and how it is stopped."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from aotgaudi.build.executor import Progress

_LINE_SECONDS = 10.0
_STANDARD_ERROR = 2
_STOPPING = b"stopping after the units under way (again to stop at once)...\n"


class StopRequest:
    """Set by the first Ctrl-C or SIGTERM: finish the units under way, then stop. A second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.is_set = False

    def __call__(self) -> bool:
        """Whether to stop."""
        return self.is_set

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Listens for the signals while the block runs."""
        saved = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in saved.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
        os.write(_STANDARD_ERROR, _STOPPING)  # Not through a buffer, which may be in the midst of a write.


@contextmanager
def progress_display() -> Iterator[Callable[[Progress], None]]:
    """Yields what to call with each `Progress`. Writes to standard error."""
    if sys.stderr.isatty():
        with _bar() as show:
            yield show
    else:
        yield _Lines()


class _Lines:
    def __init__(self) -> None:
        self._last = 0.0
        self._shown: tuple[int, int] | None = None

    def __call__(self, progress: Progress) -> None:
        state = (progress.num_done, progress.num_total)
        is_end = progress.num_done == progress.num_total
        if state == self._shown or (time.monotonic() - self._last < _LINE_SECONDS and not is_end):
            return
        self._last, self._shown = time.monotonic(), state
        what = progress.labels[0] if progress.labels else "done"
        click.echo(
            f"[{progress.num_done}/{progress.num_total}] about {progress.eta_seconds:.0f} s left: {what}",
            err=True,
        )


@contextmanager
def _bar() -> Iterator[Callable[[Progress], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("building"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("about {task.fields[eta]:.0f} s left"),
        TextColumn("[dim]{task.description}"),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=None, eta=0.0)

        def show(progress: Progress) -> None:
            what = ", ".join(progress.labels) or "done"
            bar.update(
                task,
                completed=progress.num_done,
                total=progress.num_total,
                eta=progress.eta_seconds,
                description=what,
            )

        yield show
