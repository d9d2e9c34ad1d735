"""KV blocks: which ids are free, shared or cached, and which hold the beginning of a prompt. The device has their contents.

A block is in one of three states:

======  ===============================================================================================
used    handed out, to one sequence or to several that share it
kept    free, but its contents have a key: a request with the same key can reuse it
empty   free, and its contents are worthless
======  ===============================================================================================

New blocks come from the empty ones, and then from the kept ones, the least recently used first. Only full blocks get a key,
and a used block with a key is never written to.

A full block's key is made of all tokens up to its end::

    key of block i   =  sha256(key of block i - 1 | tokens of block i, 8 bytes each)
    key of block -1  =  sha256("aotgaudi.prefix/1" | cache salt, each length-framed)

A token's keys and values depend only on the tokens up to it, so blocks with equal keys have equal contents. Because sha256
is collision-resistant, no prompt finds blocks of other tokens under its key, and tokens need not be compared. Only requests
with the same salt share blocks. Keys live in one process, for one model and one cache, so they include neither.
docs/adr/0017-engine.md has the reasons.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from aotgaudi.digest import framed

if TYPE_CHECKING:  # Admission, which the API server's workers import, needs only `num_blocks_for`.
    from aotgaudi.engine.request import Request

PADDING_BLOCK = 0
"""A block that is never handed out. Padding reads from it and writes to it."""
_SCHEMA = "aotgaudi.prefix/1"
_ID_CODE = "q"
"""The form in which token ids are hashed: 64 bits, in this machine's byte order."""


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Returns how many blocks of `block_size` tokens hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class BlockPool:
    """Hands out block ids 1..`num_blocks`, the lowest empty one first, so that used ids stay packed at the low end.

    `num_used` counts the blocks that are handed out. `num_users` has the number of sequences that hold a block. `kept` has
    the kept blocks, the next one to evict first, and `num_evicted` counts those that were given up for new contents.

    Not thread-safe: the engine's thread owns it. Misuse (taking more blocks than are free, freeing twice, moving onto a used
    block) is a bug of the caller and raises ValueError before anything is changed.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self._free = list(range(1, num_blocks + 1))  # The empty ones, as a heap (a sorted list is one).
        self.kept: OrderedDict[int, None] = OrderedDict()  # The least recently used first.
        self._is_used = bytearray(num_blocks + 1)
        self.num_users = [0] * (num_blocks + 1)
        self.num_used = 0
        self._keys: dict[int, bytes] = {}
        self._by_key: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """How many blocks can be allocated, which are the empty and the kept ones."""
        return self.num_blocks - self.num_used

    @property
    def max_used(self) -> int:
        """The highest id in use; 0 if no block is in use."""
        return max(self._is_used.rfind(1), 0)

    def used_ids(self) -> tuple[int, ...]:
        """Returns the ids in use, ascending."""
        return tuple(block for block, is_used in enumerate(self._is_used) if is_used)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free blocks: the lowest empty ones first, then the least recently used of the kept ones.

        Raises ValueError if fewer are free.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} of {self.num_blocks} are free")
        num_empty = min(count, len(self._free))
        blocks = [heapq.heappop(self._free) for _ in range(num_empty)]
        blocks += [self._evict() for _ in range(count - num_empty)]
        for block in blocks:
            self._add_user(block)
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Takes back the blocks of one sequence, given in the sequence's order.

        Blocks that no other sequence holds become kept if they have a key, else empty. Later blocks are evicted before
        earlier ones, which more prompts share. Raises ValueError if a block is not in use or is given twice.
        """
        blocks = list(blocks)
        self._require_used(blocks)
        for block in reversed(blocks):
            self.num_users[block] -= 1
            if self.num_users[block] == 0:
                self._is_used[block] = 0
                self.num_used -= 1
                self._set_free(block)

    # Keys

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Returns the used or kept blocks with these keys, up to the first key without a block."""
        blocks: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Hands out used or kept blocks to one more sequence. Raises ValueError if a block is empty or given twice."""
        blocks = list(blocks)
        wrong = [block for block in blocks if not self._is_used[block] and block not in self.kept]
        if wrong or len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks {wrong or blocks} are empty, or are named twice")
        for block in blocks:
            self.kept.pop(block, None)
            self._add_user(block)

    def name(self, block: int, key: bytes) -> None:
        """Gives a used block the key of its contents, unless another block has that key already.

        Raises ValueError if the block is not in use or has another key.
        """
        self._require_used([block])
        if self._keys.get(block, key) != key:
            raise ValueError(f"block {block} has another key")
        if key not in self._by_key:
            self._keys[block], self._by_key[key] = key, block

    def forget(self, blocks: Iterable[int]) -> None:
        """Removes the keys of these blocks, so that no request reuses their contents. Kept blocks become empty."""
        for block in blocks:
            key = self._keys.pop(block, None)
            if key is None:
                continue
            del self._by_key[key]
            if block in self.kept:
                del self.kept[block]
                heapq.heappush(self._free, block)

    # Moves

    def relocate(self, mapping: Mapping[int, int]) -> None:
        """Updates the pool after the contents of used sources and free destinations were exchanged.

        Users, keys and the order of the kept blocks follow the contents. Raises ValueError unless `mapping` maps used blocks
        to free ones, one to one.
        """
        self._require_used(list(mapping))
        taken = [block for block in mapping.values() if not self._is_free(block)]
        if taken or len(set(mapping.values())) != len(mapping):
            raise ValueError(
                f"blocks cannot move onto {taken or sorted(mapping.values())}: taken, or named twice"
            )
        for source, destination in mapping.items():
            self._is_used[source], self._is_used[destination] = 0, 1
            self.num_users[destination], self.num_users[source] = self.num_users[source], 0
        renamed = {**mapping, **{destination: source for source, destination in mapping.items()}}
        self._keys = {renamed.get(block, block): key for block, key in self._keys.items()}
        self._by_key = {key: block for block, key in self._keys.items()}
        self.kept = OrderedDict.fromkeys(renamed.get(block, block) for block in self.kept)
        self._free = [block for block in range(1, self.num_blocks + 1) if self._is_empty(block)]

    def check_integrity(self) -> None:
        """Raises RuntimeError unless used, kept and empty ids partition 1..num_blocks and no empty one has a key."""
        ids = range(1, self.num_blocks + 1)
        empty = [block for block in ids if self._is_empty(block)]
        is_sound = (
            sorted(self._free) == empty
            and not self._is_used[PADDING_BLOCK]
            and all(self._is_free(block) and block in self._keys for block in self.kept)
            and all((self.num_users[block] > 0) == self._is_used[block] for block in ids)
            and self.num_used == sum(self._is_used)
            and {key: block for block, key in self._keys.items()} == self._by_key
            and len(self._keys) == len(self._by_key)
            and all(self._is_used[block] or block in self.kept for block in self._keys)
        )
        if not is_sound:
            raise RuntimeError(f"the block pool is corrupt: empty {sorted(self._free)}, expected {empty}")

    def _evict(self) -> int:
        block, _ = self.kept.popitem(last=False)
        del self._by_key[self._keys.pop(block)]
        self.num_evicted += 1
        return block

    def _add_user(self, block: int) -> None:
        self.num_used += not self._is_used[block]
        self._is_used[block] = 1
        self.num_users[block] += 1

    def _set_free(self, block: int) -> None:
        if block in self._keys:
            self.kept[block] = None
        else:
            heapq.heappush(self._free, block)

    def _is_free(self, block: int) -> bool:
        return 1 <= block <= self.num_blocks and not self._is_used[block]

    def _is_empty(self, block: int) -> bool:
        return self._is_free(block) and block not in self.kept

    def _require_used(self, blocks: list[int]) -> None:
        wrong = [block for block in blocks if not 1 <= block <= self.num_blocks or not self._is_used[block]]
        if wrong or len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks {wrong or blocks} are not in use, or are named twice (a double free?)")


