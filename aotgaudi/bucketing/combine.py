"""From ranges to tables, for every strategy of vllm-gaudi (common.py 333-547 at 091bbad).

A table is the product of its ranges, corrected and filtered, as an ascending list without repetition. It is
made run by run, and so in order: the buckets of a run share batch size and query length, and their contexts
are a piece of the context range with at most one value inserted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, Protocol

from aotgaudi.bucketing.filters import (
    ProductRules,
    capped_decode,
    edge_context,
    has_edge,
    is_off_slice,
    keeps_decode,
    keeps_prompt,
    most_decode_context,
    most_prompt_context,
    rounded_query,
)
from aotgaudi.bucketing.strategy import Bucket, BucketingInputs, Ranges, check_num_buckets, collector_paused
from aotgaudi.errors import SpecError


class RangeSource(Protocol):
    """How the values of each dimension are chosen: what sets one strategy apart from another."""

    def prompt_ranges(self, inputs: BucketingInputs) -> Ranges:
        """Returns the ranges of the prompt phase."""
        ...

    def decode_ranges(self, inputs: BucketingInputs) -> Ranges:
        """Returns the ranges of the decode phase."""
        ...


@dataclass(frozen=True, slots=True)
class ProductStrategy:
    """A strategy of vllm-gaudi: corrected and filtered products of ranges. See ``strategy.Strategy``."""

    ranges: RangeSource
    rules: ProductRules

    def prompt_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the prompt buckets, ascending."""
        check_mamba(inputs, self.rules)
        return combine_prompt(self.ranges.prompt_ranges(inputs), inputs, self.rules)

    def decode_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the decode buckets with those of speculative decoding, ascending."""
        return with_speculation(self.decode_seed_table(inputs), inputs, self.rules)

    def decode_seed_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the decode buckets before those of speculative decoding are added, ascending."""
        check_mamba(inputs, self.rules)
        return combine_decode(self.ranges.decode_ranges(inputs), inputs, self.rules)


def combine_prompt(ranges: Ranges, inputs: BucketingInputs, rules: ProductRules) -> tuple[Bucket, ...]:
    """Returns the prompt table. Raises SpecError when no bucket is within the limits, or too many are."""
    contexts = sorted(set(ranges.contexts))
    kept = contexts[:-1] if has_edge(inputs, rules) else contexts
    runs = _checked(_prompt_runs(ranges, contexts, kept, inputs, rules), "prompt", inputs)
    table = _built(runs, kept)
    if inputs.sliding is None:
        return tuple(table)
    return tuple(bucket for bucket in table if not is_off_slice(bucket, inputs))


def combine_decode(ranges: Ranges, inputs: BucketingInputs, rules: ProductRules) -> tuple[Bucket, ...]:
    """Returns the decode table before speculation. Raises SpecError when it has no bucket, or too many."""
    contexts = sorted(set(ranges.contexts))
    if inputs.contiguous_pa and contexts[-1] < inputs.num_blocks:
        contexts.append(inputs.num_blocks)
    runs = _checked(_decode_runs(ranges, contexts, inputs, rules), "decode", inputs)
    return tuple(_built(runs, contexts))


def filter_prompt(
    buckets: Iterable[Bucket], inputs: BucketingInputs, rules: ProductRules
) -> tuple[Bucket, ...]:
    """Returns the prompt buckets of a bucket file: filtered, without the edge rule."""
    table = sorted({bucket for bucket in buckets if keeps_prompt(bucket, inputs, rules)})
    _check_not_empty(len(table), "prompt", inputs)
    return tuple(bucket for bucket in table if not is_off_slice(bucket, inputs))


def filter_decode(
    buckets: Iterable[Bucket], inputs: BucketingInputs, rules: ProductRules
) -> tuple[Bucket, ...]:
    """Returns the decode buckets of a bucket file, filtered and capped, before speculation."""
    kept = (bucket for bucket in buckets if keeps_decode(bucket, inputs))
    table = sorted({capped_decode(bucket, inputs, rules) for bucket in kept})
    _check_not_empty(len(table), "decode", inputs)
    return tuple(table)


def with_speculation(
    seeds: tuple[Bucket, ...], inputs: BucketingInputs, rules: ProductRules
) -> tuple[Bucket, ...]:
    """Returns the decode table with a row for each of the drafted tokens and the next (common.py 333-371).

    `seeds` is the table before speculation; it is returned as it is when no tokens are drafted.
    """
    if inputs.num_speculative_tokens == 0 or not rules.speculates:
        return seeds
    factor = inputs.num_speculative_tokens + 1
    found = set(seeds)
    for batch_size, query_len, context in seeds:
        if batch_size * factor <= context:
            found.add(_capped_to_model((batch_size * factor, query_len, context), inputs))
        found.add(_capped_to_model((batch_size * factor, query_len, context * factor), inputs))
    return tuple(sorted(found))


