"""Options that several commands share, and where their defaults come from."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from aotgaudi.errors import SpecError, StoreError
from aotgaudi.machine import available_cores
from aotgaudi.store.access import default_store_root

Command = Callable[..., Any]

_BYTE_COUNT = re.compile(
    r"(?P<number>[0-9]{1,15}(\.[0-9]{1,9})?)\s*(?P<unit>[KMGT]i?B|B?)", re.IGNORECASE | re.ASCII
)
_UNITS = MappingProxyType(
    {
        "": 1,
        "b": 1,
        **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
        **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
    }
)


def store_option(function: Command) -> Command:
    """``--store DIR``, else $AOTGAUDI_STORE, else the user's cache directory."""
    return click.option(
        "--store",
        "store_root",
        type=click.Path(path_type=Path),
        envvar="AOTGAUDI_STORE",
        default=default_store_root,
        metavar="DIR",
        help="The store  [default: $AOTGAUDI_STORE or ~/.cache/aotgaudi]",
    )(function)


def jobs_option(function: Command) -> Command:
    """``-j N``: worker processes, one a core by default."""
    return click.option(
        "-j",
        "--jobs",
        type=click.IntRange(min=1),
        default=available_cores,
        metavar="N",
        help="Worker processes  [default: one a core]",
    )(function)


def parse_byte_count(text: str) -> int:
    """Returns the bytes that a number with a unit stands for: ``96GiB``, ``1.5 TB``, ``4096``.

    Raises:
        ValueError: `text` is not a size, or is less than a byte.
    """
    match = _BYTE_COUNT.fullmatch(text.strip())
    num_bytes = int(Decimal(match["number"]) * _UNITS[match["unit"].lower()]) if match else 0
    if num_bytes < 1:
        raise ValueError(f"{text!r} is not a size: a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB")
    return num_bytes


def _to_byte_count(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else parse_byte_count(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from error


def memory_budget_option(function: Command) -> Command:
    """``--memory-budget SIZE``: what KV cache and step buffers may take."""
    return click.option(
        "--memory-budget",
        callback=_to_byte_count,
        metavar="SIZE",
        help="Device memory for KV cache and step buffers, weights not counted, e.g. 96GiB; warns if they need more.",
    )(function)


def with_options(function: Command, options: Sequence[Callable[[Command], Command]]) -> Command:
    """Returns a command with all of these options, which its help lists in their order."""
    for option in reversed(options):
        function = option(function)
    return function


class FiniteRange(click.FloatRange):
    """A number of a range, which neither ``nan`` nor ``inf`` is: click takes them for numbers of any."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Part of click."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


def refuse_unwritable(path: Path, *inputs: Path | None) -> None:
    """Raises StoreError if a file cannot be written, before the work for it is done.

    Raises SpecError where it is one of the `inputs`, which are only read, or lies within one, a sealed bundle say.
    """
    for given in inputs:
        if given is not None and path.resolve().is_relative_to(given.resolve()):
            problem = (
                f"would be written into {given}" if given.is_dir() else "is read, and would be written over"
            )
            raise SpecError(str(path), problem, "another file")
    if path.is_dir():
        raise StoreError(f"{path}: cannot be written: it is a directory")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise StoreError(f"{path}: cannot be written: {path.parent} is not a writable directory")
