"""Which entries of a manifest matter most: the order in which a tier or a budget builds them, and where it may stop.

An entry stands in the first of these passages that names it:

1. entries that cannot be left out: those of kinds about which nothing is proved;
2. entries that close the smallest limits, which are one sequence of two blocks;
3. given `Traffic`: entries that close the limits of most of its requests, then the entries that its steps ran in, the most
   frequent first;
4. entries that close the manifest's own limits, where smaller steps run in larger entries; then exchanges;
5. all others, beginning with those that are the best entry for the most reachable steps.

Each decode entry is followed by the samplers of its batch size. To close some limits, we repeat this while there is a hole:
add the entry that the engine's look-up has for the largest step of the hole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import Literal

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.padding import decode_steps, prompt_cells
from aotgaudi.bucketing.proof import (
    DecodeHole,
    PromptHole,
    ReachableSteps,
    uncovered,
)
from aotgaudi.entries import DecodeEntry, Entry, SamplerEntry, StepEntry
from aotgaudi.errors import CoverageError
from aotgaudi.manifest.coverage import UNPROVED_KINDS
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.subset import largest_subset
from aotgaudi.spec.limits import ServingLimits

TierName = Literal["least", "hot", "covering"]
"""Each tier is the shortest prefix of the order that meets a goal. ``least``: it can be served, with all sampler settings.
``hot``: nine of ten steps run in its entries. ``covering``: it serves everything that the whole manifest does.
"""


HOT_SHARE = 0.9


_MOST_STEPS = 4096
"""How many steps of each phase are looked up, which takes fractions of a second."""


_NO_STEPS: Mapping[Entry, float] = MappingProxyType({})


@dataclass(frozen=True)
class Traffic:
    """What was served: how many steps ran in each entry, and limits that most requests stay below."""

    steps: Mapping[Entry, float] = field(default_factory=lambda: _NO_STEPS)
    limits: ServingLimits | None = None


NO_TRAFFIC = Traffic()


@dataclass(frozen=True)
class Importance:
    """The entries of `manifest` by importance. Deterministic: the same order on every machine."""

    manifest: Manifest
    traffic: Traffic = NO_TRAFFIC

    @cached_property
    def order(self) -> tuple[Entry, ...]:
        """All entries, the most important first."""
        return tuple(dict.fromkeys(self._passages()))

    def tier(self, name: TierName) -> tuple[Entry, ...]:
        """Returns the entries of a tier, by importance. Raises CoverageError if no subset of the manifest is closed."""
        if name == "least":
            return self.order[: self._least]
        if name == "hot":
            return self.order[: max(self._least, len(self._asked), self._hottest)]
        return self.order[: max(self._least, self._first(self._is_covering))]

    def first(self, num_entries: int) -> tuple[Entry, ...]:
        """Returns the first `num_entries` by importance, and at least the least tier. Raises like `tier`."""
        return self.order[: max(self._least, num_entries)]

    # Where to stop

    @cached_property
    def _least(self) -> int:
        whole = largest_subset(self.manifest, self.order, "whole")
        if whole is None:
            raise CoverageError(
                "no subset of this manifest is closed, however low the limits are"
                " (`aotgaudi coverage MANIFEST` lists the holes and says what closes them)"
            )

        def is_servable(entries: Sequence[Entry]) -> bool:
            subset = largest_subset(self.manifest, entries, "whole")
            return subset is not None and subset.settings == whole.settings

        return self._first(is_servable)

    @property
    def _hottest(self) -> int:
        steps = self.traffic.steps or self._own_steps
        total = sum(steps.values())
        shares = list(accumulate(steps.get(entry, 0.0) for entry in self.order))
        return bisect_left(shares, HOT_SHARE * total) + 1

    def _is_covering(self, entries: Sequence[Entry]) -> bool:
        subsets = (largest_subset(self.manifest, some, "whole") for some in (entries, self.order))
        found = [None if subset is None else (subset.limits, subset.settings) for subset in subsets]
        return found[0] is not None and found[0] == found[1]

    def _first(self, holds: _Holds) -> int:
        """Returns the length of the shortest prefix for which the monotone `holds` is true."""
        return bisect_left(range(len(self.order)), True, key=lambda number: holds(self.order[:number]))

    # The order

    def _passages(self) -> Iterator[Entry]:
        seen = [entry for entry in self._by(self.traffic.steps) if self.traffic.steps.get(entry)]
        named = (*self._asked, *(one for entry in seen for one in self._with_sampler(entry)))
        yield from named
        yield from self._closing(self.manifest.spec.limits, named)
        yield from self.manifest.of_kind("defrag")
        for entry in self._by(self._own_steps):
            yield from self._with_sampler(entry)
        yield from self.manifest.entries

    @cached_property
    def _asked(self) -> tuple[Entry, ...]:
        """The entries that cannot be left out, and those that close the smallest limits and the limits of the traffic."""
        asked = [entry for kind in UNPROVED_KINDS for entry in self.manifest.of_kind(kind)]
        for limits in (_least_limits(self.manifest.spec.limits), self.traffic.limits):
            if limits is not None:
                asked += self._closing(limits, asked)
        return tuple(dict.fromkeys(asked))

    def _by(self, steps: Mapping[Entry, float]) -> list[StepEntry]:
        """Returns prompt and decode entries, those of most steps first, and equal ones in the manifest's order."""
        return sorted((*self._table.prompt, *self._table.decode), key=lambda entry: -steps.get(entry, 0.0))

    def _with_sampler(self, entry: StepEntry) -> Iterator[Entry]:
        yield entry
        if isinstance(entry, DecodeEntry):
            yield from self._samplers.get(entry.batch_size, ())

    @cached_property
    def _table(self) -> BucketTable:
        return BucketTable.from_entries(self.manifest.entries)

    @cached_property
    def _samplers(self) -> Mapping[int, tuple[SamplerEntry, ...]]:
        sizes: dict[int, tuple[SamplerEntry, ...]] = {}
        for entry in self.manifest.entries:
            if isinstance(entry, SamplerEntry) and entry.batch_size:
                sizes[entry.batch_size] = (*sizes.get(entry.batch_size, ()), entry)
        return sizes

    @cached_property
    def _steps(self) -> ReachableSteps:
        return self._steps_under(self.manifest.spec.limits)

    def _steps_under(self, limits: ServingLimits) -> ReachableSteps:
        spec = self.manifest.spec
        return ReachableSteps.of(limits, spec.bucketing, generates=spec.model.generates)

    @cached_property
    def _own_steps(self) -> Mapping[Entry, float]:
        """The share of the reachable steps of its phase that the look-up gives to each entry."""
        prompts, table = self._steps.prompts, self._table
        cells = prompt_cells(prompts, _MOST_STEPS)
        lens = (
            (min(prompts.row_query(row), prompts.longest_query(context)), context) for context, row in cells
        )
        found: list[Counter[StepEntry | None]] = [
            Counter(table.find_prompt(1, *one) for one in lens),
            Counter(table.find_decode(*one) for one in decode_steps(self._steps.decodes, _MOST_STEPS)),
        ]
        return {
            entry: number / sum(steps.values())
            for steps in found
            for entry, number in steps.items()
            if entry is not None
        }

    # What closes limits

    def _closing(self, limits: ServingLimits, has: Iterable[Entry]) -> list[Entry]:
        """Returns entries that close `limits` together with `has`, as far as the manifest itself closes them."""
        return [*self._closing_steps(limits, has), *self._closing_samplers(limits, has)]

    def _closing_steps(self, limits: ServingLimits, has: Iterable[Entry]) -> list[StepEntry]:
        steps = self._steps_under(limits)
        added: list[StepEntry] = []
        while True:
            table = BucketTable.from_entries((*has, *added))
            found = map(self._covering, uncovered(steps, table))
            more = next((entry for entry in found if entry is not None and entry not in added), None)
            if more is None:
                return added
            added.append(more)

    def _covering(self, hole: object) -> StepEntry | None:
        """Returns the entry for the whole hole, else for the longest queries after its contexts, or None."""
        table = self._table
        if isinstance(hole, PromptHole):
            query_len = hole.reachable.longest_query(hole.first_ctx_blocks)
            last = hole.last_ctx_blocks
            contexts = (last, min(last, hole.reachable.longest_context(query_len)))
            found = (table.find_prompt(1, query_len, context) for context in contexts)
            return next((entry for entry in found if entry is not None), None)
        if isinstance(hole, DecodeHole):
            batch_size = hole.last_batch_size
            return table.find_decode(batch_size, hole.reachable.most_blocks(batch_size))
        return None

    def _closing_samplers(self, limits: ServingLimits, has: Iterable[Entry]) -> tuple[SamplerEntry, ...]:
        """Returns all samplers of the smallest size with enough rows, or none if `has` includes such a size."""
        most = min(limits.max_num_seqs, limits.num_blocks)
        if any(isinstance(entry, SamplerEntry) and entry.batch_size >= most for entry in has):
            return ()
        size = min((size for size in self._samplers if size >= most), default=None)
        return () if size is None else self._samplers[size]


_Holds = Callable[[Sequence[Entry]], bool]


def _least_limits(limits: ServingLimits) -> ServingLimits:
    """Returns the limits for one sequence of two blocks."""
    length = min(limits.max_model_len, 2 * limits.block_size)
    least = limits.model_copy(update={"max_num_seqs": 1, "max_num_prefill_seqs": 1, "max_model_len": length})
    return least.model_copy(update={"num_blocks": least.max_blocks_per_seq})
