"""Adds up a trace's steps, from a replay through the engine's scheduler.

Work is counted as in ``traffic/cost.py``. *Useful* work is that of the smallest shape that a step needs, *padded* work that
of the entry that it ran in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.entries import PromptEntry, StepEntry
from aotgaudi.errors import SpecError
from aotgaudi.manifest.coverage import reachable_of
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.traffic.cost import WorkModel
from aotgaudi.traffic.replay import replay
from aotgaudi.traffic.trace import Trace


@dataclass(frozen=True, slots=True)
class Use:
    """Some steps of a trace, and their work."""

    num_steps: int = 0
    useful: int = 0
    padded: int = 0

    def __add__(self, other: Use) -> Use:
        return Use(self.num_steps + other.num_steps, self.useful + other.useful, self.padded + other.padded)

    @property
    def factor(self) -> float | None:
        """The padded work by the useful work; None without any."""
        return round(self.padded / self.useful, 4) if self.useful else None


@dataclass(frozen=True)
class TracedSteps:
    """A trace's steps: prompts by (context blocks, row), decodes by (batch size, blocks). `document` says it in JSON."""

    document: Mapping[str, Any]
    prompts: Mapping[tuple[int, int], Use]
    decodes: Mapping[tuple[int, int], Use]


def steps_of_trace(path: str, trace: Trace, manifest: Manifest, model: WorkModel, basis: str) -> TracedSteps:
    """Returns the steps that the server of a manifest forms for a trace that was read from `path`.

    `basis` says where the device's rates in `model` come from.

    Raises:
        SpecError: No request of the trace fits the limits, or the manifest has no prompts and decodes.
        UncoveredStepError: The manifest has a hole, and a step hit it.
    """
    spec = manifest.spec
    table = BucketTable.from_entries((*manifest.of_kind("prompt"), *manifest.of_kind("decode")))
    if not table.prompt or not table.decode:
        raise SpecError("--trace", "needs prompt and decode entries, and there are none", "leave it out")
    replayed = replay(trace, spec.limits, table, model.seconds, spec.scheduler.policy)
    prompts: defaultdict[tuple[int, int], Use] = defaultdict(Use)
    decodes: defaultdict[tuple[int, int], Use] = defaultdict(Use)
    used: set[StepEntry] = set()
    row_of = reachable_of(spec).prompts.row_of
    for (needs, entry), count in replayed.steps.items():
        use = Use(count, count * model.work(needs), count * model.work(entry))
        used.add(entry)
        if isinstance(needs, PromptEntry):
            prompts[needs.num_ctx_blocks, row_of(needs.query_len)] += use
        else:
            decodes[needs.batch_size, needs.num_blocks] += use
    document = {
        "path": path,
        "basis": basis,
        "num_requests": replayed.num_requests,
        "num_refused": replayed.num_refused,
        "num_shortened": replayed.num_shortened,
        "num_preemptions": replayed.num_preemptions,
        "seconds": round(replayed.seconds, 3),
        "num_steps": replayed.num_steps,
        "num_entries": len(table.prompt) + len(table.decode),
        "num_entries_used": len(used),
        "factor": sum((*prompts.values(), *decodes.values()), Use()).factor,
    }
    return TracedSteps(document, prompts, decodes)
