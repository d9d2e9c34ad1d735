"""Keys, and the records that the store keeps under them. Imports no torch.

*Program key* (direct): everything that decides a program. It answers "is this entry traced?" without torch.
*Unit key* (content): the text of a graph and its target. It makes equal graphs one artifact.

A program key includes everything: a new field of the spec is in the key of every program until its name is excluded here,
with the reason. Exclusions of model fields are in ``spec/model.py``.

Records are JSON values:

* program key -> `ProgramRow`: the program's digest and its units.
* unit key -> `UnitRow`: the artifact's files, the cost of compiling and the result of the check.
* key of a model's check -> `ModelCheckRow`: the traced steps compute what transformers' own model computes.
* key of a proof -> `ProofRow`: shows that a new process compiles nothing for programs of a device that has a cache.

A record is a claim, which is checked against the objects. If an object is gone, the record is a miss. Failures are never
recorded.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar, Union, cast

from pydantic import Field

import aotgaudi.graphs
from aotgaudi.backends.base import FIXED_NUM_BLOCKS, Target, require_installed, version_of
from aotgaudi.bucketing.mhc_splits import StepSplits
from aotgaudi.bundle.receipt import ModelCheck, UnitRecord
from aotgaudi.digest import Digest, Key, canonical_json, framed, sha256_bytes
from aotgaudi.document import DigestField, Sha256, Value
from aotgaudi.entries import DecodeEntry, Entry, PromptEntry, SamplerEntry
from aotgaudi.graphs.dialect import dialect_of
from aotgaudi.source_digest import sha256_source
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.store.cas import ObjectStore
from aotgaudi.store.store import Store

PROVED_BACKENDS = frozenset({"hpu"})
"""Backends whose artifacts fill a cache of the device. A bundle is sealed only after new processes found all in it."""

CHECKED_BACKENDS = frozenset({"cpu", "hpu"})
"""Backends that serve models. Before the first unit of one is compiled, its graphs are compared with transformers' model."""

LIMITS_EXCLUDED = {
    "max_num_seqs": "bounds which entries exist, not what one computes",
    "max_num_prefill_seqs": "bounds which entries exist",
    "max_num_batched_tokens": "bounds which entries exist",
    "max_model_len": "bounds which entries exist",
    "num_blocks": "bounds which entries exist; graphs leave it open, but for the backends in FIXED_NUM_BLOCKS",
    "allow_long_max_model_len": "decides whether a max_model_len is refused",
}

_CHOICE = "chooses which entries there are; what an entry computes is in its own fields"
SPEC_EXCLUDED: Mapping[str, str] = MappingProxyType(
    {
        "schema_": "the form of the file",
        "model": "its signature is in the key: the dtype, and the config but for CONFIG_KEYS_EXCLUDED",
        "limits": "they are in the key one by one, but for LIMITS_EXCLUDED",
        "scheduler": _CHOICE,
        "bucketing": f"{_CHOICE}; contiguous_pa, which changes graphs for hpu, is in their keys where it is on",
        "sampler": f"{_CHOICE}, of which the signature is keyed: settings are tensors of the graph",
        "mhc": f"{_CHOICE}; the class of a step with hyper-connections is keyed as entry.n_splits",
        "vision": _CHOICE,
        "defrag.enabled": _CHOICE,
        "defrag.padded_swaps": _CHOICE,
        "defrag.threshold": "decides when the server exchanges blocks, not what an exchange computes",
        "defrag.with_graphs": "decides whether a server captures the exchange when it loads it; the code is the same",
        "target.backend": "the probed target is in the key, as target.backend",
        "target.isa": "the probed target is in the key, as target.isa and flags",
        "target.profile": "stands for num_sms",
        "target.num_sms": "decides the classes of hyper-connections, which are keyed as entry.n_splits",
    }
)
"""Sections and fields of a spec that are not directly in a program key. ``target.execution_mode`` is in the key, because
each mode has a different hpu graph."""


