"""How many bytes weights, KV caches and steps take, and how many KV blocks fit. Knows no device and allocates nothing.

All that speaks of a server's memory takes its numbers from here. They follow from shapes alone, in bytes of one device, that
is of one rank if the spec spreads the model over several. Let e be the bytes of a number in the spec's dtype, c those of a
number in the KV cache, H the hidden size, V the vocabulary, d the width of a head, B the block size; and for one rank: I its
share of the intermediate size, h its query heads, k its KV heads (at least one), L the most layers. A step has T tokens in r
rows, and sees K keys in all::

    prompt (b, q, c)   T = b * q   r = b   K = b * (c * B + q)   masked pairs M = q * K
    decode (b, 1, n)   T = b       r = b   K = n * B             masked pairs M = K
    unified (q, s, u)  T = q       r = q   K = (s + u) * B + q   masked pairs M = q * K

    KV cache      (num_blocks + 1) * B * 2 * k * d * c * L
    activations   T * (2 * H + max((2 * h + 2 * k) * d, 3 * I)) * e   residual, normed, and the widest sublayer
    keys, values  2 * K * k * d * c                                   gathered for one layer
    masks         M * e                                               as a fused attention adds them
    logits        r * V * 4                                           in float32, of the vocabulary

``spec/cache_rows.py`` says what layers keep other than that: one vector of ``kv_lora_rank + qk_rope_head_dim`` numbers a
token with latent attention (MLA), whole on every rank; several caches a layer in DeepSeek V4. Layers with a window keep all
rows. Recurrent states are not counted (`counted_layers`). Our CPU decode reads its blocks where they are
(backends/inductor/paged_decode.h), so it gathers none. Steps run one at a time and layers share their buffers, so only the
largest step counts. Weights are those that programs read (``bundle/programs.py``). Adapters are not included.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from string import ascii_lowercase
from typing import Protocol, Union

from aotgaudi.entries import DecodeEntry, Entry, PromptEntry, UnifiedEntry
from aotgaudi.errors import SpecError, TargetError, counted
from aotgaudi.machine import Memory
from aotgaudi.spec.build_spec import BuildSpec, ParallelSpec
from aotgaudi.spec.cache_rows import CacheRows, rows_of
from aotgaudi.spec.layer_kinds import LayerKind, keeps_rows, layer_kinds
from aotgaudi.spec.limits import LARGEST_LIMIT, ServingLimits
from aotgaudi.spec.model import ModelSpec

PROCESS_BYTES = 384 << 20
"""What the processes of a server take besides: Python, torch, tokenizers. We measured 338 MiB for SmolLM2 135M on a CPU."""

DRIFT_BYTES = 64 << 20
"""By how much the free memory of a server's next start may differ: its processes start beside each other, at times of their
own. We saw 40 MB. The number of blocks that a refusal names leaves this free."""

_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_LOGIT_DTYPE = "float32"


def sized(num_bytes: float) -> str:
    """Returns a size in powers of 1024: ``1.50 GiB``."""
    if num_bytes < 2**10:
        return f"{num_bytes:,.0f} B"
    unit, name = next(pair for pair in _UNITS if num_bytes >= pair[0])
    return f"{num_bytes / unit:,.2f} {name}"


def dtype_bytes(dtype: str) -> int:
    """Returns the bytes of a number by torch's name of its dtype, which says the bits (``float8_e4m3fn``); a bool has 8."""
    return int(dtype.lstrip(ascii_lowercase).partition("_")[0] or 8) // 8


def tensor_bytes(shape: Iterable[int], dtype: str) -> int:
    """Returns the bytes of a contiguous tensor."""
    return math.prod(shape) * dtype_bytes(dtype)


# KV caches


