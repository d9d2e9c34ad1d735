"""How a transfer looks: a bar of bytes on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import click

from aotgaudi.cli.commands.cache import size_text
from aotgaudi.remotes.transfer import Conduct

_LINE_SECONDS = 10.0


@dataclass(frozen=True)
class Display:
    """`conduct` runs transfers and is shown; `expect` is told how many bytes there are, once that is known."""

    conduct: Conduct
    expect: Callable[[int], None]


@contextmanager
def transfer_display(verb: str) -> Iterator[Display]:
    """Yields what shows a transfer that is called `verb` ("pulling"). Writes to standard error."""
    if sys.stderr.isatty():
        with _bar(verb) as display:
            yield display
    else:
        lines = _Lines(verb)
        yield Display(Conduct(advance=lines.advance, warn=_warn), lines.expect)


def _warn(text: str) -> None:
    click.echo(f"warning: {text}", err=True)


class _Lines:
    def __init__(self, verb: str) -> None:
        self._verb, self._num_done, self._total = verb, 0, 0
        self._last = time.monotonic()
        self._lock = threading.Lock()

    def expect(self, num_bytes: int) -> None:
        self._total = num_bytes

    def advance(self, num_bytes: int) -> None:
        with self._lock:
            self._num_done += num_bytes
            if time.monotonic() - self._last < _LINE_SECONDS:
                return
            self._last = time.monotonic()
        of = f" of {size_text(self._total)}" if self._total else ""
        click.echo(f"{self._verb}: {size_text(self._num_done)}{of}", err=True)


@contextmanager
def _bar(verb: str) -> Iterator[Display]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn(verb),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(verb, total=None)
        conduct = Conduct(
            advance=lambda num_bytes: bar.advance(task, num_bytes),
            warn=lambda text: console.print(
                f"warning: {text}", markup=False, highlight=False, soft_wrap=True
            ),
        )
        yield Display(conduct, lambda num_bytes: bar.update(task, total=num_bytes))
