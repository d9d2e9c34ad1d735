"""A worker's jobs: check a model, trace one entry or compile one unit, once, and record the result.

When several builders want a unit, the one that gets its lock looks up its record again, works only if there is none, and
records the result before it releases the lock. So only one builder compiles, and the kernel frees the lock of a builder that
dies. On a file system without locks two builders may compile, and the first record stays.

Jobs and results are plain values that can travel to another process or machine.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, Union

from aotgaudi.backends.base import CompiledUnit, Target, Unit
from aotgaudi.compile.keys import (
    BuiltRow,
    ModelCheckRow,
    ProgramRow,
    UnitRow,
    UnitSource,
    read_rows,
    record,
    unit_key,
)
from aotgaudi.digest import Digest, Key
from aotgaudi.entries import Entry
from aotgaudi.errors import (
    AotGaudiError,
    CompileError,
    CorruptError,
    MissingObjectError,
    SpecError,
    StoreError,
    store_error,
)
from aotgaudi.graphs.dialect import ATEN, Dialect
from aotgaudi.graphs.program import Call, Program
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.model import ModelSpec
from aotgaudi.store.cas import ObjectStore
from aotgaudi.store.scratch import locked_directory
from aotgaudi.store.store import Store

_LONGEST_MESSAGE = 500
_DROPS_KEYWORDS = re.compile(
    r"missing 1 required keyword-only argument: 'paged'|unexpected keyword argument '(?:paged|logits_to_keep)'"
)
_OUR_ATTENTION = "'aotgaudi_paged'"
_DIFFERS_BY_LAYER = re.compile(r"'(\w+)' is a per-layer attribute")
_STORE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES})
"""Errors of a store that accepts no more data. The unit is not at fault."""

_NO_SPACE = os.strerror(errno.ENOSPC)


@dataclass(frozen=True)
class Built:
    """A recorded row. `is_new`: this job made it, not another builder."""

    row: BuiltRow
    is_new: bool


@dataclass(frozen=True)
class Busy:
    """Another builder is working on this job."""


@dataclass(frozen=True)
class ModelCheckJob:
    """Compare the graphs of `model` with transformers' own model, before anything is compiled. `key`: of the record."""

    key: Key
    model: ModelSpec
    dialect: Dialect
    store_root: Path
    log_path: Path
    lower: tuple[Path, ...] = ()

    @property
    def label(self) -> str:
        """The job's name for people."""
        return f"compare {self.model.model_type} with transformers"

    def run(self) -> Built | Busy:
        """See `build_once`."""
        return build_once(self)


@dataclass(frozen=True)
class TraceJob:
    """Trace the program of `key` for `entry` (and for every other entry with that key).

    `n_splits`: the number of partial sums of a step's hyper-connections.
    """

    key: Key
    entry: Entry
    model: ModelSpec
    limits: ServingLimits
    target: Target
    store_root: Path
    log_path: Path
    lower: tuple[Path, ...] = ()
    n_splits: int = 1
    dialect: Dialect = ATEN

    @property
    def label(self) -> str:
        """The job's name for people: ``trace (prompt, 1, 256, 0)``."""
        return f"trace {self.entry}"

    def run(self) -> Built | Busy:
        """See `build_once`."""
        return build_once(self)


@dataclass(frozen=True)
class CompileJob:
    """Compile the unit whose canonical text is the object `text`."""

    key: str
    text: str
    label: str
    target: Target
    store_root: Path
    log_path: Path
    lower: tuple[Path, ...] = ()

    def run(self) -> Built | Busy:
        """See `build_once`."""
        return build_once(self)


BuildJob = Union[ModelCheckJob, TraceJob, CompileJob]

ROWS: Mapping[type, type[BuiltRow]] = MappingProxyType(
    {ModelCheckJob: ModelCheckRow, TraceJob: ProgramRow, CompileJob: UnitRow}
)
"""What the record of each kind of job is."""


def explained(error: Exception, family: str) -> SpecError | None:
    """Returns a trace's error in words that name the family and what it does; None for one that has such words."""
    text = str(error)
    if _DROPS_KEYWORDS.search(text):
        what = (
            "does not hand the keywords of a call on to its attention, and a step's KV cache travels as one"
        )
    elif _OUR_ATTENTION in text:
        what = "chooses among attention classes of its own, and takes no other attention"
    elif isinstance(error, KeyError) and text.strip("'").isdecimal():
        what = f"attends more often than its config has layers (in a layer {text})"
    elif found := _DIFFERS_BY_LAYER.search(text):
        what = f"has layers that differ in {found[1]}"
    else:
        return None
    return SpecError(
        "model.config.model_type", f"{family!r} {what}: not supported", "use another architecture"
    )


class LostTextError(CorruptError):
    """The text of a unit is gone or does not match its key. Its program must be traced again."""


def key_of(job: BuildJob) -> str:
    """Returns the key of the job's record."""
    return job.key if isinstance(job, CompileJob) else job.key.hex


def find_row(store: Store, job: BuildJob) -> BuiltRow | None:
    """Returns the record of `job` if it is intact, else None."""
    key = key_of(job)
    return read_rows(ROWS[type(job)], store, (key,)).get(key)


def build_once(job: BuildJob) -> Built | Busy:
    """Does `job` in a worker and records the result, unless another builder did so or is doing so.

    Raises like `run_model_check`, `run_trace` and `run_compile`.
    """
    store = Store(job.store_root, job.lower)
    with store.locks.try_unit(key_of(job)) as is_mine:
        if not is_mine:
            return Busy()
        found = find_row(store, job)
        if found is not None:
            return Built(found, is_new=False)
        row = _run(job)
        record(store, key_of(job), row)
        return Built(find_row(store, job) or row, is_new=True)


