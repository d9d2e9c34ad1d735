"""The guard, each time in a process of its own: an audit hook cannot be removed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

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


@pytest.mark.parametrize(
    "attempt",
    [
        "subprocess.run(['true'])",
        "subprocess.Popen('true', shell=True)",
        "os.system('true')",
        "os.fork()",
        "os.forkpty()",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "os.execv('/bin/true', ['true'])",
        "os.spawnv(os.P_WAIT, '/bin/true', ['true'])",
        "__import__('pty').spawn(['true'])",
        "__import__('multiprocessing').get_context('spawn').Process().start()",
        "__import__('multiprocessing').get_context('forkserver').Process().start()",
        "__import__('multiprocessing').get_context('fork').Process().start()",
    ],
)
def test_starting_a_process_is_refused_and_counted(attempt: str) -> None:
    printed = in_a_process(
        f"""
        guard = Guard()
        guard.arm()
        print(refused(lambda: {attempt}))
        print(guard.num_refused)
        """
    )

    message, count = printed.splitlines()
    assert message.startswith("refused while serving: an attempt to start a process (")
    assert count == "1"


@pytest.mark.parametrize(
    "module",
    [
        "torch._dynamo",
        "torch._inductor",
        "torch._inductor.codecache",
        "torch._export",
        "triton",
        "transformers",
    ],
)
def test_importing_a_compiler_is_refused(module: str) -> None:
    printed = in_a_process(
        f"""
        guard = Guard()
        guard.arm()
        print(refused(lambda: __import__('importlib').import_module({module!r})))
        print({module!r} in sys.modules, guard.num_refused >= 1)
        """
    )

    assert printed.splitlines()[0].startswith("refused while serving: an attempt to import ")
    assert printed.splitlines()[1] == "False True"


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
        print(guard.num_refused)
        """
    )

    assert printed.splitlines()[:3] == ["transformers_like", "tritonclient", "torch_dynamo"]
    assert "a thread" in printed
    assert printed.splitlines()[-1] == "0"


def test_a_guard_that_is_not_armed_refuses_nothing() -> None:
    assert in_a_process("guard = Guard(); print(subprocess.call(['true']), guard.num_refused)") == "0 0\n"


def test_arming_twice_counts_once() -> None:
    printed = in_a_process(
        """
        guard = Guard()
        guard.arm()
        guard.arm()
        refused(lambda: os.system("true"))
        print(guard.num_refused)
        """
    )

    assert printed == "1\n"


def test_excusing_lets_its_own_thread_start_a_process_and_no_other_and_ends() -> None:
    printed = in_a_process(
        """
        guard = Guard()
        guard.arm()
        inside, outside_done, results = threading.Event(), threading.Event(), []
        def other():
            inside.wait()
            results.append(refused(lambda: subprocess.run(["true"])))
            outside_done.set()
        thread = threading.Thread(target=other)
        thread.start()
        with guard.excusing():
            inside.set()
            assert outside_done.wait(30)
            print(subprocess.run(["true"]).returncode)
        thread.join()
        print(len(results), guard.num_refused)
        refused(lambda: subprocess.run(["true"]))
        print(guard.num_refused)
        """
    )

    assert printed.splitlines() == ["0", "1 1", "2"]


def test_excusing_ends_after_an_error() -> None:
    printed = in_a_process(
        """
        guard = Guard()
        guard.arm()
        try:
            with guard.excusing():
                raise KeyError
        except KeyError:
            pass
        refused(lambda: os.system("true"))
        print(guard.num_refused)
        """
    )

    assert printed == "1\n"


def test_excusing_does_not_excuse_imports() -> None:
    printed = in_a_process(
        """
        guard = Guard()
        guard.arm()
        with guard.excusing():
            print(refused(lambda: __import__("triton")))
        """
    )

    assert printed == "refused while serving: an attempt to import triton\n"


def test_excuses_nest() -> None:
    printed = in_a_process(
        """
        guard = Guard()
        guard.arm()
        with guard.excusing():
            with guard.excusing():
                pass
            print(subprocess.call(["true"]))
        """
    )

    assert printed == "0\n"


def test_retracing_is_forbidden_where_dynamo_was_loaded_before() -> None:
    printed = in_a_process(
        """
        import torch, torch._dynamo
        Guard().arm()
        print(torch._dynamo.eval_frame._stance.stance)
        """
    )

    assert printed == "fail_on_recompile\n"


def test_arming_loads_neither_torch_nor_a_compiler() -> None:
    printed = in_a_process(
        """
        Guard().arm()
        print({"torch", "torch._dynamo", "transformers"} & sys.modules.keys())
        """
    )

    assert printed == "set()\n"
