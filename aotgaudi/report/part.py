"""The part of its manifest that a bundle holds, for a report: what each policy serves of it (docs/adr/0062)."""

from __future__ import annotations

from aotgaudi.bucketing.proof import Coverage
from aotgaudi.bundle.bundle import Bundle
from aotgaudi.bundle.part import Outside, describe_part, proved_part
from aotgaudi.bundle.receipt import ClosedUnder
from aotgaudi.manifest.coverage import coverage_of
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.subset import Subset
from aotgaudi.report.report import PartPhase, PartPolicy, ReportedPart
from aotgaudi.spec.scheduler import SchedulerSpec

_OUTSIDE = {
    "refuse": "requests beyond the limits are refused",
    "chunk": "prompts are cut into shorter chunks; requests beyond the limits are refused",
    "pad-up": "nothing is: larger entries serve what is not built",
    "first-use": "what is not built is compiled when it is first needed, while requests wait",
}


def part_of(bundle: Bundle) -> ReportedPart | None:
    """Returns the part that a bundle holds, proved anew; None where it holds the whole. Raises as `proved_part` does."""
    part, cut = proved_part(bundle, "whole"), proved_part(bundle, "cut")
    if part is None or cut is None:
        return None
    whole = bundle.manifest
    reachable = _reachable(coverage_of(whole, SchedulerSpec()))
    shorter = cut if cut.limits != part.limits else part
    policies = (
        _policy("refuse", part, reachable),
        _policy("chunk", shorter, reachable),
        _policy("pad-up", part if part.has_whole_limits else None, reachable),
        _first_use(whole, reachable),
    )
    return ReportedPart(
        text=describe_part(part),
        num_entries=len(part.manifest.entries),
        num_cold=len(bundle.require_programs().missing(whole.entries)),
        num_settings=len(part.settings),
        num_settings_of_spec=len(whole.spec.sampler.settings),
        is_closed=part.coverage.is_closed and cut.coverage.is_closed,
        policies=policies,
    )


def _reachable(coverage: Coverage) -> dict[str, int]:
    return {phase.kind: phase.num_reachable for phase in coverage.phases}


def _policy(name: Outside, part: Subset | None, whole: dict[str, int]) -> PartPolicy:
    """None: a server with this policy does not start from it."""
    if part is None:
        text = "no server starts: larger entries do not cover what is not built"
        return PartPolicy(policy=name, limits=None, phases=(), text=text)
    served = _reachable(part.coverage)
    limits = ClosedUnder.of(part.limits).model_dump()
    return PartPolicy(policy=name, limits=limits, phases=_phases(served, whole), text=_OUTSIDE[name])


def _first_use(whole: Manifest, reachable: dict[str, int]) -> PartPolicy:
    limits = ClosedUnder.of(whole.spec.limits).model_dump()
    return PartPolicy(
        policy="first-use", limits=limits, phases=_phases(reachable, reachable), text=_OUTSIDE["first-use"]
    )


def _phases(served: dict[str, int], whole: dict[str, int]) -> tuple[PartPhase, ...]:
    """Of prompts and decodes: what can be formed under the limits, and of how much under those of the whole."""
    return tuple(
        PartPhase(kind=kind, num_served=served[kind], num_reachable=whole[kind])
        for kind in ("prompt", "decode")
        if kind in served and kind in whole
    )
