"""Which buckets of a table upstream's warm-up compiles: not all of them, and a step is looked up in all of them.

The warm-up runs a dummy step for each bucket, and what that is looked up to is compiled (vllm_gaudi/v1/worker/
hpu_model_runner.py at 091bbad: ``warmup_graphs`` 5466, ``_prepare_dummy_scenario`` 5623).

* **Prompts of one sequence.** From v0.19.1 on, where query and context together exceed the model's length, the dummy has
  only the whole blocks of context that are left beside the query (5637-5651). Of the buckets of one query length
  that have at least so many blocks, the smallest is therefore compiled, and no other. Versions before drop such buckets from
  their tables, and compile all that they keep. Prompts of several sequences are not looked at here.
* **Decodes** are compiled as they are. Under contiguous paged attention a dummy has two blocks a sequence (its length is a
  whole block, and the next token needs another), by which its batch is looked up before the highest block id is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from aotgaudi.bucketing.rules import GaudiVersion
from aotgaudi.bucketing.strategy import Bucket, BucketingInputs
from aotgaudi.bucketing.upstream_lookup import UpstreamLookup

_DUMMY_BLOCKS = 2


def keeps_too_long(version: GaudiVersion) -> bool:
    """Whether a version keeps prompt buckets of more tokens than the model's length, and so warms up shorter ones."""
    return version.product.prompt_fit == "apart"


def blocks_beside(query_len: int, inputs: BucketingInputs) -> int:
    """Returns the whole blocks of context that the model's length leaves beside a query."""
    return max(0, (inputs.max_model_len - query_len) // inputs.block_size)


def cold_prompts(table: Iterable[Bucket], version: GaudiVersion, inputs: BucketingInputs) -> Iterator[Bucket]:
    """Yields the buckets of one sequence in an ascending prompt table that the warm-up does not compile."""
    if not keeps_too_long(version):
        return
    ones = (bucket for bucket in table if bucket[0] == 1)
    for query_len, row in groupby(ones, key=lambda bucket: bucket[1]):
        left = blocks_beside(query_len, inputs)
        yield from [bucket for bucket in row if bucket[2] >= left][1:]


def cold_decodes(table: Iterable[Bucket], version: GaudiVersion, inputs: BucketingInputs) -> Iterator[Bucket]:
    """Yields the buckets of a decode table that the warm-up does not compile."""
    if not inputs.contiguous_pa:
        return
    buckets = tuple(table)
    lookup = UpstreamLookup(version.lookup, inputs, (), buckets)
    padded = {size: lookup.find_decode(size, _DUMMY_BLOCKS * size).bucket[0] for size, _, _ in buckets}
    compiled = {
        (padded[size], query, _blocks(lookup, padded[size], blocks)) for size, query, blocks in buckets
    }
    yield from (bucket for bucket in buckets if bucket not in compiled)


def _blocks(lookup: UpstreamLookup, batch_size: int, num_blocks: int) -> int:
    return max(num_blocks, lookup.find_decode(batch_size, num_blocks).bucket[2])
