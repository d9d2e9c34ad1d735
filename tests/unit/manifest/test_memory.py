"""Whether a server fits, and with how many blocks: against building each spec and asking what it needs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotgaudi.errors import TargetError
from aotgaudi.machine import Memory
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.memory import MemoryNeed, described_cache
from aotgaudi.spec.build_spec import BuildSpec
from tests import specs
from tests.specs import SMALL_CONFIG

GIB = 1 << 30


def spec_of() -> BuildSpec:
    return specs.spec_of(config=SMALL_CONFIG)


ENTRIES = Manifest.of(spec_of()).entries


def spec_with(num_blocks: int) -> BuildSpec:
    spec = spec_of()
    return spec.model_copy(update={"limits": spec.limits.model_copy(update={"num_blocks": num_blocks})})


def need_with(num_blocks: int, weights_bytes: int) -> MemoryNeed:
    """What a server with so many blocks needs. Entries that read more blocks are not in its manifest."""
    return MemoryNeed.of(
        spec_with(num_blocks),
        [
            entry
            for entry in ENTRIES
            if max(getattr(entry, "num_blocks", 0), getattr(entry, "num_ctx_blocks", 0)) <= num_blocks
        ],
        weights_bytes,
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 21), st.integers(1, 200), st.integers(0, 1 << 20))
def test_the_blocks_that_fit_are_the_most_whose_server_fits(free: int, num_blocks: int, weights: int) -> None:
    need = MemoryNeed.of(spec_with(num_blocks), ENTRIES, weights)

    fitting = need.fitting_blocks(free)

    fits = [number for number in range(1, 150) if need_with(number, weights).total_bytes <= free]
    assert fitting >= 150 or fitting == max(fits, default=0)


def test_too_little_memory_is_told_in_one_line_with_what_would_fit() -> None:
    need = MemoryNeed.of(spec_with(10_000_000), ENTRIES, 3 * GIB)

    need.require(Memory(1 << 50, 1 << 50))
    need.require(Memory(0, 0))  # What is not known is not refused.
    with pytest.raises(
        TargetError, match=r"weights need 3\.00 GiB, 10,000,000 KV blocks .* in all; 5\.00 GiB of"
    ) as told:
        need.require(Memory(8 * GIB, 5 * GIB))

    assert told.value.exit_code == 5
    assert "\n" not in str(told.value)
    fitting = need.fitting_blocks(5 * GIB)
    assert str(told.value).endswith(f"limits.num_blocks may be {fitting:,} at most")
    MemoryNeed.of(spec_with(fitting), ENTRIES, 3 * GIB).require(Memory(8 * GIB, 5 * GIB))
    with pytest.raises(TargetError, match="no number of KV blocks would fit"):
        need.require(Memory(8 * GIB, 2 * GIB))


def test_a_cache_is_told_in_tokens_and_sequences() -> None:
    limits = spec_of().limits

    assert described_cache(limits, GIB) == (
        f"1.00 GiB, {limits.num_blocks} blocks of {limits.block_size} tokens:"
        f" {limits.num_blocks * limits.block_size:,} tokens, or {limits.num_blocks // limits.max_blocks_per_seq} sequences"
        f" of max_model_len {limits.max_model_len}; max_num_seqs is {limits.max_num_seqs}"
    )
