"""Checks of the device: single operators, types, memory, and who has the card."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from aotgaudi.doctor.hpu.findings import HpuCheck, LineFinding, judged, skipped
from aotgaudi.doctor.hpu.lab import Lab, Outcome, ProbeProcess

_MIB = 1 << 20
_MEBIBYTES = 64
_HOLD_SECONDS = 60.0
_POLL_SECONDS = 0.02


def identity(lab: Lab) -> Outcome:
    """Returns what a process that acquired the card knows of it; one is asked in an examination."""
    return lab.kept("identity", lambda: lab.run("device.identity"))


def _eager(lab: Lab) -> Iterator[LineFinding]:
    values = lab.run("device.eager").required()
    if not values["is_told"] and not values["refused"]:
        yield from skipped(("K-17",), "this release does not tell how many it has compiled")
        return
    seen = f"{values['eager_compiled']} in its own cache, {values['compiled']} among compiled graphs"
    holds = values["eager_compiled"] > 0 and values["compiled"] == 0 and not values["refused"]
    yield judged("K-17", holds, seen, values["refused"] or seen)


def _casts(lab: Lab) -> Iterator[LineFinding]:
    values = lab.run("device.casts").required()
    integer, excess = values["integer"], values["double_excess"]
    seen = f"2**33 + 5 comes back as {integer}, 1 + 2**-40 as 1 + {excess:.1e}"
    yield judged("K-20", integer == 5 and excess == 0, seen)


def _memory(lab: Lab) -> Iterator[LineFinding]:
    values = lab.run("device.memory", mebibytes=_MEBIBYTES).required()
    taken, returned = values["taken"], values["returned"]
    holds = min(taken, returned) >= values["asked"]
    seen = f"{taken / _MIB:.0f} MiB taken for {_MEBIBYTES}, {returned / _MIB:.0f} given back"
    yield judged("K-41", holds, seen)


def _one_process(lab: Lab) -> Iterator[LineFinding]:
    """Has one process hold the card while another asks for it; then kills the first, and asks again."""
    ready = lab.new_directory("hold") / "ready"
    with lab.running("device.hold", ready=str(ready), seconds=_HOLD_SECONDS) as process:
        _wait_for(ready, process)
        second = lab.run_once("device.identity")
    began = time.monotonic()
    third = lab.run("device.identity")
    seconds = time.monotonic() - began
    lacks = "a second process has it, too" if second.is_whole else third.problem or second.problem
    seen = f"a second process is refused; when the first was killed, another had it within {seconds:.0f} s"
    yield judged("K-25", second.is_busy and third.is_whole, seen, lacks)


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
