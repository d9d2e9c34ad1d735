"""A strict server needs no compiler, starts no process, and loads nothing that could compile."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from aotgaudi.server.preprocess.worker import WORKERS
from tests.e2e.harness import PACKAGE_ROOT, Server, Workplace, environment, eventually

pytestmark = pytest.mark.slow

COMPILERS = ("torch._dynamo", "torch._inductor", "triton", "transformers")

WITNESS = '''\
"""Imported by every Python process at its start: writes down what it starts, imports, and has loaded at its end."""

import atexit
import os
import sys
import time

PROCESS_EVENTS = {
    "subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "pty.spawn"
}
COMPILERS = ("torch._dynamo", "torch._inductor", "triton", "transformers")
FILE = os.open(os.environ["E2E_WITNESS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def write(kind, what):
    os.write(FILE, f"{time.time()}\\t{kind}\\t{what}\\n".encode())


def is_compiler(name):
    return any(name == compiler or name.startswith(compiler + ".") for compiler in COMPILERS)


def hook(event, args):
    if event in PROCESS_EVENTS:
        write("process", f"{event} {args[0] if args else ''!r}")
    elif event == "import" and is_compiler(args[0]):
        write("import", args[0])


@atexit.register
def end():
    for name in sorted(sys.modules):
        write("loaded", name)


sys.addaudithook(hook)
'''


@dataclass(frozen=True)
class Seen:
    """One line of a witness; `time` in seconds since 1970."""

    time: float
    kind: str
    what: str


@dataclass(frozen=True)
class Witness:
    """Watches child processes that get `settings` into their environment."""

    folder: Path

    @property
    def settings(self) -> dict[str, str]:
        return {
            "PYTHONPATH": f"{self.folder}{os.pathsep}{PACKAGE_ROOT}",
            "E2E_WITNESS": str(self.folder / "seen"),
        }

    def seen(self, kind: str) -> list[Seen]:
        lines = (self.folder / "seen").read_text(encoding="utf-8").splitlines()
        rows = (line.split("\t", 2) for line in lines)
        return [Seen(float(when), what_kind, what) for when, what_kind, what in rows if what_kind == kind]


@pytest.fixture
def witness(tmp_path: Path) -> Witness:
    folder = tmp_path / "witness"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WITNESS, encoding="utf-8")
    return Witness(folder)


@pytest.fixture
def empty_path(tmp_path: Path) -> str:
    """A PATH on which there is nothing at all."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("g++", "c++", "gcc", "cc", "clang++", "ld", "as"):
        assert shutil.which(tool, path=str(folder)) is None
    return str(folder)


def test_the_witness_sees_a_process_and_an_import(witness: Witness, tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', '']); import torch._inductor"

    subprocess.run(
        [sys.executable, "-c", code], env=environment(tmp_path, **witness.settings), check=True, timeout=120
    )

    assert any(seen.what.startswith("subprocess.Popen") for seen in witness.seen("process"))
    assert "torch._inductor" in {seen.what for seen in witness.seen("import")}
    assert "torch._inductor" in {seen.what for seen in witness.seen("loaded")}


@pytest.mark.smoke
def test_a_strict_server_works_without_a_compiler_and_starts_no_process(
    workplace: Workplace, witness: Witness, empty_path: str
) -> None:
    with workplace.serve(PATH=empty_path, CXX="", **witness.settings) as server:
        ready_at = time.time()
        process = psutil.Process(server.process.pid)
        others = {child.pid for child in process.children(recursive=True)}
        assert len(others) == 1 + 1 + len(WORKERS)  # The engine, the fork server and its workers.
        for length in range(1, 50, 7):
            server.complete([11] * length, max_tokens=14, ignore_eos=True)
            server.complete([[11] * length, [12] * length], max_tokens=14, temperature=1, top_k=5)
        chat = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "the fox"}]})
        assert chat.status_code == 200
        assert server.metric("aotgaudi_compilations_total") == 0
        assert {child.pid for child in process.children(recursive=True)} == others
        times = process.cpu_times()
        assert (times.children_user, times.children_system) == (0, 0)

    assert [seen for seen in witness.seen("process") if seen.time >= ready_at] == []
    assert witness.seen("import") == []
    loaded = {seen.what for seen in witness.seen("loaded")}
    assert "torch" in loaded
    assert [name for name in loaded if name in COMPILERS] == []


SABOTEUR = '''\
"""Imported by every Python process at its start: on signals it tries what a server must not do, as Python and as C do it."""

import ctypes
import os
import signal
import subprocess

libc = ctypes.CDLL(None, use_errno=True)
system, fork, open_ = libc.system, libc.fork, libc.open  # Looked up before anything guards them.


def say(*words):  # In one write, which nothing that another thread writes can come into the middle of.
    os.write(2, (" ".join(map(str, ("saboteur:", *words))) + "\\n").encode())


def in_python(signum, frame):
    for attempt in (lambda: subprocess.run(["g++", "--version"]), lambda: __import__("torch._inductor")):
        try:
            attempt()
        except Exception as error:
            say(error)


def in_c(signum, frame):
    say("system", system(b"touch started"))
    process = fork()
    if process == 0:
        os._exit(0)
    say("fork", process, os.strerror(ctypes.get_errno()))
    memory = open_(f"/proc/{os.getppid()}/mem".encode(), os.O_RDWR)
    say("memory", memory, os.strerror(ctypes.get_errno()))


signal.signal(signal.SIGUSR1, in_c)
signal.signal(signal.SIGUSR2, in_python)
'''


