"""One run a place: private, checked before use, and free again however that run ended."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from aotgaudi.errors import SpecError, StoreError, UntrustedError
from aotgaudi.wrap import sandbox as places
from aotgaudi.wrap.sandbox import FOLDERS, MARK, check_path, open_sandbox


def test_a_place_is_ours_alone_and_empty(root: Path) -> None:
    root.mkdir(mode=0o755)
    (root / "cache").mkdir()
    (root / "cache" / "old").touch()
    (root / "left").touch()

    with open_sandbox(root) as place:
        place.set_state("l")
        place.set_state("e")

        assert (place.root, place.here) == (root, root)
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
        assert sorted(os.listdir(root)) == sorted([*FOLDERS, "lock", "state"])
        assert not any(os.listdir(root / name) for name in FOLDERS)
        assert place.state.read_text() == "e"


def test_events_stay_to_be_explained_and_caches_go(root: Path) -> None:
    with open_sandbox(root) as place:
        (place.folder("cache") / "kernel.so").touch()
        (place.folder("events") / "1-2.jsonl").touch()

    assert sorted(os.listdir(root)) == ["events", "lock", "witness"]
    assert os.listdir(root / "events") == ["1-2.jsonl"]


@pytest.mark.parametrize(
    "path", ["relative", "/", "/run/../run/x", "/run/" + "x" * 70, "/run/a:b", "/run/a\nb"]
)
def test_a_path_that_cannot_be_a_place_is_refused_with_one_that_can(path: str) -> None:
    with pytest.raises(SpecError) as raised:
        check_path(Path(path))

    assert "\n" not in str(raised.value).replace(path, "")


def test_a_second_run_at_once_sees_the_same_root_in_a_directory_of_its_own(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_namespace_problem", lambda root: "")

    with open_sandbox(root) as first, open_sandbox(root) as second, open_sandbox(root) as third:
        assert {place.root for place in (first, second, third)} == {root}
        assert len({place.here for place in (first, second, third)}) == 3
        assert len({place.mark for place in (first, second, third)}) == 3
    with open_sandbox(root) as again:
        assert again.here == root


def test_where_no_namespace_is_permitted_the_second_run_is_told(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_namespace_problem", lambda root: "Operation not permitted")

    with open_sandbox(root), pytest.raises(SpecError, match=r"in use by another run.*not permitted"):
        open_sandbox(root, wait_seconds=0.0).__enter__()


def test_the_lock_of_a_run_that_was_killed_is_free(root: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from aotgaudi.wrap.sandbox import open_sandbox
with open_sandbox(Path({str(root)!r})):
    print("taken", flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.communicate()

    with open_sandbox(root, wait_seconds=0.0) as place:
        assert place.here == root


def test_a_guest_that_outlived_everything_is_ended_before_its_files_go(root: Path) -> None:
    left = subprocess.Popen(["/bin/sleep", "60"], env={MARK: str(root)}, start_new_session=True)

    with open_sandbox(root):
        assert left.wait(10) == -signal.SIGKILL or left.returncode == -signal.SIGTERM


def test_a_directory_that_others_could_put_code_into_is_refused(root: Path) -> None:
    root.parent.chmod(0o777)
    with pytest.raises(UntrustedError, match="everybody may replace"), open_sandbox(root):
        pass


def test_a_directory_of_somebody_else_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)

    with pytest.raises(UntrustedError, match="must belong to uid 12345"), open_sandbox(root):
        pass


def test_a_link_or_a_file_is_no_place(root: Path) -> None:
    root.symlink_to(root.parent)

    with pytest.raises(SpecError, match="is not a directory"), open_sandbox(root):
        pass


System = namedtuple("System", "f_flag f_bavail f_frsize")


@pytest.mark.parametrize(
    ("system", "error", "message"),
    [
        (System(os.ST_NOEXEC, 1 << 30, 4096), SpecError, "mounted noexec"),
        (System(0, 10, 4096), StoreError, "has 40960 bytes free"),
    ],
)
def test_a_file_system_that_will_not_do_is_refused(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    system: System,
    error: type[Exception],
    message: str,
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: system)

    with pytest.raises(error, match=message), open_sandbox(root, needed_bytes=1 << 20):
        pass
