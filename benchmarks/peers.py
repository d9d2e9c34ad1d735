"""Servers of one model that answer the same requests: ours, vLLM (ci/guests) and llama.cpp (ci/peers).

Each runs with all of its processes in the order in which it was started. While one is measured, the others are stopped
(SIGSTOP), since threads that wait spin: nothing of them runs, and all stays in memory.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import harness
import psutil

MODEL_NAME = "m"
VLLM_FLAGS = "--dtype bfloat16 --max-model-len {max_len} --max-num-seqs {max_seqs} --served-model-name m"
VLLM_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "KMP_BLOCKTIME": "5",
    "KMP_TPAUSE": "0",
}
"""The last two are what vLLM sets by itself where it binds threads to cores. Each can be set otherwise from outside."""
LLAMA_FLAGS = "--parallel {max_seqs} --ctx-size {context} --cache-ram 0 --no-slots --alias m"
VLLM_READY_SECONDS = 1500.0
_PRELOADED = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")


@dataclass(frozen=True)
class Peer:
    """How a server is started: its command without the address, its variables, and where it says that it is ready."""

    name: str
    version: str
    words: tuple[str, ...]
    ready_path: str
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sizes:
    """What each server must have room for."""

    max_seqs: int
    max_len: int


def ours(bundle: Path, model: Path) -> Peer:
    """``aotgaudi serve --require-warm``, from this checkout."""
    words = harness.command(
        "serve", "--bundle", bundle.resolve(), "--model", model.resolve(), "--require-warm"
    )
    words += ["--served-model-name", MODEL_NAME, "--drain-delay", "0"]
    return Peer("ours", harness.aotgaudi.__version__, tuple(words), "/ready")


def vllm(python: Path, model: Path, sizes: Sizes, place: Path) -> Peer:
    """vLLM for CPUs in an environment of its own; `place` keeps what it compiles, for the next start.

    As its documentation advises, Intel's OpenMP runtime, which its package brings, is loaded first, and tcmalloc where the
    system has it. Threads are as many as OMP_NUM_THREADS says, not bound to cores, as the others' are not.
    """
    folder = python.parent.parent
    version = subprocess.check_output(
        [python, "-c", "from importlib.metadata import version; print(version('vllm'))"], text=True
    ).strip()
    libraries = [path for path in (folder / "lib" / "libiomp5.so", *_system_libraries()) if path.exists()]
    words = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model.resolve())]
    words += VLLM_FLAGS.format(max_len=sizes.max_len, max_seqs=sizes.max_seqs).split()
    variables = {
        "HOME": str(place),
        "VLLM_CACHE_ROOT": str(place / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "LD_PRELOAD": ":".join(map(str, libraries)),
        **{name: os.environ.get(name, value) for name, value in VLLM_VARIABLES.items()},
    }
    place.mkdir(parents=True, exist_ok=True)
    return Peer("vllm", version, tuple(words), "/health", variables)


def _system_libraries() -> list[Path]:
    return [path for name in _PRELOADED for path in Path("/usr/lib").glob(f"*/{name}")][:1]


def llama(folder: Path, gguf: Path, threads: int, sizes: Sizes) -> Peer:
    """llama.cpp's server, which runs all requests in one batch as the others do."""
    server = (folder / "build" / "bin" / "llama-server").resolve()
    told = subprocess.run([server, "--version"], check=True, text=True, capture_output=True)
    version = (told.stdout + told.stderr).partition("version: ")[2].partition("\n")[0]
    words = [
        str(server),
        "--model",
        str(gguf.resolve()),
        "--threads",
        str(threads),
        "--threads-batch",
        str(threads),
    ]
    context = sizes.max_seqs * sizes.max_len
    words += LLAMA_FLAGS.format(max_seqs=sizes.max_seqs, context=context).split()
    return Peer("llama.cpp", version, tuple(words), "/health")


def convert_to_gguf(folder: Path, model: Path, gguf: Path) -> None:
    """Writes the model as bfloat16 GGUF by llama.cpp's own script; does nothing where it is written."""
    if gguf.exists():
        return
    gguf.parent.mkdir(parents=True, exist_ok=True)
    begun = gguf.with_suffix(".begun")
    script = str(folder / "source" / "convert_hf_to_gguf.py")
    words = [sys.executable, script, str(model.resolve()), "--outtype", "bf16", "--outfile", str(begun)]
    environ = {**os.environ, "PYTHONPATH": str((folder / "site").resolve()), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, env=environ, text=True, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stderr[-4000:]}")
    begun.rename(gguf)


@dataclass
class Running:
    """A server that was ready `ready_seconds` after its process was started; stopped unless it is `awake`."""

    peer: Peer
    process: psutil.Popen
    port: int
    ready_seconds: float

    @contextmanager
    def awake(self) -> Iterator[Running]:
        """Lets it run while the block runs."""
        for process in self._tree():
            with suppress(psutil.NoSuchProcess):
                process.resume()
        try:
            yield self
        finally:
            self.stop()

    def stop(self) -> None:
        """Stops every process of it."""
        while running := [process for process in self._tree() if _is_running(process)]:
            for process in running:
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
            time.sleep(harness.POLL_SECONDS)

    def cpu_seconds(self) -> float:
        """What all of its processes have taken of the processors so far."""
        total = 0.0
        for process in self._tree():
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def metrics(self) -> dict[str, float]:
        """Its Prometheus counters by name and labels; none where it has no such page."""
        status, text = get(self.port, "/metrics")
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in lines} if status == 200 else {}

    def _tree(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return [self.process, *self.process.children(recursive=True)]
        return []


def _is_running(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE))
    return False


@contextmanager
def running(peer: Peer, threads: int, cores: frozenset[int] | None = None) -> Iterator[Running]:
    """Starts a server, on these cores alone, and waits until it is ready; it is stopped then. Ends it afterwards."""
    port = harness.free_port()
    words = [*peer.words, "--host", "127.0.0.1", "--port", str(port)]
    environ = {**harness.process_environment(threads), **peer.variables}
    pinned = ["taskset", "--cpu-list", ",".join(map(str, sorted(cores)))] if cores else []
    with tempfile.TemporaryFile() as log:
        started = time.perf_counter()
        process = psutil.Popen([*pinned, *words], stdout=log, stderr=log, cwd=harness.ROOT, env=environ)
        server = Running(peer, process, port, 0.0)

        def is_ready() -> bool:
            if process.poll() is not None:
                log.seek(0)
                said = log.read().decode(errors="replace")[-4000:]
                sys.exit(f"{peer.name} ended with {process.returncode}:\n{said}")
            return get(port, peer.ready_path)[0] == 200

        try:
            ready = harness.wait_until(is_ready, f"{peer.name}: {peer.ready_path}", VLLM_READY_SECONDS)
            server.ready_seconds = ready - started
            server.stop()
            yield server
        finally:
            _end(server)


def _end(server: Running) -> None:
    """Asks it to end, and kills what is left of it soon: nothing in it is worth waiting for."""
    tree = server._tree()
    for process in tree:
        with suppress(psutil.NoSuchProcess):
            process.resume()
    with suppress(psutil.NoSuchProcess):
        server.process.terminate()
    _, alive = psutil.wait_procs(tree, timeout=3)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=10)


def get(port: int, path: str) -> tuple[int, str]:
    """Status and body of a GET; status 0 where nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return 0, ""
    finally:
        connection.close()
