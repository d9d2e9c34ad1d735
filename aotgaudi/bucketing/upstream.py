"""What vllm-gaudi does with a table at run time: how it looks a step up, and which buckets its warm-up compiles.

**Look-up.** A step runs in the first bucket that is large enough. If there is none, the server adds a bucket and compiles it
while the request waits; `aotgaudi coverage` names it. Our own engine looks steps up differently (``bucketing.lookup``).
Source: vllm_gaudi/extension/bucketing/common.py 257-327 and 550-560 at 091bbad, and the same place in older versions;
vllm_hpu_extension/bucketing/common.py at 8211e0b and ad55828.

**Warm-up.** The server runs a dummy step for each bucket and compiles the bucket that the dummy is looked up to
(vllm_gaudi/v1/worker/hpu_model_runner.py at 091bbad: ``warmup_graphs`` 5466, ``_prepare_dummy_scenario`` 5623).

* *Prompts.* From v0.19.1 on, if query and context together exceed the model's length, the dummies have only the whole
  blocks of context that fit in addition to the query (5637-5651). So of the buckets of one query length with at least that
  many blocks, only the smallest is compiled. Older versions drop such buckets from their tables.
* *Prompts of several sequences* run in one batch only while no dummy has a context and their padded tokens fit a step
  (``_can_merge_prefill_contents`` 2548; up to v0.13.0 a context does not matter, and newer versions than v0.26.0 never
  batch prompts of models with mamba layers). Other dummies run one by one, as prompts of one sequence. Whether a batch
  fits is itself looked up, which may add a bucket that nothing compiles.
* *Merged prefill.* A dummy that exceeds the model's length becomes ``max_num_seqs`` smaller ones (5587-5594). Their
  contexts are padded to 32 blocks, not to those of a bucket (``_bucketize_merged_prompt`` 2527), so buckets with other
  contexts are never compiled.
* *Decodes* are compiled as listed. Under contiguous paged attention a dummy has two blocks per sequence (its length is a
  whole block, and the next token needs another). Its batch is looked up with that number, before the highest block id.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from aotgaudi.bucketing.combine import ProductRules
from aotgaudi.bucketing.strategy import Bucket, BucketingInputs

_BATCH_STEP = 2
_QUERY_STEP = 32
_CONTEXT_STEP = 32

ContextCap = Literal["none", "cache", "decode_table", "model"]
"""The bound on the context of an added bucket: the cache, the largest decode context, or the model's length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupRules:
    """What changed between versions. The defaults are those of vllm-gaudi at 091bbad.

    `rounding`: whether added buckets grow with the cube root, or are the next power of two, block, and even number.
    `caps_batch`: an added batch is at most max_num_seqs. `widens_with_mamba`: query lengths are rounded to mamba chunks.
    `slices`: long queries are rounded to slices if attention is sliced. `caps_decode`: a decode is looked up with at most
    the largest decode context, and an added bucket is not added twice. `has_seeds`: a look-up can be limited to decode
    buckets before speculation. `batches`: which prompts share a step: all, those without a context, or of these only those
    of models without mamba layers.
    """

    rounding: Literal["cube_root", "power_of_two"] = "cube_root"
    caps_batch: bool = True
    widens_with_mamba: bool = True
    slices: bool = True
    prompt_cap: ContextCap = "model"
    decode_cap: ContextCap = "decode_table"
    caps_decode: bool = True
    has_seeds: bool = True
    batches: Literal["all", "fresh", "fresh_attention"] = "fresh_attention"


class UpstreamAnswer(NamedTuple):
    """The bucket in which upstream runs a step, and whether it was added (and so compiled) for this step."""

    bucket: Bucket
    is_added: bool


