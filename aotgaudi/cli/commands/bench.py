"""``aotgaudi bench``: measurements that a user takes on a machine of their own."""

from __future__ import annotations

import click

from aotgaudi.cli.verbs import BENCH_COMMANDS, LazyGroup


@click.group(cls=LazyGroup, lazy=BENCH_COMMANDS)
def bench() -> None:
    """Measure on this machine."""
