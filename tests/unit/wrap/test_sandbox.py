"""A wrapped server's sandbox: private, checked before use, and free again however a run ends. Nothing of it is left."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from aotgaudi.errors import SpecError, StoreError, UntrustedError
from aotgaudi.machine import within
from aotgaudi.wrap import process_tree
from aotgaudi.wrap.process_tree import ProcessTree
from aotgaudi.wrap.sandbox import FOLDERS, MARK, Child, Sandbox, check_path, open_sandbox

pytestmark = pytest.mark.process


def test_a_sandbox_is_ours_alone_and_empty(root: Path) -> None:
    root.mkdir(mode=0o755)
    (root / "cache").mkdir()
    (root / "cache" / "old").touch()
    (root / "left").touch()

    with open_sandbox(root) as sandbox:
        sandbox.set_state("l")
        sandbox.set_state("e")

        assert stat.S_IMODE(root.stat().st_mode) == 0o700
        assert sorted(os.listdir(root)) == sorted([*FOLDERS, "lock", "state"])
        assert not any(os.listdir(root / name) for name in FOLDERS)
        assert (sandbox.root / "state").read_text() == "e"


def test_events_stay_to_be_explained_and_caches_go(root: Path) -> None:
    with open_sandbox(root) as sandbox:
        (sandbox.root / "cache" / "kernel.so").touch()
        (sandbox.root / "events" / "1-2.jsonl").touch()

    assert sorted(os.listdir(root)) == ["events", "lock", "witness"]
    assert os.listdir(root / "events") == ["1-2.jsonl"]


@pytest.mark.parametrize(
    "path", ["relative", "/", "/run/../run/x", "/run/" + "x" * 70, "/run/a:b", "/run/a\nb"]
)
def test_a_path_that_cannot_be_a_sandbox_is_refused_in_one_line(path: str) -> None:
    with pytest.raises(SpecError) as raised:
        check_path(Path(path))

    assert "\n" not in str(raised.value).replace(path, "")


def test_a_second_run_at_once_is_refused_and_told_which_run_is_there(root: Path) -> None:
    with (
        open_sandbox(root),
        pytest.raises(SpecError, match=rf"in use by another run: process {os.getpid()} \("),
    ):
        open_sandbox(root, wait_seconds=0.0).__enter__()


def test_the_lock_of_a_run_that_was_killed_is_free(root: Path) -> None:
    code = f"""
import time
from pathlib import Path
from aotgaudi.wrap.sandbox import open_sandbox
with open_sandbox(Path({str(root)!r})):
    print("open", flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"open\n"
    process.kill()
    process.communicate()

    with open_sandbox(root, wait_seconds=0.0):
        assert (root / "lock").read_text() == f"process {os.getpid()}"


def test_a_server_that_outlived_everything_is_ended_before_its_files_go(root: Path) -> None:
    left = subprocess.Popen(["/bin/sleep", "60"], env={MARK: str(root)}, start_new_session=True)

    with open_sandbox(root):
        assert left.wait(10) == -signal.SIGKILL or left.returncode == -signal.SIGTERM


def open_to_all(root: Path) -> None:
    root.parent.chmod(0o777)


def a_link(root: Path) -> None:
    root.symlink_to(root.parent)


@pytest.mark.parametrize(
    ("make", "error", "why"),
    [(open_to_all, UntrustedError, "everybody may replace"), (a_link, SpecError, "is not a directory")],
)
def test_a_directory_that_is_not_ours_alone_is_refused(
    root: Path, make: Callable[[Path], None], error: type[Exception], why: str
) -> None:
    make(root)

    with pytest.raises(error, match=why), open_sandbox(root):
        pass


def test_a_directory_of_another_user_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)

    with pytest.raises(UntrustedError, match="must belong to uid 12345"), open_sandbox(root):
        pass


