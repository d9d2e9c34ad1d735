"""What every command reports about a manifest: its coverage, padding, memory and warnings, computed once.

`build manifest`, `coverage` and `report` show the same `Summary`. Each part is computed on first use, because the proof of a
large manifest takes seconds, and no command shows all parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.padding import Padding, decode_padding, prompt_padding
from aotgaudi.bucketing.proof import AddedEntry, Coverage, Hole, ReachableSteps, closing_entries, uncovered
from aotgaudi.bucketing.versions import skipped_lines
from aotgaudi.document import Value
from aotgaudi.entries import DecodeEntry, Entry, PromptEntry
from aotgaudi.errors import SpecError
from aotgaudi.manifest.coverage import (
    coverage_of,
    coverage_of_server,
    described_scheduler,
    left_out,
    live_graphs_of,
    reachable_of,
)
from aotgaudi.manifest.difference import ValueChange, entries_after
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.memory import MemoryNeed, counted_layers, sized
from aotgaudi.spec.build_spec import BuildSpec


class StepMemory(Value):
    """The bytes that a kind's largest step needs."""

    kind: str
    entry: str
    activation_bytes: int
    kv_bytes: int
    mask_bytes: int
    logit_bytes: int
    total_bytes: int


class Memory(Value):
    """An estimate of one device's memory without weights (``manifest/memory.py``). `unknown`: why there is no estimate.

    `layers`: which layers the KV cache counts, if not the rows of all of them.
    """

    unknown: str | None
    num_devices: int
    num_blocks: int
    kv_cache_bytes: int = 0
    layers: str | None = None
    steps: tuple[StepMemory, ...] = ()
    total_bytes: int = 0
    budget_bytes: int | None


