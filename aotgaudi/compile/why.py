"""Explains why programs and units are not warm: which components of their keys differ from what was built before.

A plan or a receipt decides whether something is warm. This module finds the reason why something is not, and the cost.

*History* is what a store's records, a bundle or a receipt say was built. It serves for comparison only, never for building:
a record whose objects are gone still says what was built and how long it took. A receipt has no program keys. They follow
from its manifest, the target and the builder's versions. A bundle has all three.

*Nearest* is found by comparing key components by name: among programs of the same entry, those of the same model come first,
then those with the fewest differing components. For units, the same graph comes first, then the same label. Ties go to the
smaller key, so that the answer is always the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar, Union

from pydantic import ValidationError

from aotgaudi.backends.base import Target
from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.programs import load_program
from aotgaudi.bundle.receipt import Receipt
from aotgaudi.bundle.receipt import loads as load_receipt
from aotgaudi.compile.keys import ProgramKeys, ProgramRow, UnitRow, builder_versions, unit_key_of_graph
from aotgaudi.compile.plan import Plan, ProgramState
from aotgaudi.digest import Digest, Key, differing
from aotgaudi.entries import Entry
from aotgaudi.errors import AotGaudiError, CorruptError, ManifestError, StoreError
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.store.records import RecordStore
from aotgaudi.store.store import Store


@dataclass(frozen=True)
class BuiltProgram:
    """A program that was traced: its key's components, its units' keys, and the digest of its JSON."""

    key: str
    components: Mapping[str, str]
    units: tuple[str, ...] = ()
    digest: str = ""


@dataclass(frozen=True)
class BuiltUnit:
    """A unit that was compiled. `seconds` is its compile time. `label` is for people."""

    key: str
    components: Mapping[str, str]
    label: str
    seconds: float


@dataclass(frozen=True)
class History:
    """Programs and units by key. `texts`: sha256 of a unit's canonical text -> the object that holds it."""

    programs: Mapping[str, BuiltProgram] = field(default_factory=dict)
    units: Mapping[str, BuiltUnit] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_store(cls, store: Store) -> History:
        """Reads every record of `store` and of the layers below it. Raises StoreError.

        Like a look-up, it skips everything that is not a record of a program or unit.
        """
        programs: dict[str, BuiltProgram] = {}
        units: dict[str, BuiltUnit] = {}
        texts: dict[str, str] = {}
        for key, row in _rows(store):
            if isinstance(row, ProgramRow):
                programs.setdefault(key, BuiltProgram(key, row.components, tuple(row.units), row.program))
                texts.update((_sha256_of(unit.text), unit.text) for unit in row.units.values())
            else:
                units.setdefault(key, BuiltUnit(key, row.components, row.label, row.compile_seconds))
        return cls(programs, units, texts)


@dataclass(frozen=True)
class Cost:
    """The time that compiling some units took the last time, on one worker, with each unit counted once.

    `seconds` is the sum over the units on record. `num_untimed` units are not on record.
    """

    num_units: int
    seconds: float
    num_untimed: int

    @classmethod
    def of(cls, unit_keys: Iterable[str], units: Mapping[str, BuiltUnit]) -> Cost:
        """Returns the cost of the distinct `unit_keys`, by the records in `units`."""
        keys = sorted(set(unit_keys))
        timed = [units[key].seconds for key in keys if key in units]
        return cls(len(keys), sum(timed), len(keys) - len(timed))


@dataclass(frozen=True)
class Sealed:
    """A bundle or receipt at `path`: `programs` of `num_entries` entries, which call `unit_keys`.

    `assumed` names facts that the bundle or receipt does not state, and the assumption made for each.
    """

    path: Path
    manifest_id: str
    target: Target
    num_entries: int
    unit_keys: tuple[str, ...]
    programs: tuple[BuiltProgram, ...]
    assumed: tuple[str, ...] = ()