AS_A_POD = """
import os, sys
from pathlib import Path
from aotgaudi.errors import AotGaudiError
from aotgaudi.wrap.sandbox import open_sandbox
os.setgroups([]); os.setgid(54321); os.setuid(54321)
try:
    with open_sandbox(Path(sys.argv[1])) as sandbox:
        for path in (sandbox.root, *sorted(sandbox.root.iterdir())):
            print(path.name, path.lstat().st_uid, oct(path.lstat().st_mode & 0o7777))
except AotGaudiError as error:
    sys.exit(f"{error.exit_code} {error}")
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def in_a_pod(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", AS_A_POD, str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@needs_root
@pytest.mark.parametrize("below", ["", "below", "further/below"])
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o2777])
def test_a_volume_of_roots_holds_folders_of_ours_alone(root: Path, mode: int, below: str) -> None:
    """As the emptyDir of a pod that does not run as root; what others left there is not touched."""
    root.parent.chmod(0o755)
    root.mkdir()
    (root / "lost+found").mkdir(mode=0o700)
    root.chmod(mode)

    done = in_a_pod(root / below)

    rows = {line.split()[0]: tuple(line.split()[1:]) for line in done.stdout.splitlines()}
    assert done.returncode == 0, done.stderr
    assert {rows[name] for name in FOLDERS} == {("54321", "0o700")}
    assert (root / "lost+found").exists()
    assert rows[(root / below).name] == (("54321", "0o700") if below else ("0", oct(mode)))


@needs_root
@pytest.mark.parametrize("planted", ["folder", "link"])
def test_a_folder_of_another_user_in_a_volume_is_refused(root: Path, planted: str) -> None:
    root.parent.chmod(0o755)
    root.mkdir()
    if planted == "folder":
        (root / "cache").mkdir(mode=0o777)
    else:
        (root / "cache").symlink_to("/tmp")
        os.chown(root / "cache", 12345, 12345, follow_symlinks=False)
    root.chmod(0o1777)

    done = in_a_pod(root)

    assert done.returncode == 1
    assert done.stderr[0] in "24"


System = namedtuple("System", "f_flag f_bavail f_frsize")


@pytest.mark.parametrize(
    ("system", "error", "message"),
    [
        (System(os.ST_NOEXEC, 1 << 30, 4096), SpecError, "mounted noexec"),
        (System(0, 10, 4096), StoreError, "has 40960 bytes free"),
    ],
)
def test_an_unfit_file_system_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch, system: System, error: type[Exception], message: str
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: system)

    with pytest.raises(error, match=message), open_sandbox(root, needed_bytes=1 << 20):
        pass


ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8"}
STUBBORN = "trap '' TERM; touch {0}/begun; while :; do sleep 0.1; done"


@pytest.fixture
def sandbox(root: Path) -> Iterator[Sandbox]:
    with open_sandbox(root) as found:
        yield found


def shell(sandbox: Sandbox, script: str, **options: object) -> Child:
    return Child(["sh", "-c", script], ENVIRONMENT, sandbox, termination_seconds=0.5, **options)  # type: ignore[arg-type]


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
def test_the_exit_code_is_the_servers(sandbox: Sandbox, script: str, status: int) -> None:
    with shell(sandbox, script) as child:
        assert ended(child) == status


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [(["/no/such/command"], 127, "there is no such command"), (["/etc/hostname"], 126, "cannot be run")],
)
def test_a_command_that_cannot_be_run_is_told_as_a_shell_tells_it(
    sandbox: Sandbox, tmp_path: Path, words: list[str], status: int, message: str
) -> None:
    with (tmp_path / "log").open("wb") as log, Child(words, ENVIRONMENT, sandbox, output=log) as child:
        assert ended(child) == status

    assert message in (tmp_path / "log").read_text()


@pytest.fixture(autouse=True)
def hanging_up_ends() -> Iterator[None]:
    """Also where the tests were started with nohup, which children inherit."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


_OF_GLIBC = 0b11 << 31
"""Signals 32 and 33, which no program can set through glibc. A run of all tests once had 32 ignored in its own process."""


