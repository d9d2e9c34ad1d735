"""The receipt of a capture: one form, and no path in it that could lead a restore astray."""

from __future__ import annotations

import json
import unicodedata
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bundle.capture_receipt import (
    MAX_CAPTURE_BYTES,
    MAX_DEPTH,
    CapturedFile,
    CaptureReceipt,
    require_captured_path,
    require_distinct,
)
from aotgaudi.bundle.receipt import load_sealed
from aotgaudi.digest import Digest, canonical_json
from aotgaudi.errors import ManifestError, SpecError
from aotgaudi.store.cas import ObjectStore
from tests.unit.bundle.conftest import CAPTURED, LAUNCH_ID, Sealed, SealedCapture, capture_receipt
from tests.unit.bundle.test_receipt import make_receipt

GOLDEN = {
    "schema": "aotgaudi.capture/1",
    "manifest_id": LAUNCH_ID,
    "target": {"backend": "fake", "machine": "none", "isa": ["avx2"], "toolchain": {}, "flags": {}},
    "builder": {"aotgaudi": "1"},
    "files": [
        {"path": "cache/a/run.py", "digest": str(Digest.of(b"x")), "mode": "0444", "kind": "python"},
        {"path": "cache/l.so", "digest": str(Digest.of(b"y")), "mode": "0555", "kind": "library"},
    ],
    "left_out": [{"pattern": "**/*.lock", "reason": "held while a file is written"}],
    "expected": {
        "loads": {"aot:model": 1},
        "counters": {"num_aot_compiles": 0},
        "roles": {"Worker": 1},
        "hooks": ["audit"],
        "answers": ["e" * 64, ""],
    },
    "factors": {"env": {"VLLM_X": "d" * 64}},
    "proof": {"counts": {"compile": 0}, "witnesses": ["files"]},
    "residuals": ["CUDA graphs"],
    "repairs": ["vllm.finalize-loading"],
}
DIGEST = Digest.of(b"any")


def files(*paths: str) -> tuple[CapturedFile, ...]:
    return tuple(CapturedFile(path=path, digest=DIGEST) for path in paths)


def receipt_of(*paths: str, digest: Digest = DIGEST) -> CaptureReceipt:
    document = {**GOLDEN, "files": []}
    rows = [{"path": path, "digest": str(digest), "mode": "0444", "kind": "other"} for path in paths]
    loaded = load_sealed(canonical_json({**document, "files": rows}))
    assert isinstance(loaded, CaptureReceipt)
    return loaded


@pytest.mark.parametrize(
    "start",
    [
        {},
        {"start": {"requests": 3, "tokens": 0, "seconds": 1}},
        {"start": {"requests": 3, "tokens": 9, "seconds": 99, "asks_all": True, "why": "the slowest: a"}},
    ],
)
def test_the_wire_form(start: dict[str, Any]) -> None:
    document = {**GOLDEN, **start}

    loaded = load_sealed(canonical_json(document))

    assert isinstance(loaded, CaptureReceipt)
    assert json.loads(loaded.dumps()) == document
    assert [file.mode_bits for file in loaded.files] == [0o444, 0o555]


def test_members_that_came_later_are_absent_where_they_are_empty() -> None:
    more = {
        "not_exercised": ["images"],
        "live_graphs": [{"kind": "penalties", "state": "open", "text": "a graph for each length"}],
    }
    loaded = load_sealed(canonical_json({**GOLDEN, **more}))

    assert isinstance(loaded, CaptureReceipt)
    assert json.loads(loaded.dumps()) == {**GOLDEN, **more}
    assert [str(row) for row in loaded.live_graphs] == ["penalties: a graph for each length"]
    with pytest.raises(ManifestError, match="state"):
        load_sealed(canonical_json({**GOLDEN, "live_graphs": [{**more["live_graphs"][0], "state": "warm"}]}))


def test_the_schema_says_which_receipt_it_is() -> None:
    programs = make_receipt()

    assert load_sealed(programs.dumps()) == programs
    with pytest.raises(
        ManifestError, match=r"receipt has schema 'aotgaudi\.other/1'; this aotgaudi reads"
    ) as error:
        load_sealed(b'{"schema":"aotgaudi.other/1"}')
    assert "'aotgaudi.receipt/1' and 'aotgaudi.capture/1'" in str(error.value)


