from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aotgaudi_witness.hooks import WAITING, Hooks


class Told:
    def __init__(self) -> None:
        self.statuses: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.hooks = Hooks(self.statuses.append, lambda hook, error: self.failures.append(f"{hook}: {error}"))


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    yield Told()
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.startswith("witnessed")]:
        del sys.modules[name]


def test_a_hook_waits_for_its_module_and_is_in_place_before_anybody_uses_it(
    told: Told, tmp_path: Path
) -> None:
    (tmp_path / "witnessed.py").write_text("def f(): return 1")

    def install(module: ModuleType) -> bool:
        module.f = lambda: 2  # type: ignore[attr-defined]
        return True

    told.hooks.add("a", "witnessed", install)
    told.hooks.begin()
    assert told.hooks.status == {"a": WAITING}

    from witnessed import f

    assert f() == 2
    assert told.statuses == [{"a": True}]


def test_a_module_that_is_there_already_is_hooked_at_once(told: Told, tmp_path: Path) -> None:
    (tmp_path / "witnessed_before.py").write_text("")
    __import__("witnessed_before")
    told.hooks.add("a", "witnessed_before", lambda module: True)

    told.hooks.begin()

    assert told.hooks.status == {"a": True}


def test_a_module_without_the_feature_is_said_to_lack_it(told: Told, tmp_path: Path) -> None:
    (tmp_path / "witnessed_other.py").write_text("")
    told.hooks.add("a", "witnessed_other", lambda module: hasattr(module, "feature"))
    told.hooks.begin()

    __import__("witnessed_other")

    assert told.hooks.status == {"a": False}
    assert told.failures == []


def test_a_hook_that_fails_breaks_no_import(told: Told, tmp_path: Path) -> None:
    (tmp_path / "witnessed_bad.py").write_text("x = 1")
    told.hooks.add("a", "witnessed_bad", lambda module: module.missing)
    told.hooks.add("b", "witnessed_bad", lambda module: True)
    told.hooks.begin()

    module = __import__("witnessed_bad")

    assert module.x == 1
    assert told.hooks.status == {"a": False, "b": True}
    assert len(told.failures) == 1


def test_a_module_that_fails_to_import_is_still_waited_for(told: Told, tmp_path: Path) -> None:
    (tmp_path / "witnessed_twice.py").write_text("raise ValueError('not yet')")
    told.hooks.add("a", "witnessed_twice", lambda module: True)
    told.hooks.begin()
    with pytest.raises(ValueError, match="not yet"):
        __import__("witnessed_twice")
    assert told.hooks.status == {"a": WAITING}

    (tmp_path / "witnessed_twice.py").write_text("right_now = 1")
    __import__("importlib").invalidate_caches()
    __import__("witnessed_twice")

    assert told.hooks.status == {"a": True}


def test_a_missing_module_is_as_missing_as_before(told: Told) -> None:
    told.hooks.add("a", "witnessed_nowhere", lambda module: True)
    told.hooks.begin()

    with pytest.raises(ModuleNotFoundError):
        __import__("witnessed_nowhere")


def test_a_module_that_came_in_no_ordinary_way_is_found_by_looking(told: Told) -> None:
    told.hooks.add("a", "witnessed_made", lambda module: True)
    told.hooks.begin()
    sys.modules["witnessed_made"] = ModuleType("witnessed_made")

    told.hooks.look()

    assert told.hooks.status == {"a": True}


def test_a_hook_is_put_in_place_once(told: Told, tmp_path: Path) -> None:
    (tmp_path / "witnessed_once.py").write_text("")
    calls: list[str] = []
    told.hooks.add("a", "witnessed_once", lambda module: calls.append("a") is None)
    told.hooks.begin()

    __import__("witnessed_once")
    told.hooks.look()

    assert calls == ["a"]
