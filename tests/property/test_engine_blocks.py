"""The block pool against a set, and the plan of a defragmentation against its definition."""

from __future__ import annotations

from collections import Counter
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aotgaudi.engine.blocks import BlockPool
from aotgaudi.engine.defragmenter import plan_moves


class PoolMachine(RuleBasedStateMachine):
    """A pool is who uses which block, which free blocks are kept, in order, and what each block is known by."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.pool, self.ids = BlockPool(num_blocks), range(1, num_blocks + 1)
        self.users: Counter[int] = Counter()
        self.kept: list[int] = []
        self.keys: dict[int, bytes] = {}
        self.num_evicted = 0

    def _empty(self) -> list[int]:
        return [block for block in self.ids if not self.users[block] and block not in self.kept]

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        expected = (self._empty() + self.kept)[:count]
        if count > self.pool.num_free:
            assert count > len(self._empty()) + len(self.kept)
            return
        assert self.pool.allocate(count) == expected
        for block in expected:
            if block in self.kept:
                self.kept.remove(block)
                del self.keys[block]
                self.num_evicted += 1
        self.users.update(expected)

    @precondition(lambda self: +self.users)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(+self.users)), min_size=1, unique=True))
        self.pool.free(blocks)
        self.users.subtract(blocks)
        self.kept += [block for block in reversed(blocks) if not self.users[block] and block in self.keys]

    @precondition(lambda self: +self.users)
    @rule(data=st.data(), key=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def name(self, data: st.DataObject, key: bytes) -> None:
        block = data.draw(st.sampled_from(sorted(+self.users)))
        if self.keys.get(block, key) != key:
            with pytest.raises(ValueError, match="another key"):
                self.pool.name(block, key)
            return
        self.pool.name(block, key)
        if key not in self.keys.values():
            self.keys[block] = key

    @rule(keys=st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), unique=True))
    def find_and_share(self, keys: list[bytes]) -> None:
        by_key = {key: block for block, key in self.keys.items()}
        expected = [by_key[key] for key in takewhile(by_key.__contains__, keys)]
        assert self.pool.find(keys) == expected
        self.pool.share(expected)
        self.users.update(expected)
        self.kept = [block for block in self.kept if block not in expected]

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sets(st.sampled_from(self.ids)))
        self.pool.forget(blocks)
        self.keys = {block: key for block, key in self.keys.items() if block not in blocks}
        self.kept = [block for block in self.kept if block not in blocks]

    @rule(limit=st.integers(1, 4))
    def defragment(self, limit: int) -> None:
        moves = plan_moves(self.pool.used_ids(), limit)
        self.pool.relocate(dict(moves))
        renamed = {block: block for block in self.ids}
        for source, destination in moves:
            renamed[source], renamed[destination] = destination, source
        self.users = Counter({renamed[block]: count for block, count in self.users.items()})
        self.keys = {renamed[block]: key for block, key in self.keys.items()}
        self.kept = [renamed[block] for block in self.kept]

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        used = sorted(+self.users)
        self.pool.check_integrity()
        assert self.pool.used_ids() == tuple(used)
        assert all(self.pool.num_users[block] == self.users[block] for block in self.ids)
        assert self.pool.num_used == len(used) == len(self.ids) - self.pool.num_free
        assert self.pool.max_used == max(used, default=0)
        assert (tuple(self.pool.kept), len(self.pool.kept)) == (tuple(self.kept), len(self.kept))
        assert self.pool.num_evicted == self.num_evicted


TestPool = PoolMachine.TestCase


def _literal_plan(used: set[int], limit: int) -> list[tuple[int, int]]:
    """The documented algorithm, word by word."""
    moves: list[tuple[int, int]] = []
    free = 1
    for source in sorted(used, reverse=True):
        while free in used:
            free += 1
        if free > source or len(moves) == limit:
            break
        moves.append((source, free))
        free += 1
    return moves


@given(st.sets(st.integers(1, 40)), st.integers(1, 10))
def test_a_plan_is_the_documented_one(used: set[int], limit: int) -> None:
    assert list(plan_moves(used, limit)) == _literal_plan(used, limit)


@given(st.sets(st.integers(1, 40)))
def test_an_unlimited_plan_packs_the_blocks(used: set[int]) -> None:
    moves = plan_moves(used, 100)

    after = (used - {source for source, _ in moves}) | {free for _, free in moves}

    assert after == set(range(1, len(used) + 1))
