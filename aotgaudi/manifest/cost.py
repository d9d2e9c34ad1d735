"""What the entries of a manifest cost: hours of compiling if there are too many, and memory while serving.

**Too many.** Users of the public tables met 14,368 prompt and 4,042 decode buckets (vllm-gaudi#762), and about 14 s of
compiling for each of 126 decode buckets (vllm-gaudi#1160). `find_explosion` warns, and names single changes that give fewer.

**Memory.** `estimate_memory` says how much device memory a manifest needs in addition to the weights: the KV cache and the
buffers of the largest steps. It is an estimate from shapes alone, for comparison with a budget before compiling. Sizes are
in bytes of one device, that is of one rank if the spec spreads the model over several. Let e be the bytes of a number in the
spec's dtype, c those of a number in the KV cache, H the hidden size, V the vocabulary, d the width of a head, B the block
size; and for one rank: I its share of the intermediate size, h its query heads, k its KV heads (at least one), L the most
layers. A step has T tokens in r rows, and sees K keys in all::

    prompt (b, q, c)   T = b * q   r = b   K = b * (c * B + q)   masked pairs M = q * K
    decode (b, 1, n)   T = b       r = b   K = n * B             masked pairs M = K
    unified (q, s, u)  T = q       r = q   K = (s + u) * B + q   masked pairs M = q * K

    KV cache      (num_blocks + 1) * B * 2 * k * d * c * L
    activations   T * (2 * H + max((2 * h + 2 * k) * d, 3 * I)) * e   residual, normed, and the widest sublayer
    keys, values  2 * K * k * d * c                                   gathered for one layer
    masks         M * e                                               as a fused attention adds them
    logits        r * V * 4                                           in float32, of the vocabulary

With latent attention (MLA) a token's row is one vector of ``kv_lora_rank + qk_rope_head_dim`` numbers, whole on every rank,
instead of 2 * k * d (``spec/cache_rows.py``). Only one layer runs at a time, and all share their buffers. Weights, adapters,
the allocator's slack and the runtime's own memory are not included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Union

from aotgaudi.entries import DecodeEntry, Entry, PromptEntry, UnifiedEntry
from aotgaudi.errors import SpecError
from aotgaudi.manifest.enumerate import enumerate_entries
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.cache_rows import CacheRows, rows_of
from aotgaudi.spec.change import ValueChange, with_change
from aotgaudi.spec.layer_kinds import LayerKind, keeps_rows, layer_kinds

MANY_STEPS = 2000
"""We warn of more prompt, decode and unified entries than this."""

SECONDS_A_STEP = 14.0
"""Compile time of one bucket on Gaudi, as reported in vllm-gaudi#1160."""

_STEP_KINDS = ("prompt", "decode", "unified")
_USUAL_BATCHED_TOKENS = 8192


@dataclass(frozen=True)
class Explosion:
    """`num_steps`: the entries of each kind of step. `remedies`: single changes of the spec, fewest steps first."""

    num_steps: dict[str, int]
    remedies: tuple[tuple[ValueChange, int], ...]

    @property
    def total(self) -> int:
        """Steps of all kinds."""
        return sum(self.num_steps.values())

    @property
    def compile_seconds(self) -> float:
        """The time for compiling all of them in sequence."""
        return self.total * SECONDS_A_STEP

    def __str__(self) -> str:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.num_steps.items() if count)
        remedies = ", or ".join(
            f"{change.where} = {change.new!r} ({count:,})" for change, count in self.remedies
        )
        return (
            f"{self.total:,} step programs ({kinds}): {self.compile_seconds / 3600:,.1f} hours of compiling at"
            f" {SECONDS_A_STEP:g} s each, as in vllm-gaudi#1160; fewer with"
            f" {remedies or 'lower limits, or bounds under bucketing.prompt and bucketing.decode'}"
        )


def find_explosion(manifest: Manifest) -> Explosion | None:
    """Returns the warning, or None if there are at most `MANY_STEPS` steps."""
    num_steps = {kind: len(manifest.of_kind(kind)) for kind in _STEP_KINDS}
    total = sum(num_steps.values())
    if total <= MANY_STEPS:
        return None
    counted = ((change, _steps_with(manifest.spec, change)) for change in _candidates(manifest.spec))
    fewer = [(change, count) for change, count in counted if count is not None and count < total]
    return Explosion(num_steps, tuple(sorted(fewer, key=lambda remedy: remedy[1])))


