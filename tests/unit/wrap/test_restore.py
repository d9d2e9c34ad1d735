"""Restoring: what is in the directory is what was sealed, or nothing is."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.trust import TrustPolicy
from aotgaudi.bundle.verify import verify_bundle
from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, SpecError, StoreError, UntrustedError
from aotgaudi.store.cas import ObjectStore
from aotgaudi.wrap import restore as restore_module
from aotgaudi.wrap.restore import restore
from tests.unit.bundle.conftest import CAPTURED, Sealed, SealedCapture, capture_receipt


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir(mode=0o700)
    return path


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def modes(root: Path) -> dict[str, int]:
    return {str(path.relative_to(root)): stat.S_IMODE(path.lstat().st_mode) for path in root.rglob("*")}


def test_every_file_is_there_again_read_only_whatever_the_umask_and_shares_no_inode(
    captured: SealedCapture, root: Path
) -> None:
    before = os.umask(0o077)
    try:
        done = restore(captured.open(), root)
    finally:
        os.umask(before)

    assert tree(root) == CAPTURED
    assert (done.files, done.bytes) == (len(CAPTURED), sum(map(len, CAPTURED.values())))
    assert done.seconds >= 0
    assert {path.stat().st_nlink for path in root.rglob("*") if path.is_file()} == {1}
    for name, mode in modes(root).items():
        assert mode == (0o755 if name not in CAPTURED else 0o555 if name.endswith("l.so") else 0o444)


def test_directories_that_are_there_are_used_and_kept(captured: SealedCapture, root: Path) -> None:
    (root / "cache" / "a").mkdir(parents=True)
    (root / "cache" / "a" / "lock").touch()

    restore(captured.open(), root)

    assert tree(root) == {**CAPTURED, "cache/a/lock": b""}


def _flip(captured: SealedCapture) -> None:
    path = captured.object("cache/b/k.so")
    data = bytearray(path.read_bytes())
    data[4711] ^= 1
    path.write_bytes(data)


def _add_a_line(captured: SealedCapture) -> None:
    with captured.object("cache/a/run.py").open("ab") as file:
        file.write(b"import os\n")


def _remove(captured: SealedCapture) -> None:
    captured.object("cache/a/run.py").unlink()


def _swap(captured: SealedCapture) -> None:
    one, other = captured.object("cache/a/run.py"), captured.object("home/.config/x.json")
    one_bytes, other_bytes = one.read_bytes(), other.read_bytes()
    one.write_bytes(other_bytes)
    other.write_bytes(one_bytes)


def _link(captured: SealedCapture) -> None:
    path = captured.object("cache/a/run.py")
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _fifo(captured: SealedCapture) -> None:
    path = captured.object("cache/a/run.py")
    path.unlink()
    os.mkfifo(path)


def _directory(captured: SealedCapture) -> None:
    path = captured.object("cache/a/run.py")
    path.unlink()
    path.mkdir()


def _empty(captured: SealedCapture) -> None:
    captured.object("cache/a/model").write_bytes(b"")


FAULTS = (_flip, _add_a_line, _remove, _swap, _link, _fifo, _directory, _empty)


@pytest.mark.parametrize("damage", FAULTS, ids=lambda damage: damage.__name__)
def test_a_damaged_bundle_is_refused_by_path_and_digest_and_leaves_nothing(
    damage: Callable[[SealedCapture], None], captured: SealedCapture, root: Path
) -> None:
    (root / "cache").mkdir()
    (root / "cache" / "mine").touch()
    bundle = captured.open()
    damage(captured)

    with pytest.raises(CorruptError) as error:
        restore(bundle, root)

    assert error.value.exit_code == 4
    names = [path for path in CAPTURED if path in str(error.value)]
    assert names
    assert any(str(Digest.of(CAPTURED[name])) in str(error.value) for name in names)
    assert tree(root) == {"cache/mine": b""}
    assert sorted(modes(root)) == ["cache", "cache/mine"]


@pytest.mark.parametrize("damage", FAULTS, ids=lambda damage: damage.__name__)
def test_verifying_finds_the_same_faults_and_names_the_captured_path(
    damage: Callable[[SealedCapture], None], captured: SealedCapture
) -> None:
    damage(captured)
    report = verify_bundle(captured.open())

    assert not report.is_intact
    with pytest.raises(CorruptError) as error:
        report.raise_if_bad(captured.path)
    assert any(path in str(error.value) for path in CAPTURED)
    assert "aotgaudi build capture -o" in str(error.value)


def test_a_file_that_changes_while_it_is_copied_is_refused(
    captured: SealedCapture, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is restored is what was hashed: the file is read once."""
    original, opened = restore_module.copy_blob, []

    def copy(path: Path, digest: Digest, target: int, *rest: object) -> object:
        fault = original(path, digest, target, *rest)  # type: ignore[arg-type]
        path.chmod(0o644)
        path.write_bytes(b"changed after it was read")
        opened.append(digest)
        return fault

    monkeypatch.setattr(restore_module, "copy_blob", copy)
    with pytest.raises(
        CorruptError, match=r"cache/b/[kl]\.so"
    ):  # Two files of one object: the second finds it changed.
        restore(captured.open(), root)
    assert len(opened) >= 2
    assert tree(root) == {}


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o770])
def test_a_directory_that_others_may_enter_is_refused(mode: int, captured: SealedCapture, root: Path) -> None:
    root.chmod(mode)

    with pytest.raises(UntrustedError, match=f"mode {mode:04o}"):
        restore(captured.open(), root)
    assert tree(root) == {}


