"""The block pool against a set, and the plan of a defragmentation against its definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aotgaudi.engine.blocks import BlockPool
from aotgaudi.engine.defragmenter import plan_moves


class PoolMachine(RuleBasedStateMachine):
    """A pool is a set of used ids."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.pool, self.ids, self.used = BlockPool(num_blocks), range(1, num_blocks + 1), set[int]()

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        free = [block for block in self.ids if block not in self.used]
        if not self.pool.can_allocate(count):
            assert count > len(free)
            return
        assert self.pool.allocate(count) == free[:count]
        self.used |= set(free[:count])

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sets(st.sampled_from(sorted(self.used)), min_size=1))
        self.pool.free(blocks)
        self.used -= blocks

    @rule(limit=st.integers(1, 4))
    def defragment(self, limit: int) -> None:
        moves = plan_moves(self.pool.used_ids(), limit)
        self.pool.relocate(dict(moves))
        self.used = (self.used - {source for source, _ in moves}) | {free for _, free in moves}

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        assert self.pool.used_ids() == tuple(sorted(self.used))
        assert self.pool.num_used == len(self.used) == len(self.ids) - self.pool.num_free
        assert self.pool.max_used == max(self.used, default=0)


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
