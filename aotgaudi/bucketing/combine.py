"""From the ranges of a vllm-gaudi strategy to its table: products, corrections and filters, by version.

Source: common.py 333-547 at 091bbad. `ProductRules` holds what changed between versions. Each function below it answers one
question about a bucket, or about the contexts of one batch size and query length.

A table is the product of its ranges, corrected and filtered, ascending and without repetition. It is made in order, run by
run: the buckets of a run share batch size and query length, and their contexts are a slice of the context range with at most
one additional value.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple, Protocol

from aotgaudi.bucketing.strategy import Bucket, BucketingInputs, Ranges, check_num_buckets, collector_paused
from aotgaudi.errors import SpecError

EDGE_MODEL_LEN = 8192
"""The edge rule applies from this model length on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRules:
    """The rules that changed between versions of vllm-gaudi. The defaults are those of 091bbad.

    `edge`: whether the top of the context range becomes the room that each query leaves, and whether
    VLLM_PROMPT_CTX_BUCKET_MAX bounds it. `prompt_fit`: a prompt's context and query fit the model's length together
    (``total``) or each alone (``apart``), so that a padded query may reach past the end. `mamba_rounding`: which models'
    queries are rounded up to the chunk. `mamba_floors_decode`: for models with mamba layers, decode contexts are at most the
    *whole* blocks of the model's length, always. `mamba_divides_step`: the step's tokens must be a multiple of the chunk.
    `speculates`: decode buckets for speculative decoding are added.
    """

    edge: Literal["none", "unbounded", "bounded"] = "bounded"
    prompt_fit: Literal["total", "apart"] = "apart"
    mamba_rounding: Literal["never", "always", "explicit"] = "explicit"
    mamba_floors_decode: bool = False
    mamba_divides_step: bool = True
    speculates: bool = True


def edge_context(query_len: int, context: int, inputs: BucketingInputs, rules: ProductRules) -> int:
    """Returns the context at the top of the context range: as many blocks as `query_len` leaves room for."""
    edge = (inputs.max_model_len - query_len) // inputs.block_size
    if edge < 0:
        return context
    if rules.edge == "bounded" and inputs.prompt_ctx_max is not None and edge >= inputs.prompt_ctx_max:
        return context
    return edge


