from __future__ import annotations

import pytest

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.engine.chunks import Chunk, Chunker
from aotgaudi.engine.interleaving import StepCosts
from aotgaudi.engine.request import Request
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.spec.limits import ServingLimits
from tests.driving import request_of

SIZES = (4, 8, 32, 64)
TABLE = tuple(PromptEntry(1, size, 8) for size in SIZES)


def _request(num_tokens: int) -> Request:
    return request_of(range(num_tokens), 1)


def _chunker(*entries: PromptEntry, **seconds: float) -> Chunker:
    """`seconds`: of entries by query length, ``q8=1.0``."""
    costs = StepCosts()
    for name, each in seconds.items():
        costs.observe(PromptEntry(1, int(name[1:]), 8), each)
    limits = ServingLimits(
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, block_size=16, num_blocks=32
    )
    return Chunker(limits, BucketTable(entries or TABLE, ()), costs)


@pytest.mark.parametrize(
    ("start", "budget", "num_tokens"),
    [
        (0, 64, 64),
        (0, 40, 32),  # Down to the end of a block.
        (8, 64, 56),  # From inside a block to the end of another.
        (48, 64, 52),  # The rest.
        (8, 7, 0),
    ],
)
def test_a_chunk_ends_with_the_prompt_or_with_a_block(start: int, budget: int, num_tokens: int) -> None:
    assert _chunker().longest(_request(100), start, budget).num_tokens == num_tokens


def test_a_rest_is_covered_when_each_of_its_chunks_is() -> None:
    chunker = _chunker(PromptEntry(1, 64, 0), PromptEntry(1, 16, 4))

    assert chunker.covers_rest(_request(80), 32)
    assert not chunker.covers_rest(_request(81), 32)


class TestCut:
    def _cut(self, chunker: Chunker, start: int = 0, num_tokens: int = 64, *, of: int = 100) -> int:
        return chunker.cut(Chunk(_request(of), start, num_tokens), 1.0).num_tokens

    def test_it_is_the_largest_that_fits(self) -> None:
        assert self._cut(_chunker(q4=0.1, q8=0.2, q32=0.9, q64=1.1)) == 32

    def test_the_smallest_is_always_allowed(self) -> None:
        assert self._cut(_chunker(q4=7.0, q8=8.0)) == 4

    def test_a_chunk_that_fits_is_not_cut(self) -> None:
        assert self._cut(_chunker(q4=0.1, q8=0.2, q32=0.9, q64=1.0)) == 64

    @pytest.mark.parametrize(
        ("known", "num_tokens"), [({}, 4), ({"q4": 0.1}, 8), ({"q4": 0.1, "q8": 1.5}, 4)]
    )
    def test_one_unknown_size_is_tried_at_a_time(self, known: dict[str, float], num_tokens: int) -> None:
        assert self._cut(_chunker(**known)) == num_tokens

    def test_it_ends_with_a_block_where_one_ends_before(self) -> None:
        chunker = _chunker(q4=0.1, q8=0.2, q32=0.9, q64=9.0)

        assert self._cut(chunker, start=8, num_tokens=56) == 24
        assert self._cut(_chunker(q4=0.1, q8=0.2, q32=9.0), start=24, num_tokens=40) == 8
        assert self._cut(_chunker(q4=0.1, q8=9.0), start=24, num_tokens=40) == 4

    def test_nothing_is_cut_where_the_rest_would_have_no_entry(self) -> None:
        assert self._cut(_chunker(PromptEntry(1, 8, 0), PromptEntry(1, 64, 0), q8=0.1), of=64) == 64


class TestPacked:
    def _packed(
        self, *entries: PromptEntry, of: int = 2, allowance: float | None = None, **seconds: float
    ) -> PromptEntry:
        """Chunks of 8 tokens, `of` of them: the entry that as many as pay have."""
        packed = _chunker(*entries, **seconds).packed([Chunk(_request(8), 0, 8)] * of, allowance)
        assert packed is not None
        entry, chunks = packed
        assert len(chunks) <= entry.batch_size
        return entry

    def test_nothing_is_packed_into_nothing(self) -> None:
        assert _chunker().packed([], None) is None

    def test_they_share_a_step_where_padding_is_no_more_than_apart(self) -> None:
        pair, four = PromptEntry(2, 8, 8), PromptEntry(4, 8, 8)

        assert self._packed(*TABLE, pair) == pair
        assert self._packed(*TABLE) == PromptEntry(1, 8, 8)
        assert self._packed(*TABLE, PromptEntry(2, 16, 8)) == PromptEntry(1, 8, 8)
        assert self._packed(PromptEntry(1, 32, 8), PromptEntry(2, 32, 8)) == PromptEntry(2, 32, 8)
        assert self._packed(*TABLE, pair, four, of=4) == four
        assert self._packed(*TABLE, pair, four, of=3) == pair

    def test_they_take_no_longer_than_allowed(self) -> None:
        pair, one = PromptEntry(2, 8, 8), PromptEntry(1, 8, 8)

        assert self._packed(*TABLE, pair, allowance=1.0, q8=0.5) == pair
        assert self._packed(*TABLE, pair, allowance=1.0, q8=0.6) == one
        assert self._packed(*TABLE, pair, allowance=1.0) == one

    @pytest.mark.parametrize(("most", "expected"), [(4, True), (3, False)])
    def test_a_third_may_join_where_a_fourth_may_come(self, most: int, expected: bool) -> None:
        chunker, chunk = (
            _chunker(*TABLE, PromptEntry(2, 8, 8), PromptEntry(4, 8, 8)),
            Chunk(_request(8), 0, 8),
        )

        assert chunker.may_join([chunk], chunk, most)
        assert chunker.may_join([chunk, chunk], chunk, most) is expected


def test_what_is_needed_is_the_exact_shape() -> None:
    assert _chunker().needed(Chunk(_request(100), 24, 0)) == PromptEntry(1, 64, 2)
    assert _chunker().needed(Chunk(_request(30), 24, 0)) == PromptEntry(1, 6, 2)


# Estimates


DECODE = DecodeEntry(4, 1, 8)


def test_an_estimate_is_the_least_of_the_last_samples() -> None:
    costs = StepCosts()
    assert costs.seconds(DECODE) is None

    for seconds in (0.1, 5.0, 2.0):
        costs.observe(DECODE, seconds)
    assert costs.seconds(DECODE) == 0.1

    for _ in range(8):
        costs.observe(DECODE, 3.0)
    assert costs.seconds(DECODE) == 3.0


def test_a_prompt_entry_that_never_ran_is_taken_for_the_one_of_the_nearest_context() -> None:
    costs = StepCosts()
    for context, seconds in ((0, 1.0), (4, 2.0), (16, 3.0)):
        costs.observe(PromptEntry(1, 32, context), seconds)

    assert costs.seconds(PromptEntry(1, 32, 5)) == 2.0
    assert costs.seconds(PromptEntry(1, 32, 100)) == 3.0
    assert costs.seconds(PromptEntry(1, 64, 4)) is None
    assert costs.seconds(PromptEntry(2, 32, 4)) is None
    assert costs.seconds(DecodeEntry(1, 1, 1)) is None


def test_what_was_seen_long_ago_is_forgotten() -> None:
    costs = StepCosts()
    costs.observe(PromptEntry(1, 32, 0), 1.0)

    for _ in range(4096):
        costs.observe(DECODE, 1.0)

    assert costs.seconds(PromptEntry(1, 32, 0)) is None
    assert costs.seconds(PromptEntry(1, 32, 4)) is None
