"""``aotgaudi``: the root of the command line, and the edge where errors become a message and an exit code."""

from __future__ import annotations

import errno
import signal
from typing import Any

import click

from aotgaudi import __version__
from aotgaudi.cli.verbs import COMMANDS, LazyGroup
from aotgaudi.errors import AotGaudiError, MissingPackageError, SpecError

_EXIT_INTERRUPTED = 130
_MOST_SHOWN_CHARS = 80


class RootGroup(LazyGroup):
    """Prints only the message of an error that is raised on purpose; any traceback is a bug of ours."""

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
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            # The one mistake that even a look whether there is such a file raises.
            raise SpecError(
                str(error.filename)[:_MOST_SHOWN_CHARS], "is too long a name for a file"
            ) from error


@click.group(cls=RootGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="aotgaudi")
def cli() -> None:
    """The build system for the graphs that a static-shape LLM server must compile.

    Exit codes: 0 done; 2 bad usage or spec; 3 not warm (missing or stale); 4 corrupt or untrusted;
    5 target not satisfied by this machine; 6 a compile failed; 7 coverage has holes.
    """


def main() -> None:
    """Runs the command line of this process and exits.

    SIGINT interrupts it even if the process was started with that signal ignored, as a script's background jobs are.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main(prog_name="aotgaudi")
