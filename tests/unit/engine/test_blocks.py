from __future__ import annotations

import pytest

from aotgaudi.engine.blocks import BlockPool, num_blocks_for


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_num_blocks_for_rounds_up(num_tokens: int, expected: int) -> None:
    assert num_blocks_for(num_tokens, 4) == expected


def test_ids_start_at_one_and_the_lowest_free_one_goes_first() -> None:
    pool = BlockPool(5)
    assert pool.allocate(3) == [1, 2, 3]

    pool.free([2, 1])

    assert pool.allocate(3) == [1, 2, 4]
    assert (pool.num_used, pool.num_free, pool.max_used) == (4, 1, 4)


def test_max_used_follows_frees() -> None:
    pool = BlockPool(4)
    assert pool.max_used == 0
    pool.allocate(4)

    pool.free([4, 2])

    assert pool.max_used == 3
    assert pool.used_ids() == (1, 3)


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


def test_relocate_frees_the_source_and_takes_the_destination() -> None:
    pool = BlockPool(4)
    pool.allocate(4)
    pool.free([1, 2])

    pool.relocate({4: 1, 3: 2})

    assert pool.used_ids() == (1, 2)
    pool.check_integrity()
    assert pool.allocate(2) == [3, 4]


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
