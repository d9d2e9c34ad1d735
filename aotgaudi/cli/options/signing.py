"""``--sign-key`` and ``--epoch``: options of the commands that seal a bundle."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from aotgaudi.bundle.signing import Signing, SigningKey, load_signing_key
from aotgaudi.cli.options.common import Command

_EPOCH = click.IntRange(0, (1 << 53) - 1)


def sign_key_option(function: Command, *, required: bool = False) -> Command:
    """``--sign-key FILE``, repeatable."""
    return click.option(
        "--sign-key",
        "sign_keys",
        type=click.Path(path_type=Path),
        multiple=True,
        required=required,
        metavar="FILE",
        help="Sign the bundle with this private key (repeatable; `aotgaudi key generate`).",
    )(function)


def epoch_option(function: Command) -> Command:
    """``--epoch N``, None where it is not given."""
    return click.option(
        "--epoch", type=_EPOCH, metavar="N", help="Number that `serve --minimum-epoch` compares  [default: 0]"
    )(function)


def signing_options(function: Command) -> Command:
    """Both; the command gets them as one argument `signing`, None where nothing is to be signed."""

    @functools.wraps(function)
    def command(*, sign_keys: tuple[Path, ...], epoch: int | None, **others: Any) -> Any:
        if epoch is not None and not sign_keys:
            raise click.UsageError("--epoch is part of what is signed: it needs --sign-key FILE")
        signing = Signing(load_keys(sign_keys), epoch or 0) if sign_keys else None
        return function(signing=signing, **others)

    return sign_key_option(epoch_option(command))


def load_keys(paths: Iterable[Path]) -> tuple[SigningKey, ...]:
    """Reads the keys. Raises SpecError and UntrustedError."""
    return tuple(load_signing_key(path) for path in paths)
