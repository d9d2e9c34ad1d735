"""Probes in processes of their own that need not import torch: forked from this one, which has.

A probe's process gets the environment that a new interpreter would get, and loads the bridge as ``import torch`` would
there (D-01). What it cannot have is a torch that was imported with other variables; the tests that are about that use
real processes.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from aotgaudi.doctor.hpu import bridge
from aotgaudi.doctor.hpu.bridge import SHAPES, graph


def import_torch() -> None:
    """Imports, without the bridge, whatever probes will need of torch, and compiles a graph, so that forks need not."""
    # torch.fx shows progress by tqdm, whose lock is one of all processes: a fork that is killed may have it for ever.
    tqdm.set_lock(threading.RLock())
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    torch = importlib.import_module("torch")
    common = importlib.import_module("torch._dynamo.backends.common")
    for name in ("torch.export", "torch._dynamo", "torch.fx.passes.infra.partitioner", "torch.utils.weak"):
        importlib.import_module(name)

    def compile_nothing(module, _inputs):  # type: ignore[no-untyped-def]
        def boxed(args):  # type: ignore[no-untyped-def]
            return module.forward(*args)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    backend = common.aot_autograd(fw_compiler=compile_nothing, inference_compiler=compile_nothing)

    class Module(torch.nn.Module):
        def forward(self, *args):  # type: ignore[no-untyped-def]
            return graph(2)(*args)

    with torch.no_grad():
        run = torch.compile(Module(), backend=backend, fullgraph=True, dynamic=False)
        run(*(torch.ones(*shape) for shape in SHAPES))
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()  # Forks share what their collectors do not touch.


class Fork:
    """A forked process, the leader of its group."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if found else None
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


def double_environment(folder: Path, **settings: str) -> dict[str, str]:
    """Returns our environment as that of a process which finds the double in `folder`, with its card and libraries."""
    inherited = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    libraries = folder / "usr" / "lib" / "habanalabs"
    return {
        **inherited,
        "PYTHONPATH": str(folder),
        "PATH": f"{folder / 'bin'}:{inherited['PATH']}",
        "LD_LIBRARY_PATH": str(libraries),
        "GC_KERNEL_PATH": str(libraries / "libtpc_kernels.so"),
        "AOTGAUDI_DOUBLE_COMPILE_MS": "1",
        **settings,
    }


def start_probe(arguments: Sequence[str], environment: Mapping[str, str]) -> Fork:
    """Starts a probe in a fork of this process; see `aotgaudi.doctor.hpu.lab.StartProbe`."""
    parent = str(os.getpid())

    def run() -> None:
        sys.argv[1:] = [*arguments, parent]
        bridge.main()

    return start_fork(run, environment, Path(os.devnull))


def start_fork(action: Callable[[], None], environment: Mapping[str, str], output: Path) -> Fork:
    """Starts a fork that does `action` beside the bridge; what it prints goes to a file."""
    pid = os.fork()
    if pid:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)  # Whoever is first, so that a kill finds the group.
        return Fork(pid)
    code = 1
    try:
        _begin(environment, output)
        action()
        atexit._run_exitfuncs()
        code = 0
    except Exception:  # The edge of the process.
        traceback.print_exc()
    finally:
        os._exit(code)


def _begin(environment: Mapping[str, str], output: Path) -> None:
    """Makes this fork what a new interpreter would be after ``import torch``."""
    with contextlib.suppress(PermissionError):
        os.setpgid(0, 0)
    atexit._clear()
    faulthandler.disable()
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for target in (1, 2):
        os.dup2(descriptor, target)
    sys.stdout = sys.stderr = open(1, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment.get("PYTHONPATH", "").split(":")
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
        getattr(importlib.import_module("habana_frameworks.autoload"), "__autoload")()
