"""Steps of replicas in lockstep: each pads its shape to the largest of all, number by number (data parallelism).

In every step all replicas of a model with experts run equally many prompt batches, then a decode if any of them decodes. A
replica that lacks one of these runs a dummy: a prompt of 128 tokens, or a decode after as many. Without any request a
replica decodes one token in one block. Each could form all of these alone. Together they run other shapes:

* **Prompts** take batch size, query and context from the buckets of up to three replicas. So a shape is run exactly if for
  each of its numbers some bucket has that number and no larger others. It may exceed the model's length.
* **Decodes** take the largest batch size b. Then each replica looks up its blocks *for b*, and the largest answer counts.
  That is a bucket, unless the row of b ends before a row of fewer sequences does.

One closure holds for any number of replicas. It is exact for prompts of one sequence, and for three or more replicas, if
some step uses each bucket. The collectives of experts have the shape of the padded step, times the replicas.

Source: vllm_gaudi/v1/worker/hpu_model_runner.py, v0.26.0 (``get_dp_padding`` and its callers, ``_dummy_run``), and
hpu_dp_utils.py for the collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, product, starmap
from operator import itemgetter

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.strategy import Bucket
from aotgaudi.entries import DecodeEntry, PromptEntry


def padded_shapes(table: BucketTable) -> tuple[PromptEntry | DecodeEntry, ...]:
    """Returns the shapes that replicas with `table` run and that are no entries: ascending prompts, then decodes."""
    prompts = padded_prompts((one.batch_size, one.query_len, one.num_ctx_blocks) for one in table.prompt)
    decodes = padded_decodes((entry.batch_size, entry.num_blocks) for entry in table.decode)
    return (*starmap(PromptEntry, prompts), *(DecodeEntry(size, 1, blocks) for size, blocks in decodes))


def padded_prompts(table: Iterable[Bucket]) -> Iterator[Bucket]:
    """Yields the prompt shapes that are no buckets of `table`, ascending."""
    buckets = frozenset(table)
    least_context: dict[int, int] = {}  # By query; `least_query` by context. Of batches that are not larger.
    least_query: dict[int, int] = {}
    for batch_size, rows in groupby(sorted(buckets), itemgetter(0)):
        own = [(query, context) for _, query, context in rows]
        for query, context in own:
            least_context[query] = min(context, least_context.get(query, context))
            least_query[context] = min(query, least_query.get(context, query))
        for query, context in product(sorted(least_context), sorted(least_query)):
            has_both = context >= least_context[query] and query >= least_query[context]
            shape = batch_size, query, context
            if has_both and shape not in buckets and any(q <= query and c <= context for q, c in own):
                yield shape


def padded_decodes(table: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yields the decode shapes (batch size, blocks) that are no buckets of `table`, ascending."""
    buckets = sorted(table)
    reach = 0
    for batch_size, row in groupby(buckets, itemgetter(0)):
        most = max(blocks for _, blocks in row)
        reach = max(reach, most)
        if most == reach:
            continue
        for blocks in (*(blocks for size, blocks in buckets if size > batch_size), reach):
            if most < min(blocks, reach):
                most = blocks
                yield batch_size, most
