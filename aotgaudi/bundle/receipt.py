"""The receipt: which artifacts answer which entries of which manifest, for which target.

``receipt.json`` is the canonical JSON (RFC 8785) of::

    {"schema":      "aotgaudi.receipt/1",
     "manifest_id": id of the manifest that the artifacts answer,
     "target":      what the artifacts were compiled for (backends.base.Target),
     "programs":    {entry id: digest of the program's JSON},
     "units":       {unit key: {"artifact": {relative file name: digest}, "tolerance": float,
                                "layouts": {number of an input: its layout}}},     absent if there are none
     "recipes":     {relative file name: digest},     what programs need beyond the files of their units (hpu: recipes with
                                                       keys that depend on what ran before); absent if empty
     "builder":     {component: version},
     "model_check": {"transformers": version, "tolerance": float, "layers": [kind of layer, ...],
                     "reduced": {size of the config: what it was reduced to}},     absent if the graphs were not compared
                                                       with the model (bundles made before; backends without models)
     "model":       {file name: digest}}     absent if no model is bound

Versions: 1 (first). `model`, `layouts`, `recipes` and `model_check` came later and may be absent. The bytes of receipts
without them have not changed.

A receipt is sealed, so it holds nothing that could differ between two builds of the same inputs: no times, no host, no
measurement (docs/adr/0010-bundle-and-trust.md). Measurements are in `UnitRecord`, which the store's records keep with the
artifact.

A bundle holds either programs, which `aotgaudi serve` runs, or a capture of the caches of a wrapped server
(capture_receipt.py). The schema of its receipt says which. `SealedReceipt` is either of the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, Union, cast

from pydantic import AfterValidator, Field, StringConstraints, field_validator

from aotgaudi.backends.base import Target
from aotgaudi.bundle.capture_receipt import CaptureReceipt
from aotgaudi.bundle.kind import says_capture
from aotgaudi.document import DigestField, Document, Sha256, SparseValue, Value, load_document, load_one_of
from aotgaudi.entries import Entry

RECEIPT_SCHEMA: Literal["aotgaudi.receipt/1"] = "aotgaudi.receipt/1"

_FILE_NAME = re.compile(r"(?:[A-Za-z0-9_+-][A-Za-z0-9._+-]{0,127}/){0,4}[A-Za-z0-9_+-][A-Za-z0-9._+-]{0,127}")


def require_file_name(name: str) -> str:
    """Returns `name`. Raises ValueError if a receipt may not hold it, see `FileName`."""
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"not a plain relative file name: {name!r:.100}")
    return name


EntryId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}\z")]
FileName = Annotated[str, AfterValidator(require_file_name)]
"""A relative path of at most five parts of ``[A-Za-z0-9._+-]``, none of which begins with a dot."""
InputNumber = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,5})\z")]
LayoutName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]{1,32}\z")]
Measure = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class SealedUnit(SparseValue):
    """One unit in a receipt: its files by relative name, and the tolerance of its check.

    `tolerance` is the largest absolute difference from eager PyTorch that the check allowed. A unit that exceeds it is never
    recorded, so every recorded unit has passed the check. `layouts` maps numbers of inputs to layouts, for the weights that
    the unit takes in another form than the checkpoint's. The loader prepares these weights (`Runtime.prepare`).
    """

    ABSENT_BY_DEFAULT: ClassVar[frozenset[str]] = frozenset({"layouts"})
    artifact: Annotated[dict[FileName, DigestField], Field(min_length=1)]
    tolerance: Measure
    layouts: dict[InputNumber, LayoutName] = Field(default_factory=dict)


class UnitRecord(SealedUnit):
    """What the builder knows about a compiled unit, including measurements. It is kept in the store, and not sealed.

    `label` is for people, and names the entry that happened to need the unit first. `compile_seconds` and `max_abs_error`
    (the largest absolute difference from eager PyTorch that the check found) differ from build to build.
    """

    label: str
    compile_seconds: Measure
    max_abs_error: Measure

    def sealed(self) -> SealedUnit:
        """Returns the part of the record that is equal in every build."""
        return SealedUnit(artifact=self.artifact, tolerance=self.tolerance, layouts=self.layouts)


class ModelCheck(Value):
    """How the traced steps were compared with transformers' own model: logits agreed within `tolerance`.

    docs/adr/0006-checked-graphs.md has the reasons. `layers` are the kinds of the compared model's layers, in order.
    `reduced` has what was smaller in it than in the spec's.
    """

    transformers: str
    tolerance: Measure
    layers: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    reduced: dict[str, int] = Field(default_factory=dict)

    def describe(self) -> str:
        """Returns what agreed, in words."""
        kinds = dict.fromkeys(self.layers)
        smaller = "".join(f", {name} {value}" for name, value in sorted(self.reduced.items()))
        return (
            f"agrees with transformers {self.transformers} within {self.tolerance:g}"
            f" ({len(self.layers)} layers: {'; '.join(kinds)}{smaller})"
        )


class Receipt(Document, SparseValue):
    """The receipt of programs, see the module. `units` may be given as records, which are reduced to what is sealed.

    `builder` maps components of the builder to versions, without hosts or times. `model` names every file of a model
    directory that a server reads, if the bundle is bound to one (bundle/model_directory.py). `model_check` says how the
    graphs were compared with the model.
    """

    ABSENT_BY_DEFAULT: ClassVar[frozenset[str]] = frozenset({"model", "model_check", "recipes"})
    schema_: Literal["aotgaudi.receipt/1"] = Field(default=RECEIPT_SCHEMA, alias="schema")
    manifest_id: Annotated[str, Field(min_length=1)]
    target: Target
    programs: dict[EntryId, DigestField]
    units: Mapping[Sha256, SealedUnit]
    recipes: dict[FileName, DigestField] = Field(default_factory=dict)
    builder: dict[str, str]
    model_check: ModelCheck | None = None
    model: Annotated[dict[FileName, DigestField], Field(min_length=1)] | None = None

    @field_validator("units", mode="before")
    @classmethod
    def _seal(cls, units: Any) -> Any:
        if not isinstance(units, Mapping):
            return units
        return {key: unit.sealed() if isinstance(unit, UnitRecord) else unit for key, unit in units.items()}

    def missing(self, entries: Iterable[Entry]) -> tuple[Entry, ...]:
        """Returns the entries without a program in this receipt, in order."""
        return tuple(entry for entry in entries if entry.id not in self.programs)


def loads(data: bytes) -> Receipt:
    """Parses a receipt's canonical bytes. Raises ManifestError, which names the place of the fault."""
    return load_document(data, Receipt, "receipt")


SealedReceipt: TypeAlias = Union[Receipt, CaptureReceipt]


def load_sealed(data: bytes) -> SealedReceipt:
    """Parses the canonical bytes of a receipt of either kind. Raises ManifestError, which names the place of the fault."""
    if says_capture(data):
        return load_document(data, CaptureReceipt, "receipt")
    return cast("SealedReceipt", load_one_of(data, (Receipt, CaptureReceipt), "receipt"))
