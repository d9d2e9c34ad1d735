"""``aotgaudi``: the root of the command line, where errors become a message and an exit code.

Here, and nowhere else, we handle what the machine withholds from any command: standard streams that are closed or full,
threads, memory, and a working directory.
"""

from __future__ import annotations

import difflib
import errno
import io
import os
import signal
import sys
from typing import Any, TextIO

import click

from aotgaudi import __version__
from aotgaudi.cli.verbs import COMMANDS, LazyGroup
from aotgaudi.errors import AotGaudiError, MissingPackageError, StoreError, machine_error

_EXIT_INTERRUPTED = 130
_CLOSE = 0.8
"""How similar a suggested option must be to an unknown one. A misspelling is similar enough, another word is not."""


class RootGroup(LazyGroup):
    """Prints only the message of an error that is raised on purpose. A traceback is a bug of ours."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        try:
            _require_working_directory()
            return self._invoke(ctx)
        except AotGaudiError as error:
            raise click.exceptions.Exit(_tell(error)) from error
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            raise click.exceptions.Exit(_EXIT_INTERRUPTED) from None

    def _invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            missing = MissingPackageError.of(error, preferred=ctx.invoked_subcommand or "")
            raise missing or error from error
        except click.NoSuchOption as error:
            close = difflib.get_close_matches(error.option_name, error.possibilities or (), cutoff=_CLOSE)
            raise click.NoSuchOption(error.option_name, possibilities=close, ctx=error.ctx) from error
        except (OSError, MemoryError, RuntimeError, ImportError) as error:
            raise machine_error(error) or error from error


def _require_working_directory() -> None:
    """Raises StoreError if the working directory was deleted: torch ends a process that it finds there."""
    try:
        os.getcwd()
    except OSError as error:
        raise StoreError(
            f"the working directory cannot be used: {error.strerror} (cd to one that exists)"
        ) from error


def _tell(error: AotGaudiError) -> int:
    unknown = (
        "" if os.path.exists("/proc/self") else " (/proc is not mounted: little is known of this machine)"
    )
    click.echo(f"error: {error}{unknown}", err=True)
    return error.exit_code


@click.group(cls=RootGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="aotgaudi")
def cli() -> None:
    """The build system for the graphs that a static-shape LLM server must compile.

    Exit codes: 0 done; 2 bad usage or spec; 3 not warm (missing or stale); 4 corrupt or untrusted;
    5 target not satisfied by this machine; 6 a compile failed; 7 coverage has holes.
    """


class _Output(io.FileIO):
    """Standard output. Of its errors it raises the first, as a StoreError, and then drops what is written.

    An OSError could be taken for that of another file on its way to the root.
    """

    def __init__(self, *, is_closed: bool) -> None:
        super().__init__(1, "w", closefd=False)
        self._is_closed, self._has_failed = is_closed, False

    def write(self, data: Any) -> int:
        """Writes some of `data`. Raises StoreError."""
        if self._has_failed:
            return len(data)
        try:
            if self._is_closed:
                raise OSError(errno.EBADF, "it is closed")
            return super().write(data)
        except OSError as error:
            self._has_failed = True
            raise StoreError(
                f"standard output cannot be written to: {error.strerror} (send it elsewhere, for example to /dev/null)"
            ) from error


class _Errors(io.FileIO):
    """Standard error. What cannot be written is dropped: there is no other place to report it."""

    def __init__(self) -> None:
        super().__init__(2, "w", closefd=False)

    def write(self, data: Any) -> int:
        """Writes some of `data`."""
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _open_streams() -> None:
    """Replaces our standard streams by ones whose failures are told. Opens those that are closed on /dev/null.

    Otherwise the next file that we or a child open would get a number below 3, and what is printed would be written into it.
    """
    closed = _open_closed()
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    sys.stdout = _text(_Output(is_closed=1 in closed), sys.stdout)
    sys.stderr = _text(_Errors(), sys.stderr)


def _open_closed() -> frozenset[int]:
    closed = set()
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            closed.add(number)
            try:
                os.open(os.devnull, os.O_RDWR)  # It gets the lowest free number, which is this one.
            except OSError:  # Without /dev, a pipe that nobody writes to is as good.
                os.close(os.pipe()[1])
            os.set_inheritable(number, True)
    return frozenset(closed)


def _text(raw: io.FileIO, before: TextIO | None) -> io.TextIOWrapper:
    known = before if isinstance(before, io.TextIOWrapper) else None
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=known.encoding if known else "utf-8",
        errors=known.errors if known else "backslashreplace",
        line_buffering=known.line_buffering if known else True,
        write_through=known.write_through if known else False,
    )


def main() -> None:
    """Runs the command line of this process and exits.

    SIGINT interrupts it even if the process was started with that signal ignored, like a script's background jobs.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _open_streams()
    code: Any = None
    try:
        cli.main(prog_name="aotgaudi")
    except SystemExit as done:
        code = done.code
    except AotGaudiError as error:  # It could not print its help.
        code = _tell(error)
    try:
        sys.stdout.flush()
    except AotGaudiError as error:
        code = _tell(error)
    sys.exit(code)
