"""Collecting: every file counts but for a reason, and what cannot be put back as it is refuses by its name."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from aotgaudi.bundle.capture_receipt import CapturedFile
from aotgaudi.digest import Digest
from aotgaudi.errors import CaptureError
from aotgaudi.store.cas import ObjectStore
from aotgaudi.wrap import collect as collect_module
from aotgaudi.wrap.adapters.base import FileKind
from aotgaudi.wrap.collect import Collected, Rules, Secret, collect


def kind_of(path: str) -> FileKind:
    return "library" if path.endswith(".so") else "other"


RULES = Rules(left_out=(("*.lock", "locks"),), kind_of=kind_of)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for folder in ("cache/a", "tmp", "home"):
        (root / folder).mkdir(parents=True)
    return root


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore(tmp_path / "store")


def paths(found: Collected) -> list[str]:
    return [file.path for file in found.files]


def test_files_are_taken_by_content_with_their_kind_and_mode(here: Path, objects: ObjectStore) -> None:
    (here / "cache/a/k.so").write_bytes(b"code")
    (here / "cache/a/run").write_bytes(b"#!")
    (here / "cache/a/run").chmod(0o755)
    (here / "cache/z.py").write_bytes(b"code")

    found = collect(here, RULES, objects)

    assert found.files == (
        CapturedFile(path="cache/a/k.so", digest=Digest.of(b"code"), mode="0444", kind="library"),
        CapturedFile(path="cache/a/run", digest=Digest.of(b"#!"), mode="0555"),
        CapturedFile(path="cache/z.py", digest=Digest.of(b"code")),
    )
    assert all(objects.read(file.digest) == (here / file.path).read_bytes() for file in found.files)


def test_what_is_left_out_is_told_with_its_reason(
    here: Path, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "cache/a/x.lock",
        "tmp/tmpabc/x",
        "home/.cache/y",
        "tmp/torchinductor_me/k.so",
        "cache/a/k.so",
    ):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).touch()
    os.mkfifo(here / "cache/pipe")
    listener = socket.socket(socket.AF_UNIX)
    monkeypatch.chdir(here)  # A socket's path is short.
    listener.bind("tmp/s")
    listener.close()

    found = collect(here, RULES, objects)

    assert paths(found) == ["cache/a/k.so", "tmp/torchinductor_me/k.so"]
    assert [row.pattern for row in found.left_out] == ["*.lock", "cache/pipe", "home/*", "tmp/s", "tmp/tmp*"]
    assert all(row.reason for row in found.left_out)
    assert found.strays == ("home/.cache/y",)


def test_a_reason_that_nothing_was_left_out_for_is_not_told(here: Path, objects: ObjectStore) -> None:
    (here / "cache/a/k.so").touch()

    assert collect(here, RULES, objects).left_out == ()


def test_a_link_within_the_caches_is_the_file_that_it_leads_to(here: Path, objects: ObjectStore) -> None:
    (here / "cache/a/k.so").write_bytes(b"code")
    (here / "cache/latest.so").symlink_to("a/k.so")

    found = collect(here, RULES, objects)

    assert {file.path: file.digest for file in found.files} == {
        "cache/a/k.so": Digest.of(b"code"),
        "cache/latest.so": Digest.of(b"code"),
    }


@pytest.mark.parametrize("target", ["/etc/hostname", "nowhere", "a", "../../../outside"])
def test_a_link_that_leads_anywhere_else_is_refused(target: str, here: Path, objects: ObjectStore) -> None:
    (here.parent.parent / "outside").write_bytes(b"")
    (here / "cache/link").symlink_to(target)

    with pytest.raises(CaptureError, match="cache/link is a link") as error:
        collect(here, RULES, objects)
    assert error.value.exit_code == 6


@pytest.mark.parametrize("name", ["cache/a/\n", "cache/x\\y", "cache/e\u0301"])
def test_a_name_that_no_receipt_may_hold_is_refused(name: str, here: Path, objects: ObjectStore) -> None:
    (here / name).touch()

    with pytest.raises(CaptureError, match="cannot be captured"):
        collect(here, RULES, objects)


def test_names_that_differ_in_case_alone_are_refused(here: Path, objects: ObjectStore) -> None:
    (here / "cache/A").mkdir()
    (here / "cache/A/x").touch()
    (here / "cache/a/y").touch()

    with pytest.raises(CaptureError, match="differ in case alone"):
        collect(here, RULES, objects)


def test_too_many_files_are_refused(
    here: Path, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect_module, "MAX_FILES", 2)
    for number in range(3):
        (here / f"cache/{number}").touch()

    with pytest.raises(CaptureError, match="left 3 files in its caches, at most 2"):
        collect(here, RULES, objects)


@pytest.mark.parametrize("size", [0, 1, 4095, (4 << 20) - 7, (4 << 20) - 1, 8 << 20])
def test_a_secret_is_found_wherever_it_stands_and_never_printed(
    size: int, here: Path, objects: ObjectStore
) -> None:
    """Files are read in pieces of 4 MiB; a value may lie across two."""
    secret = Secret("HF_TOKEN", "hf_" + "x1" * 12)
    (here / "cache/a/model").write_bytes(bytes(size) + secret.value.encode() + b"tail")
    rules = Rules(left_out=(), kind_of=kind_of, secrets=(secret,))

    with pytest.raises(CaptureError, match="cache/a/model holds the value of HF_TOKEN") as error:
        collect(here, rules, objects)

    assert secret.value not in str(error.value)
    assert error.value.exit_code == 6
    assert list(objects.digests()) == []


def test_a_secret_in_a_name_is_found_and_never_printed(here: Path, objects: ObjectStore) -> None:
    secret = Secret("HF_TOKEN", "hf_topsecret")
    (here / "cache" / f"of-{secret.value}").touch()

    with pytest.raises(CaptureError, match=r"cache/of-\*\*\* holds the value of HF_TOKEN") as error:
        collect(here, Rules(left_out=(), kind_of=kind_of, secrets=(secret,)), objects)
    assert secret.value not in str(error.value)


def test_a_secret_in_what_is_left_out_is_nobodys_business(here: Path, objects: ObjectStore) -> None:
    secret = Secret("HF_TOKEN", "hf_topsecret")
    (here / "cache/x.lock").write_text(secret.value)
    (here / "cache/a/k.so").touch()

    assert paths(collect(here, Rules((("*.lock", "locks"),), kind_of, (secret,)), objects)) == [
        "cache/a/k.so"
    ]


def test_files_that_hold_a_place_are_counted(here: Path, objects: ObjectStore) -> None:
    (here / "cache/one").write_bytes(b"... /run/aotgaudi/cache ...")
    (here / "cache/two").write_bytes(b"/run/aotgaudi and /opt/venv")
    (here / "cache/three").write_bytes(b"")
    rules = Rules(
        left_out=(), kind_of=kind_of, places={"root": "/run/aotgaudi", "prefix": "/opt/venv", "none": ""}
    )

    assert collect(here, rules, objects).places == {"root": 2, "prefix": 1}


def test_a_path_that_only_the_build_has_is_refused(here: Path, objects: ObjectStore) -> None:
    (here / "cache/one").write_bytes(b"see /run/aotgaudi.1/cache")
    rules = Rules(left_out=(), kind_of=kind_of, foreign=("/run/aotgaudi.1",))

    with pytest.raises(CaptureError, match="cache/one holds a path that only this build has"):
        collect(here, rules, objects)


def test_a_file_that_changes_while_it_is_read_is_refused(
    here: Path, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = here / "cache/a/k.so"
    path.write_bytes(b"code")
    put = objects.put_file

    def put_and_change(source: Path) -> Digest:
        digest = put(source)
        source.write_bytes(b"other code")
        return digest

    monkeypatch.setattr(objects, "put_file", put_and_change)
    with pytest.raises(CaptureError, match=r"cache/a/k\.so changed while it was read"):
        collect(here, RULES, objects)


def test_caches_that_were_never_made_hold_nothing(tmp_path: Path, objects: ObjectStore) -> None:
    assert collect(tmp_path, RULES, objects).files == ()
