from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.engine.blocks import BlockPool, PrefixCache, extend_keys, root_key
from aotgaudi.engine.request import Request
from aotgaudi.engine.scheduler import Scheduler
from aotgaudi.engine.steps import PromptRow, PromptStep
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.spec.limits import ServingLimits
from tests.driving import request_of, step_once


def test_allocating_more_than_is_free_changes_nothing() -> None:
    pool = BlockPool(2)
    assert pool.num_free == 2

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


# Prefix caching


ANY_PROMPT = (PromptEntry(4, 64, 16),)
SIZE = 4


def keys_of(token_ids: list[int], block_size: int = SIZE, salt: str = "") -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, token_ids, block_size, salt)
    return keys


class TestKeys:
    def test_they_are_the_documented_chain(self) -> None:
        root = hashlib.sha256(b"17:aotgaudi.prefix/15:alice").digest()
        first = hashlib.sha256(root + struct.pack("=4q", 1, 2, 3, 4)).digest()
        second = hashlib.sha256(first + struct.pack("=4q", 5, 6, 7, 8)).digest()

        assert root_key("alice") == root
        assert keys_of([1, 2, 3, 4, 5, 6, 7, 8, 9], salt="alice") == [first, second]

    def test_what_is_there_is_not_computed_again(self) -> None:
        keys = [b"kept"]

        extend_keys(keys, [1, 2, 3, 4, 5, 6, 7, 8], SIZE, "")

        assert keys == [b"kept", hashlib.sha256(b"kept" + struct.pack("=4q", 5, 6, 7, 8)).digest()]

    @given(
        st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=9), st.sampled_from(["", "a"])), max_size=6),
        st.integers(1, 3),
    )
    def test_blocks_have_equal_keys_exactly_when_all_tokens_up_to_their_ends_are_equal(
        self, sequences: list[tuple[list[int], str]], block_size: int
    ) -> None:
        contents: dict[bytes, tuple[str, tuple[int, ...]]] = {}

        for tokens, salt in sequences:
            for i, key in enumerate(keys_of(tokens, block_size, salt)):
                content = (salt, tuple(tokens[: (i + 1) * block_size]))
                assert contents.setdefault(key, content) == content

        assert len(set(contents.values())) == len(contents)


def _scheduler(
    *, prompt: tuple[PromptEntry, ...] = ANY_PROMPT, num_blocks: int = 16, **limits: int
) -> Scheduler:
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "block_size": SIZE}
    return Scheduler(
        ServingLimits(**{**values, "num_blocks": num_blocks, **limits}),
        BucketTable(prompt, (DecodeEntry(4, 1, 64),)),
        BlockPool(num_blocks),
        prefix_caching=True,
    )


def _add(scheduler: Scheduler, *token_ids: int, max_tokens: int = 2, **fields: object) -> Request:
    request = request_of(token_ids, max_tokens, **fields)
    scheduler.add(request)
    return request


def _run_all(scheduler: Scheduler) -> None:
    while scheduler.has_work:
        step_once(scheduler)


def _first_rows(scheduler: Scheduler) -> tuple[PromptRow, ...]:
    step = step_once(scheduler).step
    assert isinstance(step, PromptStep)
    return step.rows


class TestHits:
    def test_a_second_prompt_starts_after_what_it_has_in_common(self) -> None:
        scheduler = _scheduler()
        _add(scheduler, *range(11))
        _run_all(scheduler)

        second = _add(scheduler, *range(8), 50, 51, 52, 53, 54)
        (row,) = _first_rows(scheduler)

        assert (row.start, row.token_ids) == (8, (50, 51, 52, 53, 54))
        assert row.block_table[:2] == (1, 2)
        assert second.num_cached_tokens == 8
        assert scheduler.prefixes is not None
        assert (scheduler.prefixes.num_queries, scheduler.prefixes.num_hits) == (11 + 13, 8)

    def test_it_shares_the_blocks_of_one_that_still_runs(self) -> None:
        scheduler = _scheduler()
        first = _add(scheduler, *range(9), max_tokens=20)
        step_once(scheduler)

        second = _add(scheduler, *range(9), max_tokens=20)
        step_once(scheduler)
        step_once(scheduler)

        assert second.block_table[:2] == first.block_table[:2]
        assert second.block_table[2] != first.block_table[2]
        assert scheduler.pool.num_users[first.block_table[0]] == 2
        scheduler.finish(first, "abort")
        scheduler.check_integrity()
        assert scheduler.pool.num_used == len(second.block_table)

    @pytest.mark.parametrize(("num_tokens", "start"), [(8, 4), (9, 8), (4, 0), (5, 4), (1, 0)])
    def test_the_last_token_is_always_computed(self, num_tokens: int, start: int) -> None:
        scheduler = _scheduler()
        _add(scheduler, *range(12))
        _run_all(scheduler)

        _add(scheduler, *range(num_tokens))
        (row,) = _first_rows(scheduler)

        assert row.start == start
        assert row.sampling is not None

    def test_generated_tokens_are_found_as_well(self) -> None:
        scheduler = _scheduler()
        _add(scheduler, 0, 1, 2, max_tokens=10)
        _run_all(scheduler)

        _add(scheduler, 0, 1, 2, *[7] * 10)

        assert _first_rows(scheduler)[0].start == 12

    def test_nothing_is_shared_between_salts(self) -> None:
        scheduler = _scheduler()
        _add(scheduler, *range(12), cache_salt="alice")
        _run_all(scheduler)

        starts = []
        for salt in ("bob", "", "alice"):
            _add(scheduler, *range(12), cache_salt=salt)
            starts.append(_first_rows(scheduler)[0].start)
            _run_all(scheduler)

        assert starts == [0, 0, 8]

    def test_a_prompt_of_the_same_step_is_computed_for_itself(self) -> None:
        scheduler = _scheduler(max_num_prefill_seqs=2)
        first, second = _add(scheduler, *range(9)), _add(scheduler, *range(9))

        rows = _first_rows(scheduler)

        assert [row.start for row in rows] == [0, 0]
        assert set(first.block_table).isdisjoint(second.block_table)
        _run_all(scheduler)
        assert len(scheduler.pool.kept) == 2

    def test_only_as_much_is_shared_as_leaves_a_covered_rest(self) -> None:
        """Contexts of two blocks have entries of four tokens only, and of three blocks none."""
        scheduler = _scheduler(prompt=(PromptEntry(1, 16, 0), PromptEntry(1, 12, 1), PromptEntry(1, 4, 2)))
        _add(scheduler, *range(16))
        _run_all(scheduler)

        starts = []
        for num_tokens in (16, 12, 13):
            _add(scheduler, *range(num_tokens))
            starts.append(_first_rows(scheduler)[0].start)
            _run_all(scheduler)

        assert starts == [4, 8, 4]

    def test_a_preempted_request_finds_its_own_blocks(self) -> None:
        scheduler = _scheduler(num_blocks=5)
        older, younger = (
            _add(scheduler, *range(20, 28), max_tokens=6),
            _add(scheduler, *range(8), max_tokens=6),
        )
        while not younger.num_preemptions:
            step_once(scheduler)
        scheduler.finish(older, "abort")

        (row,) = _first_rows(scheduler)

        assert row.start > 0
        assert younger.num_cached_tokens == 0
        assert scheduler.prefixes is not None
        assert scheduler.prefixes.num_hits == 0


