"""The seccomp filter, each time in a process of its own: it cannot be taken off again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="there is a filter for Linux on x86_64 and aarch64",
)

_PREAMBLE = """
import ctypes, errno, mmap, os, signal, struct, subprocess, sys, threading, time
from aotgaudi.errors import TargetError
from aotgaudi.runtime.seccomp import forbid_processes
libc = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"
NUMBER = (
    {"execve": 59, "execveat": 322, "fork": 57, "vfork": 58, "clone": 56, "clone3": 435, "seccomp": 317, "gettid": 186,
     "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311}
    if X86 else
    {"execve": 221, "execveat": 281, "clone": 220, "clone3": 435, "seccomp": 277, "gettid": 178,
     "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271}
)
NUMBER |= {"pidfd_open": 434, "pidfd_getfd": 438, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427}
def syscall(number, *arguments):
    "Makes a system call, of which a child that comes about ends at once. Returns ok or the error's name."
    result = libc.syscall(*map(ctypes.c_long, (number, *arguments)))
    if result == 0 and number in (NUMBER["clone"], NUMBER.get("fork")):
        os._exit(0)
    return "ok" if result >= 0 else errno.errorcode[ctypes.get_errno()]
def on_a_thread(what):
    results = []
    thread = threading.Thread(target=lambda: results.append(what()))
    thread.start()
    thread.join(20)
    return results[0]
class Waiting:
    "A thread that is there before the filter, does something before, and something after."
    def __init__(self, what, before=lambda: None):
        self.is_there, self.go, self.results = threading.Event(), threading.Event(), []
        def run():
            before()
            self.is_there.set()
            self.go.wait(20)
            self.results.append(what())
        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        self.is_there.wait(20)
    def result(self):
        self.go.set()
        self.thread.join(20)
        return self.results[0]
def forbid_by_another_filter(number):
    "What a sandbox does: a filter that answers one system call with EPERM."
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]
    code = b"".join(struct.pack("=HBBI", *step) for step in steps)
    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))
    assert libc.prctl(38, *map(ctypes.c_ulong, (1, 0, 0, 0))) == 0
    assert libc.prctl(22, ctypes.c_ulong(2), ctypes.byref(Program(len(steps), code))) == 0
def status(name, thread="self"):
    lines = open(f"/proc/self/task/{thread}/status" if thread != "self" else "/proc/self/status").read().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(name + ":"))
