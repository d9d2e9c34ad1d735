"""A guest as our child: its exit code and signals are passed on, and nothing of it is left, however either of us ends."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from aotgaudi.wrap import processes
from aotgaudi.wrap.processes import Process, ProcessTree
from aotgaudi.wrap.sandbox import Child, Sandbox, exit_code, open_sandbox
from tests.container import can_mount

ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8"}
STUBBORN = "trap '' TERM; touch {0}/begun; while :; do sleep 0.1; done"


@pytest.fixture
def place(root: Path) -> Iterator[Sandbox]:
    with open_sandbox(root) as found:
        yield found


def shell(place: Sandbox, script: str, **options: object) -> Child:
    return Child(["sh", "-c", script], ENVIRONMENT, place, grace_seconds=0.5, **options)  # type: ignore[arg-type]


def wait(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def ended(child: Child) -> int:
    wait(lambda: child.poll() is not None)
    status = child.poll()
    assert status is not None
    return status


@pytest.mark.parametrize(
    ("script", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -SEGV $$", 139), ("kill -TERM $$", 143)]
)
def test_the_exit_code_is_the_guests(place: Sandbox, script: str, status: int) -> None:
    with shell(place, script) as child:
        assert ended(child) == status


def test_exit_codes_are_a_shells() -> None:
    assert [exit_code(status) for status in (0, 3, -9)] == [0, 3, 137]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [(["/no/such/command"], 127, "there is no such command"), (["/etc/hostname"], 126, "cannot be run")],
)
def test_a_command_that_cannot_be_run_is_told_as_a_shell_tells_it(
    place: Sandbox, tmp_path: Path, words: list[str], status: int, message: str
) -> None:
    with (tmp_path / "log").open("wb") as log, Child(words, ENVIRONMENT, place, output=log) as child:
        assert ended(child) == status

    assert message in (tmp_path / "log").read_text()


@pytest.fixture(autouse=True)
def hanging_up_ends() -> Iterator[None]:
    """Also where the tests were started with nohup, which children inherit."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_it_begins_with_the_signals_of_an_untouched_process(place: Sandbox, tmp_path: Path) -> None:
    script = f"grep -E '^Sig(Blk|Ign)' /proc/self/status > {tmp_path}/signals"
    with shell(place, script) as child:
        assert ended(child) == 0

    masks = [int(line.split()[1], 16) for line in (tmp_path / "signals").read_text().splitlines()]
    assert masks == [0, 0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_are_passed_on(place: Sandbox, tmp_path: Path, number: int) -> None:
    script = f"trap 'exit 42' {number}; touch {tmp_path}/begun; while :; do sleep 0.05; done"
    with shell(place, script) as child:
        wait((tmp_path / "begun").exists)
        child.send(number)

        assert ended(child) == 42


def test_what_ignores_sigterm_is_killed(place: Sandbox, tmp_path: Path) -> None:
    with shell(place, STUBBORN.format(tmp_path), output=subprocess.DEVNULL) as child:
        wait((tmp_path / "begun").exists)

        assert child.end() == 137
        assert child.living() == frozenset()


SCATTERED = "setsid sleep 60 & sleep 60 & (trap '' TERM; while :; do sleep 0.1; done) &"


def test_nothing_of_it_is_left_wherever_it_went(place: Sandbox) -> None:
    with shell(place, f"{SCATTERED} wait") as child:
        wait(lambda: len(child.living()) >= 4)
        family = child.family

    assert family.living() == frozenset()


def test_what_it_leaves_behind_when_it_ends_is_ended_too(place: Sandbox) -> None:
    with shell(place, f"{SCATTERED} exit 5") as child:
        assert ended(child) == 5
        family = child.family

    assert family.living() == frozenset()


OURS = """
import sys
from pathlib import Path
from aotgaudi.wrap.sandbox import Child
from aotgaudi.wrap.sandbox import open_sandbox
with open_sandbox(Path(sys.argv[1])) as place:
    with Child(["sh", "-c", sys.argv[2]], {"PATH": "/usr/bin:/bin"}, place, grace_seconds=0.5) as child:
        print(child.pid, flush=True)
        sys.stdin.read()
"""


def test_nothing_of_it_is_left_when_we_are_killed(root: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", OURS, str(root), f"trap '' TERM; {SCATTERED} while :; do sleep 0.1; done"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    family = ProcessTree(int(process.stdout.readline()), f"AOTGAUDI_PLACE={root}")
    wait(lambda: len(family.living()) >= 4)
    process.kill()
    process.communicate()

    wait(lambda: not family.living())

    def is_free() -> bool:
        with open_sandbox(root) as place:
            return place.here == root

    wait(is_free)  # The keeper has the lock until it has done its work.


def test_what_it_orphans_is_adopted_and_reaped(tmp_path: Path, root: Path) -> None:
    """In a process of its own: whoever adopts must have no other children."""
    code = f"""
import os, time
from pathlib import Path
from aotgaudi.wrap.sandbox import Child
from aotgaudi.wrap.sandbox import open_sandbox
from aotgaudi.wrap.processes import all_processes
with open_sandbox(Path({str(root)!r})) as place:
    script = "(env -i sh -c 'sleep 0.2' &) ; sleep 1; exit 3"
    with Child(["sh", "-c", script], {{"PATH": "/usr/bin:/bin"}}, place, adopts=True) as child:
        adopted = set()
        while (status := child.poll()) is None:
            adopted |= {{p.pid for p in all_processes() if p.parent == os.getpid()}}
            time.sleep(0.01)
    zombies = [p for p in all_processes() if p.parent == os.getpid()]
    print(status, len(adopted) > 2, zombies)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)

    assert done.stdout.split() == ["3", "True", "[]"], done


@pytest.mark.skipif(not can_mount(), reason="mount namespaces are not permitted here")
def test_two_guests_at_once_see_the_same_root_with_files_of_their_own(root: Path) -> None:
    with open_sandbox(root) as first, open_sandbox(root) as second:
        for place in (first, second):
            (place.folder("cache") / "whose").write_text(str(place.here))
            script = f"cat {shlex.quote(str(root))}/cache/whose > {shlex.quote(str(root))}/tmp/seen"
            with shell(place, script) as child:
                assert ended(child) == 0

            assert (place.folder("tmp") / "seen").read_text() == str(place.here)
        assert first.here != second.here


def test_a_guest_that_cannot_be_kept_is_not_left(place: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise OSError(errno.EAGAIN, "too many processes")

    monkeypatch.setattr("aotgaudi.wrap.sandbox._start_keeper", failing)

    with pytest.raises(OSError, match="too many processes"):
        shell(place, STUBBORN.format(place.here))
    assert not ProcessTree(None, place.mark).living()


def test_an_environment_is_read_once_and_a_process_id_that_is_used_again_is_another_process(
    place: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    table = [Process(pid=70, parent=1, session=70, started=5, is_zombie=False)]

    environments = [[], [b""], [b"X=1"], [place.mark.encode()]]

    def environment(pid: int) -> list[bytes]:
        read.append(pid)
        return environments[len(read) - 1]

    monkeypatch.setattr(processes, "all_processes", lambda: iter(table))
    monkeypatch.setattr(processes, "_environment", environment)
    family = ProcessTree(None, place.mark)

    assert [family.living() for _ in range(6)] == [frozenset()] * 6
    assert read == [70] * 3, "once where there was one to be read"
    table[0] = replace(table[0], started=6)
    assert family.living() == {70}
