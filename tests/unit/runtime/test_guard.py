"""The guard, each time in a process of its own: neither an audit hook nor a seccomp filter can be removed."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

_PREAMBLE = """
import os, subprocess, sys, threading
from aotgaudi.errors import CompileForbiddenError
from aotgaudi.runtime.guard import Guard
def refused(attempt):
    try:
        attempt()
    except CompileForbiddenError as error:
        return str(error)
    raise SystemExit("was not refused")
"""


def in_a_process(body: str, preamble: str = _PREAMBLE) -> str:
    """Runs `body` and returns what it prints; it must exit with 0."""
    done = subprocess.run(
        [sys.executable, "-c", preamble + textwrap.dedent(body)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


STARTS = (
    "subprocess.run(['true'])",
    "subprocess.Popen('true', shell=True)",
    "os.system('true')",
    "os.popen('true')",
    "os.fork()",
    "os.forkpty()",
    "os.posix_spawn('/bin/true', ['true'], {})",
    "os.posix_spawnp('true', ['true'], {})",
    "os.execv('/bin/true', ['true'])",
    "os.spawnv(os.P_WAIT, '/bin/true', ['true'])",
    "__import__('pty').spawn(['true'])",
    "__import__('pty').fork()",
    "__import__('multiprocessing').get_context('spawn').Process().start()",
    "__import__('multiprocessing').get_context('forkserver').Process().start()",
    "__import__('multiprocessing').get_context('fork').Process().start()",
    "__import__('multiprocessing.shared_memory').shared_memory.SharedMemory(create=True, size=1)",
    "__import__('multiprocessing').get_context('spawn').Lock()",
    "__import__('multiprocessing').Manager()",
    "__import__('multiprocessing.resource_tracker').resource_tracker.ensure_running()",
    "__import__('multiprocessing.forkserver').forkserver.ensure_running()",
    "__import__('concurrent.futures').futures.ProcessPoolExecutor(1, mp_context=SPAWN).submit(print)",
    "__import__('asyncio').run(__import__('asyncio').create_subprocess_exec('true'))",
    "__import__('_posixsubprocess').fork_exec([b'true'], [b'/bin/true'])",
    "__import__('ctypes').CDLL(None).system(b'true')",
    "__import__('ctypes').CDLL(None)['posix_spawnp']",
    "__import__('ctypes').pythonapi.fork()",
)


def test_starting_a_process_is_refused_and_counted() -> None:
    printed = in_a_process(
        f"""
        SPAWN = __import__("multiprocessing").get_context("spawn")
        guard = Guard()
        guard.arm()
        for number, attempt in enumerate({STARTS!r}, 1):
            message = refused(lambda: eval(attempt))
            counts = guard.compilations()
            assert message.startswith("refused while serving: an attempt to start a process ("), message
            assert message.endswith("), by __main__"), message
            assert counts["process"] == sum(counts.values()) == number, (attempt, counts)
        print(number)
        """
    )

    assert printed == f"{len(STARTS)}\n"


def test_writing_to_the_memory_of_a_process_is_refused_and_reading_is_not() -> None:
    printed = in_a_process(
        """
        guard = Guard()
        open("/proc/self/mem", "r+b").close()
        guard.arm()
        for path in (f"/proc/{os.getppid()}/mem", b"/proc/self/mem", "//proc/1/../1/task/1/mem", "/proc/thread-self/mem"):
            print(refused(lambda: os.open(path, os.O_RDWR)))
        print(refused(lambda: open(f"/proc/{os.getpid()}/mem", "wb", buffering=0)))
        open("/proc/self/mem", "rb").close()
        os.close(os.open("/dev/null", os.O_RDWR))
        print(guard.compilations()["process"])
        """
    )

    *messages, count = printed.splitlines()
    assert all(
        line.startswith("refused while serving: an attempt to write to a process's memory (")
        for line in messages
    )
    assert (len(messages), count) == (5, "5")


MODULES = (
    *("torch._dynamo", "torch._inductor", "torch._inductor.codecache", "torch._export"),
    *("triton", "transformers", "numba", "llvmlite.binding"),
)


def test_importing_a_compiler_is_refused() -> None:
    printed = in_a_process(
        f"""
        import importlib
        guard = Guard()
        guard.arm()
        for number, module in enumerate({MODULES!r}, 1):
            message = refused(lambda: importlib.import_module(module))
            assert message.startswith("refused while serving: an attempt to import "), message
            assert module not in sys.modules
            assert guard.compilations()["import"] >= number
        print(number, flush=True)
        os._exit(0)  # A torch that is loaded in part may crash at its end.
        """
    )

    assert printed == f"{len(MODULES)}\n"


def test_compiling_torchscript_is_refused_and_counted() -> None:
    printed = in_a_process(
        """
        import io, pathlib, tempfile, torch
        path = pathlib.Path(tempfile.mkdtemp(), "functions.py")  # TorchScript reads a function's source.
        path.write_text("def one(x: int) -> int: return x + 1\\n\\ndef two(x: int) -> int: return x + 2")
        sys.path.insert(0, str(path.parent))
        import functions
        saved, earlier, linear = io.BytesIO(), torch.jit.script(functions.one), torch.nn.Linear(2, 2)
        torch.jit.save(torch.jit.trace(linear, torch.ones(2)), saved)
        attempts = (
            lambda: torch.jit.trace(torch.abs, torch.ones(2)),
            lambda: torch.jit.trace(linear, torch.ones(2)),
            lambda: torch.jit.script(functions.two),
            lambda: torch.jit.script(linear),
            lambda: torch.jit.load(io.BytesIO(saved.getvalue())),
            lambda: torch.jit.CompilationUnit("def three(x):\\n    return x + 3\\n"),
            lambda: torch.jit._state._python_cu.define("def four(x):\\n    return x + 4\\n"),
        )
        guard = Guard()
        guard.arm()
        for attempt in attempts:
            print(refused(attempt))
        print(guard.compilations()["torchscript"], earlier(1))
        guard.disarm()
        for attempt in attempts:
            attempt()
        """
    )

    *messages, count = printed.splitlines()
    assert len(messages) == 7
    for message in messages:
        assert message.startswith("refused while serving: an attempt to compile TorchScript (torch._C.")
        assert message.endswith("), by __main__")
    assert count == "7 2"


def test_torch_compile_and_export_are_refused_where_dynamo_was_never_loaded() -> None:
    printed = in_a_process(
        """
        import torch
        guard = Guard()
        guard.arm()
        print(refused(lambda: torch.compile(torch.abs)(torch.ones(2))))
        print(refused(lambda: torch.export.export(torch.nn.ReLU(), (torch.ones(2),))))
        print(guard.compilations()["import"])
        """
    )

    *messages, count = printed.splitlines()
    assert [message.partition("torch._")[0] for message in messages] == [
        "refused while serving: an attempt to import "
    ] * 2
    assert count == "2"


def test_the_log_names_who_tried_once_for_each_module_and_cause() -> None:
    printed = in_a_process(
        """
        import logging
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        guard = Guard()
        guard.arm()
        for attempt in (lambda: os.system("true"), lambda: subprocess.run(["true"]), lambda: __import__("triton")):
            refused(attempt)
        print(guard.compilations()["process"])
        """
    )

    process, other, count = printed.splitlines()
    assert process.startswith("refused while serving: an attempt to start a process (os.system ")
    assert other == "refused while serving: an attempt to import triton, by __main__"
    assert count == "2"


@pytest.mark.parametrize("policy", ["auto", "require"])
def test_a_kernel_that_cannot_is_told_or_is_an_error(policy: str) -> None:
    printed = in_a_process(
        f"""
        import logging, platform
        from aotgaudi.errors import TargetError
        logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
        platform.machine = lambda: "riscv64"
        guard = Guard()
        try:
            guard.arm(seccomp={policy!r})
            print(guard.layers)
        except TargetError as error:
            print("error", error, error.exit_code)
        """
    )

    reason = "the kernel cannot be told to refuse processes: no filter is known for linux on riscv64"
    told = [f"WARNING {reason}; code that is not Python's could still start one", "('hook',)"]
    assert printed.splitlines() == (told if policy == "auto" else [f"error {reason} 5"])


BEHAVIOURS = {
    "that is not armed refuses nothing": (
        "print(subprocess.call(['true']), sum(guard.compilations().values()))",
        "0 0",
    ),
    "that is armed twice counts once": (
        """
        guard.arm()
        guard.arm()
        refused(lambda: os.system("true"))
        print(sum(guard.compilations().values()))
        """,
        "1",
    ),
    "loads neither torch nor a compiler": (
        """
        guard.arm()
        print({"torch", "torch._dynamo", "transformers"} & sys.modules.keys())
        """,
        "set()",
    ),
    "counts refusals by cause": (
        """
        guard.arm()
        refused(lambda: os.system("true"))
        refused(lambda: __import__("triton"))
        refused(lambda: __import__("triton"))
        print(dict(guard.compilations()))
        """,
        "{'process': 1, 'import': 2, 'torchscript': 0, 'dynamo': 0, 'backend': 0}",
    ),
    "lets everything else be imported and run": (
        """
        guard.arm()
        import colorsys, tempfile
        for name in ("transformers_like", "tritonclient", "torch_dynamo"):
            try:
                __import__(name)
            except ModuleNotFoundError:
                print(name)
        thread = threading.Thread(target=print, args=("a thread",))
        thread.start()
        thread.join()
        with tempfile.TemporaryFile() as file:
            file.write(b"x")
        print(sum(guard.compilations().values()))
        """,
        "transformers_like\ntritonclient\ntorch_dynamo\na thread\n0",
    ),
    "forbids retracing where dynamo was loaded before, and disarmed allows it": (
        """
        import torch, torch._dynamo
        guard.arm()
        print(torch._dynamo.eval_frame._stance.stance)
        guard.disarm()
        print(subprocess.run(["true"]).returncode, torch._dynamo.eval_frame._stance.stance)
        guard.arm()
        refused(lambda: subprocess.run(["true"]))
        print(guard.compilations()["process"])
        """,
        "fail_on_recompile\n0 default\n1",
    ),
    "counts what is watched from when it is armed": (
        """
        compiled = [5]
        guard.watch("backend", lambda: compiled[0])
        compiled[0] = 7
        guard.arm()
        print(guard.compilations()["backend"])
        compiled[0] = 9
        print(guard.compilations()["backend"])
        """,
        "0\n2",
    ),
    "counts graphs that dynamo captures": (
        """
        import torch, torch._dynamo
        guard.arm(only_thread=0)
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        print(guard.compilations()["dynamo"])
        """,
        "1",
    ),
    "of one thread leaves the others alone": (
        """
        results = []
        def guarded():
            guard.arm(only_thread=threading.get_ident())
            results.append(refused(lambda: subprocess.run(["true"])))
        thread = threading.Thread(target=guarded)
        thread.start()
        thread.join()
        print(subprocess.run(["true"]).returncode, len(results), guard.compilations()["process"])
        """,
        "0 1 1",
    ),
    "has the kernel's layer where it is asked for, and keeps it when it is disarmed": (
        """
        print(guard.layers)
        guard.arm()
        print(guard.layers)
        guard.arm(seccomp="require")
        print(guard.layers)
        guard.disarm()
        print(guard.layers)
        try:
            os.fork()
        except PermissionError as error:
            print(error)
        """,
        "()\n('hook',)\n('seccomp', 'hook')\n('seccomp', 'hook')\n[Errno 1] Operation not permitted",
    ),
    "explains what the kernel would refuse without a word": (
        """
        guard.arm(seccomp="auto")
        print(refused(lambda: subprocess.run(["true"])))
        print(guard.layers, guard.compilations()["process"])
        """,
        "refused while serving: an attempt to start a process (subprocess.Popen 'true'), by __main__\n"
        "('seccomp', 'hook') 1",
    ),
}


@pytest.mark.parametrize(("body", "expected"), BEHAVIOURS.values(), ids=BEHAVIOURS)
def test_a_guard(body: str, expected: str) -> None:
    assert in_a_process("guard = Guard()\n" + textwrap.dedent(body)) == f"{expected}\n"


# The lower layer

filters = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="there is a filter for Linux on x86_64 and aarch64",
)

_KERNEL = """
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


