"""Steps of replicas in lockstep: each pads its shape to the largest of all, number by number (data parallelism).

Every step, all replicas of a model with experts run equally many prompt batches, then a decode if any of them decodes
(vllm_gaudi/v1/worker/hpu_model_runner.py, v0.26.0: ``get_dp_padding``, ``_extract_prefill_batch_contents``,
``_form_prefill_batch``, ``_create_decode_input_data``, ``get_habana_paged_attn_buffers``). A replica that lacks one runs a
dummy: a prompt of 128 tokens, or a decode after as many; one without any request decodes one token in one block.
All of these are steps that a replica can also form alone. What is run:

* **Prompts** take batch size, query and context from up to three replicas' buckets, so together they may be no bucket, and
  longer than the model allows. Every such shape is run: for each of its numbers, some bucket has that and no larger others.
* **Decodes** take the largest batch size b. Then each replica looks its blocks up *for b*, and the largest answer counts.
  That is a bucket unless the row of b ends before a row of fewer sequences does, which those are looked up beyond it for.

The closure does not depend on the number of replicas. It is exact for two replicas and prompts of one sequence, if every
bucket is used. The collectives of experts (``hpu_dp_utils.py``) have the shapes of the padded step, times the replicas.
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
    least_context: dict[
        int, int
    ] = {}  # Of each query, and the least query of each context, in batches so far.
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
