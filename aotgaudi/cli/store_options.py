"""Options about the store: where it is, which layers lie below it, and how large it may become."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import click

from aotgaudi.cli.options import STORE, option, options_of, parse_byte_count
from aotgaudi.store.store import Store


@dataclass(frozen=True)
class StorePlace:
    """The store that the user named, its read-only layers, and whether other users may own them."""

    root: Path
    lower: tuple[Path, ...] = option(
        "A read-only layer below the store: another store, or a bundle (repeatable).",
        default=(),
        envvar="AOTGAUDI_STORE_LOWER",
        metavar="DIR",
    )
    trust_others: bool = option(
        "Use a store that other users own or may write to: they then decide what code runs.",
        "--allow-unsafe-store",
        default=False,
    )

    def open(self, *, create: bool = True) -> Store:
        """Opens the store. It is read-only if we cannot write to it, which is enough while nothing is missing.

        Raises StoreError like `Store.open`.
        """
        is_writable = not self.root.is_dir() or os.access(self.root, os.W_OK | os.X_OK)
        return Store.open(
            self.root,
            create=create,
            lower=self.lower,
            read_only=not is_writable,
            trust_others=self.trust_others,
        )

    def read(self) -> Store:
        """Opens the store to look into it. One that is not there, or is empty, is an empty one, and nothing is made.

        Raises StoreError like `Store.open`.
        """
        if self.root.is_dir() and any(self.root.iterdir()):
            return self.open(create=False)
        return Store.open_absent(self.root, self.lower, trust_others=self.trust_others)


store_options = options_of(StorePlace, "place", root=STORE)
"""``--store``, ``--lower`` and ``--allow-unsafe-store``. The command gets `place`, a `StorePlace`."""


def to_store_size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Returns the bytes in an option's value, which may be ``0``. Raises BadParameter."""
    if value is None or value.strip() == "0":
        return None if value is None else 0
    try:
        return parse_byte_count(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from error


store_limit_option = click.option(
    "--store-limit",
    callback=to_store_size,
    envvar="AOTGAUDI_STORE_LIMIT",
    metavar="SIZE",
    help="After the build, shrink the store as `cache gc --max-size SIZE` does; what this build needs is kept.",
)
"""``--store-limit SIZE``. The command gets `store_limit`, in bytes; None for no limit."""
