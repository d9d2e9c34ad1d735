"""Shards of a capture: which there are, how they run, and what they leave together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bundle.capture_receipt import CapturedFile
from aotgaudi.digest import Digest
from aotgaudi.errors import CaptureError, SpecError
from aotgaudi.store.store import Store
from aotgaudi.wrap import capture
from aotgaudi.wrap.capture_records import Shard, UnprovenRow, parse_shard, union
from tests.guests.capturing import Told


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