def check_mamba(inputs: BucketingInputs, rules: ProductRules) -> None:
    """Raises SpecError when a step is not whole mamba chunks, in a version that asks for it."""
    chunk = inputs.mamba_chunk_size
    if chunk and rules.mamba_divides_step and inputs.max_num_batched_tokens % chunk:
        raise SpecError(
            "limits.max_num_batched_tokens",
            f"is {inputs.max_num_batched_tokens}",
            f"a multiple of the model's mamba chunk of {chunk} tokens",
        )


class _Run(NamedTuple):
    """Buckets of one batch size and query length: contexts ``[start, stop)`` of a list, and one more."""

    batch_size: int
    query_len: int
    start: int
    stop: int
    inserted: int | None

    @property
    def num_buckets(self) -> int:
        return self.stop - self.start + (self.inserted is not None)


def _prompt_runs(
    ranges: Ranges,
    contexts: Sequence[int],
    kept: Sequence[int],
    inputs: BucketingInputs,
    rules: ProductRules,
) -> Iterator[_Run]:
    """Yields the runs over `kept`, the contexts that the edge rule does not change; ascending."""
    query_lens = sorted({rounded_query(query_len, inputs, rules) for query_len in ranges.query_lens})
    edges = _edges(query_lens, contexts, kept, inputs, rules)
    for batch_size in sorted(set(ranges.batch_sizes)):
        for query_len, edge in zip(query_lens, edges, strict=True):
            most = most_prompt_context(batch_size, query_len, inputs, rules)
            if most is None:
                break
            inserted = edge if edge is not None and edge <= most else None
            yield _Run(batch_size, query_len, 0, bisect_right(kept, most), inserted)


def _edges(
    query_lens: Sequence[int],
    contexts: Sequence[int],
    kept: Sequence[int],
    inputs: BucketingInputs,
    rules: ProductRules,
) -> list[int | None]:
    """Returns for each query the context that stands for the top of the range; None where `kept` has it.

    A context that the edge rule has changed stays changed for the next, longer queries.
    """
    if len(kept) == len(contexts):
        return [None] * len(query_lens)
    edges: list[int | None] = []
    context, known = contexts[-1], set(kept)
    for query_len in query_lens:
        context = edge_context(query_len, context, inputs, rules)
        edges.append(None if context in known else context)
    return edges


def _decode_runs(
    ranges: Ranges, contexts: Sequence[int], inputs: BucketingInputs, rules: ProductRules
) -> Iterator[_Run]:
    """Yields the runs; contexts above what the sequences can have become one, just that."""
    for batch_size in sorted(set(ranges.batch_sizes)):
        start = 0 if inputs.contiguous_pa else bisect_left(contexts, batch_size)
        stop, inserted = len(contexts), most_decode_context(batch_size, inputs, rules)
        if inserted is not None:
            stop = max(start, bisect_right(contexts, inserted))
            if stop == len(contexts) or inserted in contexts[max(start, stop - 1) : stop]:
                inserted = None
        for query_len in ranges.query_lens:
            yield _Run(batch_size, query_len, start, stop, inserted)


def _checked(runs: Iterable[_Run], phase: str, inputs: BucketingInputs) -> list[_Run]:
    """Returns the runs, before any bucket of them is made. Raises SpecError for none, and for too many."""
    checked: list[_Run] = []
    for run in runs:
        checked.append(run)
        check_num_buckets(len(checked), phase)
    num_buckets = sum(run.num_buckets for run in checked)
    check_num_buckets(num_buckets, phase)
    _check_not_empty(num_buckets, phase, inputs)
    return checked


def _built(runs: Iterable[_Run], contexts: Sequence[int]) -> list[Bucket]:
    table: list[Bucket] = []
    with collector_paused():
        for run in runs:
            run_contexts = list(contexts[run.start : run.stop])
            if run.inserted is not None:
                insort(run_contexts, run.inserted)
            table.extend(product((run.batch_size,), (run.query_len,), run_contexts))
    return table


def _capped_to_model(bucket: Bucket, inputs: BucketingInputs) -> Bucket:
    """Caps a bucket of speculative decoding; unlike ``capped_decode`` it never floors."""
    batch_size, query_len, context = bucket
    if inputs.contiguous_pa:
        return bucket
    return batch_size, query_len, min(context, batch_size * inputs.max_blocks_per_seq)


def _check_not_empty(num_buckets: int, phase: str, inputs: BucketingInputs) -> None:
    if num_buckets == 0:
        raise SpecError(
            "limits",
            f"leave no {phase} bucket: block_size {inputs.block_size}, max_model_len {inputs.max_model_len},"
            f" max_num_batched_tokens {inputs.max_num_batched_tokens}",
            "a block must fit the model's length and the step's tokens",
        )