"""


def in_a_process(body: str) -> list[str]:
    """Runs `body` and returns the lines that it prints; it must exit with 0."""
    done = subprocess.run(
        [sys.executable, "-c", _PREAMBLE + textwrap.dedent(body)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


CALLS = {
    "execve": "syscall(NUMBER['execve'], 0, 0, 0)",
    "execveat": "syscall(NUMBER['execveat'], 0, 0, 0, 0, 0)",
    "clone": "syscall(NUMBER['clone'], signal.SIGCHLD, 0, 0, 0, 0)",
    "clone-vm": "syscall(NUMBER['clone'], signal.SIGCHLD | 0x4100, 0, 0, 0, 0)",
    "clone3": "syscall(NUMBER['clone3'], 0, 0)",
    **(
        {
            "fork": "syscall(NUMBER['fork'])",
            "vfork": "syscall(NUMBER['vfork'])",
            "x32": "syscall(0x40000000 | 39)",
        }
        if platform.machine() == "x86_64"
        else {}
    ),
}


@pytest.mark.process
def test_the_memory_of_other_processes_cannot_be_opened_by_any_code(tmp_path: Path) -> None:
    lines = in_a_process(
        """
        from aotgaudi.runtime.seccomp import leave_others_alone
        outside = subprocess.Popen(["sleep", "60"])
        def opened(pid):
            found = libc.open(f"/proc/{pid}/mem".encode(), os.O_RDWR)  # Of C, as any library could.
            return "ok" if found >= 0 else errno.errorcode[ctypes.get_errno()]
        print(opened(outside.pid))
        if not leave_others_alone():
            sys.exit("no Landlock")
        inside = subprocess.Popen(["sleep", "60"])
        print(opened(outside.pid), on_a_thread(lambda: opened(outside.pid)), opened(os.getppid()))
        print(opened(inside.pid), opened(os.getpid()))
        os.mkdir("FOLDER/a")
        os.mkdir("FOLDER/b")
        open("FOLDER/a/file", "w").close()
        os.rename("FOLDER/a/file", "FOLDER/b/file")
        outside.kill(), inside.kill()
    """.replace("FOLDER", str(tmp_path))
    )

    assert lines == ["ok", "EACCES EACCES EACCES", "ok ok"]


@pytest.mark.process
def test_the_kernel_refuses_what_starts_processes_and_programs_on_every_thread() -> None:
    attempts = ", ".join(CALLS.values())
    lines = in_a_process(
        f"""
        attempts = lambda: [{attempts}]
        earlier = Waiting(attempts)
        forbid_processes()
        print(*attempts())
        print(*on_a_thread(attempts))
        print(*earlier.result())
        """
    )

    answers = ["ENOSYS" if name == "clone3" else "EPERM" for name in CALLS]
    assert [line.split() for line in lines] == [answers] * 3


USES_OF_OTHERS = {
    "ptrace": "syscall(NUMBER['ptrace'], 16, victim, 0, 0)",  # PTRACE_ATTACH
    "process_vm_readv": "syscall(NUMBER['process_vm_readv'], victim, ours, 1, theirs, 1, 0)",
    "process_vm_writev": "syscall(NUMBER['process_vm_writev'], victim, ours, 1, theirs, 1, 0)",
    "pidfd_getfd": "syscall(NUMBER['pidfd_getfd'], pidfd, 0, 0)",
    "io_uring_setup": "syscall(NUMBER['io_uring_setup'], 1, ctypes.addressof(ring))",
    "io_uring_enter": "syscall(NUMBER['io_uring_enter'], -1, 0, 0, 0, 0, 0)",
    "io_uring_register": "syscall(NUMBER['io_uring_register'], -1, 0, 0, 0)",
}


@pytest.mark.process
@pytest.mark.parametrize("may_fork", [False, True])
def test_the_kernel_refuses_what_uses_other_processes(may_fork: bool) -> None:
    attempts = ", ".join(USES_OF_OTHERS.values())
    lines = in_a_process(
        f"""
        data = ctypes.create_string_buffer(b"data", 8)
        vector = (ctypes.c_size_t * 2)(ctypes.addressof(data), 4)
        ours, theirs, ring = ctypes.addressof(vector), ctypes.addressof(vector), ctypes.create_string_buffer(120)
        victim = os.fork()
        if victim == 0:
            libc.prctl(0x59616D61, ctypes.c_ulong(-1))  # PR_SET_PTRACER, any: some kernels forbid it by themselves.
            time.sleep(60)
        pidfd = libc.syscall(NUMBER["pidfd_open"], victim, 0)
        attempts = lambda: [{attempts}]
        before, earlier = attempts(), Waiting(attempts)
        forbid_processes(may_fork={may_fork})
        print(*before)
        print(*attempts())
        print(*earlier.result())
        os.kill(victim, signal.SIGKILL)
        """
    )

    assert lines[0] != lines[1]  # Without the filter, this machine allows some of it.
    assert lines[1:] == [" ".join(["EPERM"] * len(USES_OF_OTHERS))] * 2


@pytest.mark.process
def test_the_c_library_and_python_are_refused_on_every_thread() -> None:
    attempts = (
        "os.fork()",
        "os.execv('/bin/true', ['true'])",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "subprocess.run(['true'])",
        "multiprocessing.shared_memory.SharedMemory(create=True, size=1)",
    )
    lines = in_a_process(
        f"""
        import multiprocessing.shared_memory
        def answer(attempt):
            try:
                return eval(attempt)
            except OSError as error:
                return errno.errorcode[error.errno]
        answers = lambda: list(map(answer, {attempts!r}))
        earlier = Waiting(answers)
        forbid_processes()
        print(*answers(), *earlier.result())
        """
    )

    assert lines == [" ".join(["EPERM"] * 2 * len(attempts))]


@pytest.mark.process
def test_libc_system_and_posix_spawn_start_nothing_and_the_process_lives_on() -> None:
    lines = in_a_process(
        """
        arguments = (ctypes.c_char_p * 2)(b"true", None)
        def spawn():
            pid = ctypes.c_int()
            return errno.errorcode[libc.posix_spawn(ctypes.byref(pid), b"/bin/true", None, None, arguments, None)]
        earlier = Waiting(spawn)
        forbid_processes()
        code = libc.system(b"exit 0")
        print(os.WIFEXITED(code) and os.WEXITSTATUS(code), spawn(), earlier.result())
        """
    )

    assert lines == ["127 EPERM EPERM"]  # POSIX: system() answers 127 as if the shell could not be run.


@pytest.mark.process
@pytest.mark.skipif(platform.machine() != "x86_64", reason="int 0x80 is x86's")
def test_a_call_by_the_32_bit_abi_is_refused() -> None:
    lines = in_a_process(
        """
        page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3")  # mov eax, 20 (getpid of i386); int 0x80; ret
        getpid = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
        if os.fork() == 0:
            os._exit(getpid() != os.getpid())
        if os.wait()[1] != 0:
            print("none")
            sys.exit()
        forbid_processes()
        print(errno.errorcode[-getpid()])
        """
    )

    assert lines in (["EPERM"], ["none"])  # Some kernels have no 32-bit ABI.


@pytest.mark.process
def test_every_thread_has_the_filter_and_no_new_privileges() -> None:
    lines = in_a_process(
        """
        earlier = Waiting(lambda: syscall(NUMBER["gettid"]))
        forbid_processes()
        print(len(os.listdir("/proc/self/task")))
        for thread in os.listdir("/proc/self/task"):
            print(status("Seccomp", thread), status("NoNewPrivs", thread))
        print(earlier.result())
        """
    )

    assert lines == ["2", "2 1", "2 1", "ok"]


@pytest.mark.process
def test_threads_start_torch_computes_on_two_of_them_and_libraries_load() -> None:
    lines = in_a_process(
        """
        import importlib, torch
        a, before = torch.eye(512), len(os.listdir("/proc/self/task"))
        forbid_processes()
        torch.set_num_threads(2)
        print((a @ a).sum().item(), torch.ones(1_000_000).sum().item(), len(os.listdir("/proc/self/task")) > before)
        print(on_a_thread(lambda: "a thread"))
        name = next(n for n in ("_lsprof", "_testcapi", "audioop", "_crypt", "_dbm") if importlib.util.find_spec(n))
        assert name not in sys.modules
        print(importlib.import_module(name).__name__ == name)
        print(bool(ctypes.CDLL("libutil.so.1")))
        """
    )

    assert lines == ["512.0 1000000.0 True", "a thread", "True", "True"]


@pytest.mark.process
def test_a_process_may_keep_forking_and_yet_start_no_program() -> None:
    lines = in_a_process(
        """
        forbid_processes(may_fork=True)
        child = os.fork()
        if child == 0:
            os._exit(7 if syscall(NUMBER["execve"], 0, 0, 0) == "EPERM" else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), syscall(NUMBER["execveat"], 0, 0, 0, 0, 0))
        print(on_a_thread(lambda: "a thread"))
        """
    )

    assert lines == ["7 EPERM", "a thread"]


@pytest.mark.process
def test_nothing_is_in_force_before_it_is_asked_for() -> None:
    lines = in_a_process(
        """
        import aotgaudi.runtime.guard
        print(status("Seccomp"), os.spawnv(os.P_WAIT, "/bin/true", ["true"]))
        """
    )

    assert lines == [f"{_own_mode()} 0"]


def _own_mode() -> str:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(line.split()[1] for line in file if line.startswith("Seccomp:"))


@pytest.mark.process
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("forbid_by_another_filter(NUMBER['seccomp'])", "seccomp: Operation not permitted"),
        (
            "forbid_by_another_filter(157 if X86 else 167)",
            "prctl(PR_SET_NO_NEW_PRIVS): Operation not permitted",
        ),
        (
            "Waiting(lambda: None, before=lambda: forbid_by_another_filter(0x3FFFFFFF))",
            "has a filter of its own",
        ),
        (
            "setattr(__import__('platform'), 'machine', lambda: 'riscv64')",
            "no filter is known for linux on riscv64",
        ),
    ],
)
def test_a_machine_that_cannot_says_why_and_nothing_is_in_force(how: str, reason: str) -> None:
    lines = in_a_process(
        f"""
        kept = {how}
        try:
            forbid_processes()
        except TargetError as error:
            print(error, error.exit_code)
        print(os.spawnv(os.P_WAIT, "/bin/true", ["true"]))
        """
    )

    assert lines[0].startswith("the kernel cannot be told to refuse processes: ")
    assert lines[0].endswith(f"{reason} 5")
    assert lines[1] == "0"
