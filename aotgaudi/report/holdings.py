"""Finds what is built, and how long it took, in a bundle, a store, or the output of a build.

A bundle holds no times (docs/adr/0002-receipt-and-bundle.md). They are in the records of the store that built it, and are
looked up if that store is available. A bundle's programs are verified as they are read. Its units are not read.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from aotgaudi.backends.base import Target
from aotgaudi.bundle.bundle import Bundle
from aotgaudi.bundle.receipt import SealedUnit
from aotgaudi.compile.keys import ProgramKeys, UnitRow, read_units
from aotgaudi.compile.plan import Plan
from aotgaudi.document import Value, first_problem, load_foreign_object
from aotgaudi.entries import Entry
from aotgaudi.errors import CorruptError, ManifestError, NotWarmError, SpecError
from aotgaudi.files import read_regular
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.report.values import BuildPhase, BuildTime, Built, Component, PieceTime, ReportedUnit, Upgrade
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.store.store import Store

_TRACING = "toolchain."
_COMPILING = "target."


@dataclass(frozen=True, slots=True)
class HeldProgram:
    """A program that can run, the entries that it serves, and the units that it calls."""

    entries: tuple[Entry, ...]
    units: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Holdings:
    """Everything that is built. `records` are the store's records of units, `lost` the programs that cannot be read."""

    source: Literal["bundle", "store"]
    target: Target
    keys: ProgramKeys
    programs: tuple[HeldProgram, ...]
    units: Mapping[str, SealedUnit]
    records: Mapping[str, UnitRow]
    lost: tuple[str, ...] = ()

    @property
    def warm_entries(self) -> frozenset[Entry]:
        """The entries with a program that can run."""
        return frozenset(entry for program in self.programs for entry in program.entries)


def holdings_of_bundle(bundle: Bundle, store: Store | None) -> Holdings:
    """Returns what a bundle of programs holds. Raises as `Bundle.manifest` does, and SpecError for a capture."""
    receipt, spec = bundle.require_programs(), bundle.manifest.spec
    groups: dict[str, list[Entry]] = defaultdict(list)
    for entry in bundle.manifest.entries:
        if entry.id in receipt.programs:
            groups[str(receipt.programs[entry.id])].append(entry)
    programs, lost = [], []
    for entries in groups.values():
        try:
            keys = bundle.program(entries[0].id).unit_keys()
        except (NotWarmError, CorruptError, ManifestError) as error:
            lost.append(str(error))
            continue
        programs.append(HeldProgram(tuple(entries), keys))
    return Holdings(
        source="bundle",
        target=receipt.target,
        keys=ProgramKeys(spec, receipt.target, receipt.builder),
        programs=tuple(programs),
        units=receipt.units,
        records={} if store is None else read_units(store, receipt.units),
        lost=tuple(lost),
    )


def holdings_of_plan(plan: Plan, spec: BuildSpec) -> Holdings:
    """Returns the part of a plan that the store has already."""
    whole = ((state.entries, tuple(row.units)) for state, row in plan.complete)
    return Holdings(
        source="store",
        target=plan.target,
        keys=ProgramKeys(spec, plan.target),
        programs=tuple(HeldProgram(entries, units) for entries, units in whole),
        units=plan.units,
        records=plan.units,
    )


def built_of(held: Holdings) -> Built:
    """Returns sizes, reuse and times of everything that is built, with the largest units first."""
    units = sorted(_units(held), key=lambda unit: (-unit.size_bytes, unit.label, unit.key))
    timed = [unit for unit in units if unit.compile_seconds is not None]
    return Built(
        source=held.source,
        num_units=len(units),
        size_bytes=sum(unit.size_bytes for unit in units),
        num_timed=len(timed),
        compile_seconds=round(sum(unit.compile_seconds or 0.0 for unit in timed), 3),
        cpu_seconds=round(sum(unit.cpu_seconds or 0.0 for unit in timed), 3),
        pieces=_pieces(units),
        units=tuple(units),
    )


def upgrades_of(held: Holdings) -> tuple[Upgrade, ...]:
    """Returns which built results a change of the compiling or of the tracing components would invalidate.

    Every program's key contains both, so all programs are traced again. A unit's key contains the target and the text of its
    graph, which only tracing reveals.
    """
    used = {key for program in held.programs for key in program.units}
    common = [Component(name=name, value=value) for name, value in held.keys.common]
    timed = [held.records[key].compile_seconds for key in sorted(used) if key in held.records]
    kinds = (("what compiles: the target", _COMPILING, True), ("what traces", _TRACING, False))
    return tuple(
        Upgrade(
            what=what,
            components=tuple(one for one in common if one.name.startswith(prefix)),
            num_entries=sum(len(program.entries) for program in held.programs),
            num_programs=len(held.programs),
            num_units=len(used),
            num_untimed=len(used) - len(timed),
            compile_seconds=round(sum(timed), 3),
            is_certain=is_certain,
        )
        for what, prefix, is_certain in kinds
    )


