"""What an examination finds: a verdict on each line of the contract, and what was seen. Plain values.

Not a `MachineFinding`: what is wrong with a machine has a remedy there, what does not hold of the contract has consequences
here (`ContractLine.consequence`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from aotgaudi.doctor.hpu.lab import Lab, ProbeFailedError

Verdict = Literal["confirmed", "refuted", "unclear", "skipped"]


@dataclass(frozen=True, slots=True)
class LineFinding:
    """The verdict on one line of the contract, and what was seen, in a few words."""

    line: str
    verdict: Verdict
    observation: str


@dataclass(frozen=True, slots=True)
class HpuCheck:
    """One check.

    Attributes:
        id: H-nn.
        title: What is examined.
        lines: Of the contract.
        look: Runs probes and judges what they saw: a finding for each line, but for those whose probe came to no end
            of its own (`Outcome.required`), which are unclear.
        needs: Lines without which nothing can be said; where one was refuted, the check is skipped. So each fault is
            reported once, where it is.
    """

    id: str
    title: str
    lines: tuple[str, ...]
    look: Callable[[Lab], Iterable[LineFinding]]
    needs: tuple[str, ...] = ()

    def findings(self, lab: Lab, verdicts: Mapping[str, Verdict]) -> tuple[LineFinding, ...]:
        """Returns a finding for each line, in their order, given the verdicts so far."""
        refuted = next((line for line in self.needs if verdicts.get(line) == "refuted"), None)
        if refuted is not None:
            return tuple(skipped(self.lines, f"{refuted} was refuted"))
        found: dict[str, LineFinding] = {}
        problem = "not looked at"
        try:
            for finding in self.look(lab):
                found[finding.line] = finding
        except ProbeFailedError as error:
            problem = str(error)
        return tuple(found.get(line) or LineFinding(line, "unclear", problem) for line in self.lines)


def judged(line: str, holds: bool, seen: str, otherwise: str = "") -> LineFinding:
    """Returns a line's finding where `holds` decides; `otherwise` is what was seen where it does not."""
    return LineFinding(line, "confirmed" if holds else "refuted", seen if holds else otherwise or seen)


def skipped(lines: Iterable[str], reason: str) -> Iterator[LineFinding]:
    """Yields the findings of lines that were not examined."""
    return (LineFinding(line, "skipped", reason) for line in lines)
