"""Which files decide what is compiled, and that a digest is computed again only where a file changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from aotgaudi.digest import sha256_file
from aotgaudi.errors import StoreError, TargetError
from aotgaudi.gaudi.identity import DigestMemory, Installation, LibraryDigests


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
    return dict(LibraryDigests.of(installation.components(), DigestMemory(tmp_path / "memory")).components)


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