class ProgramKeys:
    """The keys of the programs of one spec and target. The components that all entries share are computed once.

    Sampler settings are per-row tensors of the graph, so the key of a sampler entry contains only its signature and the
    number of log-probabilities that it returns.
    """

    def __init__(self, spec: BuildSpec, target: Target, builder: Mapping[str, str] | None = None) -> None:
        """`builder` holds the versions of the code that traces (``builder_versions``); by default, those installed here."""
        self._splits = StepSplits.of(spec)
        self._common = Key.of(
            (*_spec_components(spec, target), *_builder_components(builder), *target.components())
        ).components
        self._framed_common = framed(self._common)

    def of(self, entry: Entry) -> Key:
        """Returns the key of the program of `entry`."""
        return Key((*self._own_components(entry), *self._common))

    def hex_of(self, entry: Entry) -> str:
        """Returns ``of(entry).hex``, a hundred times faster."""
        return sha256_bytes(framed(self._own_components(entry)) + self._framed_common)

    def n_splits(self, entry: Entry) -> int | None:
        """Returns the class of hyper-connections that the program of a step calls; None for all other entries.

        Raises SpecError if the spec's rule lacks a number.
        """
        if self._splits is None or not isinstance(entry, (PromptEntry, DecodeEntry)):
            return None
        return self._splits.of_entry(entry)

    def _own_components(self, entry: Entry) -> list[tuple[str, str]]:
        components = [
            ("schema", "aotgaudi.program-key/2"),
            ("entry.kind", entry.kind),
            *_entry_components(entry),
        ]
        n_splits = self.n_splits(entry)
        return components if n_splits is None else [*components, ("entry.n_splits", str(n_splits))]


def unit_key(text: str, target: Target) -> Key:
    """Returns the key of the unit with this canonical text."""
    return unit_key_of_graph(sha256_bytes(text.encode()), target)


def unit_key_of_graph(sha256: str, target: Target) -> Key:
    """Returns the key of the unit whose canonical text has this sha256, 64 hex digits."""
    return Key.of([("schema", "aotgaudi.unit-key/1"), ("graph", sha256), *target.components()])


def model_check_key(spec: BuildSpec) -> Key:
    """Returns the key of the comparison of a spec's graphs with its model."""
    dialect = dialect_of(spec)
    return Key.of(
        [
            ("schema", "aotgaudi.model-check/1"),
            *((f"model.{name}", value) for name, value in spec.model.signature().components),
            ("dialect", f"{dialect.name}{' contiguous' if dialect.is_contiguous else ''}"),
            *_builder_components(None),
            ("toolchain.torch", version_of("torch")),
        ]
    )


def builder_versions() -> dict[str, str]:
    """Returns the versions of the code that traces: our graph code (a digest of it) and transformers."""
    return {"graphs": graph_code_digest(), "transformers": version_of("transformers")}


def require_key_parts() -> None:
    """Raises MissingPackageError if a package whose version is in every key is not installed.

    Keys can be made and explained without the package, but nothing is ever built under them.
    """
    require_installed("build", "torch", "transformers")


@functools.cache
def graph_code_digest() -> str:
    """Returns the sha256 of our graph code, including subfolders. Any change of it causes new traces."""
    folder = Path(aotgaudi.graphs.__path__[0])
    return sha256_source(folder.rglob("*.py"), folder)


def _spec_components(spec: BuildSpec, target: Target) -> Iterator[tuple[str, str]]:
    for name, value in spec.model.signature().components:
        yield f"model.{name}", value
    for name, value in sorted(spec.limits.model_dump().items()):
        if name not in LIMITS_EXCLUDED or (name == "num_blocks" and target.backend in FIXED_NUM_BLOCKS):
            yield f"limits.{name}", str(value)
    sections = BuildSpec.model_fields.keys() - SPEC_EXCLUDED.keys()
    for section, table in sorted(spec.model_dump(mode="json", include=sections).items()):
        rows = table if isinstance(table, dict) else {"": table}
        for name, value in sorted(rows.items()):
            where = f"{section}.{name}" if name else section
            if where not in SPEC_EXCLUDED:
                yield f"spec.{where}", canonical_json(value).decode()
    if dialect_of(spec).is_contiguous:
        yield "spec.bucketing.contiguous_pa", "true"


