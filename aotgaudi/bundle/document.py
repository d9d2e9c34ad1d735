"""Sealed JSON documents: written in one canonical form, and refused in any other.

Equal values have equal bytes (RFC 8785), so a document's digest names its meaning. Reading is as strict: a
document that is not byte for byte what we would write (white space, another key order, a key twice, an
unknown key, another type) is refused, so that no two readers can see different things in one file.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import from_json

from aotgaudi.digest import Digest, canonical_json
from aotgaudi.errors import ManifestError

MAX_DOCUMENT_BYTES = 256 << 20


class Document(BaseModel):
    """Base of sealed documents: frozen, strict, closed. Key ``schema`` names kind and version."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", populate_by_name=True)


D = TypeVar("D", bound=Document)


def dump_document(document: Document) -> bytes:
    """Returns the canonical bytes of a document."""
    return canonical_json(document.model_dump(mode="json", by_alias=True))


def load_document(data: bytes, model: type[D], schema: str, noun: str) -> D:
    """Parses the canonical bytes of a document of type `model`, whose schema is `schema`.

    Raises ManifestError in one line that begins with `noun` and names the place (a dotted path).
    """
    try:
        raw = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ManifestError(f"{noun} is not JSON: {error}") from error
    _check_schema(raw, schema, noun)
    try:
        document = model.model_validate_json(data)
    except pydantic.ValidationError as error:
        raise ManifestError(f"{noun}: {first_problem(error)}") from error
    if dump_document(document) != data:
        raise ManifestError(
            f"{noun} is not in canonical form (RFC 8785); it was edited, write it with aotgaudi"
        )
    return document


def first_problem(error: pydantic.ValidationError) -> str:
    """Returns the first of pydantic's findings as ``dotted.path: what is wrong``, and how many there are.

    One line of printable characters, whatever the document's keys are.
    """
    problem = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, problem["loc"])) or "document"
    others = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    text = f"{where}: {problem['msg']}"
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text[:500]) + others


def _check_schema(raw: Any, schema: str, noun: str) -> None:
    found = raw.get("schema") if isinstance(raw, dict) else None
    if found != schema:
        what = f"has schema {found!r:.100}" if found is not None else "names no schema"
        raise ManifestError(f"{noun} {what}; this aotgaudi reads {schema!r}")


def _canonical_digest(text: str) -> str:
    if str(Digest.parse(text)) != text:
        raise ValueError(f"not a digest in canonical form: {text!r:.100}")
    return text


DigestText = Annotated[str, AfterValidator(_canonical_digest)]
"""``sha256:<64 hex>:<size>``, as `aotgaudi.digest.Digest` writes it."""
