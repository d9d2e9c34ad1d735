"""Decode attention, in units: our template ``paged_decode.h``, which inductor only calls. Offline only.

Inductor's code for the operator's definition would copy every block of every row in each step. The template reads the cache
in place and skips hidden tokens, so its cost follows the tokens in use and not the size of the bucket.
"""

from __future__ import annotations

from typing import Any

from aotgaudi.backends.inductor.template import called
from aotgaudi.graphs.paged_decode import PAGED_DECODE

_CALL = r"""
  using Decode = aotgaudi::PagedDecode<{{dtype}}, {{head_size}}, {{group}}, {{block_size}}>;
  const int64_t values = {{kernel.stride(cache, 0)}}, block = {{kernel.stride(cache, 1)}};
#pragma omp parallel for schedule(dynamic) if ({{rows * kv_heads}} > 1)
  for (int64_t task = 0; task < {{rows * kv_heads}}; ++task) {
    const int64_t row = task / {{kv_heads}}, head = task % {{kv_heads}};
    const int64_t at = task * {{group * head_size}};
    const {{dtype}}* keys = cache + head * {{block_size * head_size}};
    Decode::attend(query + at, keys, keys + values, block, block_list, block_rows, seen, {{num_blocks}}, row,
                   {{"sinks + head * %d" % group if has_sinks else "nullptr"}}, {{scaling}}f, {{softcap}}f, output + at);
  }
"""


def _lower(
    query: Any,
    cache: Any,
    block_list: Any,
    block_rows: Any,
    seen: Any,
    sinks: Any,
    scaling: float,
    softcap: float,
) -> Any:
    rows, heads, head_size = map(int, query.get_size())
    kv_heads, block_size = map(int, cache.get_size()[2:4])
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
        query.get_size(),
        query.get_dtype(),
        rows=rows,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        head_size=head_size,
        block_size=block_size,
        num_blocks=int(block_list.get_size()[0]),
        has_sinks=sinks is not None,
        scaling=repr(float(scaling)),
        softcap=repr(float(softcap)),
    )


LOWERINGS = {PAGED_DECODE: _lower}
"""How inductor compiles the operator."""
