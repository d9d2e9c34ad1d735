"""Shards of a capture: which there are, how they run, and what they leave together."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bundle.capture_receipt import CapturedFile
from aotgaudi.digest import Digest
from aotgaudi.errors import CaptureError, SpecError
from aotgaudi.wrap.capture_records import UnprovenRow
from aotgaudi.wrap.shards import Shard, parse_shard, run_shards, union
from tests.guests.capturing import Told


def shards(num: int) -> tuple[Shard, ...]:
    return tuple(Shard(number, num, {}, f"{number:064x}") for number in range(1, num + 1))


class Commands:
    """Programs that say that they ran."""

    def __init__(self, folder: Path, failing: Sequence[str] = ()) -> None:
        self.told, self._failing = folder / "told", failing

    def __call__(self, name: str) -> Sequence[str]:
        if name in self._failing:
            return [sys.executable, "-S", "-c", "raise SystemExit('no card')"]
        return [sys.executable, "-S", "-c", f"print({name!r}, file=open({str(self.told)!r}, 'a'))"]

    @property
    def lines(self) -> list[str]:
        return self.told.read_text().splitlines()


@pytest.mark.process
def test_each_shard_runs_once(tmp_path: Path) -> None:
    commands = Commands(tmp_path)

    run_shards(shards(3), commands, os.environ, tmp_path / "logs", Told())

    assert commands.lines == ["1/3", "2/3", "3/3"]


@pytest.mark.process
def test_a_shard_that_fails_is_named_and_the_others_are_run(tmp_path: Path) -> None:
    commands = Commands(tmp_path, failing=["2/3"])

    with pytest.raises(CaptureError, match=r"^1 shard failed; the others are recorded") as caught:
        run_shards(shards(3), commands, os.environ, tmp_path, Told())

    assert "shard 2/3: exit code 1: no card (all of it: " in str(caught.value)
    assert commands.lines == ["1/3", "3/3"]


@pytest.mark.process
def test_a_build_that_is_interrupted_ends_its_shard(tmp_path: Path) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupted)
    began = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_shards(shards(2), lambda _: ["/bin/sleep", "60"], os.environ, tmp_path, Told())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

    assert time.monotonic() - began < 30


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
