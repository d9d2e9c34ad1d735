"""Large tables: how large one may become, and how it is made fast.

Tables grow with the product of three ranges, which a person chooses.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from aotgaudi.errors import SpecError

MAX_BUCKETS = 4_000_000
"""Most buckets of one phase. A million take about 0.1 s and 100 MB; compiling them would take months."""

MAX_RANGE_VALUES = 1_000_000
"""Most values of one dimension."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the cyclic garbage collector of this process while a table is made.

    A table has no cycles, and the collector's scans of a million new tuples take longer than making them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def check_num_buckets(num_buckets: int, phase: str) -> None:
    """Raises SpecError when a phase would have more than `MAX_BUCKETS`."""
    if num_buckets > MAX_BUCKETS:
        raise SpecError(
            f"bucketing.{phase}",
            f"gives {num_buckets:,} {phase} buckets, more than {MAX_BUCKETS:,}",
            "a larger step or a smaller max of a dimension, smaller limits, or exponential bucketing",
        )


def check_num_values(num_values: int, dimension: str) -> None:
    """Raises SpecError when a dimension (its dotted path) would have more than `MAX_RANGE_VALUES`."""
    if num_values > MAX_RANGE_VALUES:
        raise SpecError(
            dimension,
            f"gives {num_values:,} values, more than {MAX_RANGE_VALUES:,}",
            "a larger step or a smaller max",
        )