def _run(job: BuildJob) -> BuiltRow:
    if isinstance(job, ModelCheckJob):
        return run_model_check(job)
    return run_trace(job) if isinstance(job, TraceJob) else run_compile(job)


def is_busy(store: Store, job: BuildJob) -> bool:
    """Whether another builder holds the lock of `job` now."""
    with store.locks.try_unit(key_of(job)) as is_free:
        return not is_free


def run_model_check(job: ModelCheckJob) -> ModelCheckRow:
    """Compares graphs with the model. Raises ModelDiffersError, and like `run_trace`."""
    with logged_errors(job), _explained(job.model):
        from aotgaudi.compile.model_comparison import compare_model

        _one_thread()
        started = time.monotonic()
        check = compare_model(job.model, job.dialect)
        return ModelCheckRow(
            check=check, seconds=time.monotonic() - started, components=dict(job.key.components)
        )


def run_trace(job: TraceJob) -> ProgramRow:
    """Traces an entry, publishes the texts, the constants and the program, and returns the program's row.

    Raises SpecError for a model that cannot be built, StoreError, and CompileError for everything else.
    """
    with logged_errors(job), _explained(job.model):
        from aotgaudi.graphs.trace import trace

        _one_thread()
        traced = trace(job.entry, job.model, job.limits, job.dialect, n_splits=job.n_splits)
        objects = ObjectStore(job.store_root, job.lower, heals=True)
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

    Raises CompileError, StoreError, and LostTextError if the unit's text does not match its key.
    """
    with logged_errors(job), locked_directory(job.store_root) as work_dir:
        objects = ObjectStore(job.store_root, job.lower, heals=True)
        before = _cpu_seconds()
        key, compiled = _compile(job, objects, work_dir)
        artifact = {name: objects.put_file(path) for name, path in sorted(compiled.files.items())}
        return UnitRow(
            artifact=artifact,
            label=job.label,
            compile_seconds=compiled.compile_seconds,
            cpu_seconds=_cpu_seconds() - before,
            max_abs_error=compiled.max_abs_error,
            tolerance=compiled.tolerance,
            layouts={str(number): layout for number, layout in compiled.layouts.items()},
            components=dict(key.components),
        )


def compile_again(job: CompileJob, work_dir: Path) -> CompiledUnit:
    """Compiles and checks one unit in `work_dir`, and publishes nothing. Raises like `run_compile`."""
    with logged_errors(job):
        return _compile(job, ObjectStore(job.store_root, job.lower), work_dir)[1]


def _compile(job: CompileJob, objects: ObjectStore, work_dir: Path) -> tuple[Key, CompiledUnit]:
    from aotgaudi.backends.offline import make_compiler

    if job.target.backend != "fake":
        _one_thread()
    text = _read_text(job, objects)
    key = unit_key(text, job.target)
    return key, make_compiler(job.target).compile(Unit(text, key, job.label), work_dir)


def _read_text(job: CompileJob, objects: ObjectStore) -> str:
    try:
        text = objects.read(Digest.parse(job.text)).decode()
    except (CorruptError, MissingObjectError) as error:
        raise LostTextError(f"{job.label}: {error}") from error
    found = unit_key(text, job.target).hex
    if found != job.key:
        raise LostTextError(f"{job.label}: its text has the key {found:.12}..., not {job.key:.12}...")
    return text


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
def _explained(model: ModelSpec) -> Iterator[None]:
    """Puts errors of tracing into words (`explained`)."""
    try:
        yield
    except Exception as error:
        said = explained(error, model.model_type)
        if said is None:
            raise
        raise said from error


class _Placed(Protocol):
    """The parts of a job that its error handling needs."""

    @property
    def label(self) -> str: ...

    @property
    def store_root(self) -> Path: ...

    @property
    def log_path(self) -> Path: ...


@contextlib.contextmanager
def logged_errors(job: _Placed) -> Iterator[None]:
    """Sends the output of the job to its log, and turns errors into ours."""
    with _errors_of(job), _logged(job.log_path):
        yield


@contextlib.contextmanager
def _errors_of(job: _Placed) -> Iterator[None]:
    """Turns any error of the job into one of ours. Other errors may not survive the way to the parent."""
    try:
        yield
    except OSError as error:
        if error.errno in _STORE_ERRORS:
            raise store_error("build in", job.store_root, error) from error
        raise CompileError(f"{job.label}: {error}") from error
    except (Exception, SystemExit) as error:
        if not isinstance(error, StoreError) and _NO_SPACE in str(error):  # A compiler's own words.
            full = min((job.store_root, Path(tempfile.gettempdir())), key=_free_bytes)
            raise store_error("build in", full, OSError(errno.ENOSPC, _NO_SPACE)) from error
        if isinstance(error, AotGaudiError):
            raise
        text = " ".join(str(error).split()) or "no message"
        raise CompileError(f"{job.label}: {type(error).__name__}: {text[:_LONGEST_MESSAGE]}") from error


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


@contextlib.contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Sends all output of the job, including the compiler's, to its log file."""
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
            with contextlib.suppress(OSError):  # A full disk must not hide the error.
                os.write(log.fileno(), traceback.format_exc().encode(errors="backslashreplace"))
            raise
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            for descriptor, number in zip(saved, (1, 2), strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)