def _candidates(spec: BuildSpec) -> Iterator[ValueChange]:
    limits, strategy = spec.limits, spec.bucketing.strategy
    if strategy not in ("exponential", "file"):
        yield ValueChange(("bucketing", "strategy"), strategy, "exponential")
    if limits.max_num_batched_tokens > _USUAL_BATCHED_TOKENS:
        where = ("limits", "max_num_batched_tokens")
        yield ValueChange(where, limits.max_num_batched_tokens, _USUAL_BATCHED_TOKENS)
    if limits.max_num_prefill_seqs > 1:
        yield ValueChange(("limits", "max_num_prefill_seqs"), limits.max_num_prefill_seqs, 1)


def _steps_with(spec: BuildSpec, change: ValueChange) -> int | None:
    """Returns the number of steps after a change; None if the spec cannot have it."""
    try:
        entries = enumerate_entries(with_change(spec, change))
    except SpecError:
        return None
    return sum(entry.kind in _STEP_KINDS for entry in entries)


_LOGIT_BYTES = 4
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

SizedEntry = Union[PromptEntry, DecodeEntry, UnifiedEntry]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBuffers:
    """The bytes that one step needs at the same time."""

    activation_bytes: int
    kv_bytes: int
    mask_bytes: int
    logit_bytes: int

    @property
    def total_bytes(self) -> int:
        """The sum."""
        return self.activation_bytes + self.kv_bytes + self.mask_bytes + self.logit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """`steps`: for each kind the entry that needs most. Steps run one at a time, so only the largest counts."""

    kv_cache_bytes: int
    steps: tuple[tuple[SizedEntry, StepBuffers], ...]

    @property
    def total_bytes(self) -> int:
        """The KV cache, and the buffers of the step that needs most."""
        return self.kv_cache_bytes + max((buffers.total_bytes for _, buffers in self.steps), default=0)


def estimate_memory(spec: BuildSpec, entries: Iterable[Entry]) -> MemoryEstimate:
    """Returns the estimate for a manifest's spec and entries.

    Raises:
        SpecError: the model's config lacks a size that the formulas need.
    """
    largest: dict[str, tuple[SizedEntry, StepBuffers]] = {}
    for entry, buffers in step_buffers(spec, entries):
        if entry.kind not in largest or buffers.total_bytes > largest[entry.kind][1].total_bytes:
            largest[entry.kind] = entry, buffers
    return MemoryEstimate(kv_cache_bytes=kv_cache_bytes(spec), steps=tuple(largest.values()))


def step_buffers(spec: BuildSpec, entries: Iterable[Entry]) -> Iterator[tuple[SizedEntry, StepBuffers]]:
    """Yields the buffers of each step among `entries`. Raises as `estimate_memory` does."""
    factors = _Factors.of(spec)
    for entry in entries:
        if isinstance(entry, (PromptEntry, DecodeEntry, UnifiedEntry)):
            yield entry, factors.buffers(entry)


def kv_cache_bytes(spec: BuildSpec) -> int:
    """Returns the bytes of a rank's KV cache, including all its layers and the padding block. Raises SpecError."""
    limits, of_layers = spec.limits, Counter[int]()
    for cache, num_bytes in _cache_bytes(spec):
        of_layers[cache.layer] += num_bytes * (1 + limits.num_blocks)
    stage = spec.parallel.layers_of_rank(spec.model.num_layers)
    sizes = [of_layers[layer] for layer in range(spec.model.num_layers)]
    return max(sum(sizes[first : first + stage]) for first in range(len(sizes) - stage + 1))


def counted_layers(spec: BuildSpec) -> str | None:
    """Returns in words which layers the KV cache's size counts; None: all, and every token's rows in all of them."""
    kinds, num_layers = _kinds(spec), spec.model.num_layers
    if kinds is None:
        return f"all {num_layers} layers counted, as config.json does not tell which keep states in place of rows"
    num_rows = sum(map(keeps_rows, kinds))
    num_states = sum(kind in ("state", "both") for kind in kinds)
    windows = {cache.layer for cache, _ in _cache_bytes(spec) if cache.reach is not None}
    states = f", the states of {num_states} not counted" if num_states else ""
    return (
        "; ".join(
            [
                *(
                    [f"rows of {num_rows} of {num_layers} layers{states}"]
                    if num_rows < num_layers or states
                    else []
                ),
                *(
                    [f"{len(windows)} of {num_layers} layers with a window, all rows counted"]
                    if windows
                    else []
                ),
            ]
        )
        or None
    )