@dataclass(frozen=True)
class Summary:
    """A manifest, and what follows from it. `budget_bytes`: for KV cache and step buffers; None for no budget."""

    manifest: Manifest
    budget_bytes: int | None = None

    @cached_property
    def table(self) -> BucketTable:
        """The prompt and decode entries."""
        return BucketTable.from_entries(self.manifest.entries)

    @cached_property
    def steps(self) -> ReachableSteps:
        """The steps that the spec's scheduler can form."""
        return reachable_of(self.manifest.spec)

    @cached_property
    def coverage(self) -> Coverage:
        """What the entries cover of these steps."""
        return coverage_of(self.manifest)

    @property
    def proves_steps(self) -> bool:
        """Whether the proof is about prompts and decodes at all. It is not, say, if the target runs without graphs."""
        return any(phase.kind == "prompt" for phase in self.coverage.phases)

    @cached_property
    def holes(self) -> tuple[Hole, ...]:
        """The disjoint parts of what is not covered."""
        return tuple(uncovered(self.steps, self.table)) if self.proves_steps else ()

    @cached_property
    def closing(self) -> tuple[AddedEntry, ...]:
        """The entries that would close the table; empty if it is closed."""
        if self.coverage.is_closed:
            return ()
        closed = self.manifest.spec.bucketing.model_copy(update={"coverage": "closed"})
        return closing_entries(self.steps, closed, self.table)

    @cached_property
    def padding(self) -> Mapping[str, Padding | None]:
        """The padding of prompts and of decodes, over all reachable steps that have an entry."""
        return {
            "prompt": prompt_padding(self.steps.prompts, self.table),
            "decode": decode_padding(self.steps.decodes, self.table),
        }

    @cached_property
    def memory(self) -> Memory:
        """The memory for KV cache and steps."""
        spec = self.manifest.spec
        known = Memory(
            unknown=None,
            num_devices=spec.parallel.world_size,
            num_blocks=spec.limits.num_blocks,
            budget_bytes=self.budget_bytes,
        )
        try:
            need = MemoryNeed.of(spec, self.manifest.entries)
        except SpecError as error:
            return known.model_copy(update={"unknown": str(error)})
        steps = (
            StepMemory(kind=one.kind, entry=str(one), total_bytes=buffers.total_bytes, **asdict(buffers))
            for one, buffers in need.steps
        )
        found = {"layers": counted_layers(spec), "steps": tuple(steps)}
        totals = {"kv_cache_bytes": need.cache_bytes, "total_bytes": need.total_bytes}
        return known.model_copy(update={**found, **totals})

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Problems to act on: too many steps, left-out lines of a bucket file, a budget that does not suffice."""
        return tuple(self._warnings())

    def _warnings(self) -> Iterator[str]:
        explosion = find_explosion(self.manifest)
        if explosion:
            yield str(explosion)
        for line in skipped_lines(self.manifest.spec.bucketing):
            yield (
                f"bucketing.file, line {line.number} is left out, as its version of the rules does: {line.problem}"
            )
        limits = self.manifest.spec.limits
        if limits.max_num_seqs > limits.num_blocks:
            yield (
                f"limits.max_num_seqs is {limits.max_num_seqs:,}, and limits.num_blocks {limits.num_blocks:,}: each sequence"
                " needs a block, so as many can never be served at once (more blocks, or a lower max_num_seqs)"
            )
        memory, budget = self.memory, self.budget_bytes
        if budget is not None and memory.unknown is not None:
            yield f"the memory budget cannot be checked: {memory.unknown}"
        elif budget is not None and memory.total_bytes > budget:
            yield (
                f"KV cache and step buffers need {sized(memory.total_bytes)}, the budget is {sized(budget)}"
                f" ({sized(memory.kv_cache_bytes)} of it KV cache: lower limits.num_blocks, or what makes the"
                f" largest step)"
            )

    def largest(self, kind: str) -> Entry | None:
        """Returns the entry of a kind that computes most, then reads most; None if the kind has no entry."""
        return max(self.manifest.of_kind(kind), key=_size, default=None)


def _size(entry: Entry) -> tuple[int | float | bool | str, ...]:
    if isinstance(entry, PromptEntry):
        return entry.batch_size * entry.query_len, entry.batch_size * entry.num_ctx_blocks, *entry.row()
    if isinstance(entry, DecodeEntry):
        return entry.num_blocks, *entry.row()
    return entry.row()


# Too many steps

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
    """Returns the warning of hours of compiling, or None if there are at most `MANY_STEPS` steps.

    Users of the public tables met 14,368 prompt and 4,042 decode buckets (vllm-gaudi#762), and about 14 s of compiling for
    each of 126 decode buckets (vllm-gaudi#1160).
    """
    num_steps = {kind: len(manifest.of_kind(kind)) for kind in _STEP_KINDS}
    total = sum(num_steps.values())
    if total <= MANY_STEPS:
        return None
    remedies = []
    for change in _single_changes(manifest.spec):
        after = entries_after(manifest.spec, change)
        if not isinstance(after, SpecError):
            remedies.append((change, sum(entry.kind in _STEP_KINDS for entry in after)))
    fewer = [(change, count) for change, count in remedies if count < total]
    return Explosion(num_steps, tuple(sorted(fewer, key=lambda remedy: remedy[1])))


def _single_changes(spec: BuildSpec) -> Iterator[ValueChange]:
    limits, strategy = spec.limits, spec.bucketing.strategy
    if strategy not in ("exponential", "file"):
        yield ValueChange(("bucketing", "strategy"), strategy, "exponential")
    if limits.max_num_batched_tokens > _USUAL_BATCHED_TOKENS:
        where = ("limits", "max_num_batched_tokens")
        yield ValueChange(where, limits.max_num_batched_tokens, _USUAL_BATCHED_TOKENS)
    if limits.max_num_prefill_seqs > 1:
        yield ValueChange(("limits", "max_num_prefill_seqs"), limits.max_num_prefill_seqs, 1)


# As JSON


def coverage_document(summary: Summary) -> dict[str, Any]:
    """Returns what is proved, and what is not, as a JSON value."""
    coverage, manifest = summary.coverage, summary.manifest
    own = {
        "phases": [
            {**asdict(phase), "padding": _padding(summary.padding.get(phase.kind))}
            for phase in coverage.phases
        ],
        "holes": [str(hole) for hole in summary.holes],
        "smallest": asdict(coverage.smallest) if coverage.smallest else None,
        "mend": None if coverage.is_closed else _mend(summary),
        "closing_entries": [str(entry) for entry in summary.closing],
    }
    return {"id": manifest.id, "model": manifest.spec.model.name, **proof_document(summary, own)}


def proof_document(summary: Summary, own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what is proved of a manifest as a JSON value, with a command's `own` members."""
    spec = summary.manifest.spec
    return {
        "mode": spec.bucketing.coverage,
        "scheduler": described_scheduler(spec),
        "closed": summary.coverage.is_closed,
        **own,
        "not_proved": list(summary.coverage.unproved),
        "left_out": list(left_out(spec)),
        "live_graphs": [row.model_dump() for row in live_graphs_of(spec)],
        "server_table": _server_document(spec),
    }


def _server_document(spec: BuildSpec) -> dict[str, Any] | None:
    """Returns what the server's own table covers as a JSON value; None if the server uses the manifest's entries."""
    bucketing, found = spec.bucketing, coverage_of_server(spec)
    if found is None:
        return None
    smallest = found.coverage.smallest
    return {
        "version": bucketing.version,
        "strategy": bucketing.strategy,
        "closed": found.coverage.is_closed,
        "phases": [asdict(phase) for phase in found.coverage.phases],
        "holes": [str(hole) for hole in found.holes],
        "smallest": asdict(smallest) if smallest else None,
        "fallback": list(found.fallback) if found.fallback else None,
        "cold": [list(bucket) for bucket in found.cold],
    }


def _padding(padding: Padding | None) -> dict[str, Any] | None:
    if padding is None:
        return None
    rounded = {name: round(getattr(padding, name), 4) for name in ("mean", "error", "worst")}
    return {**asdict(padding), **rounded}


def _mend(summary: Summary) -> str:
    bucketing, adds = summary.manifest.spec.bucketing, summary.closing
    if bucketing.strategy == "unified":
        return (
            "another bucketing.strategy: our engine forms prompt and decode steps, no unified ones, and of vLLM's"
            " nothing is proved"
        )
    if bucketing.coverage == "closed":
        return "enumerate it anew: aotgaudi build manifest SPEC"
    entries = f"{len(adds):,} {'entry' if len(adds) == 1 else 'entries'}"
    return f'coverage = "closed" in the [bucketing] of the spec adds {entries}'
