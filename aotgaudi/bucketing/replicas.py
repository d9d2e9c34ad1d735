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

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby, starmap
from operator import itemgetter

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.strategy import Bucket
from aotgaudi.entries import DecodeEntry, PromptEntry


def padded_shapes(table: BucketTable) -> tuple[PromptEntry | DecodeEntry, ...]:
    """Returns the shapes that replicas with `table` run and that are no entries: ascending prompts, then decodes."""
    prompts = padded_prompts(
        (entry.batch_size, entry.query_len, entry.num_ctx_blocks) for entry in table.prompt
    )
    decodes = padded_decodes((entry.batch_size, entry.num_blocks) for entry in table.decode)
    return (*starmap(PromptEntry, prompts), *(DecodeEntry(size, 1, blocks) for size, blocks in decodes))


def padded_prompts(table: Iterable[Bucket]) -> Iterator[Bucket]:
    """Yields the prompt shapes that are no buckets of `table`, ascending."""
    buckets = frozenset(table)
    least_context: dict[int, int] = {}  # By query; `least_query` by context. Of batches that are not larger.
    least_query: dict[int, int] = {}
    for batch_size, rows in groupby(sorted(buckets), itemgetter(0)):
        own: dict[int, int] = {}
        for _, query, context in rows:
            own.setdefault(query, context)
            least_context[query] = min(context, least_context.get(query, context))
            least_query[context] = min(query, least_query.get(context, query))
        contexts = sorted(least_query)
        least = contexts[-1]
        for query in sorted(query for query in least_context if query >= min(own)):
            least = min(least, own.get(query, least))
            for context in contexts[bisect_left(contexts, max(least, least_context[query])) :]:
                shape = batch_size, query, context
                if query >= least_query[context] and shape not in buckets:
                    yield shape


def padded_decodes(table: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yields the decode shapes (batch size, blocks) that are no buckets of `table`, ascending."""
    rows: dict[int, list[int]] = defaultdict(list)
    for batch_size, num_blocks in sorted(table):
        rows[batch_size].append(num_blocks)
    reach = 0
    for batch_size, row in rows.items():
        most = row[-1]
        reach = max(reach, most)
        larger = (blocks for size, other in rows.items() if size > batch_size for blocks in other)
        for blocks in larger:
            if most >= reach:
                break
            if blocks > most:
                most = blocks
                yield batch_size, most
        if most < reach:
            yield batch_size, reach