def _units(held: Holdings) -> Iterable[ReportedUnit]:
    programs: Counter[str] = Counter()
    entries: Counter[str] = Counter()
    first: dict[str, Entry] = {}
    for program in held.programs:
        for key in program.units:
            programs[key] += 1
            entries[key] += len(program.entries)
            first.setdefault(key, program.entries[0])
    for key, unit in held.units.items():
        record = held.records.get(key)
        label = record.label if record else str(first.get(key, "of no entry"))
        yield ReportedUnit(
            key=key,
            label=label,
            piece=label.split(" ", 1)[0] if record else first[key].kind if key in first else "none",
            size_bytes=sum(digest.size_bytes for digest in unit.artifact.values()),
            num_programs=programs[key],
            num_entries=entries[key],
            compile_seconds=record.compile_seconds if record else None,
            cpu_seconds=record.cpu_seconds if record else None,
        )


def _pieces(units: Iterable[ReportedUnit]) -> tuple[PieceTime, ...]:
    groups: dict[str, list[ReportedUnit]] = defaultdict(list)
    for unit in units:
        groups[unit.piece].append(unit)
    rows = (
        PieceTime(
            piece=piece,
            num_units=len(group),
            num_timed=sum(unit.compile_seconds is not None for unit in group),
            compile_seconds=round(sum(unit.compile_seconds or 0.0 for unit in group), 3),
            cpu_seconds=round(sum(unit.cpu_seconds or 0.0 for unit in group), 3),
        )
        for piece, group in groups.items()
    )
    return tuple(sorted(rows, key=lambda row: (-row.compile_seconds, row.piece)))


# The output of a build

_MAX_BYTES = 64 << 20
_WANTED = "what `aotgaudi build SPEC --json`, or `build cache`, printed"
_WORK = {"check": "comparing with transformers", "trace": "tracing", "compile": "compiling"}

Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Word = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}\z")]
Count = Annotated[int, Field(ge=0, le=10**9)]


class _Told(Value):
    """The part of a build's output that a report uses. The rest is ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class _Phase(_Told):
    phase: Word
    begin: Seconds
    end: Seconds


class _Outcome(_Told):
    num_traced: Count
    num_compiled: Count
    seconds: Seconds
    num_workers: Count
    worker_seconds: dict[Word, Seconds]


class _Phases(_Told):
    phases: Annotated[tuple[_Phase, ...], Field(max_length=100)]


def read_build_time(path: Path, manifest: Manifest) -> BuildTime:
    """Returns how a build spent its time, from the output of ``build --json`` or ``build cache --json`` in `path`.

    Neither a bundle nor a store's records have these times.

    Raises:
        SpecError: The file cannot be read, is not about a build, or is about a build of another manifest.
    """
    try:
        document = load_foreign_object(read_regular(path, _MAX_BYTES), str(path))
    except FileNotFoundError:
        raise SpecError(str(path), "does not exist", _WANTED) from None
    _check_manifest(path, document, manifest)
    try:
        phases = _Phases.model_validate(document, strict=False).phases
        outcome = _Outcome.model_validate(document.get("cache", document), strict=False)
    except ValidationError as error:
        raise SpecError(
            str(path), f"does not tell where a build's time went: {first_problem(error)}", _WANTED
        ) from error
    return _build_time(path, phases, outcome)


def _check_manifest(path: Path, document: Mapping[str, Any], manifest: Manifest) -> None:
    """Raises SpecError if the output is about another manifest. `build` prints its manifest, `build cache` does not."""
    told = document.get("manifest")
    of = told.get("id") if isinstance(told, dict) else None
    if of is not None and of != manifest.id:
        raise SpecError(
            str(path),
            f"tells of a build of another manifest, {str(of)[:16]!r}",
            f"that of {manifest.id[:16]}",
        )


def _build_time(path: Path, phases: tuple[_Phase, ...], outcome: _Outcome) -> BuildTime:
    work = {_WORK.get(kind, kind): round(seconds, 3) for kind, seconds in outcome.worker_seconds.items()}
    idle = outcome.num_workers * outcome.seconds - sum(outcome.worker_seconds.values())
    rows = tuple(
        BuildPhase(name=one.phase, begin=one.begin, seconds=round(max(0.0, one.end - one.begin), 4))
        for one in phases
    )
    return BuildTime(
        path=str(path),
        seconds=max((one.end for one in phases), default=0.0),
        phases=rows,
        num_traced=outcome.num_traced,
        num_compiled=outcome.num_compiled,
        num_workers=outcome.num_workers,
        worker_seconds={**work, "idle": round(max(0.0, idle), 3)},
    )
