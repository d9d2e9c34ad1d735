"""``aotgaudi doctor --hpu``: every check in its order, and the report of what was found."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import aotgaudi
from aotgaudi.backends.base import NOT_INSTALLED, version_of
from aotgaudi.backends.hpu.probe import KeyMode
from aotgaudi.doctor.hpu import device, lowering, recipes
from aotgaudi.doctor.hpu.lab import ABSENT, HpuCheck, Lab, LineFinding, Outcome, Verdict
from aotgaudi.doctor.hpu.report import CheckReport, DoctorReport, LineReport, without_private
from aotgaudi.errors import SpecError, UnexaminedError
from aotgaudi.gaudi.identity import PLUGIN, device_type_of, python_version

CHECKS: tuple[HpuCheck, ...] = (
    *device.VERSION_CHECKS,
    *recipes.GRAPH_CHECKS,
    *recipes.RECIPE_CHECKS,
    *device.SOFTWARE_CHECKS,
    *lowering.CHECKS,
    *device.DEVICE_CHECKS,
)
"""In the order in which they run: checks that others need come first. H-26, end to end, needs the backend."""

Progress = Callable[[HpuCheck, tuple[LineFinding, ...], DoctorReport], None]
"""Called after each check with its findings and the report so far."""


@dataclass(frozen=True, slots=True)
class Device:
    """What a process that acquired the card knows of it. `capability` is V in the names of recipes."""

    name: str
    capability: str
    is_double: bool


def selected(ids: Collection[str]) -> tuple[HpuCheck, ...]:
    """Returns the checks with these ids; no ids mean all checks. Raises SpecError for an unknown id."""
    known = {check.id for check in CHECKS}
    for unknown in sorted(set(ids) - known):
        raise SpecError("--only", f"there is no check {unknown}", f"one of {', '.join(sorted(known))}")
    return tuple(check for check in CHECKS if not ids or check.id in ids)


def acquire(lab: Lab) -> Device:
    """Has a process acquire the card, and returns what it knows of it.

    Raises:
        UnexaminedError: the bridge is not installed, or no card could be acquired.
    """
    require_bridge()
    outcome = device.identity(lab)
    if not outcome.is_whole:
        raise UnexaminedError(f"{lab.card} could not be acquired: {outcome.problem} ({_remedy(outcome)})")
    return Device(*(outcome.values[name] for name in ("name", "capability", "is_double")))


def require_bridge() -> None:
    """Raises UnexaminedError unless the bridge is installed for this interpreter."""
    if version_of(PLUGIN) == NOT_INSTALLED:
        raise UnexaminedError(
            f"{PLUGIN} is not installed here, for {sys.executable} (it comes with Intel's PyTorch images for Gaudi; an"
            " environment of aotgaudi's own in one needs `python3 -m venv --system-site-packages`)"
        )


def _remedy(outcome: Outcome) -> str:
    if outcome.is_busy:
        return "doctor needs one that no process holds: `hl-smi` shows who does; --card N takes another"
    if ABSENT in outcome.problem:
        return "in a container: --runtime=habana -e HABANA_VISIBLE_DEVICES=all; `hl-smi` shows cards"
    return "that is what the bridge says on this machine, without aotgaudi, too: `python3 -c 'import torch'`"


def examine(lab: Lab, checks: Collection[HpuCheck], progress: Progress) -> DoctorReport:
    """Runs `checks`, telling `progress` of each, and returns the report.

    Raises UnexaminedError if no card can be acquired.
    """
    found = acquire(lab)
    verdicts: dict[str, Verdict] = {}
    reports: list[CheckReport] = []
    for check in checks:
        began = time.monotonic()
        findings = check.findings(lab, verdicts)
        verdicts.update({finding.line: finding.verdict for finding in findings})
        reports.append(_report(check, findings, time.monotonic() - began))
        progress(check, findings, _so_far(found, verdicts, reports))
    return _so_far(found, verdicts, reports)


def _so_far(found: Device, verdicts: Mapping[str, Verdict], reports: Collection[CheckReport]) -> DoctorReport:
    return DoctorReport(
        is_double=found.is_double,
        device_type=device_type_of(found.name) or "unknown",
        versions=dict(_versions(found.capability)),
        key_mode=_key_mode(verdicts),
        checks=tuple(sorted(reports, key=lambda report: report.id)),
    )


def _report(check: HpuCheck, findings: tuple[LineFinding, ...], seconds: float) -> CheckReport:
    lines = (
        LineReport.of(finding.line, finding.verdict, without_private(finding.observation))
        for finding in findings
    )
    return CheckReport(id=check.id, title=check.title, seconds=round(seconds, 1), lines=tuple(lines))


def _versions(capability: str) -> Iterator[tuple[str, str]]:
    yield from ((package, version_of(package)) for package in (PLUGIN, "torch", "transformers"))
    yield "python", python_version()
    yield "synapse", capability
    yield "aotgaudi", aotgaudi.__version__
    yield "system", sys.platform


def _key_mode(verdicts: Mapping[str, Verdict]) -> KeyMode | Literal["unknown"]:
    if verdicts.get("K-08") == "confirmed":
        return "stable"
    return "pinned" if verdicts.get("K-09") == "confirmed" else "unknown"