def read_sealed(path: Path, manifest: Manifest, store: Store, history: History) -> Sealed:
    """Reads the bundle or the receipt at `path`, for comparison with `manifest`.

    A receipt does not say which units a program calls, so they are looked up in `store`. A receipt of another manifest does
    not contain that manifest's spec either. If `history` does not know its programs, the spec of `manifest` is assumed.

    Raises StoreError, ManifestError and CorruptError, like opening a bundle.
    """
    if path.is_dir():
        bundle = open_bundle(path)
        return _sealed(path, bundle.require_programs(), bundle.manifest, bundle.read_object)
    receipt = _read_receipt(path)
    if receipt.manifest_id == manifest.id:
        return _sealed(path, receipt, manifest, store.objects.read)
    recorded = tuple(_recorded(receipt, history))
    if {program.digest for program in recorded} == set(map(str, receipt.programs.values())):
        return _of_programs(path, receipt, recorded, ())
    return _sealed(path, receipt, manifest, store.objects.read, (_ASSUMED_SPEC,))


_ASSUMED_SPEC = (
    "it answers another manifest, and does not say which model and limits that one has: taken to be the same"
    " (compare with a bundle)"
)


def _recorded(receipt: Receipt, history: History) -> Iterator[BuiltProgram]:
    """Yields the receipt's programs that `history` knows, built for its target by its builder."""
    digests = set(map(str, receipt.programs.values()))
    known = {*receipt.target.components(), *((f"toolchain.{n}", v) for n, v in receipt.builder.items())}
    for program in history.programs.values():
        if program.digest in digests and known <= set(program.components.items()):
            yield program


def _sealed(
    path: Path,
    receipt: Receipt,
    manifest: Manifest,
    read: Callable[[Digest], bytes],
    assumed: tuple[str, ...] = (),
) -> Sealed:
    """Computes the keys that the entries of `manifest` had when they were sealed."""
    here = builder_versions()
    lacking = [
        f"it does not say its {name}: taken to be {here[name]}"
        for name in sorted(here.keys() - receipt.builder.keys())
    ]
    keys = ProgramKeys(manifest.spec, receipt.target, {**here, **receipt.builder})
    found: dict[str, BuiltProgram] = {}
    for entry in manifest.entries:
        digest = receipt.programs.get(entry.id)
        key = keys.hex_of(entry)
        if digest is not None and key not in found:
            found[key] = BuiltProgram(key, dict(keys.of(entry).components), _units_of(digest, read))
    return _of_programs(path, receipt, tuple(found.values()), (*assumed, *lacking))


def _of_programs(
    path: Path, receipt: Receipt, programs: tuple[BuiltProgram, ...], assumed: tuple[str, ...]
) -> Sealed:
    return Sealed(
        path=path,
        manifest_id=receipt.manifest_id,
        target=receipt.target,
        num_entries=len(receipt.programs),
        unit_keys=tuple(receipt.units),
        programs=programs,
        assumed=assumed,
    )


def _units_of(digest: Digest, read: Callable[[Digest], bytes]) -> tuple[str, ...]:
    """Returns the units of a program; none if its object is gone or damaged. They are then not counted."""
    try:
        return load_program(read(digest), digest).unit_keys()
    except AotGaudiError:
        return ()


def _read_receipt(path: Path) -> Receipt:
    try:
        return load_receipt(path.read_bytes())
    except OSError as error:
        raise ManifestError(
            f"{path}: cannot be read: {error.strerror or error} (a receipt or a bundle)"
        ) from error
    except ManifestError as error:
        raise ManifestError(f"{path}: {error}") from error


def _rows(store: Store) -> Iterator[tuple[str, ProgramRow | UnitRow]]:
    for records in (store.actions.records, *map(RecordStore, store.lower)):
        for key in sorted(records.keys()):
            value = records.get(key) or {}
            with suppress(ValidationError):
                yield key, (ProgramRow if "program" in value else UnitRow).model_validate(value)


def _sha256_of(digest: str) -> str:
    return digest.removeprefix("sha256:").partition(":")[0]


Components = Mapping[str, str]
Built = TypeVar("Built", bound=Union[BuiltProgram, BuiltUnit])

