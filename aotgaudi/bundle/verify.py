"""Proves that every byte of an opened bundle is what was sealed, and keeps the proved objects in sealed memory.

Each object is opened once and hashed through its descriptor, in threads (hashing releases the interpreter lock). The server
loads the programs that were parsed here, and the sealed copies of the objects that were hashed here. It never looks up a
name twice, so later changes of the files do not matter. Nothing here follows a link, blocks on a FIFO, or loads an artifact.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from aotgaudi.backends.artifacts import Read, unit_problem
from aotgaudi.backends.base import keeps_caches_on_host
from aotgaudi.bundle.bundle import Bundle, mending_command
from aotgaudi.bundle.capture_receipt import CaptureReceipt
from aotgaudi.bundle.format import stray_paths
from aotgaudi.bundle.programs import (
    ProgramChecks,
    constants_of,
    load_program,
    program_objects,
    split_problems,
    tensor_names,
    weights_bytes,
)
from aotgaudi.bundle.receipt import Receipt
from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, ManifestError, NotWarmError, SpecError, store_errors
from aotgaudi.graphs.program import Program, weight_names
from aotgaudi.machine import anonymous_bytes, available_memory, in_threads
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.memory import PROCESS_BYTES, MemoryNeed
from aotgaudi.store.cas import Fault, find_fault, object_path, read_blob
from aotgaudi.store.memfd import SealedObjects, allow_open_files

_MAX_ROWS = 10


@dataclass(frozen=True, slots=True)
class MissingEntry:
    """An entry (its label) that cannot run because something was never built or has been removed."""

    entry: str
    reason: str


@dataclass(frozen=True, slots=True)
class CorruptObject:
    """An object that does not match its digest, and the labels of the entries that need it."""

    path: str
    reason: str
    entries: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The result of verifying a bundle. `extra` are files in the bundle that its index does not list.

    `weights_bytes`: what the weights of its sound programs take in memory.

    The entries of a capture (`kind`) are its files, by path. An absent file counts as corrupt, because it existed when the
    capture was proved.
    """

    num_entries: int
    num_objects: int
    object_bytes: int
    missing: tuple[MissingEntry, ...]
    corrupt: tuple[CorruptObject, ...]
    extra: tuple[str, ...]
    kind: Literal["programs", "capture"] = "programs"
    weights_bytes: int = 0

    @property
    def is_intact(self) -> bool:
        """Whether every entry can run and there are no extra files."""
        return not (self.missing or self.corrupt or self.extra)

    def raise_if_bad(self, bundle_path: Path) -> None:
        """Raises CorruptError if bytes differ or there are extra files, else NotWarmError if entries are missing.

        The message is a plain table of the first rows (entry, state, reason) and the command that repairs the bundle.
        """
        if self.is_intact:
            return
        counts = (f"{len(self.corrupt)} corrupt", f"{len(self.missing)} missing", f"{len(self.extra)} extra")
        rows, is_capture = self._rows(), self.kind == "capture"
        noun, nouns = ("file", "files") if is_capture else ("entry", "entries")
        message = "\n".join(
            [
                f"bundle {bundle_path} cannot be served: {', '.join(counts)} ({self.num_entries} {nouns})",
                *_table([(noun, "state", "reason"), *rows[:_MAX_ROWS]]),
                *([f"... and {len(rows) - _MAX_ROWS} more"] if len(rows) > _MAX_ROWS else []),
                mending_command(bundle_path, is_capture=is_capture),
            ]
        )
        raise CorruptError(message) if self.corrupt or self.extra else NotWarmError(message)

    def _rows(self) -> list[tuple[str, str, str]]:
        return [
            *((_abridged(bad.entries), "corrupt", f"{bad.path}: {bad.reason}") for bad in self.corrupt),
            *(("-", "extra", f"{path}: not in the index") for path in self.extra),
            *((gone.entry, "missing", gone.reason) for gone in self.missing),
        ]


