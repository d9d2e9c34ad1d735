"""``aotgaudi``: the root of the command line, where errors become a message and an exit code."""

from __future__ import annotations

import difflib
import errno
import os
import signal
from pathlib import Path
from typing import Any

import click

from aotgaudi import __version__
from aotgaudi.cli.verbs import COMMANDS, LazyGroup
from aotgaudi.errors import AotGaudiError, MissingPackageError, SpecError, store_error

_EXIT_INTERRUPTED = 130
_CLOSE = 0.8
"""How similar a suggested option must be to an unknown one. A misspelling is similar enough, another word is not."""
_UNUSABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP})


class RootGroup(LazyGroup):
    """Prints only the message of an error that is raised on purpose. A traceback is a bug of ours."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        try:
            return self._invoke(ctx)
        except AotGaudiError as error:
            click.echo(f"error: {error}", err=True)
            raise click.exceptions.Exit(error.exit_code) from error
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
        except OSError as error:
            # Even checking whether such a file exists raises these.
            if error.errno == errno.ENAMETOOLONG:
                raise SpecError(str(error.filename), "is too long a name for a file") from error
            if error.errno in _UNUSABLE and error.filename is not None:
                raise store_error("use", Path(os.fsdecode(error.filename)), error) from error
            raise


@click.group(cls=RootGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="aotgaudi")
def cli() -> None:
    """The build system for the graphs that a static-shape LLM server must compile.

    Exit codes: 0 done; 2 bad usage or spec; 3 not warm (missing or stale); 4 corrupt or untrusted;
    5 target not satisfied by this machine; 6 a compile failed; 7 coverage has holes;
    8 some requests of a batch got an error.
    """


def main() -> None:
    """Runs the command line of this process and exits.

    SIGINT interrupts it even if the process was started with that signal ignored, like a script's background jobs.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main(prog_name="aotgaudi")
