from __future__ import annotations

import pytest

from aotgaudi.engine.blocks import BlockPool


def test_allocating_more_than_is_free_changes_nothing() -> None:
    pool = BlockPool(2)
    assert pool.can_allocate(2)
    assert not pool.can_allocate(3)

    with pytest.raises(ValueError, match="3 blocks asked for, 2 of 2 are free"):
        pool.allocate(3)

    assert pool.num_free == 2


@pytest.mark.parametrize("blocks", [[1, 1], [2], [0], [3], [-1]])
def test_freeing_what_is_not_in_use_is_an_error_and_changes_nothing(blocks: list[int]) -> None:
    pool = BlockPool(2)
    pool.allocate(1)

    with pytest.raises(ValueError, match="not in use"):
        pool.free(blocks)

    assert pool.used_ids() == (1,)
    pool.check_integrity()


@pytest.mark.parametrize("mapping", [{4: 3}, {1: 2}, {3: 1, 4: 1}, {4: 0}, {4: 5}])
def test_relocate_refuses_what_is_not_used_to_free(mapping: dict[int, int]) -> None:
    pool = BlockPool(4)
    pool.allocate(4)
    pool.free([1, 2])

    with pytest.raises(ValueError, match="blocks"):
        pool.relocate(mapping)

    assert pool.used_ids() == (3, 4)
    pool.check_integrity()


def test_check_integrity_sees_a_lost_block() -> None:
    pool = BlockPool(3)
    pool._free.pop()

    with pytest.raises(RuntimeError, match="corrupt"):
        pool.check_integrity()
