"""How the build of a capture goes on: a line for each step that is done, and what the one under way is at."""

from __future__ import annotations

import sys
import time

import click

_LINE_SECONDS = 15.0
_HEADING = 11


class CaptureDisplay:
    """Writes lines ``HEADING  TEXT``; notes of the step under way go to standard error, on a terminal over each other.

    With `is_quiet` finished lines go to standard error, too: standard output is for a document. One thread only.
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
        """What it is at."""
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[K{self._heading:<{_HEADING}}{text}", err=True, nl=False)
            self._is_noted = True
        elif time.monotonic() - self._last >= _LINE_SECONDS:
            click.echo(f"{self._heading:<{_HEADING}}{text}", err=True)
            self._last = time.monotonic()

    def end(self, text: str) -> None:
        """It is done."""
        self.line(self._heading, text)

    def line(self, heading: str, text: str) -> None:
        """Something that is known now."""
        self.clear()
        click.echo(f"{heading:<{_HEADING}}{text}", err=self._is_quiet)

    def warn(self, text: str) -> None:
        """A warning, on standard error."""
        self.clear()
        click.echo(f"warning: {text}", err=True)

    def clear(self) -> None:
        """Takes away what was noted, before something else is written."""
        if self._is_noted:
            click.echo("\r\x1b[K", err=True, nl=False)
            self._is_noted = False
