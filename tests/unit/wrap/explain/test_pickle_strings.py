"""A pickle is listed, never loaded: what it would run does not run, whatever it is."""

from __future__ import annotations

import pickle
import subprocess
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.wrap.explain.pickle_strings import read_pickle_strings

TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return subprocess.call, (["touch", str(self.path)],)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_that_a_pickle_asks_for_is_run(tmp_path: Path, protocol: int) -> None:
    data = pickle.dumps({"a": Bomb(tmp_path / "it-ran")}, protocol)

    found = read_pickle_strings(data)

    assert not (tmp_path / "it-ran").exists()
    assert any(
        name.endswith(" call") for name in found.names
    )  # Old protocols name the module as Python 2 did.
    assert found.is_whole


@given(values=st.lists(TEXTS, max_size=8), protocol=st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_every_text_is_found_in_order_and_repeated_ones_again(values: list[str], protocol: int) -> None:
    twice = [*values, *values]

    found = read_pickle_strings(pickle.dumps(twice, protocol))

    assert list(found.texts) == twice


def test_a_pickle_within_a_pickle_is_read() -> None:
    inner = pickle.dumps(OrderedDict(deep="text within"))

    found = read_pickle_strings(pickle.dumps({"state": inner}))

    assert "text within" in found.texts
    assert "collections OrderedDict" in found.names


@given(cut=st.integers(0, 10_000))
def test_a_pickle_that_was_cut_off_is_not_whole(cut: int) -> None:
    data = pickle.dumps([f"text {number}" for number in range(50)])
    part = data[: cut % len(data)]

    assert not read_pickle_strings(part).is_whole


@given(
    data=st.binary(max_size=300)
    | st.binary(max_size=200).map(lambda tail: pickle.dumps(["a", b"b"])[:-1] + tail)
)
def test_any_bytes_are_read_without_an_error(data: bytes) -> None:
    read_pickle_strings(data)
