"""What a server on a card refuses, without a card: memory that is too little, and what was compiled after the rehearsal."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.backends.base import Room
from aotgaudi.backends.hpu.admission import RESERVED_SHARE
from aotgaudi.backends.hpu.process import prepare
from aotgaudi.backends.hpu.runtime import CardPlacement
from aotgaudi.errors import TargetError

MIB = 1 << 20


class FakeCard:
    def __init__(self, free: int, total: int) -> None:
        self._figures = free, total

    def memory(self) -> tuple[int, int]:
        return self._figures


def placement(free: int, total: int) -> CardPlacement:
    return CardPlacement(cast("Any", FakeCard(free, total)))


def test_what_does_not_fit_is_refused_with_the_figures_and_the_number_of_blocks_that_would() -> None:
    room = Room(weights_bytes=400 * MIB, block_bytes=10 * MIB, num_blocks=60)

    with pytest.raises(TargetError) as caught:
        placement(900 * MIB, 1000 * MIB).require(room)

    text = str(caught.value)
    for figure in ("900 of 1,000 MiB are free", "weights take 400", "60 KV blocks 610", "100 are reserved"):
        assert figure in text
    assert "limits.num_blocks may be 39 at most" in text


@given(
    free=st.integers(0, 1000),
    weights=st.integers(0, 1000),
    block=st.integers(1, 50),
    num_blocks=st.integers(1, 200),
)
def test_the_number_that_is_named_fits_and_one_more_does_not(
    free: int, weights: int, block: int, num_blocks: int
) -> None:
    device = placement(free * MIB, 1000 * MIB)
    try:
        device.require(Room(weights * MIB, block * MIB, num_blocks))
    except TargetError as error:
        words = str(error).replace(",", "").split()
        if "may" not in words:
            return
        most = int(words[words.index("be") + 1])
        device.require(Room(weights * MIB, block * MIB, most))
        with pytest.raises(TargetError):
            device.require(Room(weights * MIB, block * MIB, most + 1))


def test_a_rehearsal_that_leaves_too_little_is_refused() -> None:
    total = 1000 * MIB
    device = placement(total, total)
    device.require(Room(weights_bytes=100 * MIB, block_bytes=10 * MIB, num_blocks=50))
    device.card = cast("Any", FakeCard(int(total * RESERVED_SHARE / 4) - 1, total))

    with pytest.raises(TargetError, match=r"after every program has run, 2[45] of 1,000 MiB are free"):
        device.require_headroom()


def test_a_process_that_has_imported_torch_is_refused_since_the_bridge_has_read_its_environment() -> None:
    with pytest.raises(TargetError, match="torch was imported before"):
        prepare()
