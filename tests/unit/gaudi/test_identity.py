"""Which files decide what is compiled, when they are hashed again, and cards from each of the three sources."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aotgaudi.digest import sha256_file
from aotgaudi.errors import StoreError, TargetError
from aotgaudi.gaudi.identity import (
    Card,
    DigestMemory,
    Installation,
    Inventory,
    device_type_of,
    device_type_of_pci,
    find_cards,
    library_digests,
    usable_modules,
)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root sees the files of other processes")


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    plugin, system = tmp_path / "habana_frameworks", tmp_path / "usr/lib/habanalabs"
    files = {
        plugin / "torch/lib/libhabana_pytorch_plugin.so": b"plugin",
        plugin / "torch/lib/libhabana_pytorch_backend.so": b"backend",
        plugin / "torch/dynamo/compile_backend/passes.py": b"passes",
        plugin / "torch/dynamo/compile_backend/__init__.py": b"",
        system / "libSynapse.so": b"synapse",
        system / "libtpc_fuser.so": b"fuser",
        system / "libtpc_kernels.so": b"kernels",
        system / "libgaudi2_complex_guid_lib.so": b"guid",
    }
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return Installation(plugin, system, ())


def digests(installation: Installation, tmp_path: Path) -> dict[str, str]:
    return dict(library_digests(installation, tmp_path / "memory"))


@pytest.mark.parametrize(
    ("path", "component"),
    [
        ("habana_frameworks/torch/lib/libhabana_pytorch_backend.so", "bridge"),
        ("habana_frameworks/torch/dynamo/compile_backend/passes.py", "bridge-python"),
        ("usr/lib/habanalabs/libSynapse.so", "graph-compiler"),
        ("usr/lib/habanalabs/libtpc_fuser.so", "kernels"),
        ("usr/lib/habanalabs/libtpc_kernels.so", "kernels"),
        ("usr/lib/habanalabs/libgaudi2_complex_guid_lib.so", "kernels"),
    ],
)
def test_an_edit_of_a_library_changes_its_component_alone(
    installation: Installation, tmp_path: Path, path: str, component: str
) -> None:
    before = digests(installation, tmp_path)
    (tmp_path / path).write_bytes(b"edited")

    after = digests(installation, tmp_path)

    assert {name for name in before if before[name] != after[name]} == {component}


def test_kernels_that_the_environment_names_take_the_place_of_the_default_ones(
    installation: Installation, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.so"
    mine.write_bytes(b"mine")
    changed = Installation(installation.plugin, installation.system, (mine,))

    assert digests(changed, tmp_path)["kernels"] != digests(installation, tmp_path)["kernels"]
    assert mine in changed.components()["kernels"]


@pytest.mark.parametrize("component", ["bridge", "bridge-python", "graph-compiler", "kernels"])
def test_a_component_without_files_is_named(installation: Installation, component: str) -> None:
    for path in installation.components()[component]:
        path.unlink()

    with pytest.raises(TargetError, match=component):
        installation.components()


def test_a_kernel_library_that_is_not_there_is_named(installation: Installation) -> None:
    missing = Installation(installation.plugin, installation.system, (Path("/nowhere.so"),))

    with pytest.raises(TargetError, match=r"GC_KERNEL_PATH names /nowhere\.so"):
        missing.components()


def test_without_the_bridge_there_is_nothing_to_identify() -> None:
    with pytest.raises(TargetError, match="habana-torch-plugin is not installed"):
        Installation.find({})


def counting(counted: list[Path]) -> Callable[[Path], str]:
    def hash_file(path: Path) -> str:
        counted.append(path)
        return sha256_file(path)

    return hash_file


def test_a_file_is_read_again_only_where_it_changed(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for path in (one, two):
        path.write_bytes(b"1")
    read: list[Path] = []
    memory = DigestMemory(tmp_path / "memory", counting(read))

    first = memory.digests([one, two])
    assert memory.digests([one, two]) == first
    two.write_bytes(b"2")
    os.utime(
        two, ns=(one.stat().st_atime_ns, one.stat().st_mtime_ns)
    )  # The time of the change gives it away.

    assert memory.digests([one, two]) == {one: first[one], two: sha256_file(two)}
    assert sorted(read) == [one, two, two]


def test_the_graph_compiler_is_the_one_that_the_loader_would_take(
    installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (installation.plugin / "__init__.py").write_bytes(b"")
    monkeypatch.syspath_prepend(tmp_path)
    other, empty = tmp_path / "other", tmp_path / "empty"
    empty.mkdir()
    other.mkdir()
    (other / "libSynapse.so").write_bytes(b"another")

    def found(path: str) -> Path:
        return Installation.find({"LD_LIBRARY_PATH": path}, tmp_path).system

    assert found(f":{empty}:{other}") == other
    assert found(str(empty)) == found("") == installation.system


@pytest.mark.parametrize("content", [b"", b"{", b"[[1]]", b"[" * 100_000, b'{"a": 1}', b'[["/x", ["y"], 3]]'])
def test_a_damaged_memory_costs_a_reading(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "library.so"
    path.write_bytes(b"1")
    memory = DigestMemory(tmp_path / "memory")
    memory.digests([path])
    (remembered,) = (tmp_path / "memory").iterdir()
    remembered.write_bytes(content)

    assert memory.digests([path]) == {path: sha256_file(path)}


def test_a_memory_that_cannot_be_kept_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    path.write_bytes(b"1")
    (tmp_path / "memory").write_bytes(b"in the way")

    assert DigestMemory(tmp_path / "memory").digests([path]) == {path: sha256_file(path)}


def test_a_library_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nowhere"):
        DigestMemory(tmp_path).digests([tmp_path / "nowhere"])


def test_a_memory_without_a_place_hashes_each_time(tmp_path: Path) -> None:
    (tmp_path / "a.so").write_bytes(b"one")
    read: list[Path] = []
    memory = DigestMemory(None, counting(read))

    assert memory.digests([tmp_path / "a.so"]) == memory.digests([tmp_path / "a.so"])
    assert len(read) == 2


def test_names_and_pci_numbers_of_cards() -> None:
    names = ("HL-225B", "HL-325L", "GAUDI2", "GAUDI3", "HL-205", "NVIDIA H100")
    numbers = ("0x1020", "0x1030", "0x1060", "0x106F", "0x1000", "0x2")

    assert [*map(device_type_of, names)] == ["gaudi2", "gaudi3", "gaudi2", "gaudi3", "gaudi", None]
    assert [*map(device_type_of_pci, numbers)] == ["gaudi2", "gaudi2", "gaudi3", "gaudi3", "gaudi", None]


def accel(
    root: Path, index: int, *, vendor: str = "0x1da3", device: str = "0x1020", module: str = "3"
) -> None:
    folder = root / f"sys/class/accel/accel{index}/device"
    folder.mkdir(parents=True)
    for name, value in {"vendor": vendor, "device": device, "module_id": module}.items():
        (folder / name).write_text(f"{value}\n", encoding="ascii")


def test_the_kernel_shows_cards(tmp_path: Path) -> None:
    accel(tmp_path, 10, module="7")
    accel(tmp_path, 2)
    accel(tmp_path, 3, vendor="0x8086")

    found = find_cards(tmp_path)

    assert [(card.index, card.module_id) for card in found.cards] == [(2, 3), (10, 7)]
    assert found.device_type() == "gaudi2"


@needs_root
def test_a_card_that_a_process_holds_is_busy(tmp_path: Path) -> None:
    accel(tmp_path, 0)
    accel(tmp_path, 1)
    (tmp_path / "proc/77/fd").mkdir(parents=True)
    (tmp_path / "proc/77/fd/5").symlink_to("/dev/accel/accel1")

    assert [card.is_busy for card in find_cards(tmp_path).cards] == [False, True]


@needs_root
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
    )


def test_the_drivers_library_is_asked_first(tmp_path: Path) -> None:
    accel(tmp_path, 5)

    found = find_cards(tmp_path, hlml=hlml(b"HL-325L", b"HL-325L"))

    assert [(card.device_type, card.module_id) for card in found.cards] == [("gaudi3", 7), ("gaudi3", 6)]


def test_a_library_without_a_driver_leaves_it_to_the_others(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("HLML_ERROR_LIBRARY_NOT_FOUND")

    accel(tmp_path, 5)
    assert [card.index for card in find_cards(tmp_path, hlml=SimpleNamespace(hlmlInit=fail)).cards] == [5]


def tool(folder: Path, text: str) -> None:
    path = folder / "hl-smi"
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="ascii")
    path.chmod(0o755)


@pytest.mark.process
def test_the_tool_is_asked_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, 'echo "0, HL-225B, 4"; echo "1, HL-225B, N/A"; echo broken')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    found = find_cards(tmp_path)

    assert [(card.index, card.module_id) for card in found.cards] == [(0, 4), (1, None)]


@needs_root
@pytest.mark.parametrize(
    ("listed", "modules"), [("4, 6", (4, 6)), ("2", (2,)), ("", (3,)), ("all", (3,)), (",", (3,))]
)
def test_cards_that_may_be_used_are_the_listed_ones_or_those_that_are_free(
    tmp_path: Path, listed: str, modules: tuple[int, ...]
) -> None:
    accel(tmp_path, 0, module="3")
    accel(tmp_path, 1, module="5")
    (tmp_path / "proc/77/fd").mkdir(parents=True)
    (tmp_path / "proc/77/fd/5").symlink_to("/dev/accel/accel1")

    assert usable_modules({"HABANA_VISIBLE_MODULES": listed}, tmp_path) == modules


@needs_root
def test_without_a_free_card_none_may_be_used(tmp_path: Path) -> None:
    accel(tmp_path, 1)
    (tmp_path / "proc/77/fd").mkdir(parents=True)
    (tmp_path / "proc/77/fd/5").symlink_to("/dev/accel/accel1")

    with pytest.raises(TargetError, match="all 1 cards of this machine are busy"):
        usable_modules({}, tmp_path)


@pytest.mark.process
@pytest.mark.parametrize("text", ["exit 3", "echo nothing", "echo; exit 0"])
def test_no_card_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    tool(tmp_path, text)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    found = find_cards(tmp_path)

    assert found == Inventory()
    with pytest.raises(TargetError, match="has no Gaudi"):
        found.device_type()


def test_two_types_of_cards_are_not_one_target() -> None:
    mixed = Inventory((Card(0, "gaudi2", 0), Card(1, "gaudi3", 1)))

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