def test_a_link_in_the_place_of_a_directory_is_not_followed(
    captured: SealedCapture, root: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    (outside / "a").mkdir(parents=True)
    (root / "cache").symlink_to(outside)

    with pytest.raises(StoreError, match="cache"):
        restore(captured.open(), root)

    assert tree(outside) == {}
    assert (root / "cache").is_symlink()


def test_a_link_in_the_place_of_a_file_is_not_followed(
    captured: SealedCapture, root: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"mine")
    (root / "cache" / "a").mkdir(parents=True)
    (root / "cache" / "a" / "run.py").symlink_to(target)

    with pytest.raises(StoreError, match=r"cache/a/run\.py .*name is taken"):
        restore(captured.open(), root)

    assert target.read_bytes() == b"mine"
    assert sorted(modes(root)) == ["cache", "cache/a", "cache/a/run.py"]


def test_the_root_itself_may_be_no_link(captured: SealedCapture, root: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(root)

    with pytest.raises(StoreError, match="link"):
        restore(captured.open(), link)
    with pytest.raises(StoreError, match="No such file"):
        restore(captured.open(), tmp_path / "none")


def test_a_disk_that_is_full_is_a_store_error_and_leaves_nothing(
    captured: SealedCapture, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object) -> int:
        raise OSError(28, "No space left on device")

    bundle = captured.open()
    monkeypatch.setattr("aotgaudi.store.cas.os.write", no_space)
    with pytest.raises(StoreError, match=r"cannot restore .*No space left"):
        restore(bundle, root)
    monkeypatch.undo()

    assert sorted(modes(root)) == []


def test_nothing_of_programs_is_restored(sealed: Sealed, root: Path) -> None:
    with pytest.raises(SpecError, match="holds programs"):
        restore(sealed.open(), root)


def test_a_file_of_somebody_else_is_not_read(captured: SealedCapture, root: Path) -> None:
    bundle = open_bundle(captured.path, TrustPolicy.demanding())
    captured.object("cache/a/run.py").chmod(0o666)

    with pytest.raises(UntrustedError, match="can be written to by everybody"):
        restore(bundle, root)
    assert tree(root) == {}


def test_many_files_in_many_directories(tmp_path: Path, root: Path) -> None:
    objects = ObjectStore(tmp_path / "many")
    contents = {f"cache/{n % 7}/{n % 5}/{n}": b"%d" % (n % 50) for n in range(700)}
    many = SealedCapture(tmp_path / "bundle", objects, capture_receipt(objects, contents))
    many.pack()

    restore(many.open(), root)

    assert tree(root) == contents
