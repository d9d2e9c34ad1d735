"""What appears at a bundle's place, and what is left beside it by processes that died."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from aotgaudi.bundle.staging import replacing, sweep_abandoned
from aotgaudi.errors import StoreError

DEAD = 2**31 - 1
"""No process has this number (pid_max is at most 2**22)."""


def directory(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "file").write_text(text)
    return path


def replace(out: Path, text: str) -> None:
    with replacing(out, "it", accept) as building:
        (building / "file").write_text(text)


def accept(_: Path) -> None:
    """Lets anything be replaced."""


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_there_is_something_at_the_place_at_every_moment(tmp_path: Path) -> None:
    out = directory(tmp_path / "out", "0")
    is_done = threading.Event()
    missed = []

    def watch() -> None:
        while not is_done.is_set():
            if not out.exists():
                missed.append(1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(300):
        replace(out, str(number))
    is_done.set()
    watcher.join()

    assert missed == []


def test_without_an_exchange_two_renames_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aotgaudi.bundle.staging.exchange_names", lambda *_: False)
    out = directory(tmp_path / "out", "old")

    replace(out, "new")

    assert (out / "file").read_text() == "new"
    assert names(tmp_path) == {"out"}


def test_another_writer_leaves_alone_what_is_moved_aside_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where two names cannot be exchanged, a writer with our number sweeps between our two renames."""
    monkeypatch.setattr("aotgaudi.bundle.staging.exchange_names", lambda *_: False)
    out, real = directory(tmp_path / "out", "old"), os.rename

    def rename(old: Path, new: Path) -> None:
        real(old, new)
        if old == out:
            sweep_abandoned(out)
            assert not out.exists()

    monkeypatch.setattr(os, "rename", rename)
    replace(out, "new")

    assert (out / "file").read_text() == "new"
    assert names(tmp_path) == {"out"}


def test_what_dead_processes_left_goes_and_what_live_ones_have_stays(tmp_path: Path) -> None:
    for name in (f".out.old-{DEAD}", f"out.tmp-{DEAD}", f".out.tmp-{DEAD}", f".out.tmp-{os.getppid()}"):
        directory(tmp_path / name, "x")
    for name in (f"other.tmp-{DEAD}", f".out.tmp-{DEAD}x", ".out.other", "out.tmp-"):
        directory(tmp_path / name, "x")
    (tmp_path / f"out.tmp-{DEAD - 1}").symlink_to(tmp_path / ".out.other")
    directory(tmp_path / "out", "x")

    with replacing(tmp_path / "out", "it", accept) as building:
        (building / "file").write_text("new")
        sweep_abandoned(tmp_path / "out")
        assert building.is_dir(), "it is locked"

    assert names(tmp_path) == {
        *(
            f".out.tmp-{os.getppid()}",
            f"other.tmp-{DEAD}",
            f".out.tmp-{DEAD}x",
            ".out.other",
            "out.tmp-",
            "out",
        ),
        f"out.tmp-{DEAD - 1}",
    }


def test_a_bundle_whose_writer_died_between_two_renames_is_put_back(tmp_path: Path) -> None:
    directory(tmp_path / f".out.old-{DEAD}", "the only one")

    sweep_abandoned(tmp_path / "out")

    assert (tmp_path / "out" / "file").read_text() == "the only one"
    assert names(tmp_path) == {"out"}


@pytest.mark.process
def test_a_builder_that_is_killed_leaves_nothing_for_long(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, signal\n"
        "from aotgaudi.bundle.staging import replacing\n"
        f"with replacing(pathlib.Path({str(tmp_path / 'out')!r}), 'it'):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert len(names(tmp_path)) == 1

    with replacing(tmp_path / "out", "it") as building:
        assert names(tmp_path) == {building.name}
        (building / "file").write_text("whole")
    assert names(tmp_path) == {"out"}


def test_of_two_writers_with_one_process_number_each_has_its_own_directory(tmp_path: Path) -> None:
    """As in two containers that share a volume. Both began when nothing was there; the last one stays."""
    out = tmp_path / "out"

    with replacing(out, "it", accept) as building:
        (building / "file").write_text("ours")
        replace(out, "theirs")
        assert (out / "file").read_text() == "theirs"

    assert (out / "file").read_text() == "ours"
    assert names(tmp_path) == {"out"}


def test_what_somebody_else_put_there_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def seal() -> None:
        with replacing(out, "it") as building:
            (building / "file").write_text("ours")
            directory(out, "notes of somebody else")

    with pytest.raises(StoreError, match="neither a bundle nor empty"):
        seal()

    assert (out / "file").read_text() == "notes of somebody else"
    assert names(tmp_path) == {"out"}