def rounded_query(query_len: int, inputs: BucketingInputs, rules: ProductRules) -> int:
    """Returns the query length that a model with mamba layers computes."""
    chunk = inputs.mamba_chunk_size
    if chunk == 0 or rules.mamba_rounding == "never":
        return query_len
    if rules.mamba_rounding == "explicit" and not inputs.mamba_chunk_size_is_explicit:
        return query_len
    return -(-query_len // chunk) * chunk


def most_prompt_context(
    batch_size: int, query_len: int, inputs: BucketingInputs, rules: ProductRules
) -> int | None:
    """Returns the most context blocks of a prompt bucket; None if no bucket is kept.

    If the result is None, it is also None for every longer query and every larger batch.
    """
    max_model_len, block_size = inputs.max_model_len, inputs.block_size
    if inputs.merged_prefill:
        num_seqs = inputs.max_num_prefill_seqs
        return num_seqs * ((max_model_len - query_len // num_seqs) // block_size)
    if query_len > max_model_len or batch_size * query_len > inputs.max_num_batched_tokens:
        return None
    if rules.prompt_fit == "total":
        return (max_model_len - query_len) // block_size
    return -(-(max_model_len - 1) // block_size)


def keeps_prompt(bucket: Bucket, inputs: BucketingInputs, rules: ProductRules) -> bool:
    """Whether a prompt bucket is within the model's length and the step's token budget."""
    batch_size, query_len, context = bucket
    most = most_prompt_context(batch_size, query_len, inputs, rules)
    return most is not None and context <= most


def keeps_decode(bucket: Bucket, inputs: BucketingInputs) -> bool:
    """Whether a decode bucket has a block for every sequence. Always true under contiguous paged attention."""
    batch_size, _, context = bucket
    return inputs.contiguous_pa or batch_size <= context


def most_decode_context(batch_size: int, inputs: BucketingInputs, rules: ProductRules) -> int | None:
    """Returns the most context blocks of a decode bucket; None if they are unbounded.

    With ``mamba_floors_decode`` it may be 0, which upstream keeps as a bucket.
    """
    if inputs.mamba_chunk_size and rules.mamba_floors_decode:
        return batch_size * (inputs.max_model_len // inputs.block_size)
    return None if inputs.contiguous_pa else batch_size * inputs.max_blocks_per_seq


def capped_decode(bucket: Bucket, inputs: BucketingInputs, rules: ProductRules) -> Bucket:
    """Returns a decode bucket with at most as many blocks as its sequences can have."""
    batch_size, query_len, context = bucket
    most = most_decode_context(batch_size, inputs, rules)
    return bucket if most is None else (batch_size, query_len, min(context, most))


def is_off_slice(bucket: Bucket, inputs: BucketingInputs) -> bool:
    """Whether sliced attention cannot run a prompt bucket: long, without context, and no multiple of a slice."""
    _, query_len, context = bucket
    return context == 0 and is_off_slice_query(query_len, inputs)


def is_off_slice_query(query_len: int, inputs: BucketingInputs) -> bool:
    """Whether a query is long and no multiple of a slice; False if attention is not sliced."""
    sliding = inputs.sliding
    return sliding is not None and query_len >= sliding.threshold and query_len % sliding.slice_len != 0


class RangeSource(Protocol):
    """Chooses the values of each dimension: what distinguishes one strategy from another."""

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
    """Returns the prompt table. Raises SpecError if no bucket is within the limits, or too many are."""
    contexts = sorted(set(ranges.contexts))
    has_edge = rules.edge != "none" and inputs.max_model_len >= EDGE_MODEL_LEN
    kept = contexts[:-1] if has_edge else contexts
    runs = _checked(_prompt_runs(ranges, contexts, kept, inputs, rules), "prompt", inputs)
    table = _built(runs, kept)
    if inputs.sliding is None:
        return tuple(table)
    return tuple(bucket for bucket in table if not is_off_slice(bucket, inputs))


def combine_decode(ranges: Ranges, inputs: BucketingInputs, rules: ProductRules) -> tuple[Bucket, ...]:
    """Returns the decode table before speculation. Raises SpecError if it has no bucket, or too many."""
    contexts = sorted(set(ranges.contexts))
    if inputs.contiguous_pa and contexts and contexts[-1] < inputs.num_blocks:
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
    """Returns the decode table with a row for each of the drafted tokens and the next one (common.py 333-371).

    `seeds` is the table before speculation. It is returned unchanged if no tokens are drafted.
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
    """Raises SpecError if a step does not consist of whole mamba chunks, in a version that requires this."""
    chunk = inputs.mamba_chunk_size
    if chunk and rules.mamba_divides_step and inputs.max_num_batched_tokens % chunk:
        raise SpecError(
            "limits.max_num_batched_tokens",
            f"is {inputs.max_num_batched_tokens}",
            f"a multiple of the model's mamba chunk of {chunk} tokens",
        )


class _Run(NamedTuple):
    """Buckets of one batch size and query length: contexts ``[start, stop)`` of a list, and possibly one more."""

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
    """Yields, in ascending order, the runs over `kept`, which are the contexts that the edge rule does not change."""
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
    """Returns, for each query, the context that replaces the top of the range; None if `kept` contains it.

    Once the edge rule has changed the context, it stays changed for the following, longer queries.
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
    """Yields the runs. Contexts above what the sequences can have are replaced by that maximum."""
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
    """Returns the runs, before any of their buckets is made. Raises SpecError for no buckets, and for too many."""
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
    """Caps a bucket of speculative decoding. Unlike ``capped_decode`` it never rounds blocks down."""
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
