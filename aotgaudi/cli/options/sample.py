"""``--check`` and ``--sample``: what ``build cache`` compiles again, and how the comparison is reported."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import click

from aotgaudi.build.recheck import Difference, Recheck
from aotgaudi.errors import NotReproducibleError

Command = Callable[..., Any]

DEFAULT_SAMPLE = 3
ALL = sys.maxsize
"""Of ``--sample all``."""


def check_options(function: Command) -> Command:
    """Gives a command ``sample``: how many units to compile again, or None where ``--check`` is not given."""

    @functools.wraps(function)
    def with_sample(*args: Any, check: bool, sample: int | None, **options: Any) -> Any:
        if sample is not None and not check:
            raise click.UsageError("--sample says how many units --check compiles again: give --check, too")
        return function(*args, sample=(sample or DEFAULT_SAMPLE) if check else None, **options)

    return _check_option(_sample_option(with_sample))


def describe_check(found: Recheck) -> str:
    """One line for people, of a check that found no difference."""
    return f"check: {len(found.labels)} units compiled again in {found.seconds:.1f} s, all to the same bytes"


def check_document(found: Recheck) -> dict[str, Any]:
    """The outcome as a JSON value; seconds are wall-clock."""
    return {
        "same": not found.differences,
        "units": list(found.labels),
        "seconds": found.seconds,
        "differences": [dataclasses.asdict(difference) for difference in found.differences],
    }


def failure_of(found: Recheck) -> NotReproducibleError | None:
    """The error that names every difference, or None."""
    if not found.differences:
        return None
    units = {difference.unit for difference in found.differences}
    head = f"{len(units)} of {len(found.labels)} units compiled again came out otherwise than stored"
    return NotReproducibleError("\n".join([head, *map(_row, found.differences)]))


def _row(difference: Difference) -> str:
    stored, rebuilt = difference.stored or "no such file", difference.rebuilt or "no such file"
    return (
        f"  {difference.label} (unit {difference.unit[:12]}): {difference.file} differs from byte"
        f" {difference.offset}\n    stored:  {stored}\n    rebuilt: {rebuilt}"
    )


def _to_sample(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    if value == "all":
        return ALL
    if not value.isascii() or not value.isdecimal() or int(value) < 1:
        raise click.BadParameter(f"{value!r} is no sample: a number from 1, or 'all'", context, parameter)
    return min(int(value), ALL)


def _check_option(function: Command) -> Command:
    return click.option(
        "--check",
        is_flag=True,
        help="Compile nothing new: compile some of what is stored again, and compare the bytes.",
    )(function)


def _sample_option(function: Command) -> Command:
    return click.option(
        "--sample",
        callback=_to_sample,
        metavar="N|all",
        help=f"How many units --check compiles again  [default: {DEFAULT_SAMPLE}]",
    )(function)