def test_it_begins_with_the_signals_of_an_untouched_process(sandbox: Sandbox, tmp_path: Path) -> None:
    script = f"grep -E '^Sig(Blk|Ign)' /proc/self/status > {tmp_path}/signals"
    with shell(sandbox, script) as child:
        assert ended(child) == 0

    masks = [int(line.split()[1], 16) for line in (tmp_path / "signals").read_text().splitlines()]
    assert [mask & ~_OF_GLIBC for mask in masks] == [0, 0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_are_passed_on(sandbox: Sandbox, tmp_path: Path, number: int) -> None:
    script = f"trap 'exit 42' {number}; touch {tmp_path}/begun; while :; do sleep 0.05; done"
    with shell(sandbox, script) as child:
        wait((tmp_path / "begun").exists)
        child.send(number)

        assert ended(child) == 42


def test_what_ignores_sigterm_is_killed(sandbox: Sandbox, tmp_path: Path) -> None:
    with shell(sandbox, STUBBORN.format(tmp_path), output=subprocess.DEVNULL) as child:
        wait((tmp_path / "begun").exists)

        assert child.end() == 137
        assert child.tree.living() == frozenset()


def test_what_cannot_even_die_is_not_waited_for_for_ever(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a process that waits for a device, nothing comes of any signal."""
    with shell(sandbox, STUBBORN.format(tmp_path), output=subprocess.DEVNULL) as child:
        wait((tmp_path / "begun").exists)
        with monkeypatch.context() as patched:
            patched.setattr(process_tree, "_KILL_SECONDS", 0.2)
            patched.setattr("aotgaudi.wrap.sandbox._REAP_SECONDS", 0.2)
            patched.setattr(process_tree, "send", lambda *_: None)

            assert within(30.0, child.end) == 137
            assert child.poll() is None


SCATTERED = "setsid sleep 60 & sleep 60 & (trap '' TERM; while :; do sleep 0.1; done) &"


@pytest.mark.parametrize("end", ["wait", "exit 5"])
def test_nothing_of_it_is_left_wherever_it_went_and_however_it_ends(sandbox: Sandbox, end: str) -> None:
    with shell(sandbox, f"{SCATTERED} {end}") as child:
        if end == "wait":
            wait(lambda: len(child.tree.living()) >= 4)
        else:
            assert ended(child) == 5

    assert child.tree.living() == frozenset()


OURS = """
import sys
from pathlib import Path
from aotgaudi.wrap.sandbox import Child
from aotgaudi.wrap.sandbox import open_sandbox
with open_sandbox(Path(sys.argv[1])) as sandbox:
    with Child(["sh", "-c", sys.argv[2]], {"PATH": "/usr/bin:/bin"}, sandbox, termination_seconds=0.5) as child:
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
    tree = ProcessTree(int(process.stdout.readline()), f"AOTGAUDI_PLACE={root}")
    wait(lambda: len(tree.living()) >= 4)
    process.kill()
    process.communicate()

    wait(lambda: not tree.living())

    with open_sandbox(root):  # The reaper holds the lock until it is done.
        pass


def test_what_it_orphans_is_adopted_and_reaped(tmp_path: Path, root: Path) -> None:
    """In a process of its own: whoever adopts must have no other children."""
    code = f"""
import os, time
from pathlib import Path
from aotgaudi.wrap.sandbox import Child
from aotgaudi.wrap.sandbox import open_sandbox
import psutil
with open_sandbox(Path({str(root)!r})) as sandbox:
    seen = sandbox.root / "tmp" / "seen"
    until = f"while ! [ -e {{seen}} ]; do sleep 0.05; done"
    script = f"(env -i sh -c '{{until}}' &) ; {{until}}; sleep 1; exit 3"
    with Child(["sh", "-c", script], {{"PATH": "/usr/bin:/bin"}}, sandbox, adopts=True) as child:
        adopted = set()
        while (status := child.poll()) is None:
            adopted |= {{p.pid for p in psutil.Process().children()}}
            if len(adopted) > 2:
                seen.touch()
            time.sleep(0.01)
    zombies = psutil.Process().children()
    print(status, len(adopted) > 2, zombies)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120
    )

    assert done.stdout.split() == ["3", "True", "[]"], done


def test_a_server_without_a_reaper_is_ended(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise OSError(errno.EAGAIN, "too many processes")

    monkeypatch.setattr("aotgaudi.wrap.sandbox._start_reaper", failing)

    with pytest.raises(OSError, match="too many processes"):
        shell(sandbox, STUBBORN.format(sandbox.root))
    assert not ProcessTree(None, sandbox.mark).living()


@dataclass
class FakeProcess:
    """A row of the system's table, whose environment reads otherwise each time."""

    environments: list[dict[str, str]]
    pid: int = 70
    created: float = 5.0
    num_reads: int = 0

    @property
    def info(self) -> dict[str, object]:
        return {"ppid": 1, "status": psutil.STATUS_SLEEPING, "create_time": self.created}

    def environ(self) -> dict[str, str]:
        self.num_reads += 1
        return self.environments[self.num_reads - 1]


def test_an_environment_is_read_once_and_a_reused_process_id_is_another_process(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = FakeProcess([{}, {}, {"X": "1"}, {MARK: str(sandbox.root)}])
    monkeypatch.setattr(process_tree, "processes", lambda: {process.pid: process})
    tree = ProcessTree(None, sandbox.mark)

    assert [tree.living() for _ in range(6)] == [frozenset()] * 6
    assert process.num_reads == 3, "not again once it was not empty"
    process.created = 6.0
    assert tree.living() == {70}
