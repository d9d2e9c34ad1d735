"""Roots: what they say, and that one which cannot be read stops everything."""

from __future__ import annotations

from pathlib import Path

import pytest

from aotgaudi.digest import Digest, canonical_json
from aotgaudi.errors import CorruptError, StoreError
from aotgaudi.store.store import Root, Roots, load_root

KEY, OTHER = "ab" * 32, "01" * 32
DIGEST = Digest("cd" * 32, 7)
ROOT = Root(name="prod-1.2", keys=frozenset({KEY, OTHER}), objects=frozenset({DIGEST}))
GOLDEN = (
    b'{"keys":["0101010101010101010101010101010101010101010101010101010101010101",'
    b'"abababababababababababababababababababababababababababababababab"],"name":"prod-1.2",'
    b'"objects":["sha256:cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd:7"],'
    b'"schema":"aotgaudi.root/1"}'
)


def test_the_bytes_of_a_root_are_these_and_canonical() -> None:
    document = {
        "schema": "aotgaudi.root/1",
        "name": "prod-1.2",
        "keys": [OTHER, KEY],
        "objects": [str(DIGEST)],
    }

    assert ROOT.dumps() == GOLDEN == canonical_json(document)
    assert load_root("prod-1.2", GOLDEN) == ROOT


def test_roots_are_put_listed_and_removed(tmp_path: Path) -> None:
    roots = Roots(tmp_path)
    roots.put(ROOT)
    roots.put(Root(name="empty"))

    assert roots.names() == ("empty", "prod-1.2")
    assert list(roots) == [Root(name="empty"), ROOT]
    assert (tmp_path / "roots" / "prod-1.2.json").read_bytes() == GOLDEN

    roots.remove("empty")
    assert roots.names() == ("prod-1.2",)
    with pytest.raises(StoreError, match="there is no root 'empty'"):
        roots.remove("empty")
    with pytest.raises(StoreError, match="there is no root 'empty'"):
        roots.get("empty")


def test_the_same_root_is_not_written_again_and_another_replaces_it(tmp_path: Path) -> None:
    roots = Roots(tmp_path)
    roots.put(ROOT)
    path = tmp_path / "roots" / "prod-1.2.json"
    inode = path.stat().st_ino

    roots.put(ROOT)
    assert path.stat().st_ino == inode

    roots.put(Root(name="prod-1.2"))
    assert roots.get("prod-1.2") == Root(name="prod-1.2")


@pytest.mark.parametrize("name", ["", ".hidden", "../evil", "a/b", "x" * 129, "ä", "a\n"])
def test_a_name_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a root's name"):
        Root(name=name)
    with pytest.raises(StoreError, match="not a root's name"):
        Roots(tmp_path).remove(name)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        GOLDEN[:-1],
        GOLDEN + b"\n",
        GOLDEN.replace(b"root/1", b"root/2"),
        GOLDEN.replace(b"prod-1.2", b"prod-1.3"),
        GOLDEN.replace(b"0101", b"zz01", 1),
        GOLDEN.replace(b":7", b":x"),
        GOLDEN.replace(b'"name"', b'"more":1,"name"'),
        GOLDEN.replace(b'"sha256:', b'1,"sha256:'),
    ],
)
def test_a_root_that_cannot_be_read_is_corrupt_and_never_empty(tmp_path: Path, data: bytes) -> None:
    roots = Roots(tmp_path)
    roots.put(ROOT)
    (tmp_path / "roots" / "prod-1.2.json").write_bytes(data)

    with pytest.raises(CorruptError, match="nothing is collected"):
        list(roots)
