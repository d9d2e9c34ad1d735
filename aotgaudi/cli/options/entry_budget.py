"""How many entries there may be: a number, or build seconds and graph memory, by what one entry takes of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from aotgaudi.cli.options.common import FiniteRange, parse_byte_count, with_options
from aotgaudi.errors import SpecError
from aotgaudi.manifest.cost import SECONDS_A_STEP
from aotgaudi.traffic.tune import FEWEST_ENTRIES, MOST_ENTRIES

Command = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What prompt and decode entries take of one budget, each on average, in its unit; `source` says who says so."""

    prompt: float
    decode: float
    source: str

    def of(self, num_prompts: int, num_decodes: int) -> float:
        """Returns what so many take."""
        return self.prompt * num_prompts + self.decode * num_decodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One budget and what entries take of it."""

    name: str
    most: float
    price: Price


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryBudget:
    """The least of what was given; as many as today where nothing was."""

    entries: int | None = None
    shares: tuple[Share, ...] = ()

    def num_entries(self, today: int, split: Callable[[int], tuple[int, int]]) -> int:
        """Returns how many entries fit, `split` being how many of a number are prompts and decodes.

        Raises:
            SpecError: not even the fewest fit.
        """
        is_given = self.entries is not None or self.shares
        most = MOST_ENTRIES if self.entries is None and is_given else self.entries or today
        for num in range(min(most, MOST_ENTRIES), FEWEST_ENTRIES - 1, -1):
            if all(share.price.of(*split(num)) <= share.most for share in self.shares):
                return num
        one = self.shares[0] if self.shares else None
        problem = f"is {most:,} entries" if one is None else f"is less than {FEWEST_ENTRIES} entries take"
        raise SpecError("the budget", problem, f"{FEWEST_ENTRIES} to {MOST_ENTRIES} entries")


_OPTIONS = (
    click.option(
        "--entries",
        type=click.IntRange(FEWEST_ENTRIES, MOST_ENTRIES),
        metavar="N",
        help="At most so many prompt and decode entries  [default: as many as SPEC has, 400 at most]",
    ),
    click.option(
        "--build-seconds",
        type=FiniteRange(min=0, min_open=True),
        metavar="S",
        help="At most so long a build, one entry after the other.",
    ),
    click.option(
        "--seconds-per-entry",
        type=FiniteRange(min=0, min_open=True),
        metavar="S",
        help=f"What building one takes, for --build-seconds  [default: by --built, or {SECONDS_A_STEP}]",
    ),
    click.option("--graph-memory", metavar="SIZE", help="At most so much memory for graphs, e.g. 4GiB."),
    click.option(
        "--bytes-per-entry",
        metavar="SIZE",
        help="What the graphs of one entry take, for --graph-memory  [default: by --built]",
    ),
    click.option(
        "--built",
        metavar="BUNDLE",
        type=click.Path(path_type=Path),
        help="A bundle of such a spec: how large its prompt and decode entries are, and with --store how long they took.",
    ),
    click.option(
        "--store",
        "store_root",
        metavar="DIR",
        type=click.Path(path_type=Path),
        help="The store that built BUNDLE: its records have the seconds.",
    ),
)


def entry_budget_options(function: Command) -> Command:
    """Gives a command ``budget``, an `EntryBudget`."""

    @functools.wraps(function)
    def with_budget(*args: Any, **options: Any) -> Any:
        names = ("entries", "build_seconds", "seconds_per_entry", "graph_memory", "bytes_per_entry")
        given = {name: options.pop(name) for name in (*names, "built", "store_root")}
        return function(*args, budget=_budget(**given), **options)

    return with_options(with_budget, _OPTIONS)


def _budget(
    *,
    entries: int | None,
    build_seconds: float | None,
    seconds_per_entry: float | None,
    graph_memory: str | None,
    bytes_per_entry: str | None,
    built: Path | None,
    store_root: Path | None,
) -> EntryBudget:
    if store_root is not None and built is None:
        raise click.UsageError("--store is about --built BUNDLE: it says how long its entries took.")
    if seconds_per_entry is not None and build_seconds is None:
        problem = "is about a build whose time has no limit"
        raise SpecError("--seconds-per-entry", problem, "--build-seconds as well")
    if bytes_per_entry is not None and graph_memory is None:
        raise SpecError("--bytes-per-entry", "is about memory that has no limit", "--graph-memory as well")
    means = None if built is None else _Means.of(built, store_root)
    shares = []
    if build_seconds is not None:
        price = _seconds_price(seconds_per_entry, means)
        shares.append(Share(name="--build-seconds", most=build_seconds, price=price))
    if graph_memory is not None:
        price = _bytes_price(bytes_per_entry, means)
        shares.append(Share(name="--graph-memory", most=_bytes("--graph-memory", graph_memory), price=price))
    return EntryBudget(entries=entries, shares=tuple(shares))


@dataclass(frozen=True, slots=True)
class _Means:
    """What the entries of a bundle take: seconds where a store knows them."""

    where: Path
    store: Path | None
    seconds: tuple[float, float] | None
    sizes: tuple[float, float]

    @classmethod
    def of(cls, built: Path, store_root: Path | None) -> _Means:
        """Reads a bundle, and the records of a store. Raises as `open_bundle` and `Store.open` do."""
        from aotgaudi.bundle.bundle import open_bundle
        from aotgaudi.cli.options.store import StorePlace
        from aotgaudi.report.entry_means import entry_mean
        from aotgaudi.report.holdings import holdings_of_bundle

        store = None if store_root is None else StorePlace(store_root).open(create=False)
        held = holdings_of_bundle(open_bundle(built), store)
        prompt, decode = (entry_mean(held, kind) for kind in ("prompt", "decode"))
        if prompt is None or decode is None:
            raise SpecError(
                str(built), "has no built prompt or no built decode entry", "a bundle of such a spec"
            )
        known = prompt.compile_seconds is not None and decode.compile_seconds is not None
        seconds = (prompt.compile_seconds or 0.0, decode.compile_seconds or 0.0) if known else None
        return cls(built, store_root, seconds, (prompt.size_bytes, decode.size_bytes))


def _seconds_price(given: float | None, means: _Means | None) -> Price:
    if given is not None:
        return Price(prompt=given, decode=given, source="--seconds-per-entry: the same for every entry")
    if means is None:
        source = (
            "a per-entry average of another machine's (vllm-gaudi#1160); --built BUNDLE --store DIR has yours"
        )
        return Price(prompt=SECONDS_A_STEP, decode=SECONDS_A_STEP, source=source)
    if means.seconds is None:
        where = "a bundle has no times, which are in the records of the store that built it"
        raise SpecError("--build-seconds", where, "--store DIR beside --built, or --seconds-per-entry")
    source = (
        f"averages of each kind in {means.where}, by the records of {means.store}; tracing is not in them"
    )
    return Price(prompt=means.seconds[0], decode=means.seconds[1], source=source)


def _bytes_price(given: str | None, means: _Means | None) -> Price:
    if given is not None:
        size = _bytes("--bytes-per-entry", given)
        return Price(prompt=size, decode=size, source="--bytes-per-entry: the same for every entry")
    if means is None:
        raise SpecError(
            "--graph-memory",
            "does not say what one graph takes",
            "--bytes-per-entry or --built BUNDLE as well",
        )
    source = (
        f"averages of each kind in {means.where}: the sizes of compiled files, not what a device adds to them"
    )
    return Price(prompt=means.sizes[0], decode=means.sizes[1], source=source)


def _bytes(option: str, text: str) -> int:
    try:
        return parse_byte_count(text)
    except ValueError as error:
        raise SpecError(option, str(error), "such as 4GiB") from error
