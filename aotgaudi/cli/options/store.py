"""Where the store is (``--store``, ``--lower``, ``--allow-unsafe-store``), and how large it may become."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from aotgaudi.cli.options.common import parse_byte_count, store_option
from aotgaudi.digest import sha256_bytes
from aotgaudi.store.access import default_store_root, is_on_network
from aotgaudi.store.store import Store

Command = Callable[..., Any]


@dataclass(frozen=True)
class StorePlace:
    """A store that the user named, its read-only layers, and whether other users may own them."""

    root: Path
    lower: tuple[Path, ...] = ()
    trust_others: bool = False

    def open(self, *, create: bool = True) -> Store:
        """Opens the store; read-only if it cannot be written to, which is enough while nothing is missing.

        Raises StoreError as `Store.open` does.
        """
        is_writable = not self.root.is_dir() or os.access(self.root, os.W_OK | os.X_OK)
        return Store.open(
            self.root,
            create=create,
            lower=self.lower,
            read_only=not is_writable,
            index_root=self._index_root() if is_writable else None,
            trust_others=self.trust_others,
        )

    def _index_root(self) -> Path | None:
        """A directory of this machine for the index of a store that several share; None: in the store."""
        if not self.root.exists() or not is_on_network(self.root):
            return None
        local = default_store_root() / "indexes" / sha256_bytes(str(self.root.resolve()).encode())[:16]
        return None if is_on_network(default_store_root()) else local


def store_options(function: Command) -> Command:
    """Gives a command ``place``, a `StorePlace`."""

    @functools.wraps(function)
    def with_place(
        *args: Any, store_root: Path, lower: tuple[Path, ...], trust_others: bool, **options: Any
    ) -> Any:
        return function(*args, place=StorePlace(store_root, lower, trust_others), **options)

    return store_option(_lower_option(_unsafe_option(with_place)))


def store_limit_option(function: Command) -> Command:
    """``--store-limit SIZE``: gives a command ``store_limit``, in bytes; None if the store may grow."""
    return click.option(
        "--store-limit",
        callback=to_store_size,
        envvar="AOTGAUDI_STORE_LIMIT",
        metavar="SIZE",
        help="After the build, shrink the store as `cache gc --max-size SIZE` does; what this build needs is kept.",
    )(function)


def to_store_size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Returns the bytes that an option's value stands for, ``0`` included. Raises BadParameter."""
    if value is None or value.strip() == "0":
        return None if value is None else 0
    try:
        return parse_byte_count(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from error


def _lower_option(function: Command) -> Command:
    return click.option(
        "--lower",
        multiple=True,
        type=click.Path(path_type=Path),
        envvar="AOTGAUDI_STORE_LOWER",
        metavar="DIR",
        help="A read-only layer below the store: another store, or a bundle (repeatable).",
    )(function)


def _unsafe_option(function: Command) -> Command:
    return click.option(
        "--allow-unsafe-store",
        "trust_others",
        is_flag=True,
        help="Use a store that other users own or may write to: they then decide what code runs.",
    )(function)
