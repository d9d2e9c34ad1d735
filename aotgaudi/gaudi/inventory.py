"""The cards of this machine, found without acquiring one: a process that acquires a card keeps others from it (K-25).

Asked in this order; the first that knows of a card answers: the library of the driver (`pyhlml`), the kernel's
``/sys/class/accel``, and the tool ``hl-smi``.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from aotgaudi.errors import TargetError

DeviceType = Literal["gaudi", "gaudi2", "gaudi3"]
Source = Literal["pyhlml", "sysfs", "hl-smi"]

VENDOR = "0x1da3"
"""Habana Labs, in the PCI database."""

_HL_SMI_COLUMNS = ("index", "name", "module_id", "bus_id")
_HL_SMI_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Card:
    """One card.

    Attributes:
        index: As the driver counts, from 0.
        device_type: ``gaudi2``, say.
        module_id: What ``HLS_MODULE_ID`` and ``HABANA_VISIBLE_MODULES`` name; None where it is not known.
        bus_id: Its place on the PCI bus: ``0000:19:00.0``.
        is_busy: Whether a process holds it; None where that cannot be seen.
    """

    index: int
    device_type: DeviceType
    module_id: int | None
    bus_id: str
    is_busy: bool | None = None


@dataclass(frozen=True, slots=True)
class Inventory:
    """The cards of a machine, in order of their indices, and who named them; None: nobody knows of any."""

    cards: tuple[Card, ...] = ()
    source: Source | None = None

    def device_type(self) -> DeviceType:
        """Returns the type of all cards.

        Raises:
            TargetError: there is no card, or there are two types of them.
        """
        types = sorted({card.device_type for card in self.cards})
        if not types:
            raise TargetError("target: this machine has no Gaudi that its driver shows")
        if len(types) > 1:
            raise TargetError(
                f"target: this machine has cards of several types: {', '.join(types)};"
                " show one with HABANA_VISIBLE_DEVICES"
            )
        return types[0]


def device_type_of(name: str) -> DeviceType | None:
    """Returns the type that a card's name stands for: ``HL-225B``, ``GAUDI2``, ``HL-325L``; None for others."""
    text = name.upper()
    for kind, marks in _NAME_MARKS:
        if any(mark in text for mark in marks):
            return kind
    return None


_NAME_MARKS: tuple[tuple[DeviceType, tuple[str, ...]], ...] = (
    ("gaudi3", ("GAUDI3", "HL-325", "HL-328", "HL-388", "HL-338")),
    ("gaudi2", ("GAUDI2", "HL-225", "HL-228", "HL-288")),
    ("gaudi", ("GAUDI", "HL-205", "HL-200", "HL-202")),
)


def device_type_of_pci(device: str) -> DeviceType | None:
    """Returns the type that a PCI device number stands for (``0x1020``); None for others."""
    number = device.lower().removeprefix("0x")
    if number in ("1020", "1030"):
        return "gaudi2"
    if number.startswith("106") and len(number) == 4:
        return "gaudi3"
    return "gaudi" if number in ("1000", "1001", "1010", "1011") else None


def find_cards(root: Path = Path("/"), *, hlml: Any = None) -> Inventory:
    """Returns the cards that the driver shows. Acquires none; asks ``hl-smi``, a process, last.

    Args:
        root: Stands for the root of the file system.
        hlml: Stands for the module ``pyhlml``; None: the installed one, if any.
    """
    asked: tuple[tuple[Source, Callable[[], Iterator[Card]]], ...] = (
        ("pyhlml", lambda: _from_hlml(hlml or _import_hlml())),
        ("sysfs", lambda: _from_sysfs(root)),
        ("hl-smi", _from_hl_smi),
    )
    busy = _open_devices(root)
    for source, cards in asked:
        found = sorted(cards(), key=lambda card: card.index)
        if found:
            return Inventory(tuple(_with_state(card, busy) for card in found), source)
    return Inventory()


def _import_hlml() -> Any:
    try:
        return importlib.import_module("pyhlml")
    except Exception:  # What is broken there must not keep us from asking the others.
        return None


def _from_hlml(hlml: Any) -> Iterator[Card]:
    """Asks the driver's library (``libhlml.so``), which needs no card of its own."""
    if hlml is None:
        return
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # It prints what it also raises.
            hlml.hlmlInit()
    except Exception:  # HLMLError: no driver, or no library.
        return
    try:
        for index in range(hlml.hlmlDeviceGetCount()):
            handle = hlml.hlmlDeviceGetHandleByIndex(index)
            kind = device_type_of(_text(hlml.hlmlDeviceGetName(handle)))
            if kind is not None:
                bus_id = _text(getattr(hlml.hlmlDeviceGetPCIInfo(handle), "bus_id", b""))
                yield Card(index, kind, int(hlml.hlmlDeviceGetModuleID(handle)), bus_id)
    finally:
        hlml.hlmlShutdown()


def _from_sysfs(root: Path) -> Iterator[Card]:
    """Reads ``/sys/class/accel/accel<N>/device`` (kernel documentation, sysfs-driver-habanalabs)."""
    for folder in sorted((root / "sys/class/accel").glob("accel[0-9]*")):
        device = folder / "device"
        if _line(device / "vendor") != VENDOR or not folder.name[5:].isdecimal():
            continue
        kind = device_type_of_pci(_line(device / "device"))
        if kind is not None:
            module = _line(device / "module_id")
            bus_id = _line(device / "pci_addr") or device.resolve().name
            yield Card(int(folder.name[5:]), kind, int(module) if module.isdecimal() else None, bus_id)


def _from_hl_smi() -> Iterator[Card]:
    path = shutil.which("hl-smi")
    if path is None:
        return
    command = [path, "-Q", ",".join(_HL_SMI_COLUMNS), "-f", "csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_HL_SMI_SECONDS, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return  # No driver, or a tool that hangs: it knows of no card.
    for row in csv.reader(done.stdout.splitlines(), skipinitialspace=True):
        if len(row) != len(_HL_SMI_COLUMNS) or not row[0].strip().isdecimal():
            continue
        index, name, module, bus_id = (value.strip() for value in row)
        kind = device_type_of(name)
        if kind is not None:
            yield Card(int(index), kind, int(module) if module.isdecimal() else None, bus_id)


def _with_state(card: Card, busy: frozenset[int] | None) -> Card:
    state = None if busy is None else card.index in busy
    return Card(card.index, card.device_type, card.module_id, card.bus_id, state)


def _open_devices(root: Path) -> frozenset[int] | None:
    """The indices of the cards whose device file some process has open; None unless we may see every process."""
    if os.geteuid() != 0:
        return None
    found: set[int] = set()
    for target in map(Path, _open_files(root / "proc")):
        if target.parent == Path("/dev/accel") and target.name[5:].isdecimal():
            found.add(int(target.name[5:]))
    return frozenset(found)


def _open_files(proc: Path) -> Iterator[str]:
    """What the open files of all processes are; not of those that end, or are closed, while we look."""
    for process in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(process / "fd"):
                with contextlib.suppress(OSError):
                    yield os.readlink(process / "fd" / descriptor)


def _text(value: bytes | str) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""  # Not there in this version of the driver.