def test_whoever_needs_one_kind_refuses_the_other_in_one_line(
    sealed: Sealed, captured: SealedCapture
) -> None:
    assert sealed.open().require_programs() == sealed.receipt
    assert captured.open().require_capture() == captured.receipt
    for refuse in (
        lambda: captured.open().require_programs(),
        lambda: sealed.open().require_capture(),
        lambda: captured.open().manifest,
        lambda: captured.open().program("e"),
    ):
        with pytest.raises(SpecError) as error:
            refuse()
        assert "\n" not in str(error.value)
    with pytest.raises(SpecError, match=r"aotgaudi run --bundle"):
        captured.open().require_programs()


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"files": []}, "files"),
        ({"manifest_id": "m"}, "manifest_id"),
        ({"seconds": 1.5}, "seconds"),
        ({"proof": {"counts": {"compile": -1}, "witnesses": []}}, "compile"),
        ({"files": [{**GOLDEN["files"][0], "mode": "4755"}]}, "mode"),  # type: ignore[index]
        ({"files": [{**GOLDEN["files"][0], "kind": "exe"}]}, "kind"),  # type: ignore[index]
    ],
)
def test_other_documents_are_refused_by_the_place(changes: dict[str, Any], where: str) -> None:
    with pytest.raises(ManifestError, match=where):
        load_sealed(canonical_json({**GOLDEN, **changes}))


@pytest.mark.parametrize(
    ("paths", "why"),
    [
        (("b", "a"), "sorted by path"),
        (("a", "a"), "there twice"),
        (("A", "a"), "differ in case alone"),
        (("Cache/a", "cache/b"), "differ in case alone"),
        (("ß", "ss"), "differ in case alone"),
        (("a", "a/b"), "leads through the file"),
        (("/etc/passwd",), "absolute"),
        (("a/../../b",), "empty, . or .."),
        (("a//b",), "empty, . or .."),
        (("./a",), "empty, . or .."),
        (("a/",), "empty, . or .."),
        (("",), "empty, . or .."),
        (("a\nb",), "not printable"),
        (("a\x7f",), "not printable"),
        (("a\u202eb",), "not printable"),
        (("a\\b",), "backslash"),
        (("e\u0301",), "normal form C"),
        (("x" * 256,), "255 bytes"),
        (("/".join("a" * (MAX_DEPTH + 1)),), "16 parts"),
        (("/".join(["x" * 200] * 6),), "1024 bytes"),
    ],
)
def test_paths_that_could_lead_astray_are_refused(paths: tuple[str, ...], why: str) -> None:
    with pytest.raises(ManifestError, match=why):
        receipt_of(*paths)


def test_more_than_is_ever_restored_is_refused() -> None:
    huge = Digest("a" * 64, MAX_CAPTURE_BYTES + 1)

    with pytest.raises(ManifestError, match="at most 274877906944 are restored"):
        receipt_of("a", digest=huge)


@given(
    st.text(max_size=40)
    | st.lists(st.sampled_from([*"ab./\\", "..", "é", "A", "\0", "\u2028"])).map("/".join)
)
def test_an_accepted_path_stays_below_wherever_it_is_put(path: str) -> None:
    try:
        require_captured_path(path)
    except ValueError:
        return
    parts = PurePosixPath(path).parts

    assert "/".join(parts) == path
    assert not path.startswith("/")
    assert not {"", ".", ".."} & set(path.split("/"))
    assert path.isprintable()
    assert unicodedata.normalize("NFC", path) == path


@given(st.lists(st.lists(st.sampled_from("aAbBsß"), min_size=1, max_size=3).map("/".join), max_size=6))
def test_accepted_paths_are_distinct_on_every_file_system(paths: list[str]) -> None:
    """A model of a file system that folds case: it makes every file, and none is met where another is meant."""

    def can_be_made() -> bool:
        spelt: dict[tuple[str, ...], tuple[str, ...]] = {}
        made: set[tuple[str, ...]] = set()
        for path in map(tuple, (path.split("/") for path in paths)):
            for depth in range(1, len(path) + 1):
                name = path[:depth]
                if spelt.setdefault(tuple(part.casefold() for part in name), name) != name:
                    return False
            if path in made:
                return False
            made.add(path)
        return not any(path[:depth] in made for path in made for depth in range(1, len(path)))

    try:
        require_distinct(paths)
        accepted = True
    except ValueError:
        accepted = False

    assert accepted == can_be_made()


def test_equal_captures_have_equal_bytes_whatever_was_measured(captured: SealedCapture) -> None:
    again = capture_receipt(ObjectStore(captured.path.parent / "other"), dict(reversed(CAPTURED.items())))

    assert again.dumps() == captured.receipt.dumps()