@pytest.mark.parametrize("victim", ["server", "engine"])
def test_what_tries_to_compile_is_refused_by_the_kernel_and_counted_by_the_hook_and_the_server_goes_on(
    workplace: Workplace, tmp_path: Path, victim: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SABOTEUR, encoding="utf-8")

    with workplace.serve(PYTHONPATH=f"{tmp_path}{os.pathsep}{PACKAGE_ROOT}") as server:
        causes = ("process", "import", "torchscript", "dynamo", "backend")
        pid = server.engine.pid if victim == "engine" else server.process.pid
        before = server.complete([3] * 4, max_tokens=4)

        os.kill(pid, signal.SIGUSR1)
        assert eventually(lambda: server.log.count("saboteur: ") == 3), server.log

        assert f"saboteur: system {127 << 8}\n" in server.log
        assert "saboteur: fork -1 Operation not permitted\n" in server.log
        assert "saboteur: memory -1 Permission denied\n" in server.log
        assert not (workplace.folder / "started").exists()
        assert [server.metric("aotgaudi_compilations_total", cause=cause) for cause in causes] == [0] * 5
        assert server.client.get("/ready").json()["compilations"] == 0
        assert server.complete([3] * 4, max_tokens=4)["choices"] == before["choices"]

        os.kill(pid, signal.SIGUSR2)
        assert eventually(lambda: server.log.count("saboteur: refused while serving") == 2), server.log

        assert server.metric("aotgaudi_compilations_total", cause="process") == 1
        assert server.metric("aotgaudi_compilations_total", cause="import") == 1
        assert server.client.get("/ready").json()["compilations"] == 2
        assert server.complete([3] * 4, max_tokens=4)["choices"] == before["choices"]


def _modes(process: str) -> set[str]:
    """The modes of seccomp that the threads of a process have; 2 is a filter."""
    statuses = [task.read_text(encoding="ascii") for task in Path("/proc", process, "task").glob("*/status")]
    return {mode for status in statuses for mode in re.findall(r"^Seccomp:\s+(\d)", status, re.MULTILINE)}


def _guard_of(server: Server) -> tuple[str, float, set[str]]:
    """What /ready, the metrics and the kernel say of the guard."""
    metric = server.metric("aotgaudi_guard", layer="seccomp")
    return server.client.get("/ready").json()["guard"], metric, _modes(str(server.engine.pid))


def test_every_thread_of_a_strict_server_has_the_filter_and_it_answers(server: Server) -> None:
    assert server.complete("the fox", max_tokens=4)["choices"]

    assert _guard_of(server) == ("seccomp+hook", 1, {"2"})
    assert _modes(str(server.process.pid)) == {"2"}


def test_what_is_not_wanted_of_the_guard_is_not_there(workplace: Workplace) -> None:
    with workplace.serve("--seccomp", "off") as server:
        assert _guard_of(server) == ("hook", 0, _modes("self"))
    with workplace.serve(strict=False) as server:
        assert server.complete("the fox", max_tokens=4)["choices"]
        assert _guard_of(server) == ("", 0, _modes("self"))
        assert _modes(str(server.process.pid)) == _modes("self")


SANDBOX = '''\
"""Imported by every Python process at its start: forbids seccomp(2) to it, as some sandboxes do."""

import ctypes
import os
import struct


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


number = {"x86_64": 317, "aarch64": 277}[os.uname().machine]
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]
code = b"".join(struct.pack("=HBBI", *step) for step in steps)
libc = ctypes.CDLL(None)
assert libc.prctl(38, *map(ctypes.c_ulong, (1, 0, 0, 0))) == 0
assert libc.prctl(22, ctypes.c_ulong(2), ctypes.byref(Program(len(steps), code))) == 0
'''


def test_where_a_sandbox_forbids_filters_the_hook_alone_guards_unless_one_is_required(
    workplace: Workplace, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SANDBOX, encoding="utf-8")
    path = f"{tmp_path}{os.pathsep}{PACKAGE_ROOT}"
    strict = ("--bundle", workplace.bundle, "--model", workplace.model, "--port", "0", "--require-warm")

    with workplace.serve(PYTHONPATH=path) as server:
        assert _guard_of(server)[:2] == ("hook", 0)
        assert "WARNING the kernel cannot be told to refuse processes: seccomp: Operation not" in server.log
    done = workplace.run("serve", *strict, "--seccomp", "require", timeout_seconds=60, PYTHONPATH=path)

    assert done.returncode == 5
    assert done.stderr.splitlines()[-1].startswith("error: the kernel cannot be told to refuse processes")
    assert "ready in" not in done.stderr


def test_a_filter_is_not_required_without_require_warm(workplace: Workplace) -> None:
    done = workplace.run(
        "serve", "--bundle", workplace.bundle, "--model", workplace.model, "--seccomp", "require"
    )

    assert done.returncode == 2
    assert "--seccomp require goes with --require-warm" in done.stderr
