"""The store against its model: objects are a dict from digest to bytes, the index a dict from key to JSON."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError
from aotgaudi.store.action_index import ActionIndex
from aotgaudi.store.cas import ObjectStore, object_path

BLOBS = st.binary(max_size=300)
KEYS = st.sampled_from([f"{number:064x}" for number in range(6)])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
)
JSON = st.recursive(
    SCALARS | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
VALUES = st.dictionaries(st.text(max_size=8), JSON, max_size=4)


class TestObjects:
    """An object is whole or absent: what is read is what was put, under the digest of exactly that."""

    @given(data=BLOBS)
    @settings(max_examples=25)
    def test_round_trip_by_bytes_and_by_file(
        self, tmp_path_factory: pytest.TempPathFactory, data: bytes
    ) -> None:
        root = tmp_path_factory.mktemp("store")
        (root / "source").write_bytes(data)
        objects = ObjectStore(root)

        digest = objects.put_bytes(data)

        assert digest == Digest.of(data) == objects.put_file(root / "source")
        assert objects.read(digest) == data
        assert list(objects.digests()) == [digest]
        assert list((root / "tmp").iterdir()) == []

    @given(data=BLOBS, bad=BLOBS)
    @settings(max_examples=25)
    def test_other_bytes_are_never_read_and_always_mended(
        self, tmp_path_factory: pytest.TempPathFactory, data: bytes, bad: bytes
    ) -> None:
        objects = ObjectStore(tmp_path_factory.mktemp("store"))
        digest = objects.put_bytes(data)
        path = object_path(objects.root, digest)
        path.chmod(0o644)
        path.write_bytes(bad)

        if bad != data:
            with pytest.raises(CorruptError):
                objects.read(digest)
        objects.put_bytes(data)

        assert objects.read(digest) == data


class ObjectsMachine(RuleBasedStateMachine):
    """Puts, discards and damage in any order; the model is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.objects = ObjectStore(self.root)
        self.model: dict[Digest, bytes] = {}
        self.damaged: set[Digest] = set()

    @rule(data=BLOBS, as_file=st.booleans())
    def put(self, data: bytes, as_file: bool) -> None:
        (self.root / "source").write_bytes(data)
        digest = self.objects.put_file(self.root / "source") if as_file else self.objects.put_bytes(data)
        self.model[digest] = data
        self.damaged.discard(digest)

    @precondition(lambda self: self.model)
    @rule(draw=st.data())
    def discard(self, draw: st.DataObject) -> None:
        digest = draw.draw(st.sampled_from(sorted(self.model, key=str)))
        self.objects.discard(digest)
        del self.model[digest]
        self.damaged.discard(digest)

    @precondition(lambda self: self.model)
    @rule(draw=st.data())
    def damage(self, draw: st.DataObject) -> None:
        digest = draw.draw(st.sampled_from(sorted(self.model, key=str)))
        path = object_path(self.root, digest)
        path.chmod(0o644)
        path.write_bytes(self.model[digest] + b"!")
        self.damaged.add(digest)

    @invariant()
    def equals_the_model(self) -> None:
        assert {d.sha256 for d in self.objects.digests()} == {d.sha256 for d in self.model}
        for digest, data in self.model.items():
            if digest in self.damaged:
                with pytest.raises(CorruptError):
                    self.objects.read(digest)
            else:
                assert self.objects.has(digest)
                assert self.objects.read(digest) == data

    def teardown(self) -> None:
        shutil.rmtree(self.root)


class IndexMachine(RuleBasedStateMachine):
    """Two open indexes on one directory, closed and opened at will; the model is one dict."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.indexes = [ActionIndex(self.root / "actions") for _ in range(2)]
        self.model: dict[str, dict[str, Any]] = {}

    @rule(which=st.integers(0, 1), key=KEYS, value=VALUES)
    def put(self, which: int, key: str, value: dict[str, Any]) -> None:
        self.indexes[which].put(key, value)
        self.model[key] = value

    @rule(which=st.integers(0, 1), key=KEYS)
    def discard(self, which: int, key: str) -> None:
        self.indexes[which].discard(key)
        self.model.pop(key, None)

    @rule(which=st.integers(0, 1))
    def close(self, which: int) -> None:
        self.indexes[which].close()

    @rule(which=st.integers(0, 1), keys=st.lists(KEYS, unique=True))
    def get(self, which: int, keys: list[str]) -> None:
        expected = {key: self.model[key] for key in keys if key in self.model}
        assert self.indexes[which].get_many(keys) == expected
        assert [self.indexes[which].get(key) for key in keys] == [self.model.get(key) for key in keys]

    @invariant()
    def has_the_keys_of_the_model(self) -> None:
        assert sorted(self.indexes[0]) == sorted(self.model)

    def teardown(self) -> None:
        for index in self.indexes:
            index.close()
        shutil.rmtree(self.root)


TestObjectsMachine = ObjectsMachine.TestCase
TestObjectsMachine.settings = settings(max_examples=10, stateful_step_count=12)
TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=10, stateful_step_count=15)