@dataclass(frozen=True, slots=True)
class VerifiedBundle:
    """The loadable contents of a bundle: programs, parsed from the bytes that were hashed, and sealed objects.

    `objects` are all intact objects except programs. Close them when everything is loaded.
    """

    bundle: Bundle
    report: Report
    programs: Mapping[Digest, Program]
    """Digest -> program, for sound programs."""
    objects: SealedObjects

    def program(self, entry_id: str) -> Program:
        """Returns the program of a sound entry. Raises NotWarmError if it has none, KeyError if it is unsound."""
        return self.programs[self.bundle.program_digest(entry_id)]

    def read(self, digest: Digest) -> bytes:
        """Returns the bytes of a sound object. Raises KeyError."""
        return self.objects.read(digest)

    def path(self, digest: Digest) -> Path:
        """Returns a path that opens the sealed copy of a sound object. Raises KeyError."""
        return self.objects.path(digest)


def require_memory(manifest: Manifest, report: Report) -> None:
    """Raises TargetError if weights, KV caches, the largest step and processes of a server need more memory than is free.

    Does nothing if the caches are not in the machine's memory, if the bundle cannot be served anyway, or if its config lacks
    a size.
    """
    if not report.is_intact or not keeps_caches_on_host(manifest.spec.target.backend):
        return
    with contextlib.suppress(SpecError):
        need = replace(
            MemoryNeed.of(manifest.spec, manifest.entries),
            weights_bytes=report.weights_bytes,
            reserved_bytes=max(0, PROCESS_BYTES - anonymous_bytes()),
            is_open=True,
        )
        memory = available_memory()
        if memory.total_bytes:  # Zeros where the machine does not tell.
            need.require(memory, "this machine")


def verify_bundle(bundle: Bundle) -> Report:
    """Hashes every object again, checks every program, and reports which entries can run and why the others cannot.

    For a capture, checks every file. Reads each object's file once.

    Raises:
        StoreError: the system does not let us look.
        UntrustedError: the bundle's policy does not allow a file.
        ManifestError, CorruptError: the manifest cannot be used (as `Bundle.manifest`).
    """
    if isinstance(bundle.receipt, CaptureReceipt):
        return _verify_capture(bundle, bundle.receipt)
    return _verify(bundle, None)[0]


def hold_bundle(bundle: Bundle, *, hashes: bool = True) -> VerifiedBundle:
    """Verifies a bundle as `verify_bundle` does, with the same errors, and keeps every intact object in sealed memory.

    Without `hashes`, only programs are hashed. Other objects need only exist with the right size, and are read from their
    files.

    First raises this process's limit of open files by the number of objects. Raises StoreError if that is not allowed.
    """
    allow_open_files(len({*bundle.index.objects} - {*bundle.require_programs().programs.values()}))
    held = SealedObjects(hashes=hashes)
    try:
        report, programs = _verify(bundle, held)
    except BaseException:
        held.close()
        raise
    return VerifiedBundle(bundle, report, programs, held)


def _verify(bundle: Bundle, held: SealedObjects | None) -> tuple[Report, Mapping[Digest, Program]]:
    receipt, entries = bundle.require_programs(), bundle.entry_labels
    checked = _check_programs(bundle, receipt)
    faults, needs = dict(checked.faults), checked.needs
    known = faults.keys() | needs.keys()
    others = {*bundle.index.objects, *(digest for digests in needs.values() for digest in digests)} - known
    faults |= _find_faults(bundle, sorted(others, key=str), held)
    read = bundle.read_object if held is None else held.read
    faults |= _check_constants(checked.programs, faults, read)
    faults |= _check_units(receipt, checked, faults, read)
    users = _users(receipt, entries, needs)
    sound = {digest: program for digest, program in checked.programs.items() if digest not in faults}
    report = Report(
        num_entries=len(entries),
        num_objects=len(bundle.index.objects),
        object_bytes=bundle.index.counts.object_bytes,
        missing=_missing(bundle, receipt, entries, faults, users),
        corrupt=_corrupt(bundle, faults, users),
        extra=_extra(bundle),
        weights_bytes=weights_bytes(sound.values(), receipt),
    )
    return report, sound