def _builder_components(builder: Mapping[str, str] | None) -> Iterator[tuple[str, str]]:
    for name, value in sorted((builder_versions() if builder is None else builder).items()):
        yield f"toolchain.{name}", value


def _entry_components(entry: Entry) -> list[tuple[str, str]]:
    if isinstance(entry, SamplerEntry):
        return [
            ("entry.batch_size", str(entry.batch_size)),
            ("entry.signature", str(entry.signature)),
            ("entry.num_logprobs", str(entry.num_logprobs)),
        ]
    return [(f"entry.{name}", str(value)) for name, value in zip(entry.columns(), entry.row(), strict=True)]


_LOG = logging.getLogger(__name__)


class UnitSource(Value):
    """A unit of a program: the digest of its canonical text, and a label for people."""

    text: str
    label: str


class ProgramRow(Value):
    """A traced program. `program` is its JSON's digest, `units` maps unit keys to sources, `constants` is a digest."""

    program: str
    units: dict[Sha256, UnitSource]
    constants: str | None = None
    components: dict[str, str] = Field(default_factory=dict)

    def digests(self) -> Iterator[Digest]:
        """Yields every digest in the row. Raises ValueError."""
        yield Digest.parse(self.program)
        yield from (Digest.parse(unit.text) for unit in self.units.values())
        if self.constants:
            yield Digest.parse(self.constants)


class UnitRow(UnitRecord):
    """A compiled unit. `cpu_seconds` includes the compiler's processes."""

    cpu_seconds: float
    components: dict[str, str] = Field(default_factory=dict)

    def digests(self) -> Iterator[Digest]:
        """Yields the files of the artifact."""
        yield from self.artifact.values()


class ModelCheckRow(Value):
    """A model whose traced steps agree with transformers' (compile/model_comparison.py). `seconds` is what that took."""

    check: ModelCheck
    seconds: float
    components: dict[str, str] = Field(default_factory=dict)

    def digests(self) -> Iterator[Digest]:
        """Yields nothing: the record is all there is."""
        return iter(())


class ProofRow(Value):
    """A proof that processes which find only recorded recipes compile nothing for these programs (compile/cards.py).

    `recipes` maps file name -> digest of files that programs need in addition to their units' artifacts. `num_recipes`
    counts all recipes.
    """

    recipes: dict[str, DigestField]
    num_recipes: int
    num_rounds: int
    label: str = "proof"

    def digests(self) -> Iterator[Digest]:
        """Yields the files."""
        yield from self.recipes.values()


BuiltRow = Union[ProgramRow, UnitRow, ModelCheckRow]
"""The record of a job of a build."""

RowT = TypeVar("RowT", bound=Union[ProgramRow, UnitRow, ModelCheckRow, ProofRow])


def record(store: Store, key: str, row: BuiltRow | ProofRow) -> None:
    """Records the result of a job. If there is a result already, it stays, unless one of its objects is gone.

    Raises StoreError if the record cannot be written.
    """
    recorded = store.actions.put(
        key, row.model_dump(mode="json"), lambda value: _intact(type(row), value, store.objects) is not None
    )
    first = _intact(type(row), recorded, store.objects)
    if first is not None and set(first.digests()) != set(row.digests()):
        _LOG.warning("%s: built twice, with different results; the first stays", key)


def read_rows(kind: type[RowT], store: Store, keys: Iterable[str]) -> dict[str, RowT]:
    """Returns the intact rows of `keys`, whose records are of this `kind`, in their order. Leaves out keys without one."""
    values = store.actions.get_many(keys).items()
    rows = ((key, _intact(kind, value, store.objects)) for key, value in values)
    return {key: row for key, row in rows if row is not None}


def _intact(kind: type[RowT], value: dict[str, object] | None, objects: ObjectStore) -> RowT | None:
    """Returns the row if it is well-formed and the store has all its objects, else None (a miss)."""
    try:
        row = cast("RowT", kind.model_validate(value)) if value else None
        return row if row and all(map(objects.has, row.digests())) else None
    except ValueError:  # It is of another shape, or has a malformed digest.
        return None
