"""What a worker process does: trace one entry, or compile one unit. One job at a time, one torch thread.

A worker publishes objects itself and returns digests; the parent alone writes the action index. Jobs and
results are plain values, so that they can travel to another machine.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import multiprocessing.util
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aotgaudi.backends.base import Target, Unit
from aotgaudi.build.keys import unit_key
from aotgaudi.build.records import ProgramRow, UnitRow, UnitSource
from aotgaudi.digest import Digest, Key
from aotgaudi.errors import AotGaudiError, CompileError, CorruptError
from aotgaudi.graphs.program import Call, Program
from aotgaudi.manifest.entries import Entry
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.model import ModelSpec
from aotgaudi.store.cas import ObjectStore
from aotgaudi.store.faults import store_error

_BEFORE_ALL_OTHERS = 1000
_LONGEST_MESSAGE = 500
_STORE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES})
"""What a job meets when its store takes no more; it is not the unit's fault."""


@dataclass(frozen=True)
class TraceJob:
    """Trace the program of `key`, as needed by `entry` (and by every other entry with that key)."""

    key: Key
    entry: Entry
    model: ModelSpec
    limits: ServingLimits
    target: Target
    store_root: Path
    log_path: Path

    @property
    def label(self) -> str:
        """For people: ``trace (prompt, 1, 256, 0)``."""
        return f"trace {self.entry}"


@dataclass(frozen=True)
class CompileJob:
    """Compile the unit whose canonical text is the object `text`."""

    key: str
    text: str
    label: str
    target: Target
    store_root: Path
    log_path: Path


def start_worker(cache_dir: str) -> None:
    """Prepares a fresh process: single-threaded, interrupts left to the parent, a build cache of our own.

    Runs before torch is imported. Ctrl-C reaches the whole process group; only the parent acts on it, so a
    unit under way is finished (its compiler inherits the ignored signal).

    The pool ends its workers by SIGTERM, for which it has a handler that runs multiprocessing's clean-up.
    That handler stays: torch's progress bars own a named semaphore, which a worker killed outright would
    leave behind. Once the clean-up has begun, a further SIGTERM must not cut it short.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ignore_sigterm = (signal.SIGTERM, signal.SIG_IGN)
    multiprocessing.util.Finalize(None, signal.signal, ignore_sigterm, exitpriority=_BEFORE_ALL_OTHERS)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), "1")
    os.environ.update(threads, TORCHINDUCTOR_CACHE_DIR=cache_dir, TOKENIZERS_PARALLELISM="false")


def run_trace(job: TraceJob) -> ProgramRow:
    """Traces, publishes texts, constants and the program, and returns its row.

    Raises SpecError for a model that cannot be built, StoreError, and CompileError for all else.
    """
    with _errors_of(job), _logged(job.log_path):
        from aotgaudi.graphs.trace import trace

        _one_thread()
        traced = trace(job.entry, job.model, job.limits)
        objects = ObjectStore(job.store_root)
        constants = str(objects.put_bytes(traced.constants)) if traced.constants else None
        units: dict[str, UnitSource] = {}
        calls = []
        for piece in traced.pieces:
            key = unit_key(piece.text, job.target).hex
            if key not in units:
                text = str(objects.put_bytes(piece.text.encode()))
                units[key] = UnitSource(text=text, label=f"{piece.label} {job.entry}")
            calls.append(Call(unit=key, inputs=piece.inputs, outputs=piece.outputs))
        program = Program(
            inputs=traced.inputs,
            weights=traced.weights,
            caches=traced.caches,
            calls=tuple(calls),
            outputs=traced.outputs,
            constants=constants,
        )
        digest = objects.put_bytes(program.dumps())
    return ProgramRow(
        program=str(digest), units=units, constants=constants, components=dict(job.key.components)
    )


def run_compile(job: CompileJob) -> UnitRow:
    """Compiles and checks one unit, publishes its artifact, and returns its row.

    Raises CompileError, StoreError, and CorruptError where the unit's text is not what its key says.
    """
    with _errors_of(job), _logged(job.log_path), _work_dir(job.store_root) as work_dir:
        from aotgaudi.backends.offline import make_compiler

        if job.target.backend != "fake":
            _one_thread()
        objects = ObjectStore(job.store_root)
        text = objects.read(Digest.parse(job.text)).decode()
        key, before = unit_key(text, job.target), _cpu_seconds()
        if key.hex != job.key:
            raise CorruptError(
                f"{job.label}: its text has the key {key.hex:.12}..., the action index says {job.key:.12}..."
                f" (remove {job.store_root / 'actions'}; it is filled again by the next build)"
            )
        compiled = make_compiler(job.target).compile(Unit(text, key, job.label), work_dir)
        artifact = {name: str(objects.put_file(path)) for name, path in sorted(compiled.files.items())}
        return UnitRow(
            artifact=artifact,
            label=job.label,
            compile_seconds=compiled.compile_seconds,
            cpu_seconds=_cpu_seconds() - before,
            max_abs_error=compiled.max_abs_error,
            tolerance=compiled.tolerance,
            components=dict(key.components),
        )


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)


def _cpu_seconds() -> float:
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )


@contextlib.contextmanager
def _errors_of(job: TraceJob | CompileJob) -> Iterator[None]:
    """Turns whatever the job raises into an error of ours: others may not survive the way to the parent."""
    try:
        yield
    except AotGaudiError:
        raise
    except OSError as error:
        if error.errno in _STORE_ERRORS:
            raise store_error("build in", job.store_root, error) from error
        raise CompileError(f"{job.label}: {error}") from error
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split()) or "no message"
        raise CompileError(f"{job.label}: {type(error).__name__}: {text[:_LONGEST_MESSAGE]}") from error


@contextlib.contextmanager
def _work_dir(store_root: Path) -> Iterator[Path]:
    """A private directory inside the store (same file system), removed at the end."""
    path = Path(tempfile.mkdtemp(prefix="unit-", dir=store_root / "tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Sends everything that the job prints, the compiler's output included, to its log file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with path.open("wb") as log:
        try:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            yield
        except (Exception, SystemExit):
            with contextlib.suppress(OSError):  # A log on a full disk must not hide what it is about.
                os.write(log.fileno(), traceback.format_exc().encode(errors="backslashreplace"))
            raise
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            for descriptor, number in zip(saved, (1, 2), strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)
