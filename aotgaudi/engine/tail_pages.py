"""Tail pages: the map from blocks to pages of those caches whose rows are read for a limited number of tokens. Numbers only.

Some rows are read only through a window, or until a cache entry is made from them. Only few blocks need such rows, so their
caches have *pages*, fewer than there are blocks. This module maps blocks to pages, with one map for all these caches. The
other caches have the rows of all blocks, so block tables, the pool and keys of prefixes do not change. A page is in one of
three states:

======  ===============================================================================================
held    belongs to a block whose rows a running request still reads, or writes to in its next step
kept    belongs to another block with a key: a later hit may end so that it is read again
empty   belongs to no block
======  ===============================================================================================

New pages come from the empty ones, and then from the kept ones, the least recently used first. `fewest_tail_pages`
(aotgaudi/spec/cache_rows.py) is the number that requests can hold at a time, so no request ever waits for a page.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from aotgaudi.engine.blocks import PADDING_BLOCK, BlockPool, num_blocks_for
from aotgaudi.engine.request import Request


class TailPages:
    """Assigns pages 1..`num_pages` to blocks of `pool`. Page 0 is padding, and stands for every block without a page.

    Not thread-safe: the engine's thread owns it.

    Args:
        pool: The blocks. A page is kept only for a block with a key.
        num_pages: How many pages there are.
        reach: How many tokens back the rows are read at most, including the newest token.
        block_size: How many tokens a block holds.
    """

    def __init__(self, pool: BlockPool, num_pages: int, reach: int, block_size: int) -> None:
        self.num_pages = num_pages
        self._pool, self._reach, self._block_size = pool, reach, block_size
        self._empty = list(range(num_pages, 0, -1))
        self._pages: dict[int, int] = {}
        self._num_holders: Counter[int] = Counter()
        self._kept: OrderedDict[int, None] = OrderedDict()  # Blocks, the least recently used first.
        self._held: dict[Request, range] = {}

    @property
    def num_held(self) -> int:
        """How many pages running requests hold. A page that several hold counts once."""
        return len(self._num_holders)

    @property
    def num_kept(self) -> int:
        """How many pages are kept for later hits of the prefix cache."""
        return len(self._kept)

    def of(self, blocks: Iterable[int]) -> tuple[int, ...]:
        """Returns the page of each block, 0 for a block without one."""
        return tuple(self._pages.get(block, PADDING_BLOCK) for block in blocks)

    def ends(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Returns the numbers of these blocks after which a sequence that begins with them can go on, largest first.

        It can go on where all blocks that its next token reads have pages.
        """
        found, num_paged = [0], 0
        for i, block in enumerate(blocks, start=1):
            num_paged = num_paged + 1 if block in self._pages else 0
            if num_paged >= i - self._first_read(i * self._block_size):
                found.append(i)
        return tuple(reversed(found))

    def cover(self, request: Request, start: int, end: int) -> None:
        """Makes the request hold the pages of a step that computes its tokens from `start` up to `end`, and no others.

        Raises ValueError if all pages are held, or if a page that the step reads was given away. Both are bugs of the
        caller.
        """
        table, before = request.block_table, self._held.get(request, range(0))
        wanted = range(self._first_read(start), num_blocks_for(end, self._block_size))
        lost = [i for i in wanted if table[i] not in self._pages and i * self._block_size < start]
        if lost:
            raise ValueError(
                f"request {request.request_id!r} reads block {table[lost[0]]}, which has no page"
            )
        for i in wanted:
            if i not in before:
                self._hold(table[i])
        self._held[request] = wanted
        self._release(table[i] for i in before if i not in wanted)

    def drop(self, request: Request) -> None:
        """Makes the request hold no pages. Call it while the request has its block table."""
        held = self._held.pop(request, range(0))
        self._release(request.block_table[i] for i in reversed(held))

    def relocate(self, mapping: Mapping[int, int]) -> None:
        """Updates the map after an exchange of block contents. A page follows its contents' block; the page itself stays."""
        renamed = {**mapping, **{destination: source for source, destination in mapping.items()}}
        self._pages = {renamed.get(block, block): page for block, page in self._pages.items()}
        self._num_holders = Counter(
            {renamed.get(block, block): num for block, num in self._num_holders.items()}
        )
        self._kept = OrderedDict.fromkeys(renamed.get(block, block) for block in self._kept)

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raises RuntimeError unless held, kept and empty pages partition 1..num_pages and `running` hold all held ones."""
        holders = Counter(r.block_table[i] for r in running for i in self._held.get(r, ()))
        pages = sorted([*self._pages.values(), *self._empty])
        is_sound = (
            pages == list(range(1, self.num_pages + 1))
            and holders == self._num_holders
            and not holders.keys() & self._kept.keys()
            and holders.keys() | self._kept.keys() == self._pages.keys()
            and set(self._held) <= set(running)
        )
        if not is_sound:
            raise RuntimeError(f"the tail pages are corrupt: {self._pages}, held {dict(holders)}")

    def _first_read(self, start: int) -> int:
        """Returns the index of the first block whose rows a step from token `start` on reads."""
        return max(0, start - self._reach + 1) // self._block_size

    def _hold(self, block: int) -> None:
        if block not in self._pages:
            if not self._empty and not self._kept:
                raise ValueError(f"all {self.num_pages} tail pages are held")
            page = self._empty.pop() if self._empty else self._pages.pop(self._kept.popitem(last=False)[0])
            self._pages[block] = page
        self._kept.pop(block, None)
        self._num_holders[block] += 1

    def _release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                continue
            del self._num_holders[block]
            if self._pool.has_key(block):
                self._kept[block] = None
            else:
                self._empty.append(self._pages.pop(block))