def root_key(cache_salt: str) -> bytes:
    """Returns the key of block -1, 32 bytes."""
    return hashlib.sha256(framed([(_SCHEMA, cache_salt)])).digest()


def extend_keys(keys: list[bytes], token_ids: Sequence[int], block_size: int, cache_salt: str) -> None:
    """Appends the keys of those full blocks of `token_ids` that `keys` lacks."""
    for i in range(len(keys), len(token_ids) // block_size):
        tokens = array(_ID_CODE, token_ids[i * block_size : (i + 1) * block_size])
        keys.append(hashlib.sha256((keys[-1] if keys else root_key(cache_salt)) + tokens.tobytes()).digest())


class PrefixCache:
    """Finds and names the blocks of `pool` by their contents: sequences that begin with the same tokens share blocks.

    A prompt gets the cached blocks of its beginning (`BlockPool.share`), and its first chunk starts after them. The last
    known token is always computed, because its logits give the next token. Not thread-safe: the engine's thread owns it.

    `num_queries` counts the tokens of requests at their first admission, and `num_hits` those of them that were found. A
    request that was preempted is not counted again.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.num_queries = 0
        self.num_hits = 0
        self._pool, self._block_size = pool, block_size

    def find(self, request: Request) -> list[int]:
        """Returns the blocks that hold the beginning of the request's known tokens, without the last token."""
        num_blocks = (request.num_tokens - 1) // self._block_size
        extend_keys(request.block_keys, request.token_ids, self._block_size, request.cache_salt)
        return self._pool.find(request.block_keys[:num_blocks])

    def count(self, request: Request, num_hit_tokens: int) -> None:
        """Counts the look-up at a request's admission, and stores the hit in the request."""
        if request.num_preemptions == 0:
            self.num_queries += request.num_tokens
            self.num_hits += num_hit_tokens
            request.num_cached_tokens = num_hit_tokens

    def keep(self, request: Request) -> None:
        """Names the blocks that the request's computed tokens have filled since the last call."""
        num_full = request.num_computed_tokens // self._block_size
        if num_full <= request.num_named_blocks:
            return
        extend_keys(request.block_keys, request.token_ids, self._block_size, request.cache_salt)
        for i in range(request.num_named_blocks, num_full):
            self._pool.name(request.block_table[i], request.block_keys[i])
        request.num_named_blocks = num_full