ENTRY = "entry."
_MODEL = ("model.", "limits.")


@dataclass(frozen=True, slots=True)
class Change:
    """One key component that differs. None means that the side lacks the component."""

    name: str
    old: str | None
    new: str | None


def changes(old: Components, new: Components) -> tuple[Change, ...]:
    """Returns the components that differ, in the order of `new`, followed by those that only `old` has."""
    found = differing(new, dict(sorted(old.items())))
    return tuple(Change(name, before, after) for name, after, before in found)


class NearestProgram:
    """Finds the nearest program in `built`."""

    def __init__(self, built: Iterable[BuiltProgram]) -> None:
        programs = sorted(built, key=lambda program: program.key)
        self._of_entry = _grouped(programs, lambda program: _part(program.components, ENTRY))

    def find(self, components: Components) -> BuiltProgram | None:
        """Returns the nearest program of the same entry, or None."""
        same, model = self._of_entry.get(_part(components, ENTRY), []), _part(components, *_MODEL)
        of_model = [program for program in same if _part(program.components, *_MODEL) == model]
        return _least(of_model or same, components)


class NearestUnit:
    """Finds the nearest unit in `built`."""

    def __init__(self, built: Iterable[BuiltUnit]) -> None:
        units = sorted(built, key=lambda unit: unit.key)
        self._of_graph = _grouped(units, lambda unit: unit.components.get("graph", ""))
        self._of_label = _grouped(units, lambda unit: unit.label)

    def find(self, components: Components, label: str) -> BuiltUnit | None:
        """Returns the nearest unit of the same graph, else of the same label, else None."""
        same = self._of_graph.get(components["graph"]) or self._of_label.get(label, [])
        return _least(same, components)


def _least(built: Iterable[Built], components: Components) -> Built | None:
    return min(built, key=lambda one: len(changes(one.components, components)), default=None)


def _part(components: Components, *prefixes: str) -> frozenset[tuple[str, str]]:
    return frozenset(row for row in components.items() if row[0].startswith(prefixes))


def _grouped(built: Iterable[Built], name: Callable[[Built], Hashable]) -> dict[Hashable, list[Built]]:
    groups: dict[Hashable, list[Built]] = defaultdict(list)
    for one in built:
        groups[name(one)].append(one)
    return groups


State = Literal["warm", "changed", "lost", "never built"]
"""`changed`: built before under another key. `lost`: built, but objects are gone."""

_TARGET = "target."
_GRAPH = "graph"


@dataclass(frozen=True)
class Finding:
    """The state of one program (which runs `entries`) or one unit (which has no entries), and the reason for it.

    `label` is the first entry, or the unit's label. `nearest` is the nearest program or unit that was built, and `changes`
    are the components that differ from it. `lines` is the first line in which the unit's text differs, old and new, if the
    store has both texts.
    """

    key: Key
    label: str
    state: State
    entries: tuple[Entry, ...] = ()
    nearest: BuiltProgram | BuiltUnit | None = None
    changes: tuple[Change, ...] = ()
    lines: tuple[str, str] | None = None

    @property
    def is_program(self) -> bool:
        """Whether it is about a program."""
        return bool(self.entries)

    @property
    def unit_keys(self) -> tuple[str, ...]:
        """The units whose cost should be similar."""
        if isinstance(self.nearest, BuiltProgram):
            return self.nearest.units
        return (self.nearest.key,) if self.nearest else ()


@dataclass(frozen=True)
class Reason:
    """Programs or units that are not warm for the same reason. `findings` has at least one, in the manifest's order."""

    findings: tuple[Finding, ...]

    @property
    def state(self) -> State:
        """The state that they all share."""
        return self.findings[0].state

    @property
    def num_entries(self) -> int:
        """The number of entries that need these programs; 0 for units."""
        return sum(len(finding.entries) for finding in self.findings)

    @property
    def is_certain(self) -> bool:
        """Whether the units are certainly compiled again: a component of the target changed, and every key contains it."""
        return any(change.name.startswith(_TARGET) for change in self.findings[0].changes)

    def cost(self, history: History) -> Cost:
        """Returns the compile time of the units of the nearest programs, or of the nearest units."""
        return Cost.of((key for finding in self.findings for key in finding.unit_keys), history.units)


