"""Prefix caching: sequences that begin with the same tokens share the blocks computed for them.

A full block has a key, made of all tokens up to its end::

    key of block i   =  sha256(key of block i - 1 | tokens of block i, 8 bytes each)
    key of block -1  =  sha256("aotgaudi.prefix/1" | cache salt, each length-framed)

A token's keys and values depend only on the tokens up to it, so blocks with equal keys have equal contents. Because sha256
is collision-resistant, no prompt finds blocks of other tokens under its key, and tokens need not be compared. Only requests
with the same salt share blocks. Keys live in one process, for one model and one cache, so they include neither.

A prompt gets the cached blocks of its beginning (`BlockPool.share`), and its first chunk starts after them. The last known
token is always computed, because its logits give the next token. docs/adr/0017-engine.md has the reasons.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from aotgaudi.digest import framed
from aotgaudi.engine.blocks import BlockPool
from aotgaudi.engine.request import Request

_SCHEMA = "aotgaudi.prefix/1"
_ID_CODE = "q"
"""The form in which token ids are hashed: 64 bits, in this machine's byte order."""


def root_key(cache_salt: str) -> bytes:
    """Returns the key of block -1, 32 bytes."""
    return hashlib.sha256(framed([(_SCHEMA, cache_salt)])).digest()


def extend_keys(keys: list[bytes], token_ids: Sequence[int], block_size: int, cache_salt: str) -> None:
    """Appends the keys of those full blocks of `token_ids` that `keys` lacks."""
    for i in range(len(keys), len(token_ids) // block_size):
        tokens = array(_ID_CODE, token_ids[i * block_size : (i + 1) * block_size])
        keys.append(hashlib.sha256((keys[-1] if keys else root_key(cache_salt)) + tokens.tobytes()).digest())


class PrefixCache:
    """Finds and names the blocks of `pool` by their contents. Not thread-safe: the engine's thread owns it.

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