@dataclass(frozen=True, slots=True)
class KvCache:
    """The KV cache of a device: `block_bytes` for each block, and `fixed_bytes` for blocks that hold no sequence's rows."""

    block_bytes: int
    fixed_bytes: int

    @classmethod
    def of(cls, spec: BuildSpec) -> KvCache:
        """Returns that of a rank. Raises SpecError if the model's config lacks a size."""
        return cls.of_model(spec.model, spec.parallel, spec.limits.block_size)

    @classmethod
    def of_model(cls, model: ModelSpec, parallel: ParallelSpec, block_size: int) -> KvCache:
        """Returns that of the pipeline stage whose layers keep most: it has room for the fewest blocks. Raises SpecError."""
        of_layers = Counter[int]()
        for cache, num_bytes in _cache_bytes(model, parallel, block_size):
            of_layers[cache.layer] += num_bytes
        stage = parallel.layers_of_rank(model.num_layers)
        sizes = [of_layers[layer] for layer in range(model.num_layers)]
        block_bytes = max(sum(sizes[first : first + stage]) for first in range(len(sizes) - stage + 1))
        return cls(block_bytes, fixed_bytes=block_bytes)

    def num_bytes(self, num_blocks: int) -> int:
        """Returns the bytes of a cache with `num_blocks` usable blocks."""
        return self.fixed_bytes + num_blocks * self.block_bytes

    def blocks_in(self, num_bytes: float) -> int:
        """Returns how many usable blocks `num_bytes` hold; 0 if none."""
        return max(0, min(LARGEST_LIMIT, int((num_bytes - self.fixed_bytes) // max(1, self.block_bytes))))


def kv_cache_bytes(spec: BuildSpec) -> int:
    """Returns the bytes of a rank's KV cache, including all its layers and the padding block. Raises SpecError."""
    return KvCache.of(spec).num_bytes(spec.limits.num_blocks)


def counted_layers(spec: BuildSpec) -> str | None:
    """Returns in words which layers the KV cache's size counts; None: all, and every token's rows in all of them."""
    kinds, num_layers = _kinds(spec.model), spec.model.num_layers
    if kinds is None:
        return f"all {num_layers} layers counted, as config.json does not tell which keep states in place of rows"
    num_rows = sum(map(keeps_rows, kinds))
    num_states = sum(kind in ("state", "both") for kind in kinds)
    windows = {cache.layer for cache, _ in _caches_of(spec) if cache.reach is not None}
    states = f", the states of {num_states} not counted" if num_states else ""
    said = []
    if num_rows < num_layers or states:
        said.append(f"rows of {num_rows} of {num_layers} layers{states}")
    if windows:
        said.append(f"{len(windows)} of {num_layers} layers with a window, all rows counted")
    return "; ".join(said) or None


def described_cache(limits: ServingLimits, num_bytes: int) -> str:
    """Returns in words what a KV cache of `num_bytes` holds."""
    num_tokens = limits.num_blocks * limits.block_size
    num_whole = limits.num_blocks // limits.max_blocks_per_seq
    return (
        f"{sized(num_bytes)}, {counted(limits.num_blocks, 'block')} of {limits.block_size} tokens: {num_tokens:,} tokens,"
        f" or {counted(num_whole, 'sequence')} of max_model_len {limits.max_model_len:,}; max_num_seqs is"
        f" {limits.max_num_seqs:,}"
    )


def with_kv_cache_memory(spec: BuildSpec, num_bytes: int) -> BuildSpec:
    """Returns `spec` with as many KV blocks as `num_bytes` hold beside the padding block, in place of its own number.

    For backends whose units take any number of blocks (those not in `backends.base.FIXED_NUM_BLOCKS`). That they do is
    ensured where they are made: graphs are traced with an open number (graphs/forms.py), a unit's text writes no number for
    it (graphs/canonical.py), and a unit is stored only after it ran on another number than the compiler saw
    (backends/inductor/check.py).

    Raises:
        SpecError: a sequence of max_model_len needs more; or the model's config lacks a size.
    """
    cache, limits = KvCache.of(spec), spec.limits
    num_blocks, fewest = cache.blocks_in(num_bytes), limits.max_blocks_per_seq
    if num_blocks < fewest:
        raise SpecError(
            "--kv-cache-memory",
            f"is {sized(num_bytes)}, which holds {counted(num_blocks, 'KV block')}; a sequence of max_model_len"
            f" {limits.max_model_len:,} needs {fewest:,}",
            f"at least {memory_option(cache.num_bytes(fewest))}",
        )
    return spec.model_copy(update={"limits": limits.model_copy(update={"num_blocks": num_blocks})})


def memory_option(num_bytes: int) -> str:
    """Returns the exact size as options take it: ``3GiB``, ``1536KiB``, ``1000``."""
    unit, name = next((pair for pair in _UNITS if num_bytes % pair[0] == 0), (1, ""))
    return f"{num_bytes // unit}{name}"


def kv_bytes_per_token(spec: BuildSpec) -> int:
    """Returns the bytes that a token takes in a layer's caches on a rank, for the layer that keeps most."""
    of_layers = Counter[int]()
    for cache, num_bytes in _caches_of(spec):
        of_layers[cache.layer] += num_bytes
    return -(-max(of_layers.values(), default=0) // spec.limits.block_size)


def kv_bytes_read_per_token(spec: BuildSpec) -> int:
    """Returns the bytes that a step reads for a token of its context, in all layers of a rank.

    Windows count as whole contexts. A layer's second caches are left out if they are only read for the newest tokens.
    """
    read = (
        num_bytes
        for cache, num_bytes in _caches_of(spec)
        if not cache.part or any(kind.reach is None for kind in cache.rows)
    )
    return -(-sum(read) // spec.limits.block_size)


def _caches_of(spec: BuildSpec) -> Iterator[tuple[CacheRows, int]]:
    return _cache_bytes(spec.model, spec.parallel, spec.limits.block_size)


def _cache_bytes(
    model: ModelSpec, parallel: ParallelSpec, block_size: int
) -> Iterator[tuple[CacheRows, int]]:
    """Yields each cache of a rank in layers that keep rows, and the bytes of a block in it."""
    kinds = _kinds(model)
    value_bytes = None if model.quantization is None else model.quantization.kv_value_bytes
    for cache in rows_of(model):
        if kinds and not keeps_rows(kinds[cache.layer]):
            continue
        own = replace(cache, heads=parallel.kv_heads_of_rank(cache.heads))
        each = value_bytes or dtype_bytes(model.dtype) if own.dtype is None else dtype_bytes(own.dtype)
        yield own, own.values_per_block(block_size) * each


def _kinds(model: ModelSpec) -> tuple[LayerKind, ...] | None:
    """Returns what each layer keeps; None if the config does not say, or not of each."""
    nested = model.config.get("text_config")
    kinds = layer_kinds({**model.config, **(nested if isinstance(nested, dict) else {})})
    return kinds if kinds is not None and len(kinds) == model.num_layers else None


# Steps

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


def _largest_steps(spec: BuildSpec, entries: Iterable[Entry]) -> tuple[tuple[SizedEntry, StepBuffers], ...]:
    """Returns the entry of each kind that needs most, the first one of several. Raises SpecError."""
    factors, largest = _Factors.of(spec), dict[str, tuple[SizedEntry, StepBuffers]]()
    for entry in entries:
        if isinstance(entry, (PromptEntry, DecodeEntry, UnifiedEntry)):
            buffers = factors.buffers(entry)
            if entry.kind not in largest or buffers.total_bytes > largest[entry.kind][1].total_bytes:
                largest[entry.kind] = entry, buffers
    return tuple(largest.values())


@dataclass(frozen=True, slots=True)
class _Factors:
    """Bytes for each token, key, masked pair and row of a step of one model."""

    block_size: int
    per_token: int
    per_key: int
    per_pair: int
    per_row: int
    gathers: bool

    @classmethod
    def of(cls, spec: BuildSpec) -> _Factors:
        model, parallel = spec.model, spec.parallel
        query_heads = parallel.share_of_rank(model.num_attention_heads)
        heads = 2 * (query_heads + parallel.kv_heads_of_rank(model.num_kv_heads)) * model.head_dim
        wide = max(heads, 3 * parallel.share_of_rank(model.intermediate_size))
        each = dtype_bytes(model.dtype)
        return cls(
            block_size=spec.limits.block_size,
            per_token=(2 * model.hidden_size + wide) * each,
            per_key=kv_bytes_per_token(spec),
            per_pair=each,
            per_row=model.vocab_size * dtype_bytes(_LOGIT_DTYPE),
            gathers=not (spec.has_own_steps and spec.target.backend == "cpu"),
        )

    def buffers(self, entry: SizedEntry) -> StepBuffers:
        tokens, rows, keys, pairs = _counts(entry, self.block_size)
        gathers = self.gathers or not isinstance(entry, DecodeEntry)
        return StepBuffers(
            activation_bytes=tokens * self.per_token,
            kv_bytes=keys * self.per_key * gathers,
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


# A server


class _Tensor(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


def tensors_bytes(tensors: Iterable[_Tensor]) -> int:
    """Returns the bytes of tensors, each name counted once."""
    return sum(tensor_bytes(one.shape, one.dtype) for one in {one.name: one for one in tensors}.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """What a server needs of a device: weights, KV cache, its largest step, and what is reserved for others.

    Attributes:
        num_blocks: Usable KV blocks.
        fewest_blocks: What one sequence of max_model_len needs.
        steps: The entry of each kind that needs most, and its buffers. Steps run one at a time, so only the largest counts.
        reserved_bytes: What is kept for `reserved_for`, which is no tensor of a step.
        is_open: Whether a server can be told another number of blocks (`with_kv_cache_memory`).
    """

    cache: KvCache
    num_blocks: int
    fewest_blocks: int = 1
    weights_bytes: int = 0
    steps: tuple[tuple[SizedEntry, StepBuffers], ...] = ()
    reserved_bytes: int = 0
    reserved_for: str = "processes"
    is_open: bool = False

    @classmethod
    def of(cls, spec: BuildSpec, entries: Iterable[Entry]) -> MemoryNeed:
        """Returns what caches and steps need. Raises SpecError if the model's config lacks a size."""
        limits = spec.limits
        return cls(
            cache=KvCache.of(spec),
            num_blocks=limits.num_blocks,
            fewest_blocks=limits.max_blocks_per_seq,
            steps=_largest_steps(spec, entries),
        )

    @property
    def cache_bytes(self) -> int:
        """The KV cache."""
        return self.cache.num_bytes(self.num_blocks)

    @property
    def step_bytes(self) -> int:
        """The buffers of the step that needs most."""
        return max((buffers.total_bytes for _, buffers in self.steps), default=0)

    @property
    def total_bytes(self) -> int:
        """The sum."""
        return self.cache_bytes + self._other_bytes

    @property
    def _other_bytes(self) -> int:
        return self.weights_bytes + self.step_bytes + self.reserved_bytes

    def blocks_that_fit(self, free_bytes: int) -> int:
        """Returns the largest `num_blocks` with which the server fits into `free_bytes`; 0 if it does not with any."""
        return self.cache.blocks_in(free_bytes - self._other_bytes)

    def require(self, memory: Memory, where: str) -> None:
        """Raises TargetError, with all figures in one line, unless the server fits."""
        if self.total_bytes > memory.free_bytes:
            raise TargetError(f"target: {where} has too little memory: {self.described(memory)}")

    def described(self, memory: Memory) -> str:
        """Returns in words what is needed, what is free, and the most blocks that fit at the next start, too."""
        step = f", the largest step {sized(self.step_bytes)}" if self.steps else ""
        fitting = self.blocks_that_fit(memory.free_bytes - DRIFT_BYTES * self.is_open)
        if fitting < self.fewest_blocks:
            fitting = self.blocks_that_fit(memory.free_bytes)
        return (
            f"weights need {sized(self.weights_bytes)}, {counted(self.num_blocks, 'KV block')} {sized(self.cache_bytes)}"
            f"{step} and {self.reserved_for} {sized(self.reserved_bytes)}, {sized(self.total_bytes)} in all;"
            f" {sized(memory.free_bytes)} of {sized(memory.total_bytes)} are free;"
            f" {self.remedy(fitting)}"
        )

    def remedy(self, num_blocks: int) -> str:
        """Returns in words what to do where `num_blocks` fit."""
        if not num_blocks:
            return "no number of KV blocks would fit"
        if num_blocks < self.fewest_blocks:
            fitting = counted(num_blocks, "KV block")
            return f"{fitting} would fit, and a sequence of max_model_len needs {self.fewest_blocks:,}"
        option = f", or --kv-cache-memory {memory_option(self.cache.num_bytes(num_blocks))}" * self.is_open
        return f"limits.num_blocks may be {num_blocks:,} at most{option}"
