from __future__ import annotations

import pytest

from aotgaudi.engine.blocks import BlockPool
from aotgaudi.engine.defragmenter import padded, plan_step, should_defragment
from aotgaudi.engine.steps import DefragStep
from aotgaudi.entries import DefragEntry
from aotgaudi.errors import CoverageError
from aotgaudi.spec.scheduler import DefragSpec


@pytest.mark.parametrize(("max_used", "expected"), [(41, False), (42, False), (43, True)])
def test_the_trigger_is_strict(max_used: int, expected: bool) -> None:
    assert should_defragment(max_used, num_used=10, threshold=32) is expected


@pytest.mark.parametrize(("num_swaps", "expected"), [(1, 8), (8, 8), (9, 16), (512, 512)])
def test_padding_takes_the_next_size(num_swaps: int, expected: int) -> None:
    assert padded(num_swaps, (8, 16, 512)) == expected


def test_padding_beyond_the_largest_size_is_uncovered() -> None:
    with pytest.raises(CoverageError, match=r"no \(defrag\) entry covers 9 swaps"):
        padded(9, (4, 8))


def _fragmented_pool() -> BlockPool:
    pool = BlockPool(10)
    pool.allocate(10)
    pool.free(range(1, 8))
    return pool


def test_a_step_is_due_when_the_threshold_is_passed() -> None:
    spec = DefragSpec(threshold=6, padded_swaps=(2, 4))

    assert plan_step(_fragmented_pool(), spec) == DefragStep(DefragEntry(4), ((10, 1), (9, 2), (8, 3)))


def test_no_step_is_due_at_the_threshold_or_when_disabled() -> None:
    assert plan_step(_fragmented_pool(), DefragSpec(threshold=7)) is None
    assert plan_step(_fragmented_pool(), DefragSpec(threshold=1, enabled=False)) is None