@dataclass(frozen=True, slots=True)
class _CheckedPrograms:
    """The programs that can be parsed, the objects that each needs, and the faults of the others."""

    programs: Mapping[Digest, Program]
    needs: Mapping[Digest, tuple[Digest, ...]]
    faults: Mapping[Digest, Fault]


def _check_programs(bundle: Bundle, receipt: Receipt) -> _CheckedPrograms:
    programs: dict[Digest, Program] = {}
    needs: dict[Digest, tuple[Digest, ...]] = {}
    faults: dict[Digest, Fault] = {}
    checks, entries_of = ProgramChecks(bundle.manifest.spec), defaultdict(list)
    for entry in bundle.manifest.entries:
        if entry.id in receipt.programs:
            entries_of[receipt.programs[entry.id]].append(entry)
    for digest in sorted(set(receipt.programs.values()), key=str):
        found = _read_program(bundle, digest)
        if isinstance(found, Fault):
            faults[digest] = found
            continue
        try:
            needs[digest] = program_objects(found, receipt)
        except ManifestError as error:
            faults[digest] = Fault("missing", str(error))
            continue
        problems = (
            checks.problem(found),
            *(checks.entry_problem(found, entry) for entry in entries_of[digest]),
        )
        problem = next(filter(None, problems), None)
        if problem is not None:
            faults[digest] = Fault("corrupt", f"cannot run: {problem}")
        programs[digest] = found
    sound = {
        entry: programs[digest]
        for digest, served in entries_of.items()
        if digest in programs and digest not in faults
        for entry in served
    }
    for entry, problem in split_problems(bundle.manifest.spec, sound):
        faults.setdefault(receipt.programs[entry.id], Fault("corrupt", f"cannot run: {problem}"))
    return _CheckedPrograms(programs, needs, faults)


def _check_constants(
    programs: Mapping[Digest, Program], faults: Mapping[Digest, Fault], read: Read
) -> dict[Digest, Fault]:
    """Returns the faults of programs that bind constants which their intact object of constants lacks."""
    found: dict[Digest, Fault] = {}
    names: dict[Digest, frozenset[str]] = {}
    for digest, program in programs.items():
        constants = None if program.constants is None else Digest.parse(program.constants)
        if constants is None or constants in faults or digest in faults:
            continue
        if constants not in names:
            names[constants] = tensor_names(read(constants))
        lacking = constants_of(program) - names[constants]
        if lacking:
            found[digest] = Fault("corrupt", f"cannot run: its constants lack {min(lacking)!r:.80}")
    return found


def _check_units(
    receipt: Receipt, checked: _CheckedPrograms, faults: Mapping[Digest, Fault], read: Read
) -> dict[Digest, Fault]:
    """Returns the faults of programs with a unit that no server could load or call. Units' calls have equal arities."""
    found: dict[Digest, Fault] = {}
    problem = functools.cache(functools.partial(_unit_problem, receipt, read))
    for digest, program in checked.programs.items():
        if digest in faults or not faults.keys().isdisjoint(checked.needs[digest]):
            continue
        for call in program.calls:
            layouts = receipt.units[call.unit].layouts
            wrong = (n for n in layouts if not any(map(weight_names, call.inputs[int(n) : int(n) + 1])))
            reason = problem(call.unit, (len(call.inputs), len(call.outputs))) or next(
                (f"takes its input {number} in a layout, which is no weight" for number in wrong), None
            )
            if reason is not None:
                found.setdefault(
                    digest, Fault("corrupt", f"cannot run: unit {call.unit:.12}... of it {reason}")
                )
    return found


def _unit_problem(receipt: Receipt, read: Read, key: str, arity: tuple[int, int]) -> str | None:
    unit = receipt.units[key]
    return unit_problem(receipt.target.backend, unit.artifact, unit.layouts.values(), arity, read)


