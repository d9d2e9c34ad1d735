"""Files below a server's roots, seen from outside: by what happened, and by what is there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from aotgaudi.digest import Digest
from aotgaudi.wrap.file_watch import FileChanges, FileRules, Watcher, compare

PLACE = Path("/run/aotgaudi")
SEALED = {"cache/a/model": b"model", "cache/a/b/kernel.so": b"kernel", "home/.tool/plan": b"plan"}
RULES = FileRules(PLACE, {path: Digest.of(data) for path, data in SEALED.items()}, ("*.lock", "*/locks/*"))


@pytest.fixture
def here(tmp_path: Path) -> Path:
    for path, data in SEALED.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    return tmp_path


@pytest.fixture
def watcher(here: Path) -> Iterator[Watcher]:
    found = Watcher(here, RULES)
    yield found
    found.close()


def add(here: Path) -> None:
    (here / "cache/a/new.py").write_text("x")


def plant(here: Path) -> None:
    (here / "cache/deep/er").mkdir(parents=True)
    (here / "cache/deep/er/x.so").write_text("x")


def link(here: Path) -> None:
    (here / "cache/link").symlink_to(here / "cache/a")


def flip(here: Path) -> None:
    (here / "cache/a/model").write_bytes(b"modeL")


def swap(here: Path) -> None:
    (here / "cache/a/other.lock").write_bytes(b"modeL")
    (here / "cache/a/other.lock").rename(here / "cache/a/model")


def remove(here: Path) -> None:
    (here / "cache/a/b/kernel.so").unlink()


def move_away(here: Path) -> None:
    shutil.move(here / "cache/a/b", here / "gone")


def no_link_may_stand_for_a_file(here: Path) -> None:
    (here / "cache/a/model").rename(here / "elsewhere")
    (here / "cache/a/model").symlink_to(here / "elsewhere")


def a_fifo(here: Path) -> None:
    (here / "cache/a/model").unlink()
    os.mkfifo(here / "cache/a/model")


def plan(here: Path) -> None:
    (here / "home/.tool/plan").write_text("plaN")


CHANGES: list[tuple[Callable[[Path], None], FileChanges]] = [
    (add, FileChanges(added=("cache/a/new.py",))),
    (plant, FileChanges(added=("cache/deep/er/x.so",))),
    (link, FileChanges(added=("cache/link",))),
    (flip, FileChanges(changed=("cache/a/model",))),
    (swap, FileChanges(changed=("cache/a/model",))),
    (remove, FileChanges(missing=("cache/a/b/kernel.so",))),
    (move_away, FileChanges(missing=("cache/a/b/kernel.so",))),
    (plan, FileChanges(changed=("home/.tool/plan",))),
]


def seen(sight: FileChanges) -> tuple[object, ...]:
    return sight.added, sight.changed, sight.missing


@pytest.mark.parametrize(("change", "expected"), CHANGES)
def test_a_comparison_finds_it_and_inotify_tells_it(
    here: Path, watcher: Watcher, change: Callable[[Path], None], expected: FileChanges
) -> None:
    change(here)

    assert seen(compare(here, RULES)) == seen(watcher.read()) == seen(expected)
    assert watcher.read().is_watched


@pytest.mark.parametrize("replace_file", [no_link_may_stand_for_a_file, a_fifo])
def test_what_is_no_file_or_cannot_be_read_has_changed(
    here: Path, replace_file: Callable[[Path], None]
) -> None:
    replace_file(here)

    assert compare(here, RULES).changed == ("cache/a/model",)


def test_what_was_undone_was_seen_all_the_same(here: Path, watcher: Watcher) -> None:
    path = here / "cache/a/model"
    path.write_bytes(b"modeL")
    path.write_bytes(b"model")

    assert compare(here, RULES) == FileChanges(is_compared=True, is_watched=True)
    assert watcher.read().changed == ("cache/a/model",)


def test_a_writer_through_memory_is_found_by_the_comparison(here: Path, watcher: Watcher) -> None:
    import mmap

    with (here / "cache/a/model").open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        watcher.read()
        memory[0:1] = b"M"

    assert compare(here, RULES).changed == ("cache/a/model",)


def test_what_is_left_out_and_what_is_read_is_no_finding(here: Path, watcher: Watcher) -> None:
    (here / "cache/a/model.lock").touch()
    (here / "cache/locks").mkdir()
    (here / "cache/locks/x").touch()
    (here / "home/.bash_history").write_text("not ours")
    (here / "cache/a/model").read_bytes()

    assert watcher.read() == FileChanges(is_watched=True)
    assert compare(here, RULES) == FileChanges(is_compared=True, is_watched=True)


def test_where_there_is_no_inotify_the_sight_says_so(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aotgaudi.linux._LIBC", None)
    watcher = Watcher(here, RULES)
    add(here)

    assert watcher.read() == FileChanges(is_watched=False)


def test_what_is_sealed_is_never_left_out(here: Path) -> None:
    rules = FileRules(PLACE, RULES.sealed, ("home/*", "*.so"))

    assert compare(here, rules) == FileChanges(is_compared=True, is_watched=True)
    flip(here)
    remove(here)
    assert compare(here, rules).missing == ("cache/a/b/kernel.so",)


def test_both_sights_count() -> None:
    one = FileChanges(added=("a",), is_compared=True, is_watched=True)
    other = FileChanges(added=("b", "a"), missing=("c",), is_watched=False)

    assert one | other == FileChanges(("a", "b"), (), ("c",), is_compared=True, is_watched=False)


def test_paths_are_relative_to_what_the_server_sees() -> None:
    assert RULES.relative("/run/aotgaudi/cache/x") == "cache/x"
    assert RULES.relative("cache/x") == "cache/x"
    assert RULES.relative("/run/aotgaudi-else/x") is None


@pytest.mark.parametrize("moved", ["cache", "."])
def test_a_folder_that_was_replaced_for_a_moment_was_gone(here: Path, watcher: Watcher, moved: str) -> None:
    folder = here / moved
    away = here.with_name("away") if moved == "." else here / "away"
    folder.rename(away)
    shutil.copytree(away, folder)
    (folder / "planted.so").write_text("x")
    shutil.rmtree(folder)
    away.rename(folder)

    assert set(watcher.read().missing) >= {path for path in SEALED if path.startswith(("cache", moved[1:]))}
    assert compare(here, RULES) == FileChanges(is_compared=True, is_watched=True)


@pytest.mark.parametrize("name", ["sitecustomize.py", "usercustomize.pyc", "x.lock", "site/vllm.py"])
def test_nothing_may_join_the_agent(here: Path, name: str) -> None:
    (here / "witness").mkdir()
    (here / "witness" / "agent.zip").write_bytes(b"agent")
    rules = replace(RULES, agent={"witness/agent.zip": Digest.of(b"agent")}, left_out=("*.pyc", "*.lock"))
    watcher = Watcher(here, rules)
    path = here / "witness" / name
    path.parent.mkdir(exist_ok=True)

    path.write_text("import os")

    assert f"witness/{name}" in compare(here, rules).added
    assert f"witness/{name}" in watcher.read().added
    watcher.close()
    assert rules.cache_tops == ("cache", "home"), "what the server may load from its caches"
