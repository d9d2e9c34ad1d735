"""Cards by each of the three sources, and by their names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aotgaudi.errors import TargetError
from aotgaudi.gaudi.inventory import Card, Inventory, device_type_of, device_type_of_pci, find_cards


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("HL-225B", "gaudi2"),
        ("HL-325L", "gaudi3"),
        ("GAUDI2", "gaudi2"),
        ("GAUDI3", "gaudi3"),
        ("HL-205", "gaudi"),
        ("NVIDIA H100", None),
    ],
)
def test_names_of_cards(name: str, kind: str | None) -> None:
    assert device_type_of(name) == kind


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("0x1020", "gaudi2"),
        ("0x1030", "gaudi2"),
        ("0x1060", "gaudi3"),
        ("0x106F", "gaudi3"),
        ("0x1000", "gaudi"),
        ("0x2", None),
    ],
)
def test_pci_numbers(device: str, kind: str | None) -> None:
    assert device_type_of_pci(device) == kind


def accel(
    root: Path, index: int, *, vendor: str = "0x1da3", device: str = "0x1020", module: str = "3"
) -> None:
    folder = root / f"sys/class/accel/accel{index}/device"
    folder.mkdir(parents=True)
    for name, value in {
        "vendor": vendor,
        "device": device,
        "module_id": module,
        "pci_addr": "0000:19:00.0",
    }.items():
        (folder / name).write_text(f"{value}\n", encoding="ascii")


def test_the_kernel_shows_cards(tmp_path: Path) -> None:
    accel(tmp_path, 10, module="7")
    accel(tmp_path, 2)
    accel(tmp_path, 3, vendor="0x8086")

    found = find_cards(tmp_path)

    assert found.source == "sysfs"
    assert [(card.index, card.module_id) for card in found.cards] == [(2, 3), (10, 7)]
    assert found.device_type() == "gaudi2"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees the files of other processes")
def test_a_card_that_a_process_holds_is_busy(tmp_path: Path) -> None:
    accel(tmp_path, 0)
    accel(tmp_path, 1)
    (tmp_path / "proc/77/fd").mkdir(parents=True)
    (tmp_path / "proc/77/fd/5").symlink_to("/dev/accel/accel1")

    assert [card.is_busy for card in find_cards(tmp_path).cards] == [False, True]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees the files of other processes")
def test_a_process_that_ends_while_it_is_looked_at_has_no_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accel(tmp_path, 0)
    ended = tmp_path / "proc/77"
    (ended / "fd").mkdir(parents=True)

    def after_its_end(look: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def looked(path: Any) -> Any:
            if str(path) == str(ended / "fd"):
                (ended / "fd").rmdir()
                ended.rmdir()
            return look(path)

        return looked

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, after_its_end(getattr(os, name)))

    assert [card.is_busy for card in find_cards(tmp_path).cards] == [False]
    assert not ended.exists()


def hlml(*names: bytes) -> SimpleNamespace:
    return SimpleNamespace(
        hlmlInit=lambda: None,
        hlmlShutdown=lambda: None,
        hlmlDeviceGetCount=lambda: len(names),
        hlmlDeviceGetHandleByIndex=lambda index: index,
        hlmlDeviceGetName=lambda handle: names[handle],
        hlmlDeviceGetModuleID=lambda handle: 7 - handle,
        hlmlDeviceGetPCIInfo=lambda handle: SimpleNamespace(bus_id=b"0000:33:00.0"),
    )


def test_the_drivers_library_is_asked_first(tmp_path: Path) -> None:
    accel(tmp_path, 5)

    found = find_cards(tmp_path, hlml=hlml(b"HL-325L", b"HL-325L"))

    assert found.source == "pyhlml"
    assert [(card.device_type, card.module_id, card.bus_id) for card in found.cards] == [
        ("gaudi3", 7, "0000:33:00.0"),
        ("gaudi3", 6, "0000:33:00.0"),
    ]


def test_a_library_without_a_driver_leaves_it_to_the_others(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("HLML_ERROR_LIBRARY_NOT_FOUND")

    accel(tmp_path, 5)
    assert find_cards(tmp_path, hlml=SimpleNamespace(hlmlInit=fail)).source == "sysfs"


def tool(folder: Path, text: str) -> None:
    path = folder / "hl-smi"
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="ascii")
    path.chmod(0o755)


def test_the_tool_is_asked_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, 'echo "0, HL-225B, 4, 0000:19:00.0"; echo "1, HL-225B, N/A, 0000:1a:00.0"; echo broken')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    found = find_cards(tmp_path)

    assert found.source == "hl-smi"
    assert [(card.index, card.module_id) for card in found.cards] == [(0, 4), (1, None)]


@pytest.mark.parametrize("text", ["exit 3", "echo nothing", "echo; exit 0"])
def test_no_card_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    tool(tmp_path, text)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    found = find_cards(tmp_path)

    assert found == Inventory()
    with pytest.raises(TargetError, match="has no Gaudi"):
        found.device_type()


def test_two_types_of_cards_are_not_one_target() -> None:
    mixed = Inventory((Card(0, "gaudi2", 0, ""), Card(1, "gaudi3", 1, "")))

    with pytest.raises(TargetError, match="gaudi2, gaudi3"):
        mixed.device_type()


def test_what_the_drivers_library_prints_where_it_is_not_there_is_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """pyhlml 1.24.2: ``LibHLML._load_lib`` prints, and then calls fail; so did the JSON of ``doctor --json``."""

    def init() -> None:
        print("Failed to load libhlml")
        raise RuntimeError

    assert find_cards(tmp_path, hlml=SimpleNamespace(hlmlInit=init)) == Inventory()
    assert capsys.readouterr().out == ""