def reasons(findings: Iterable[Finding]) -> tuple[Reason, ...]:
    """Groups the findings that are not warm by reason, in order of appearance."""
    groups: dict[object, list[Finding]] = defaultdict(list)
    for finding in findings:
        if finding.state != "warm":
            groups[_reason(finding)].append(finding)
    return tuple(Reason(tuple(group)) for group in groups.values())


def explain_plan(plan: Plan, store: Store, history: History) -> tuple[Finding, ...]:
    """Returns a finding for every program of `plan`, then for every unit that has no artifact."""
    programs, units = NearestProgram(history.programs.values()), NearestUnit(history.units.values())
    found = [_of_program(state, programs, history) for state in plan.programs]
    return (*found, *_of_units(plan, units, store, history))


def explain_against(
    entries: Iterable[Entry], keys: ProgramKeys, built: Iterable[BuiltProgram]
) -> tuple[Finding, ...]:
    """Returns a finding for the program of every entry, as if only `built` had ever been built."""
    programs = {program.key: program for program in built}
    nearest = NearestProgram(programs.values())
    groups: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        groups[keys.hex_of(entry)].append(entry)
    return tuple(
        _warm(keys.of(group[0]), tuple(group), programs[key])
        if key in programs
        else _missing(keys.of(group[0]), tuple(group), nearest)
        for key, group in groups.items()
    )


def _of_program(state: ProgramState, nearest: NearestProgram, history: History) -> Finding:
    built = history.programs.get(state.key.hex)
    if state.row is not None:
        return _warm(state.key, state.entries, built)
    if built is not None:
        return Finding(state.key, str(state.entries[0]), "lost", state.entries, built)
    return _missing(state.key, state.entries, nearest)


def _warm(key: Key, entries: tuple[Entry, ...], built: BuiltProgram | None) -> Finding:
    return Finding(key, str(entries[0]), "warm", entries, built)


def _missing(key: Key, entries: tuple[Entry, ...], nearest: NearestProgram) -> Finding:
    components = dict(key.components)
    built = nearest.find(components)
    if built is None:
        return Finding(key, str(entries[0]), "never built", entries)
    return Finding(key, str(entries[0]), "changed", entries, built, changes(built.components, components))


def _of_units(plan: Plan, nearest: NearestUnit, store: Store, history: History) -> Iterator[Finding]:
    texts = {key: unit.text for state in plan.programs if state.row for key, unit in state.row.units.items()}
    for hexdigits, label in plan.missing_units.items():
        digest = Digest.parse(texts[hexdigits])
        key = unit_key_of_graph(digest.sha256, plan.target)
        if hexdigits in history.units:
            yield Finding(key, label, "lost", nearest=history.units[hexdigits])
            continue
        built = nearest.find(dict(key.components), label)
        if built is None:
            yield Finding(key, label, "never built")
            continue
        found = changes(built.components, dict(key.components))
        lines = _differing_lines(store, history.texts.get(built.components.get(_GRAPH, "")), str(digest))
        yield Finding(key, label, "changed", nearest=built, changes=found, lines=lines)


def _differing_lines(store: Store, old: str | None, new: str) -> tuple[str, str] | None:
    """Returns the first differing line of each text ("" past the end), or None if the texts are equal or unreadable."""
    if old is None or old == new:
        return None
    try:
        texts = [store.objects.read(Digest.parse(text)).decode().splitlines() for text in (old, new)]
    except (StoreError, CorruptError, ValueError):
        return None
    before, after = texts
    length = max(len(before), len(after))
    pairs = zip(*(lines + [""] * (length - len(lines)) for lines in (before, after)), strict=True)
    return next(((one, other) for one, other in pairs if one != other), None)


def _reason(finding: Finding) -> object:
    shared = tuple(change for change in finding.changes if change.name != _GRAPH)
    return finding.is_program, finding.state, shared
