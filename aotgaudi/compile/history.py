"""What was built before: the programs and units that a store's records, a bundle, or a receipt alone, speak of.

History is for comparing with, never for building from: a record whose objects are gone still says what was built
and how long it took. A receipt does not hold the keys of its programs. They follow from the manifest that it answers,
the target and the builder's versions; a bundle has all three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from aotgaudi.backends.base import Target
from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.programs import load_program
from aotgaudi.bundle.receipt import Receipt
from aotgaudi.bundle.receipt import loads as load_receipt
from aotgaudi.compile.keys import ProgramKeys, builder_versions
from aotgaudi.compile.records import ProgramRow, UnitRow
from aotgaudi.digest import Digest
from aotgaudi.errors import AotGaudiError, ManifestError
from aotgaudi.graphs.program import Program
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.store.records import RecordStore
from aotgaudi.store.store import Store


@dataclass(frozen=True)
class BuiltProgram:
    """A program that was traced: the components of its key, the keys of its units, and the digest of its JSON."""

    key: str
    components: Mapping[str, str]
    units: tuple[str, ...] = ()
    digest: str = ""


@dataclass(frozen=True)
class BuiltUnit:
    """A unit that was compiled. `seconds` is what compiling took; `label` is for people."""

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

        Anything that is not a record of a program or a unit is skipped, as a look-up would skip it.
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
    """What compiling some units took the last time, on one worker, each unit counted once.

    `seconds` is the sum over the units on record; `num_untimed` units are not on record.
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
    """What was sealed at `path`: `programs` of `num_entries` entries, on `unit_keys`.

    `assumed`: what the bundle or receipt does not say, and what was assumed instead.
    """

    path: Path
    manifest_id: str
    target: Target
    num_entries: int
    unit_keys: tuple[str, ...]
    programs: tuple[BuiltProgram, ...]
    assumed: tuple[str, ...] = ()


def read_sealed(path: Path, manifest: Manifest, store: Store | None, history: History) -> Sealed:
    """Reads the bundle or the receipt at `path`, to be compared with `manifest`.

    A receipt alone does not say which units a program calls: they are looked up in `store`. If it answers another
    manifest, it does not hold that manifest's spec either: `history` may know its programs; if not, the spec is assumed
    to be that of `manifest`.

    Raises StoreError, ManifestError and CorruptError, as opening a bundle does.
    """
    if path.is_dir():
        bundle = open_bundle(path)
        return _sealed(
            path, bundle.require_programs(), bundle.manifest, partial(_read, bundle.read_object), ()
        )
    receipt = _read_receipt(path)
    program_of = partial(_read, store.objects.read) if store else _unknown
    if receipt.manifest_id == manifest.id:
        return _sealed(path, receipt, manifest, program_of, ())
    recorded = tuple(_recorded(receipt, history))
    if {program.digest for program in recorded} == set(map(str, receipt.programs.values())):
        return _of_programs(path, receipt, recorded, ())
    return _sealed(path, receipt, manifest, program_of, (_ASSUMED_SPEC,))


_ASSUMED_SPEC = (
    "it answers another manifest, and does not say which model and limits that one has: taken to be the same"
    " (compare with a bundle)"
)


def _recorded(receipt: Receipt, history: History) -> Iterator[BuiltProgram]:
    """The programs of the receipt that `history` has on record, built for its target by its builder."""
    digests = set(map(str, receipt.programs.values()))
    known = {*receipt.target.components(), *((f"toolchain.{n}", v) for n, v in receipt.builder.items())}
    for program in history.programs.values():
        if program.digest in digests and known <= set(program.components.items()):
            yield program


def _sealed(
    path: Path,
    receipt: Receipt,
    manifest: Manifest,
    program_of: Callable[[Digest], Program | None],
    assumed: tuple[str, ...],
) -> Sealed:
    """The keys that the entries of `manifest` had when they were sealed."""
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
            found[key] = BuiltProgram(key, dict(keys.of(entry).components), _units_of(program_of(digest)))
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


def _units_of(program: Program | None) -> tuple[str, ...]:
    return () if program is None else tuple(dict.fromkeys(call.unit for call in program.calls))


def _unknown(_: Digest) -> None:
    return None


def _read(read: Callable[[Digest], bytes], digest: Digest) -> Program | None:
    """The program, or None if its object is gone or damaged; its units then go uncounted."""
    try:
        return load_program(read(digest), digest)
    except AotGaudiError:
        return None


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
            value = records.get(key)
            row = None if value is None else _row_of(value)
            if row is not None:
                yield key, row


def _row_of(value: dict[str, object]) -> ProgramRow | UnitRow | None:
    try:
        return ProgramRow.model_validate(value) if "program" in value else UnitRow.model_validate(value)
    except ValidationError:
        return None


def _sha256_of(digest: str) -> str:
    return digest.removeprefix("sha256:").partition(":")[0]
