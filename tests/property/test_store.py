"""The store against its model: objects are a dict from digest to bytes, the index a dict from key to JSON."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aotgaudi.digest import Digest, canonical_json
from aotgaudi.errors import CorruptError
from aotgaudi.store.cas import ObjectStore, object_path
from aotgaudi.store.collect import collect
from aotgaudi.store.fsck import check_store
from aotgaudi.store.records import RecordError, dump_record, load_record
from aotgaudi.store.store import Index, Root, Store

BLOBS = st.binary(max_size=300)
KEYS = st.sampled_from([f"{number:064x}" for number in range(6)])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
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
    """Two indexes on one directory; the model is one dict."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.indexes = [Index(self.root / "index") for _ in range(2)]
        self.model: dict[str, dict[str, Any]] = {}

    @rule(which=st.integers(0, 1), key=KEYS, value=VALUES)
    def put(self, which: int, key: str, value: dict[str, Any]) -> None:
        self.indexes[which].put(key, value)
        self.model.pop(key, None)
        self.model[key] = value

    @rule(which=st.integers(0, 1), key=KEYS)
    def get(self, which: int, key: str) -> None:
        assert self.indexes[which].get(key) == self.model.get(key)

    @invariant()
    def has_the_rows_of_the_model(self) -> None:
        assert len(self.indexes[0]) == len(self.model)

    def teardown(self) -> None:
        shutil.rmtree(self.root)


class TestRecords:
    """A record gives back what was put, for its own key; any other bytes give nothing."""

    @given(value=VALUES)
    def test_round_trip(self, value: dict[str, Any]) -> None:
        key = "ab" * 32

        data = dump_record(key, value)

        assert load_record(key, data) == value
        assert data == canonical_json({**json.loads(data), "value": load_record(key, data)})

    @given(value=VALUES, draw=st.data())
    def test_any_other_bytes_are_refused(self, value: dict[str, Any], draw: st.DataObject) -> None:
        key = "ab" * 32
        data = dump_record(key, value)
        start = draw.draw(st.integers(0, len(data)))
        end = draw.draw(st.integers(start, len(data)))
        other = data[:start] + draw.draw(st.binary(max_size=8)) + data[end:]

        if other != data:
            with pytest.raises(RecordError):
                load_record(key, other)
        with pytest.raises(RecordError):
            load_record("cd" * 32, data)


class StoreMachine(RuleBasedStateMachine):
    """Results, uses, roots, damage, fsck and collections in any order, through two stores on one directory.

    The model: which keys have which result. A look-up gives that or nothing, never anything else; what a root keeps
    is never collected; after fsck, what is left is intact.
    """

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp()) / "store"
        self.stores = [Store.open(self.root) for _ in range(2)]
        self.model: dict[str, dict[str, Any]] = {}
        self.bad_records: set[str] = set()
        self.bad_objects: set[str] = set()
        self.kept: set[str] = set()

    @rule(
        which=st.integers(0, 1),
        key=KEYS,
        blob=st.sampled_from([b"a", b"b", b"c" * 500]),
        used=st.integers(0, 9),
    )
    def build(self, which: int, key: str, blob: bytes, used: int) -> None:
        store = self.stores[which]
        digest = store.objects.put_bytes(blob)

        def is_whole(value: dict[str, Any]) -> bool:
            return store.objects.has(Digest.parse(value["object"]))

        recorded = store.actions.put(key, {"object": str(digest)}, is_whole)
        store.actions.records.touch(key, float(used))
        if key in self.model and not self.is_lost(key):
            assert recorded == self.model[key], "the first publisher wins"
        self.model[key] = recorded
        self.bad_records.discard(key)
        self.bad_objects.discard(str(digest))

    @precondition(lambda self: self.model)
    @rule(draw=st.data())
    def keep(self, draw: st.DataObject) -> None:
        self.kept = set(draw.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True)))
        self.stores[0].roots.put(Root(name="kept", keys=frozenset(self.kept)))

    @rule(which=st.integers(0, 1), max_bytes=st.integers(0, 2000))
    def collect(self, which: int, max_bytes: int) -> None:
        store = self.stores[which]
        outcome = collect(store, max_bytes)
        evicted = {eviction.record.key for eviction in outcome.evicted}
        assert not evicted & self.kept
        assert outcome.bytes_after <= max(max_bytes, outcome.kept_bytes)
        for key in evicted:
            self.model.pop(key, None)
            self.bad_records.discard(key)
        there = {str(digest) for digest in store.objects.digests()}
        self.bad_objects |= {v["object"] for k, v in self.model.items() if k in self.bad_records} - there

    @precondition(lambda self: self.model)
    @rule(draw=st.data(), is_record=st.booleans())
    def damage(self, draw: st.DataObject, is_record: bool) -> None:
        key = draw.draw(st.sampled_from(sorted(self.model)))
        digest = Digest.parse(self.model[key]["object"])
        path = self.stores[0].actions.records.path(key) if is_record else object_path(self.root, digest)
        if path.exists():
            path.chmod(0o644)
            path.write_bytes(path.read_bytes()[:-1])
        if is_record:
            self.bad_records.add(key)
        else:
            self.bad_objects.add(str(digest))

    @rule(which=st.integers(0, 1))
    def fsck(self, which: int) -> None:
        check_store(self.stores[which])
        again = check_store(self.stores[which])
        assert again.is_clean
        assert all(self.is_lost(loss.key) for loss in again.losses)

    def is_lost(self, key: str) -> bool:
        return key in self.bad_records or self.model[key]["object"] in self.bad_objects

    @invariant()
    def a_look_up_gives_the_result_or_nothing(self) -> None:
        for store in self.stores:
            found = store.actions.get_many(self.model)
            for key, value in self.model.items():
                if self.is_lost(key):
                    assert found.get(key) in (None, value)
                    continue
                assert found[key] == value
                assert store.objects.has(Digest.parse(value["object"]))

    def teardown(self) -> None:
        shutil.rmtree(self.root.parent)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestObjectsMachine = ObjectsMachine.TestCase
TestObjectsMachine.settings = settings(max_examples=10, stateful_step_count=12)
TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=10, stateful_step_count=15)
