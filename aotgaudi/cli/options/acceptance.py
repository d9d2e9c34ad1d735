"""Which bundles a command accepts: trusted keys, how many of them, since which epoch, and whose files."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import click

from aotgaudi.bundle.trust import TrustPolicy
from aotgaudi.cli.options.common import Command, with_options

_OPTIONS = (
    click.option(
        "--trusted-key",
        "trusted_keys",
        type=click.Path(path_type=Path),
        multiple=True,
        metavar="PEM",
        help="Public key whose signature the bundle must carry (repeatable).",
    ),
    click.option(
        "--threshold",
        type=click.IntRange(min=1),
        metavar="N",
        help="How many of the trusted keys must have signed  [default: 1]",
    ),
    click.option(
        "--minimum-epoch",
        type=click.IntRange(min=0),
        metavar="N",
        help="Refuse a bundle that was signed for an older epoch.",
    ),
    click.option(
        "--allow-unsafe-permissions",
        is_flag=True,
        help="Accept files that users other than you and root own or may write to.",
    ),
)


def acceptance_options(function: Command) -> Command:
    """Adds the options; the command gets them as one argument `acceptance`."""

    @functools.wraps(function)
    def command(
        *,
        trusted_keys: tuple[Path, ...],
        threshold: int | None,
        minimum_epoch: int | None,
        allow_unsafe_permissions: bool,
        **others: Any,
    ) -> Any:
        for name, value in (("--threshold", threshold), ("--minimum-epoch", minimum_epoch)):
            if value is not None and not trusted_keys:
                raise click.UsageError(f"{name} is about signatures: it needs --trusted-key PEM")
        acceptance = TrustPolicy.demanding(
            trusted_keys, threshold, minimum_epoch, allow_unsafe_permissions=allow_unsafe_permissions
        )
        return function(acceptance=acceptance, **others)

    return with_options(command, _OPTIONS)
