from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.from_vllm.limits import num_kv_blocks

GIB = 2**30


def test_the_example_of_upstreams_tuning_page() -> None:
    """79.22 GiB free, 71.3 usable, 7.13 reserved for graphs, 64.17 for the cache, in blocks of 16 MiB."""
    assert num_kv_blocks(int(79.22 * GIB), 0.9, 0.1, 16 * 2**20, num_dummy_blocks=0) == 4106
    assert num_kv_blocks(int(79.22 * GIB), 0.9, 0.1, 16 * 2**20) == 4105


def test_no_block_fits() -> None:
    assert num_kv_blocks(100, 0.9, 0.1, 200) == 0


@given(
    st.integers(1, 2**40), st.floats(0.01, 1), st.floats(0, 0.99), st.integers(1, 2**30), st.integers(0, 1)
)
def test_the_blocks_and_the_dummy_fit_and_one_more_does_not(
    free: int, share: float, reserved: float, block: int, dummies: int
) -> None:
    blocks = num_kv_blocks(free, share, reserved, block, num_dummy_blocks=dummies)
    usable = free * share * (1 - reserved)

    assert (blocks + dummies) * block <= usable * (1 + 1e-9) or blocks == 0
    assert (blocks + dummies + 1) * block > usable * (1 - 1e-9) - block * 1e-9


@given(st.integers(1, 2**40), st.integers(1, 2**40), st.integers(1, 2**30))
def test_more_memory_is_never_fewer_blocks(one: int, other: int, block: int) -> None:
    less, more = sorted((one, other))

    assert num_kv_blocks(less, 0.9, 0.1, block) <= num_kv_blocks(more, 0.9, 0.1, block)