class TestWhatIsNeverShared:
    def test_a_request_that_ends_while_its_step_runs(self) -> None:
        scheduler = _scheduler()
        gone, stays = _add(scheduler, *range(9)), _add(scheduler, 3)
        scheduled = scheduler.schedule()
        assert scheduled is not None

        scheduler.finish(gone, "abort")
        sampled = scheduler.complete(scheduled, [7 for _ in scheduled.requests])

        scheduler.check_integrity()
        assert gone not in sampled
        assert len(scheduler.pool.kept) == 0
        assert gone.num_output_tokens == 0
        scheduler.finish(stays, "abort")

    def test_what_is_discarded(self) -> None:
        scheduler = _scheduler()
        first = _add(scheduler, *range(9), max_tokens=20)
        step_once(scheduler)
        second = _add(scheduler, *range(9), max_tokens=20)
        step_once(scheduler)
        step_once(scheduler)
        shared, own = second.block_table[:2], second.block_table[2:]

        freed = scheduler.discard(second)

        assert list(freed) == own
        assert first.block_table[:2] == shared
        _add(scheduler, *range(9))
        while not isinstance(step := step_once(scheduler).step, PromptStep):
            pass
        assert step.rows[0].start == 0


class TestEviction:
    def test_who_was_used_least_recently_goes_first_and_an_end_before_its_beginning(self) -> None:
        scheduler = _scheduler(num_blocks=6)
        _add(scheduler, *range(8), max_tokens=1)
        _run_all(scheduler)
        _add(scheduler, *range(20, 28), max_tokens=1)
        _run_all(scheduler)
        assert tuple(scheduler.pool.kept) == (2, 1, 4, 3)
        _add(scheduler, *range(9), max_tokens=1)  # Uses 1 and 2 again, and 5.
        _run_all(scheduler)
        assert tuple(scheduler.pool.kept) == (4, 3, 2, 1)

        _add(scheduler, *range(40, 53), max_tokens=1)  # Takes 5 and 6, which are empty, then 4 and 3.
        _run_all(scheduler)

        assert scheduler.pool.num_evicted == 2
        assert set(scheduler.pool.kept) == {1, 2, 4, 5, 6}
        assert _starts_of(scheduler, range(20, 29)) == 0

    def test_moved_blocks_are_found_where_they_are_now(self) -> None:
        scheduler = _scheduler()
        kept = _add(scheduler, *range(8), max_tokens=1)
        step_once(scheduler)
        running = _add(scheduler, *range(20, 28), max_tokens=20)
        step_once(scheduler)
        assert kept.is_finished
        assert (tuple(scheduler.pool.kept), running.block_table) == ((2, 1), [3, 4])

        scheduler.relocate([(4, 1), (3, 2)])

        scheduler.check_integrity()
        assert (tuple(scheduler.pool.kept), running.block_table) == ((3, 4), [2, 1])
        _add(scheduler, *range(9), max_tokens=1)
        while not isinstance(step := step_once(scheduler).step, PromptStep):
            pass
        assert (step.rows[0].start, step.rows[0].block_table[:2]) == (8, (4, 3))


def _starts_of(scheduler: Scheduler, tokens: range) -> int:
    _add(scheduler, *tokens, max_tokens=1)
    return _first_rows(scheduler)[0].start


def test_a_cache_counts_first_admissions_only() -> None:
    cache = PrefixCache(BlockPool(4), SIZE)
    request = request_of([1] * 9, 2)

    cache.count(request, 4)
    request.num_preemptions = 1
    cache.count(request, 8)

    assert (cache.num_queries, cache.num_hits, request.num_cached_tokens) == (9, 4, 4)
