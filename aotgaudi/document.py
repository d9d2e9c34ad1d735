"""JSON documents: the base class of all values read from JSON, and the canonical form of sealed documents.

Equal values have equal bytes (RFC 8785), so a document's digest names its meaning. Reading is as strict as writing: a
document must be byte for byte what we would write. White space, another order of keys, a repeated or unknown key, or a
value of another type is refused, so two readers never see different things in one file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic_core import core_schema, from_json

from aotgaudi.digest import Digest, canonical_json
from aotgaudi.errors import ManifestError, SpecError


class Value(BaseModel):
    """A frozen value that refuses unknown keys, values of another type, and numbers that are not finite."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class ForeignValue(Value):
    """Like `Value`, but ignores unknown keys: for formats that others define and extend."""

    model_config = ConfigDict(extra="ignore")


class SparseValue(Value):
    """A value to which fields can be added: JSON leaves those of `ABSENT_BY_DEFAULT` out while they have their default.

    So what does not use a new field keeps its bytes, and the ids and keys that follow from them.
    """

    ABSENT_BY_DEFAULT: ClassVar[frozenset[str]] = frozenset()

    @pydantic.model_serializer(mode="wrap")
    def _without_absent(self, serialize: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = serialize(self)
        for name in self.ABSENT_BY_DEFAULT:
            if getattr(self, name) == type(self).model_fields[name].get_default(call_default_factory=True):
                values.pop(name, None)
        return values


class Document(Value):
    """Base of sealed documents. Only their canonical bytes are accepted."""

    model_config = ConfigDict(populate_by_name=True)

    def dumps(self) -> bytes:
        """Returns the canonical bytes."""
        return canonical_json(self.model_dump(mode="json", by_alias=True))


D = TypeVar("D", bound=Document)


def load_document(data: bytes, model: type[D], noun: str) -> D:
    """Parses the canonical bytes of a document of type `model`.

    If the model has a member ``schema`` (kind and version), it is compared first.

    Raises ManifestError with a one-line message that begins with `noun` and names the place (a dotted path).
    """
    if "schema_" in model.model_fields:
        return load_one_of(data, (model,), noun)
    return _validated(data, model, noun)


def load_one_of(data: bytes, models: Iterable[type[D]], noun: str) -> D:
    """Like `load_document`, for bytes whose member ``schema`` names one of `models`."""
    known = {model.model_fields["schema_"].default: model for model in models}
    found = _schema_of(data, noun)
    model = known.get(found) if isinstance(found, str) else None
    if model is None:
        what = f"has schema {found!r:.100}" if found is not None else "names no schema"
        raise ManifestError(f"{noun} {what}; this aotgaudi reads {' and '.join(map(repr, known))}")
    return _validated(data, model, noun)


def _validated(data: bytes, model: type[D], noun: str) -> D:
    try:
        document = model.model_validate_json(data)
    except pydantic.ValidationError as error:
        raise ManifestError(f"{noun}: {first_problem(error)}") from error
    if document.dumps() != data:
        raise ManifestError(
            f"{noun} is not in canonical form (RFC 8785); it was edited, write it with aotgaudi"
        )
    return document


def load_foreign_object(data: bytes, where: str) -> dict[str, Any]:
    """Parses a JSON object that others wrote, in any formatting. Numbers must be finite and nesting shallow.

    Raises SpecError with a one-line message that begins with `where`, the name of the file.
    """
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise SpecError(where, f"cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise SpecError(where, f"holds {type(value).__name__}", "a JSON object is expected")
    return value


def first_problem(error: pydantic.ValidationError) -> str:
    """Returns pydantic's first finding as ``dotted.path: what is wrong``, with the number of other findings.

    The result is one line of printable characters.
    """
    problem = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, problem["loc"])) or "document"
    others = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    text = f"{where}: {problem['msg'].removeprefix('Value error, ')}"
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text[:500]) + others


def _schema_of(data: bytes, noun: str) -> object:
    try:
        raw = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ManifestError(f"{noun} is not JSON: {error}") from error
    return raw.get("schema") if isinstance(raw, dict) else None


def _parsed_digest(text: str) -> Digest:
    digest = Digest.parse(text)
    if str(digest) != text:
        raise ValueError(f"not a digest in canonical form: {text!r:.100}")
    return digest


class _DigestInJson:
    """A `Digest` in Python, the text ``sha256:<64 hex>:<size>`` in JSON."""

    @staticmethod
    def __get_pydantic_core_schema__(
        source: type[Any], handler: Callable[[Any], core_schema.CoreSchema]
    ) -> core_schema.CoreSchema:
        text = core_schema.no_info_after_validator_function(
            _parsed_digest, core_schema.str_schema(strict=True)
        )
        return core_schema.json_or_python_schema(
            json_schema=text,
            python_schema=core_schema.union_schema([core_schema.is_instance_schema(Digest), text]),
            serialization=core_schema.to_string_ser_schema(),
        )


DigestField = Annotated[Digest, _DigestInJson]
"""A member that is a `Digest` in Python and ``sha256:<64 hex>:<size>`` in the document."""

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}\z")]
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
"""A whole number that every JSON reader represents exactly."""
