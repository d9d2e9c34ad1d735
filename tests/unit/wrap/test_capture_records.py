"""What a store remembers of captures: a row whose objects are gone is a miss, and garbage collection keeps what it names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bundle.capture_receipt import CapturedFile
from aotgaudi.bundle.launch import Place
from aotgaudi.digest import Digest
from aotgaudi.errors import CaptureError, ManifestError, SpecError
from aotgaudi.store.records import digests_in
from aotgaudi.store.store import Store
from aotgaudi.wrap import capture
from aotgaudi.wrap.capture_records import (
    CaptureRow,
    Shard,
    UnprovenRow,
    capture_key,
    find_capture,
    find_unproven,
    parse_shard,
    read_documents,
    record_capture,
    record_unproven,
    union,
    unproven_key,
)
from tests.guests.capturing import Told
from tests.launches import a_launch
from tests.unit.bundle.conftest import CAPTURED, capture_receipt

LAUNCH = a_launch(guest="fake")
KEY = capture_key(LAUNCH).hex


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


def row_of(store: Store, seconds: float = 1.5) -> CaptureRow:
    receipt = capture_receipt(store.objects, CAPTURED)
    return CaptureRow(
        label="capture of fake",
        launch=store.objects.put_bytes(LAUNCH.dumps()),
        receipt=store.objects.put_bytes(receipt.dumps()),
        objects=tuple(sorted({file.digest for file in receipt.files}, key=str)),
        cold_seconds=seconds,
        warm_seconds=0.5,
        build_seconds=9,
        cold_counts={"process": 3},
    )


def test_what_is_recorded_is_found_with_its_documents(store: Store) -> None:
    row = record_capture(store, KEY, row_of(store))

    assert find_capture(store, KEY) == row
    launch, receipt = read_documents(store, row)
    assert (launch, receipt.manifest_id) == (LAUNCH, LAUNCH.id)


def test_the_first_of_two_captures_stays_while_its_objects_are_there(store: Store) -> None:
    first, second = row_of(store), row_of(store, seconds=99)

    record_capture(store, KEY, first)
    assert record_capture(store, KEY, second) == first
    store.objects.discard(first.objects[0])
    assert find_capture(store, KEY) is None
    assert record_capture(store, KEY, second) == second


def test_garbage_collection_sees_every_object_in_the_record(store: Store) -> None:
    row = record_capture(store, KEY, row_of(store))

    assert set(digests_in(store.actions.get(KEY))) == set(row.digests())


def test_a_row_of_another_kind_or_shape_is_a_miss(store: Store) -> None:
    draft = UnprovenRow(label="x", files=(), left_out=(), answers=(), cold_seconds=1, cold_counts={})
    record_unproven(store, KEY, draft)

    assert find_capture(store, KEY) is None
    assert find_unproven(store, KEY) is not None


def test_a_receipt_of_another_launch_is_not_believed(store: Store) -> None:
    other = a_launch(guest="fake", repairs=("another",))
    row = row_of(store).model_copy(update={"launch": store.objects.put_bytes(other.dumps())})

    with pytest.raises(ManifestError, match="answers launch"):
        read_documents(store, row)


def test_a_capture_is_of_a_sandbox_though_its_launch_is_not() -> None:
    elsewhere = a_launch(guest="fake", place=LAUNCH.place.model_copy(update={"root": "/elsewhere"}))

    assert elsewhere.id == LAUNCH.id
    assert capture_key(elsewhere) != capture_key(LAUNCH)
    assert [name for name, *_ in capture_key(elsewhere).differences(capture_key(LAUNCH))] == [
        "condition.place.root"
    ]


def test_every_condition_and_every_component_is_in_the_key() -> None:
    place = Place(root="/r", prefix="/p", site_packages="/s", variables={"VLLM_IMAGE_TAG": "v8"})
    names = {name for name, _ in capture_key(a_launch(place=place)).components}

    conditions = {f"condition.{name}" for name, _ in a_launch(place=place).conditions()}
    assert conditions - names == {"condition.model.name"}  # An alias stands in its stead.
    assert {name for name, _ in a_launch().components()} <= names


def test_a_cold_run_is_no_capture_and_is_of_one_agent() -> None:
    assert unproven_key(LAUNCH, "w") != capture_key(LAUNCH)
    assert {name for name, _ in unproven_key(LAUNCH, "w").components} >= {
        "builder.aotgaudi",
        "builder.witness",
    }


def test_a_cold_run_is_gone_on_with_for_the_same_weights_only() -> None:
    differing = unproven_key(LAUNCH, "w").differences(unproven_key(LAUNCH, "other"))

    assert [name for name, *_ in differing] == ["weights"]


def test_a_model_in_another_directory_is_the_same_capture_and_another_one_of_the_hub_is_not() -> None:
    def key(name: str) -> str:
        return capture_key(a_launch(model=a_launch().model.model_copy(update={"name": name}))).hex

    assert key("/models/tiny") == key("/elsewhere/tiny")
    assert len({key("/models/tiny"), key("org/tiny"), key("org/other")}) == 3


def test_each_shard_runs_once_and_one_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    failing, asked = {2: "no card"}, []

    def build_shard(order: object, number: int, num: int, *_: object) -> None:
        asked.append((order, number, num))
        if number in failing:
            raise CaptureError(failing[number])

    monkeypatch.setattr(capture, "build_shard", build_shard)
    order, store = cast("capture.CaptureRequest", "order"), cast("Store", "store")
    shards = [Shard(number, 3, {}, "") for number in (1, 2, 3)]

    with pytest.raises(CaptureError) as caught:
        capture.build_shards(order, shards, store, Told())

    others = "; the others are recorded, and are not run again"
    assert str(caught.value) == f"1 shard failed{others}:\n  shard 2/3: no card"
    with pytest.raises(CaptureError, match=r"^1 shard failed:\n  shard 2/3: no card$"):
        capture.build_shards(order, shards[1:2], store, Told())
    failing.clear()
    capture.build_shards(order, shards[1:2], store, Told())
    assert asked == [(order, number, 3) for number in (1, 2, 3, 2, 2)]


@pytest.mark.parametrize("text", ["", "0/3", "4/3", "1", "1/", "/3", "a/b", "1/2/3", "-1/3", "1/1025"])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="I/N, such as 1/4"):
        parse_shard(text)


def test_a_shard_is_a_number_of_a_count() -> None:
    assert parse_shard("3/12") == (3, 12)


def row(files: Mapping[str, bytes]) -> UnprovenRow:
    captured = tuple(CapturedFile(path=path, digest=Digest.of(data)) for path, data in sorted(files.items()))
    return UnprovenRow(
        label="", files=captured, left_out=(), answers=(), cold_seconds=1.0, cold_counts={}, places={}
    )


RECIPES = st.dictionaries(st.sampled_from("abcdef"), st.binary(max_size=2), max_size=6)


@given(st.lists(RECIPES, min_size=1, max_size=4))
def test_a_recipe_and_its_metadata_come_from_one_shard(made: list[dict[str, bytes]]) -> None:
    rows = [
        row(
            {f"cache/hpu/{name}.recipe": b"r" + data for name, data in shard.items()}
            | {f"cache/hpu/{name}.metadata": b"m" + data for name, data in shard.items()}
            | {"cache/shapes/vllm.buckets": bytes([number])}
        )
        for number, shard in enumerate(made)
    ]

    files = {file.path: file.digest for file in union(rows, ["cache/shapes/vllm.buckets"])}

    first: dict[str, bytes] = {}
    for shard in made:
        first = shard | first
    assert files == {
        f"cache/hpu/{name}.{end}": Digest.of(end[:1].encode() + data)
        for name, data in first.items()
        for end in ("recipe", "metadata")
    }
