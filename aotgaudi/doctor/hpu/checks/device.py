"""Checks of the device: single operators, types, memory, and who has the card."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from aotgaudi.doctor.hpu.findings import HpuCheck, LineFinding, judged, unclear
from aotgaudi.doctor.hpu.lab import BUSY, Lab, ProbeProcess

_MIB = 1 << 20
_MEBIBYTES = 64
_HOLD_SECONDS = 60.0
_POLL_SECONDS = 0.02


def _eager(lab: Lab) -> Iterator[LineFinding]:
    outcome = lab.run("device.eager")
    if not outcome.is_whole:
        yield from unclear(("K-17",), outcome)
        return
    values = outcome.values
    seen = f"{values['eager_compiled']} in its own cache, {values['compiled']} among compiled graphs"
    holds = values["eager_compiled"] > 0 and values["compiled"] == 0 and not values["refused"]
    yield judged("K-17", holds, seen, values["refused"] or seen)


def _casts(lab: Lab) -> Iterator[LineFinding]:
    outcome = lab.run("device.casts")
    if not outcome.is_whole:
        yield from unclear(("K-20",), outcome)
        return
    integer, excess = outcome.values["integer"], outcome.values["double_excess"]
    seen = f"2**33 + 5 comes back as {integer}, 1 + 2**-40 as 1 + {excess:.1e}"
    yield judged("K-20", integer == 5 and excess == 0, seen)


def _memory(lab: Lab) -> Iterator[LineFinding]:
    outcome = lab.run("device.memory", mebibytes=_MEBIBYTES)
    if not outcome.is_whole:
        yield from unclear(("K-41",), outcome)
        return
    taken, returned = outcome.values["taken"], outcome.values["returned"]
    holds = min(taken, returned) >= outcome.values["asked"]
    seen = f"{taken / _MIB:.0f} MiB taken for {_MEBIBYTES}, {returned / _MIB:.0f} given back"
    yield judged("K-41", holds, seen)


def _one_process(lab: Lab) -> Iterator[LineFinding]:
    """Has one process hold the card while another asks for it; then kills the first, and asks again."""
    ready = lab.new_directory("hold") / "ready"
    with lab.running("device.hold", ready=str(ready), seconds=_HOLD_SECONDS) as process:
        _wait_for(ready, process)
        second = lab.run("device.identity")
    third = lab.run_when_free("device.identity")
    holds = BUSY in second.problem and third.is_whole
    lacks = "a second process has it, too" if second.is_whole else third.problem or second.problem
    yield judged("K-25", holds, "a second process is refused; it is free when the first was killed", lacks)


def _wait_for(path: Path, process: ProbeProcess) -> None:
    deadline = time.monotonic() + _HOLD_SECONDS
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


CHECKS = (
    HpuCheck("H-11", "operators outside graphs", ("K-17",), _eager),
    HpuCheck("H-14", "narrow types", ("K-20",), _casts),
    HpuCheck("H-21", "memory", ("K-41",), _memory),
    HpuCheck("H-20", "one process a card", ("K-25",), _one_process),
)