def lines_of(body: str) -> list[str]:
    """The lines that `body` prints, run after `_KERNEL`."""
    return in_a_process(body, _KERNEL).splitlines()


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


@filters
def test_the_memory_of_other_processes_cannot_be_opened_by_any_code(tmp_path: Path) -> None:
    lines = lines_of(
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


@filters
def test_the_kernel_refuses_what_starts_processes_and_programs_on_every_thread() -> None:
    attempts = ", ".join(CALLS.values())
    lines = lines_of(
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


@filters
@pytest.mark.parametrize("may_fork", [False, True])
def test_the_kernel_refuses_what_uses_other_processes(may_fork: bool) -> None:
    attempts = ", ".join(USES_OF_OTHERS.values())
    lines = lines_of(
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


@filters
def test_the_c_library_and_python_are_refused_on_every_thread() -> None:
    attempts = (
        "os.fork()",
        "os.execv('/bin/true', ['true'])",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "subprocess.run(['true'])",
        "multiprocessing.shared_memory.SharedMemory(create=True, size=1)",
    )
    lines = lines_of(
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


@filters
def test_libc_system_and_posix_spawn_start_nothing_and_the_process_lives_on() -> None:
    lines = lines_of(
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


@filters
@pytest.mark.skipif(platform.machine() != "x86_64", reason="int 0x80 is x86's")
def test_a_call_by_the_32_bit_abi_is_refused() -> None:
    lines = lines_of(
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


@filters
def test_every_thread_has_the_filter_and_no_new_privileges() -> None:
    lines = lines_of(
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


@filters
def test_threads_start_torch_computes_on_two_of_them_and_libraries_load() -> None:
    lines = lines_of(
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


@filters
def test_a_process_may_keep_forking_and_yet_start_no_program() -> None:
    lines = lines_of(
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


@filters
def test_nothing_is_in_force_before_it_is_asked_for() -> None:
    lines = lines_of(
        """
        import aotgaudi.runtime.guard
        print(status("Seccomp"), os.spawnv(os.P_WAIT, "/bin/true", ["true"]))
        """
    )

    assert lines == [f"{_own_mode()} 0"]


def _own_mode() -> str:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(line.split()[1] for line in file if line.startswith("Seccomp:"))


@filters
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
    lines = lines_of(
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
