"""What is captured of a server's files, and which secrets are found in them."""

from __future__ import annotations

import json
import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bundle.capture_receipt import CapturedFile
from aotgaudi.digest import Digest
from aotgaudi.errors import CaptureError
from aotgaudi.store.cas import ObjectStore
from aotgaudi.wrap import collect as collect_module
from aotgaudi.wrap.adapters.base import FileKind
from aotgaudi.wrap.collect import (
    MIN_SECRET_BYTES,
    Collected,
    Rules,
    Secret,
    collect,
    require_public,
    secrets_of,
)


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
    assert found.left_out == (), "no file matched a pattern"


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


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["cache/a/\n"], "cannot be captured"),
        (["cache/x\\y"], "cannot be captured"),
        (["cache/e\u0301"], "cannot be captured"),
        (["cache/A/x", "cache/a/y"], "differ in case alone"),
        (["cache/1", "cache/2", "cache/3"], "left 3 files in its caches, at most 2"),
    ],
)
def test_names_that_no_receipt_may_hold_and_too_many_files_are_refused(
    names: list[str], why: str, here: Path, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect_module, "MAX_FILES", 2)
    for name in names:
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).touch()

    with pytest.raises(CaptureError, match=why):
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
    """But a secret in a file that is left out does no harm."""
    secret = Secret("HF_TOKEN", "hf_topsecret")
    rules = Rules((("*.lock", "locks"),), kind_of, (secret,))
    (here / "cache/x.lock").write_text(secret.value)
    (here / "cache/a/k.so").touch()
    assert paths(collect(here, rules, objects)) == ["cache/a/k.so"]
    (here / "cache" / f"of-{secret.value}").touch()

    with pytest.raises(CaptureError, match=r"cache/of-\*\*\* holds the value of HF_TOKEN") as error:
        collect(here, rules, objects)
    assert secret.value not in str(error.value)


def test_files_that_hold_a_path_are_counted(here: Path, objects: ObjectStore) -> None:
    (here / "cache/one").write_bytes(b"... /run/aotgaudi.1/cache ...")
    (here / "cache/two").write_bytes(b"/run/aotgaudi and /opt/venv")
    (here / "cache/three").write_bytes(b"")
    places = {"root": "/run/aotgaudi", "prefix": "/opt/venv", "none": ""}

    assert collect(here, Rules((), kind_of, places=places), objects).places == {"root": 2, "prefix": 1}


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


VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=14, max_size=40)
FORMS: dict[str, Callable[[str], bytes]] = {
    "plain": lambda value: value.encode(),
    "JSON": lambda value: json.dumps({"token": value}).encode(),
    "JSON in UTF-8": lambda value: json.dumps([value], ensure_ascii=False).encode(),
    "pickle": lambda value: pickle.dumps({"token": value}),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@given(value=VALUES)
def test_a_secret_is_found_as_it_is_and_escaped(form: Callable[[str], bytes], value: str) -> None:
    data = b"before " + form(value) + b" after"

    assert any(needle in data for needle in Secret("HF_TOKEN", value).forms())


def test_a_value_is_never_shown_and_searched_only_if_it_is_long() -> None:
    assert "hunter2hunter2" not in repr(Secret("HF_TOKEN", "hunter2hunter2"))
    assert not Secret("HF_TOKEN", "x" * (MIN_SECRET_BYTES - 1)).is_searched
    assert Secret("HF_TOKEN", "x" * MIN_SECRET_BYTES).is_searched


def test_variables_count_by_their_names() -> None:
    environ = {
        "HF_TOKEN": "hf_abcdef",
        "AWS_SECRET_ACCESS_KEY": "wJalr",
        "PATH": "/usr/bin",
        "VLLM_API_KEY": "",
    }

    assert {secret.name: secret.value for secret in secrets_of(environ, (), ())} == {
        "HF_TOKEN": "hf_abcdef",
        "AWS_SECRET_ACCESS_KEY": "wJalr",
    }


@pytest.mark.parametrize(
    ("secret", "public"),
    [
        (("--api-key", "topsecret"), ()),
        (("--api-key=topsecret",), ()),
        (("env", "HF_TOKEN=topsecret"), ("env",)),
        (("--extra-config", '{"auth_token": "topsecret", "x": 1}'), ("--extra-config", '{"x":1}')),
    ],
)
def test_words_that_are_not_public_count(secret: tuple[str, ...], public: tuple[str, ...]) -> None:
    words = ("vllm", "serve", "M", "--max-model-len", "512")

    assert secrets_of({}, words, words) == ()
    assert "topsecret" in {one.value for one in secrets_of({}, (*words, *secret), (*words, *public))}


def test_a_document_that_holds_a_secret_is_not_sealed() -> None:
    secrets = (
        Secret("HF_TOKEN", "hf_abcdefgh"),
        Secret("SHORT_KEY", "abc"),
        Secret("OTHER_KEY", "not there"),
    )

    require_public(b'{"words": ["abc"]}', "launch", secrets)
    with pytest.raises(CaptureError, match="the receipt holds the value of HF_TOKEN, a secret") as error:
        require_public(b'{"factors": {"VLLM_X": "hf_abcdefgh"}}', "receipt", secrets)
    assert "hf_abcdefgh" not in str(error.value)
