"""The guard, each time in a process of its own: an audit hook cannot be removed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

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


def in_a_process(body: str) -> str:
    """Runs `body` and returns what it prints; it must exit with 0."""
    done = subprocess.run(
        [sys.executable, "-c", _PREAMBLE + textwrap.dedent(body)],
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


def test_the_kernels_layer_is_there_where_it_is_asked_for_and_outlives_a_disarmed_guard() -> None:
    printed = in_a_process(
        """
        guard = Guard()
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
        """
    )

    assert printed.splitlines() == [
        "()",
        "('hook',)",
        "('seccomp', 'hook')",
        "('seccomp', 'hook')",
        "[Errno 1] Operation not permitted",
    ]


def test_the_hook_explains_what_the_kernel_would_refuse_without_a_word() -> None:
    printed = in_a_process(
        """
        guard = Guard()
        guard.arm(seccomp="auto")
        print(refused(lambda: subprocess.run(["true"])))
        print(guard.layers, guard.compilations()["process"])
        """
    )

    assert printed.splitlines() == [
        "refused while serving: an attempt to start a process (subprocess.Popen 'true'), by __main__",
        "('seccomp', 'hook') 1",
    ]


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


def test_what_is_no_compiler_is_imported_and_run_as_before() -> None:
    printed = in_a_process(
        """
        import importlib.machinery, types
        guard = Guard()
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
        """
    )

    assert printed.splitlines()[:3] == ["transformers_like", "tritonclient", "torch_dynamo"]
    assert "a thread" in printed
    assert printed.splitlines()[-1] == "0"


def test_a_guard_that_is_not_armed_refuses_nothing() -> None:
    assert (
        in_a_process("guard = Guard(); print(subprocess.call(['true']), sum(guard.compilations().values()))")
        == "0 0\n"
    )


BEHAVIOURS = {
    "arming twice counts once": (
        """
        guard.arm()
        refused(lambda: os.system("true"))
        print(sum(guard.compilations().values()))
        """,
        "1",
    ),
    "arming loads neither torch nor a compiler": (
        'print({"torch", "torch._dynamo", "transformers"} & sys.modules.keys())',
        "set()",
    ),
    "refusals are counted by cause": (
        """
        refused(lambda: os.system("true"))
        refused(lambda: __import__("triton"))
        refused(lambda: __import__("triton"))
        print(dict(guard.compilations()))
        """,
        "{'process': 1, 'import': 2, 'torchscript': 0, 'dynamo': 0, 'backend': 0}",
    ),
}


@pytest.mark.parametrize(("body", "expected"), BEHAVIOURS.values(), ids=BEHAVIOURS)
def test_an_armed_guard(body: str, expected: str) -> None:
    assert in_a_process("guard = Guard()\nguard.arm()\n" + textwrap.dedent(body)) == f"{expected}\n"


def test_retracing_is_forbidden_where_dynamo_was_loaded_before() -> None:
    printed = in_a_process(
        """
        import torch, torch._dynamo
        Guard().arm()
        print(torch._dynamo.eval_frame._stance.stance)
        """
    )

    assert printed == "fail_on_recompile\n"


def test_what_is_watched_counts_from_when_the_guard_is_armed() -> None:
    printed = in_a_process(
        """
        compiled = [5]
        guard = Guard()
        guard.watch("backend", lambda: compiled[0])
        compiled[0] = 7
        guard.arm()
        print(guard.compilations()["backend"])
        compiled[0] = 9
        print(guard.compilations()["backend"])
        """
    )

    assert printed == "0\n2\n"


def test_graphs_that_dynamo_captures_are_counted() -> None:
    printed = in_a_process(
        """
        import torch, torch._dynamo
        guard = Guard()
        guard.arm(only_thread=0)
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        print(guard.compilations()["dynamo"])
        """
    )

    assert printed == "1\n"


def test_a_guard_of_one_thread_leaves_the_others_alone() -> None:
    printed = in_a_process(
        """
        guard, results = Guard(), []
        def guarded():
            guard.arm(only_thread=threading.get_ident())
            results.append(refused(lambda: subprocess.run(["true"])))
        thread = threading.Thread(target=guarded)
        thread.start()
        thread.join()
        print(subprocess.run(["true"]).returncode, len(results), guard.compilations()["process"])
        """
    )

    assert printed == "0 1 1\n"


def test_a_guard_that_is_disarmed_refuses_nothing_and_can_be_armed_again() -> None:
    printed = in_a_process(
        """
        import torch, torch._dynamo
        guard = Guard()
        guard.arm()
        guard.disarm()
        print(subprocess.run(["true"]).returncode, torch._dynamo.eval_frame._stance.stance)
        guard.arm()
        refused(lambda: subprocess.run(["true"]))
        print(guard.compilations()["process"])
        """
    )

    assert printed == "0 default\n1\n"