def _verify_capture(bundle: Bundle, receipt: CaptureReceipt) -> Report:
    users: defaultdict[Digest, list[str]] = defaultdict(list)
    for file in receipt.files:
        users[file.digest].append(file.path)
    faults = {
        digest: Fault("corrupt", fault.reason)
        for digest, fault in _find_faults(bundle, bundle.index.objects, None).items()
    }
    return Report(
        num_entries=len(receipt.files),
        num_objects=len(bundle.index.objects),
        object_bytes=bundle.index.counts.object_bytes,
        missing=(),
        corrupt=_corrupt(bundle, faults, {digest: tuple(paths) for digest, paths in users.items()}),
        extra=_extra(bundle),
        kind="capture",
    )


def _read_program(bundle: Bundle, digest: Digest) -> Program | Fault:
    data = read_blob(object_path(bundle.path, digest), digest, bundle.policy.examine)
    if isinstance(data, Fault):
        return data
    try:
        return load_program(data, digest)
    except ManifestError as error:
        return Fault("corrupt", str(error))


def _find_faults(
    bundle: Bundle, digests: Iterable[Digest], held: SealedObjects | None
) -> dict[Digest, Fault]:
    examine = bundle.policy.examine

    def look(digest: Digest) -> tuple[Digest, Fault | None]:
        path = object_path(bundle.path, digest)
        return digest, find_fault(path, digest, examine) if held is None else held.hold(path, digest, examine)

    return {digest: fault for digest, fault in in_threads(look, digests) if fault is not None}


def _users(
    receipt: Receipt, entries: Mapping[str, str], needs: Mapping[Digest, Iterable[Digest]]
) -> Mapping[Digest, tuple[str, ...]]:
    """Returns the labels of the entries that need each object, in the order of `entries`."""
    users: defaultdict[Digest, list[str]] = defaultdict(list)
    for entry_id, label in entries.items():
        program = receipt.programs.get(entry_id)
        if program is not None:
            for digest in dict.fromkeys((program, *needs.get(program, ()))):
                users[digest].append(label)
    return {digest: tuple(labels) for digest, labels in users.items()}


def _missing(
    bundle: Bundle,
    receipt: Receipt,
    entries: Mapping[str, str],
    faults: Mapping[Digest, Fault],
    users: Mapping[Digest, tuple[str, ...]],
) -> tuple[MissingEntry, ...]:
    """Returns a row for each missing entry, in the order of `entries`, then one for each absent object that none needs."""
    absent = {digest: fault for digest, fault in faults.items() if fault.state == "missing"}
    reasons: dict[str, str] = {}
    for digest, fault in absent.items():
        for label in users.get(digest, ("-",)):
            reasons.setdefault(label, f"{_relative(bundle, digest)}: {fault.reason}")
    for entry_id, label in entries.items():
        if entry_id not in receipt.programs:
            reasons[label] = "no program in the receipt"
    order = (*dict.fromkeys(entries.values()), "-")
    return tuple(MissingEntry(label, reasons[label]) for label in order if label in reasons)


def _corrupt(
    bundle: Bundle, faults: Mapping[Digest, Fault], users: Mapping[Digest, tuple[str, ...]]
) -> tuple[CorruptObject, ...]:
    return tuple(
        CorruptObject(_relative(bundle, digest), fault.reason, users.get(digest, ()))
        for digest, fault in sorted(faults.items(), key=lambda row: str(row[0]))
        if fault.state == "corrupt"
    )


def _extra(bundle: Bundle) -> tuple[str, ...]:
    with store_errors("list", bundle.path):
        return stray_paths(bundle.path, bundle.index.objects)


def _relative(bundle: Bundle, digest: Digest) -> str:
    return str(object_path(bundle.path, digest).relative_to(bundle.path))


def _abridged(labels: tuple[str, ...]) -> str:
    if not labels:
        return "-"
    return labels[0] + (f" and {len(labels) - 1} more" if len(labels) > 1 else "")


def _table(rows: list[tuple[str, str, str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return [f"{entry:{widths[0]}}  {state:{widths[1]}}  {reason}" for entry, state, reason in rows]