class UpstreamLookup:
    """Upstream's tables, which grow with the steps that are looked up. Not thread-safe."""

    def __init__(
        self,
        rules: LookupRules,
        inputs: BucketingInputs,
        prompt_table: Iterable[Bucket],
        decode_table: Iterable[Bucket],
        decode_seeds: Iterable[Bucket] = (),
    ) -> None:
        """Starts with the tables of a strategy. `decode_seeds` are the decode buckets before speculation."""
        self._rules, self._inputs = rules, inputs
        self._prompt, self._decode = sorted(prompt_table), sorted(decode_table)
        self._seeds = sorted(decode_seeds)
        self._largest_decode = max((context for _, _, context in self._decode), default=0)

    def prompts_downwards(self) -> Iterator[Bucket]:
        """Yields the prompt buckets from the last on, as ``reversed`` does while look-ups add others."""
        yield from reversed(self._prompt)

    def find_prompt(self, batch_size: int, query_len: int, num_ctx_blocks: int) -> UpstreamAnswer:
        """Returns upstream's bucket for `batch_size` (>= 1) chunks of `query_len` (>= 1) tokens, after a context (>= 0)."""
        found = first_covering(self._prompt, (batch_size, query_len, num_ctx_blocks))
        if found is not None:
            return UpstreamAnswer(found, is_added=False)
        context = self._capped(self._rounded_context(num_ctx_blocks), self._rules.prompt_cap)
        added = (self._rounded_batch(batch_size), self._rounded_query(query_len), context)
        insort(self._prompt, added)
        return UpstreamAnswer(added, is_added=True)

    def find_decode(self, batch_size: int, num_blocks: int, *, seeds_first: bool = False) -> UpstreamAnswer:
        """Returns upstream's bucket for one token of each of `batch_size` sequences, over `num_blocks` in all.

        `seeds_first` is upstream's ``seed_buckets``: it leaves out buckets of speculative decoding.
        """
        if self._rules.caps_decode and self._largest_decode > 0:
            num_blocks = min(num_blocks, self._largest_decode)
        wanted = (batch_size, 1, num_blocks)
        found = None
        if seeds_first and self._rules.has_seeds:
            found = first_covering(self._seeds, wanted)
        found = found or first_covering(self._decode, wanted)
        return UpstreamAnswer(found, is_added=False) if found else self._add_decode(wanted)

    def _add_decode(self, wanted: Bucket) -> UpstreamAnswer:
        batch_size, query_len, num_blocks = wanted
        if self._rules.rounding == "cube_root":
            query_len = self._rounded_query(query_len)
        context = self._capped(self._rounded_context(num_blocks), self._rules.decode_cap)
        added = (self._rounded_batch(batch_size), query_len, context)
        if self._rules.caps_decode and added in self._decode:
            return UpstreamAnswer(added, is_added=False)
        insort(self._decode, added)
        return UpstreamAnswer(added, is_added=True)

    def _rounded_batch(self, batch_size: int) -> int:
        if self._rules.rounding == "power_of_two":
            return int(2 ** math.ceil(math.log2(batch_size)))
        rounded = calc_fallback_value(batch_size, _BATCH_STEP)
        return min(rounded, self._inputs.max_num_seqs) if self._rules.caps_batch else rounded

    def _rounded_query(self, query_len: int) -> int:
        inputs, rules = self._inputs, self._rules
        if rules.rounding == "power_of_two":
            return -(-query_len // inputs.block_size) * inputs.block_size
        if rules.slices and inputs.sliding is not None and query_len >= inputs.sliding.threshold:
            return -(-query_len // inputs.sliding.slice_len) * inputs.sliding.slice_len
        step = max(_QUERY_STEP, inputs.mamba_chunk_size) if rules.widens_with_mamba else _QUERY_STEP
        return min(calc_fallback_value(query_len, step), inputs.max_num_batched_tokens)

    def _rounded_context(self, context: int) -> int:
        if self._rules.rounding == "power_of_two":
            return -(-context // 2) * 2
        return calc_fallback_value(context, _CONTEXT_STEP)

    def _capped(self, context: int, cap: ContextCap) -> int:
        bounds = {
            "none": context,
            "cache": self._inputs.num_blocks,
            "decode_table": self._largest_decode or context,
            "model": -(-(self._inputs.max_model_len - 1) // self._inputs.block_size),
        }
        return min(context, bounds[cap])


def first_covering(table: list[Bucket], wanted: Bucket) -> Bucket | None:
    """Returns the first bucket of an ascending table that is at least as large in every dimension.

    This is the lexicographically first one, not the one with the least padding.
    """
    for index in range(bisect_left(table, wanted), len(table)):
        bucket = table[index]
        if bucket[0] >= wanted[0] and bucket[1] >= wanted[1] and bucket[2] >= wanted[2]:
            return bucket
    return None


def calc_fallback_value(value: int, base_step: int) -> int:
    """Returns `value` rounded up to a multiple of its cube root (itself rounded up) times `base_step`. 0 and 1 stay."""
    if value <= 1:
        return value
    step = math.ceil(math.pow(value, 1 / 3)) * base_step
    return -(-value // step) * step


_DUMMY_BLOCKS = 2
_MERGED_BLOCKS = 32


def keeps_too_long(rules: ProductRules) -> bool:
    """Whether a version keeps prompt buckets of more tokens than the model's length, and so warms up shorter ones."""
    return rules.prompt_fit == "apart"


def blocks_beside(query_len: int, inputs: BucketingInputs) -> int:
    """Returns the whole blocks of context that the model's length leaves next to a query."""
    return max(0, (inputs.max_model_len - query_len) // inputs.block_size)


def cold_prompts(
    table: Iterable[Bucket], product: ProductRules, rules: LookupRules, inputs: BucketingInputs
) -> Iterator[Bucket]:
    """Yields the buckets of an ascending prompt table that the warm-up does not compile."""
    buckets = tuple(table)
    compiled = set(warmed_prompts(buckets, product, rules, inputs))
    yield from (bucket for bucket in buckets if bucket not in compiled)


def warmed_prompts(
    table: Iterable[Bucket], product: ProductRules, rules: LookupRules, inputs: BucketingInputs
) -> Iterator[Bucket]:
    """Yields the shapes of the prompt steps that the warm-up of an ascending table runs, in order, with repetitions."""
    lookup = UpstreamLookup(rules, inputs, table, ())
    return _PromptWarmUp(lookup, rules, inputs, keeps_too_long(product)).compiled()


_Dummy = tuple[int, int]
"""The tokens and the context blocks of a dummy prompt."""


@dataclass(frozen=True, slots=True)
class _PromptWarmUp:
    """The prompt steps of a warm-up. `lookup` is changed by them. `cuts`: whether dummies fit the model's length."""

    lookup: UpstreamLookup
    rules: LookupRules
    inputs: BucketingInputs
    cuts: bool

    def compiled(self) -> Iterator[Bucket]:
        """Yields the shape of each step, in order."""
        most = self.inputs.max_num_batched_tokens
        for size, query_len, blocks in self.lookup.prompts_downwards():
            if query_len <= most:
                batches = list(
                    self._batches(size * self._dummies(query_len, blocks))
                )  # All are formed first.
                yield from map(self._shape, batches)

    def _dummies(self, query_len: int, blocks: int) -> list[_Dummy]:
        inputs = self.inputs
        if query_len + blocks * inputs.block_size <= inputs.max_model_len:
            return [(query_len, blocks)]
        if inputs.merged_prefill:
            return list(
                zip(*(_evenly(total, inputs.max_num_seqs) for total in (query_len, blocks)), strict=True)
            )
        return [(query_len, blocks_beside(query_len, inputs) if self.cuts else blocks)]

    def _batches(self, dummies: list[_Dummy]) -> Iterator[list[_Dummy]]:
        batch: list[_Dummy] = []
        for dummy in dummies:
            if self._joins(batch, dummy):
                batch = [*batch, dummy]
                continue
            if batch:
                yield batch
            batch = [dummy]
        yield batch

    def _joins(self, batch: list[_Dummy], dummy: _Dummy) -> bool:
        inputs = self.inputs
        has_mamba = inputs.mamba_chunk_size > 0 and self.rules.batches == "fresh_attention"
        has_context = bool(batch) and any(blocks for _, blocks in (*batch, dummy))
        if has_mamba or (has_context and self.rules.batches != "all"):
            return False
        if not inputs.merged_prefill and len(batch) >= inputs.max_num_prefill_seqs:
            return False
        size, query_len, _ = self._shape([(tokens, 0) for tokens, _ in (*batch, dummy)])
        return size <= inputs.max_num_prefill_seqs and size * query_len <= inputs.max_num_batched_tokens

    def _shape(self, batch: list[_Dummy]) -> Bucket:
        """Returns the shape of a step (``_bucketize_2d_prompt``, ``_bucketize_merged_prompt``)."""
        tokens, blocks = zip(*batch, strict=True)
        if not self.inputs.merged_prefill:
            return self.lookup.find_prompt(len(batch), max(tokens), max(blocks)).bucket
        _, query_len, _ = self.lookup.find_prompt(1, sum(tokens), sum(blocks)).bucket
        return 1, query_len, -(-sum(blocks) // _MERGED_BLOCKS) * _MERGED_BLOCKS


def _evenly(total: int, num: int) -> list[int]:
    """Returns `num` parts of `total`, the larger ones first."""
    base, rest = divmod(total, num)
    return [base + (index < rest) for index in range(num)]


def cold_decodes(table: Iterable[Bucket], rules: LookupRules, inputs: BucketingInputs) -> Iterator[Bucket]:
    """Yields the buckets of a decode table that the warm-up does not compile."""
    if not inputs.contiguous_pa:
        return
    buckets = tuple(table)
    lookup = UpstreamLookup(rules, inputs, (), buckets)
    padded = {size: lookup.find_decode(size, _DUMMY_BLOCKS * size).bucket[0] for size, _, _ in buckets}
    compiled = {
        (padded[size], query, _blocks(lookup, padded[size], blocks)) for size, query, blocks in buckets
    }
    yield from (bucket for bucket in buckets if bucket not in compiled)


def _blocks(lookup: UpstreamLookup, batch_size: int, num_blocks: int) -> int:
    return max(num_blocks, lookup.find_decode(batch_size, num_blocks).bucket[2])
