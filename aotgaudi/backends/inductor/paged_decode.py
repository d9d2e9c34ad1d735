"""Decode attention, in units: our template ``paged_decode.h``, which inductor only calls. Offline only.

Inductor's code for the operator's definition would copy every block of every row in each step. The template reads the cache
in place and skips hidden tokens, so its cost follows the tokens in use and not the size of the bucket.
"""

from __future__ import annotations

from typing import Any

from aotgaudi.backends.inductor.template import called
from aotgaudi.graphs.paged_decode import PAGED_DECODE

_CALL = r"""
  using Decode = aotgaudi::PagedDecode<{{dtype}}, {{head_size}}, {{value_size}}, {{group}}, {{block_size}}>;
  const int64_t values = {{kernel.stride(cache, 0) if planes > 1 else 0}}, block = {{kernel.stride(cache, 1)}};
#pragma omp parallel for schedule(dynamic) if ({{rows * groups}} > 1)
  for (int64_t task = 0; task < {{rows * groups}}; ++task) {
    const int64_t row = task / {{groups}}, of_row = task % {{groups}}, head = of_row / {{groups // kv_heads}};
    const {{dtype}}* keys = cache + head * {{block_size * head_size}};
    Decode::attend(query + task * {{group * head_size}}, keys, keys + values, block, block_list, block_rows, seen,
                   {{num_blocks}}, row, {{"sinks + of_row * %d" % group if has_sinks else "(const float*)nullptr"}},
                   {{scaling}}f, {{softcap}}f, output + task * {{group * value_size}});
  }
"""

_MOST_HEADS, _FEWEST_HEADS = 16, 4
"""Fewer heads a call would read a block too often."""


def _lower(  # noqa: PLR0913, PLR0917 - the operator's arguments
    query: Any,
    cache: Any,
    block_list: Any,
    block_rows: Any,
    seen: Any,
    sinks: Any,
    scaling: float,
    softcap: float,
    value_dim: int = 0,
) -> Any:
    rows, heads, head_size = map(int, query.get_size())
    planes = int(cache.get_size()[0])
    kv_heads, block_size = map(int, cache.get_size()[2:4])
    value_size = value_dim or head_size
    group = _heads_at_once(heads // kv_heads)
    return called(
        "paged_decode",
        _CALL,
        {
            "query": query,
            "cache": cache,
            "block_list": block_list,
            "block_rows": block_rows,
            "seen": seen,
            "sinks": sinks,
        },
        [rows, heads, value_size],
        query.get_dtype(),
        rows=rows,
        planes=planes,
        kv_heads=kv_heads,
        group=group,
        groups=heads // group,
        head_size=head_size,
        value_size=value_size,
        block_size=block_size,
        num_blocks=int(block_list.get_size()[0]),
        has_sinks=sinks is not None,
        scaling=repr(float(scaling)),
        softcap=repr(float(softcap)),
    )


def _heads_at_once(group: int) -> int:
    """Returns how many of a KV head's query heads one call serves: all, if they are few.

    Latent attention has one KV head for all query heads. In one call they would be one thread's, on a large stack.
    """
    if group <= _MOST_HEADS:
        return group
    shared = max(n for n in range(1, _MOST_HEADS + 1) if group % n == 0)
    return shared if shared >= _FEWEST_HEADS else group


LOWERINGS = {PAGED_DECODE: _lower}
"""How inductor compiles the operator."""