def kv_bytes_per_token(spec: BuildSpec) -> int:
    """Returns the bytes that a token takes in a layer's caches on a rank, for the layer that keeps most."""
    of_layers = Counter[int]()
    for cache, num_bytes in _cache_bytes(spec):
        of_layers[cache.layer] += num_bytes
    return -(-max(of_layers.values(), default=0) // spec.limits.block_size)


def kv_bytes_read_per_token(spec: BuildSpec) -> int:
    """Returns the bytes that a step reads for a token of its context, in all layers of a rank.

    Windows count as whole contexts. A layer's second caches are left out if they are only read for the newest tokens.
    """
    read = (
        num_bytes
        for cache, num_bytes in _cache_bytes(spec)
        if not cache.part or any(kind.reach is None for kind in cache.rows)
    )
    return -(-sum(read) // spec.limits.block_size)


def _cache_bytes(spec: BuildSpec) -> Iterator[tuple[CacheRows, int]]:
    """Yields each cache of a rank in layers that keep rows, and the bytes of a block in it."""
    kinds = _kinds(spec)
    quantization, parallel = spec.model.quantization, spec.parallel
    value_bytes = None if quantization is None else quantization.kv_value_bytes
    for cache in rows_of(spec.model):
        if kinds and not keeps_rows(kinds[cache.layer]):
            continue
        own = replace(cache, heads=parallel.kv_heads_of_rank(cache.heads))
        each = value_bytes or _DTYPE_BYTES[spec.model.dtype] if own.dtype is None else _DTYPE_BYTES[own.dtype]
        yield own, own.values_per_block(spec.limits.block_size) * each


def _kinds(spec: BuildSpec) -> tuple[LayerKind, ...] | None:
    """Returns what each layer keeps; None if the config does not say, or not of each."""
    nested = spec.model.config.get("text_config")
    kinds = layer_kinds({**spec.model.config, **(nested if isinstance(nested, dict) else {})})
    return kinds if kinds is not None and len(kinds) == spec.model.num_layers else None


@dataclass(frozen=True, slots=True)
class _Factors:
    """Bytes for each token, key, masked pair and row of a step of one model."""

    block_size: int
    per_token: int
    per_key: int
    per_pair: int
    per_row: int

    @classmethod
    def of(cls, spec: BuildSpec) -> _Factors:
        model, parallel = spec.model, spec.parallel
        query_heads = parallel.share_of_rank(model.num_attention_heads)
        heads = 2 * (query_heads + parallel.kv_heads_of_rank(model.num_kv_heads)) * model.head_dim
        wide = max(heads, 3 * parallel.share_of_rank(model.intermediate_size))
        dtype_bytes = _DTYPE_BYTES[model.dtype]
        return cls(
            block_size=spec.limits.block_size,
            per_token=(2 * model.hidden_size + wide) * dtype_bytes,
            per_key=kv_bytes_per_token(spec),
            per_pair=dtype_bytes,
            per_row=model.vocab_size * _LOGIT_BYTES,
        )

    def buffers(self, entry: SizedEntry) -> StepBuffers:
        tokens, rows, keys, pairs = _counts(entry, self.block_size)
        return StepBuffers(
            activation_bytes=tokens * self.per_token,
            kv_bytes=keys * self.per_key,
            mask_bytes=pairs * self.per_pair,
            logit_bytes=rows * self.per_row,
        )


def _counts(entry: SizedEntry, block_size: int) -> tuple[int, int, int, int]:
    """Returns the tokens, rows, keys and masked pairs of a step."""
    if isinstance(entry, PromptEntry):
        keys = entry.batch_size * (entry.num_ctx_blocks * block_size + entry.query_len)
        return entry.batch_size * entry.query_len, entry.batch_size, keys, entry.query_len * keys
    if isinstance(entry, DecodeEntry):
        keys = entry.num_blocks * block_size
        return entry.batch_size, entry.batch_size, keys, keys
    blocks = entry.num_shared_blocks + entry.num_unique_blocks
    keys = blocks * block_size + entry.query_len
    return entry.query_len, entry.query_len, keys, entry.query_len * keys
