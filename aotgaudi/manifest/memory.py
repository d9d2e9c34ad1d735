"""Whether a server fits into a memory, and how many KV blocks would. Knows no device and allocates nothing.

The sizes of caches and step buffers are those of `aotgaudi.manifest.cost`, those of weights are what programs read. Steps
run one at a time, so only the largest counts. A decode step of the CPU reads its blocks where they are
(backends/inductor/paged_decode.h), so its keys and values, which others gather, do not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aotgaudi.entries import DecodeEntry, Entry, PromptEntry, UnifiedEntry
from aotgaudi.errors import TargetError, counted
from aotgaudi.machine import Memory
from aotgaudi.manifest.cost import kv_cache_bytes, step_buffers
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.limits import ServingLimits

_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def sized(num_bytes: int) -> str:
    """Returns a size in powers of 1024: ``1.50 GiB``."""
    unit, name = next((pair for pair in _UNITS if num_bytes >= pair[0]), _UNITS[-1])
    return f"{num_bytes / unit:,.2f} {name}"


def described_cache(limits: ServingLimits, num_bytes: int) -> str:
    """Returns in words what a KV cache of `num_bytes` holds."""
    num_tokens = limits.num_blocks * limits.block_size
    num_whole = limits.num_blocks // limits.max_blocks_per_seq
    return (
        f"{sized(num_bytes)}, {counted(limits.num_blocks, 'block')} of {limits.block_size} tokens: {num_tokens:,} tokens,"
        f" or {counted(num_whole, 'sequence')} of max_model_len {limits.max_model_len:,}; max_num_seqs is"
        f" {limits.max_num_seqs:,}"
    )


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What a server needs: `weights_bytes`, `cache_bytes`, and the buffers of its largest step.

    `buffers` has the bytes of steps by the number of blocks that they read. `block_bytes` is what one block more would take.
    """

    limits: ServingLimits
    weights_bytes: int
    cache_bytes: int
    block_bytes: int
    buffers: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, spec: BuildSpec, entries: Iterable[Entry], weights_bytes: int) -> MemoryNeed:
        """Returns what a server of `entries` needs. Raises SpecError if the model's config lacks a size."""
        limits, cache_bytes = spec.limits, kv_cache_bytes(spec)
        more = spec.model_copy(
            update={"limits": limits.model_copy(update={"num_blocks": limits.num_blocks + 1})}
        )
        largest: dict[int, int] = {}
        for entry, buffers in step_buffers(spec, entries):
            gathered = buffers.kv_bytes if isinstance(entry, DecodeEntry) else 0
            blocks = _num_blocks(entry)
            largest[blocks] = max(largest.get(blocks, 0), buffers.total_bytes - gathered)
        block_bytes = kv_cache_bytes(more) - cache_bytes
        return cls(limits, weights_bytes, cache_bytes, block_bytes, tuple(sorted(largest.items())))

    @property
    def buffer_bytes(self) -> int:
        """The buffers of the step that needs most."""
        return max((size for _, size in self.buffers), default=0)

    @property
    def total_bytes(self) -> int:
        """The sum."""
        return self.weights_bytes + self.cache_bytes + self.buffer_bytes

    def fitting_blocks(self, free_bytes: int) -> int:
        """Returns the largest `num_blocks` with which a server would fit; 0 if none would."""
        fixed = self.weights_bytes + self.cache_bytes - self.limits.num_blocks * self.block_bytes
        fitting = needed = 0
        steps = ((1, 0), *self.buffers)
        for (_, size), above in zip(steps, (*steps[1:], None), strict=True):
            needed = max(needed, size)  # A step that reads more blocks than there are does not exist.
            most = (free_bytes - fixed - needed) // max(1, self.block_bytes)
            fitting = max(fitting, most if above is None else min(most, above[0] - 1))
        return fitting

    def require(self, memory: Memory) -> None:
        """Raises TargetError, with all figures in one line, unless the server fits. Memory that is not known is enough."""
        free_bytes = memory.free_bytes
        if not memory.total_bytes or self.total_bytes <= free_bytes:
            return
        fitting = self.fitting_blocks(free_bytes)
        remedy = "no number of KV blocks would fit"
        if fitting:
            longest = fitting * self.limits.block_size
            is_long = longest < self.limits.max_model_len
            remedy = f"limits.num_blocks may be {fitting:,} at most" + (
                f", with limits.max_model_len {longest:,} at most" * is_long
            )
        raise TargetError(
            f"target: this machine has too little memory: weights need {sized(self.weights_bytes)},"
            f" {counted(self.limits.num_blocks, 'KV block')} {sized(self.cache_bytes)} and the largest step"
            f" {sized(self.buffer_bytes)}, {sized(self.total_bytes)} in all; {sized(free_bytes)} of"
            f" {sized(memory.total_bytes)} are free, control groups counted; {remedy}"
        )


def _num_blocks(entry: PromptEntry | DecodeEntry | UnifiedEntry) -> int:
    if isinstance(entry, PromptEntry):
        return entry.num_ctx_blocks
    if isinstance(entry, DecodeEntry):
        return entry.num_blocks
    return entry.num_shared_blocks + entry.num_unique_blocks
