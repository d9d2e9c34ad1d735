"""Waiting until recipes are stored, where the bridge can be told to and where it cannot."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from aotgaudi.gaudi import flush
from aotgaudi.gaudi.flush import flush_recipes


def test_the_bridge_is_told_to_where_it_can_be(tmp_path: Path) -> None:
    told: list[bool] = []

    assert flush_recipes(SimpleNamespace(_flush_disk_cache=lambda: told.append(True)), tmp_path)
    assert told == [True]


def test_else_it_waits_until_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flush, "_SETTLED_SECONDS", 0.5)

    def store() -> None:
        for size in range(4):
            (tmp_path / "1_2_syn3.recipe").write_bytes(bytes(size))
            time.sleep(0.1)
        (tmp_path / "last").touch()

    writer = threading.Thread(target=store)
    writer.start()
    was_told = flush_recipes(SimpleNamespace(), tmp_path)

    assert not was_told
    assert (tmp_path / "last").exists()
    writer.join()


def test_it_waits_no_longer_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flush, "_SETTLED_SECONDS", 0.0)
    monkeypatch.setattr(flush, "_LONGEST_SECONDS", 0.1)
    sizes = iter(range(10**9))
    monkeypatch.setattr(flush, "_sizes", lambda _: {"1_2_syn3.recipe": next(sizes)})

    assert not flush_recipes(SimpleNamespace(), tmp_path)


def test_a_directory_that_was_not_made_has_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flush, "_SETTLED_SECONDS", 0.0)

    assert not flush_recipes(SimpleNamespace(), tmp_path / "missing")
