"""Subsets of a manifest: the warm entries, and the lower limits under which they are closed.

A subset is served as a separate manifest: the same spec with lower limits, fewer sampler settings and fewer sizes of
exchanges, and the warm entries (`Subset.manifest`). The proof for whole manifests therefore applies to it (`coverage_of`),
and the engine looks steps up in the table that was proved: a larger warm entry serves a smaller step.

**The largest limits** (`largest_subset`; B is `block_size`):

=========================  =================================================================================
M `max_model_len`          at least 2
T `max_num_batched_tokens` at least B; a chunk of a prompt has no more tokens
S `max_num_seqs`           at least 1
N `num_blocks`             at least what a sequence of M tokens has
=========================  =================================================================================

Lowering a limit only removes steps, so a subset that is closed under some limits is closed under all lower ones. Bisection
with the proof itself therefore finds each limit while the others are fixed. Several combinations may be largest. We choose:

1. As many sampler settings, in the order of the spec, as have a size for which all their mixtures are warm.
2. Chunks ``whole``: T as in the spec, then the largest M. Chunks ``cut``: the largest M for any T, then the largest T.
3. S and N so that the most blocks can be in use at once, ``min(N, S * ceil(M / B))``; then the largest S, then N.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.proof import (
    Coverage,
    ReachableSteps,
    decode_holes,
    prompt_holes,
)
from aotgaudi.entries import DecodeEntry, DefragEntry, Entry, PromptEntry, SamplerEntry
from aotgaudi.manifest.coverage import UNPROVED_KINDS, coverage_of
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.sampler import SamplerSetting
from aotgaudi.spec.sampler_signature import SamplerSignature, missing_joins
from aotgaudi.spec.scheduler import SchedulerSpec

Chunks = Literal["whole", "cut"]
"""Whether prompts are computed in chunks as long as the spec allows, or may be cut into shorter ones."""

_LEAST_MODEL_LEN = 2


@dataclass(frozen=True)
class Subset:
    """Some entries of `whole`, and the lower limits under which they are served.

    `manifest` has a spec with those limits, and the warm entries that its server uses. It is for serving and for the proof.
    Keys, bundles and receipts belong to the whole.
    """

    whole: Manifest
    manifest: Manifest

    @property
    def limits(self) -> ServingLimits:
        """The lower limits."""
        return self.manifest.spec.limits

    @property
    def settings(self) -> tuple[int, ...]:
        """The remaining sampler settings, by their position in the whole spec."""
        places = {setting: place for place, setting in enumerate(self.whole.spec.sampler.settings)}
        return tuple(places[setting] for setting in self.manifest.spec.sampler.settings)

    @property
    def has_whole_limits(self) -> bool:
        """Whether it serves every request that the whole serves."""
        whole = self.whole.spec
        return self.limits == whole.limits and self.manifest.spec.sampler == whole.sampler

    @cached_property
    def coverage(self) -> Coverage:
        """What its entries cover for our own scheduler, by the proof for whole manifests."""
        return coverage_of(self.manifest, SchedulerSpec())


def largest_subset(whole: Manifest, warm: Collection[Entry], chunks: Chunks) -> Subset | None:
    """Returns the subset that serves most if the entries `warm` of `whole` are warm; None if no limits close them.

    The module's docstring defines "most". None also if `warm` lacks an entry of a kind that the proof does not cover.
    """
    has = frozenset(warm)
    if any(entry not in has for kind in UNPROVED_KINDS for entry in whole.of_kind(kind)):
        return None
    if whole.spec.model.generates:
        settings = _settled(whole.spec.sampler.settings, _samplers(has))
    else:  # The model samples nothing.
        settings = _Settled(whole.spec.sampler.settings, whole.spec.limits.max_num_seqs)
    limits = None if settings is None else _Search.of(whole.spec, has).limits(settings.num_rows, chunks)
    if settings is None or limits is None:
        return None
    subset = subset_under(whole, has, limits, settings.settings)
    return subset if subset.coverage.is_closed else None


def subset_under(
    whole: Manifest, warm: Collection[Entry], limits: ServingLimits, settings: Iterable[SamplerSetting]
) -> Subset:
    """Returns the subset that serves the entries `warm` under `limits`. Its `coverage` says whether it is closed.

    It leaves out sampler sizes that lack a mixture of `settings`, and cold sizes of exchanges. Exchanges are then padded or
    cut to other sizes.
    """
    has, spec = frozenset(warm), whole.spec
    sampler = spec.sampler.model_copy(update={"settings": tuple(settings)})
    sizes = set(_whole_sizes(sampler.settings, _samplers(has)))
    entries = tuple(
        entry
        for entry in whole.entries
        if entry in has and (not isinstance(entry, SamplerEntry) or entry.batch_size in sizes)
    )
    exchanges = {entry.padded_swaps for entry in entries if isinstance(entry, DefragEntry)}
    swaps = tuple(size for size in spec.defrag.padded_swaps if size in exchanges)
    defrag = {"padded_swaps": swaps} if swaps else {"enabled": False}
    lower = limits.model_copy(
        update={"max_num_prefill_seqs": min(limits.max_num_prefill_seqs, limits.max_num_seqs)}
    )
    changes = {"limits": lower, "sampler": sampler, "defrag": spec.defrag.model_copy(update=defrag)}
    return Subset(whole, Manifest(spec.model_copy(update=changes), entries))


# Samplers


_Samplers = dict[int, set[SamplerSignature]]


@dataclass(frozen=True, slots=True)
class _Settled:
    settings: tuple[SamplerSetting, ...]
    num_rows: int


def _samplers(warm: Iterable[Entry]) -> _Samplers:
    """Returns the signatures of the warm samplers, by size."""
    found: _Samplers = {}
    for entry in warm:
        if isinstance(entry, SamplerEntry) and entry.batch_size:
            found.setdefault(entry.batch_size, set()).add(entry.signature)
    return found


def _whole_sizes(settings: Sequence[SamplerSetting], samplers: _Samplers) -> list[int]:
    """Returns the sizes for which every mixture of `settings` has a warm sampler."""
    given = [setting.signature for setting in settings]
    needed = {*given, *missing_joins(given)}
    return [
        size
        for size, has in samplers.items()
        if all(any(one.serves(signature) for one in has) for signature in needed)
    ]


def _settled(settings: Sequence[SamplerSetting], samplers: _Samplers) -> _Settled | None:
    chosen: tuple[SamplerSetting, ...] = ()
    for setting in settings:
        if _whole_sizes((*chosen, setting), samplers):
            chosen = (*chosen, setting)
    return _Settled(chosen, max(_whole_sizes(chosen, samplers))) if chosen else None


# Limits


@dataclass(frozen=True, slots=True)
class _Search:
    """Searches for the largest limits under which a table of prompts and decodes is closed."""

    spec: BuildSpec
    table: BucketTable

    @classmethod
    def of(cls, spec: BuildSpec, warm: Iterable[Entry]) -> _Search:
        """Keeps only the outermost entries, because the proof does not need an entry that another one covers."""
        entries = tuple(warm)
        prompts = _outermost(
            (entry.num_ctx_blocks, entry.query_len) for entry in entries if isinstance(entry, PromptEntry)
        )
        decodes = _outermost(
            (entry.batch_size, entry.num_blocks) for entry in entries if isinstance(entry, DecodeEntry)
        )
        table = BucketTable(
            tuple(PromptEntry(1, query_len, blocks) for blocks, query_len in prompts),
            tuple(DecodeEntry(batch_size, 1, blocks) for batch_size, blocks in decodes),
        )
        return cls(spec, table)

    def limits(self, num_rows: int, chunks: Chunks) -> ServingLimits | None:
        """Returns the limits that the module's rule chooses; None if no limits close the table."""
        limits = self._lengths(chunks)
        if limits is None:
            return None
        most = limits.max_num_seqs
        sizes = {most, num_rows, *(entry.batch_size for entry in self.table.decode)}
        found = [
            found
            for size in sizes
            if size <= most and (found := self._with_seqs(limits, size, num_rows)) is not None
        ]
        return max(found, key=_capacity, default=None)

    def _lengths(self, chunks: Chunks) -> ServingLimits | None:
        """Returns limits with the largest M and T for one sequence with only its own blocks."""
        limits = self.spec.limits
        whole, least = limits.max_num_batched_tokens, limits.block_size

        def closes(max_model_len: int, most_tokens: int) -> bool:
            alone = _lowered(
                limits, max_model_len=max_model_len, max_num_batched_tokens=most_tokens, max_num_seqs=1
            )
            return self._closes_prompts(alone) and self._closes_decodes(
                _lowered(alone, num_blocks=alone.max_blocks_per_seq)
            )

        most_tokens = whole if chunks == "whole" else least
        length = _largest(_LEAST_MODEL_LEN, limits.max_model_len, lambda value: closes(value, most_tokens))
        if length is None:
            return None
        if chunks == "cut":
            most_tokens = _largest(least, whole, lambda value: closes(length, value)) or least
        return _lowered(limits, max_model_len=length, max_num_batched_tokens=most_tokens)

    def _with_seqs(self, limits: ServingLimits, max_num_seqs: int, num_rows: int) -> ServingLimits | None:
        """Returns the limits with the most blocks. A step has at most as many rows as it has blocks and as it can sample."""
        lowered = _lowered(limits, max_num_seqs=max_num_seqs)
        num_blocks = _largest(
            limits.max_blocks_per_seq,
            limits.num_blocks if max_num_seqs <= num_rows else min(limits.num_blocks, num_rows),
            lambda value: self._closes_decodes(_lowered(lowered, num_blocks=value)),
        )
        return None if num_blocks is None else _lowered(lowered, num_blocks=num_blocks)

    def _closes_prompts(self, limits: ServingLimits) -> bool:
        return next(prompt_holes(self._steps(limits).prompts, self.table), None) is None

    def _closes_decodes(self, limits: ServingLimits) -> bool:
        return next(decode_holes(self._steps(limits).decodes, self.table), None) is None

    def _steps(self, limits: ServingLimits) -> ReachableSteps:
        return ReachableSteps.of(limits, self.spec.bucketing, generates=self.spec.model.generates)


def _lowered(limits: ServingLimits, **lower: int) -> ServingLimits:
    return limits.model_copy(update=lower)


def _capacity(limits: ServingLimits) -> tuple[int, int, int]:
    in_use = min(limits.num_blocks, limits.max_num_seqs * limits.max_blocks_per_seq)
    return in_use, limits.max_num_seqs, limits.num_blocks


def _largest(least: int, most: int, holds: Callable[[int], bool]) -> int | None:
    """Returns the largest value for which the monotone `holds` is true, or None if there is none."""
    if least > most or not holds(least):
        return None
    while least < most:
        middle = (least + most + 1) // 2
        if holds(middle):
            least = middle
        else:
            most = middle - 1
    return least


def _outermost(sizes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the pairs that no other pair matches or exceeds in both numbers."""
    outermost: list[tuple[int, int]] = []
    for x, y in sorted(set(sizes), reverse=True):
        if not outermost or y > outermost[-1][1]:
            outermost.append((x, y))
    return outermost
