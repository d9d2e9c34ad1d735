"""How much of a manifest is built, and what first: ``--tier``, ``--budget``, ``--trace``. Everything where none is given."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import click

from aotgaudi.compile.extent import Extent
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.subset import NO_TRAFFIC, Importance, TierName
from aotgaudi.traffic.replay import traffic_of
from aotgaudi.traffic.trace import read_trace

Command = Callable[..., Any]

_AMOUNT = re.compile(r"(?P<number>[0-9]{1,9}(?:\.[0-9]{1,6})?)(?P<unit>[smh]?)")
_SECONDS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Budget:
    """So many seconds, or so many entries."""

    seconds: float | None = None
    num_entries: int | None = None


@dataclass(frozen=True)
class AskedExtent:
    """What the command line asks for."""

    tier: TierName | None
    budget: Budget | None
    trace: Path | None = None

    @property
    def is_all(self) -> bool:
        """Whether neither is given."""
        return self.tier is None and self.budget is None

    def of(self, manifest: Manifest) -> Extent | None:
        """Returns what is to be built of `manifest`; None: all.

        Raises CoverageError where no part of it is closed, SpecError for a trace that cannot be read or does not fit.
        """
        if self.is_all:
            return None
        traffic = NO_TRAFFIC if self.trace is None else traffic_of(manifest, read_trace(self.trace))
        importance = Importance(manifest, traffic)
        if self.tier is not None:
            return Extent(importance.tier(self.tier))
        assert self.budget is not None
        if self.budget.num_entries is not None:
            return Extent(importance.beginning(self.budget.num_entries))
        return Extent(importance.order, len(importance.tier("least")), self.budget.seconds)


def extent_options(function: Command) -> Command:
    """Gives a command ``asked``, an `AskedExtent`."""

    @functools.wraps(function)
    def with_extent(
        *args: Any, tier: TierName | None, budget: Budget | None, trace: Path | None, **options: Any
    ) -> Any:
        if tier is not None and budget is not None:
            raise click.UsageError("--tier and --budget exclude each other")
        if trace is not None and tier is None and budget is None:
            raise click.UsageError("--trace says what is built first: it goes with --tier or --budget")
        return function(*args, asked=AskedExtent(tier, budget, trace), **options)

    return _tier_option(_budget_option(_trace_option(with_extent)))


def _tier_option(function: Command) -> Command:
    return click.option(
        "--tier",
        type=click.Choice(get_args(TierName)),
        help="Build a proved part: what can be served at all, what most steps run in, or what covers every step.",
    )(function)


def _budget_option(function: Command) -> Command:
    return click.option(
        "--budget",
        callback=_to_budget,
        metavar="TIME|N",
        help="Build what matters most for so long (90s, 10m, 1.5h), or so many entries; never less than can be served.",
    )(function)


def _trace_option(function: Command) -> Command:
    return click.option(
        "--trace",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="With --tier or --budget: what the requests of this trace (CSV or JSONL) ran in matters most.",
    )(function)


def _to_budget(context: click.Context, parameter: click.Parameter, value: str | None) -> Budget | None:
    if value is None:
        return None
    found = _AMOUNT.fullmatch(value.strip())
    if found is None or (not found["unit"] and "." in found["number"]) or not float(found["number"]):
        raise click.BadParameter(
            f"{value!r:.60} is no budget: a time such as 90s, 10m or 1.5h, or a number of entries",
            context,
            parameter,
        )
    if found["unit"]:
        return Budget(seconds=float(found["number"]) * _SECONDS[found["unit"]])
    return Budget(num_entries=int(found["number"]))
