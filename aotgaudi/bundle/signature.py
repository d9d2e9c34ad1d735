"""The signature of a bundle: a DSSE envelope around an in-toto statement, which names the bundle's index.

The envelope (DSSE v1: secure-systems-lab/dsse, protocol.md and envelope.md)::

    {"payload":     base64 of the signed bytes,
     "payloadType": their type,
     "signatures":  [{"keyid": hint, "sig": base64}, ...]}

The signature does not cover this JSON but the pre-authentication encoding of payload and type. As DSSE requires, unknown
keys of the JSON are ignored, base64 may use either alphabet, and a ``keyid`` is only a hint.

The payload (in-toto Statement v1: in-toto/attestation, spec/v1/statement.md) is the canonical JSON (RFC 8785) of::

    {"_type":         "https://in-toto.io/Statement/v1",
     "subject":       [{"name": "aotgaudi.bundle.json", "digest": {"sha256": of the index's bytes}}],
     "predicateType": "https://github.com/aotgaudi/aotgaudi/bundle/v1",
     "predicate":     {"manifest_id": the manifest's id,
                       "manifest":    digest of manifest.json,
                       "receipt":     digest of receipt.json,
                       "target":      the receipt's target,
                       "builder":     the receipt's builder,
                       "counts":      the index's counts,
                       "epoch":       0}}

Versions of the predicate: v1 (first).

Everything follows from the bundle, so the same bundle and key give the same bytes.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from aotgaudi.backends.base import Target
from aotgaudi.bundle.format import INDEX_NAME, BundleIndex, Counts
from aotgaudi.bundle.receipt import SealedReceipt
from aotgaudi.digest import canonical_json, sha256_bytes
from aotgaudi.document import DigestField, Document, ForeignValue, Sha256, Value, first_problem, load_document
from aotgaudi.errors import ManifestError

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE: Literal["https://in-toto.io/Statement/v1"] = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Literal["https://github.com/aotgaudi/aotgaudi/bundle/v1"] = (
    "https://github.com/aotgaudi/aotgaudi/bundle/v1"
)
MAX_ENVELOPE_BYTES = 1 << 20
MAX_SIGNATURES = 64


@dataclass(frozen=True, slots=True, order=True)
class Signature:
    """A signature, and the id of the key that claims to have made it."""

    key_id: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Envelope:
    """Signed bytes, their type, and the signatures over both."""

    payload: bytes
    payload_type: str
    signatures: tuple[Signature, ...]

    def signed_bytes(self) -> bytes:
        """Returns the bytes that the signatures cover: the pre-authentication encoding (PAE) of type and payload."""
        kind = self.payload_type.encode()
        return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(self.payload), self.payload)


class _SignatureJson(ForeignValue):
    keyid: Annotated[str, Field(max_length=200)] = ""
    sig: str


class _EnvelopeJson(ForeignValue):
    payload: str
    payloadType: Annotated[str, Field(max_length=200)]  # noqa: N815 - the name in the format
    signatures: Annotated[list[_SignatureJson], Field(min_length=1, max_length=MAX_SIGNATURES)]


def dump_envelope(envelope: Envelope) -> bytes:
    """Returns the envelope's JSON in canonical form with sorted signatures, so that equal envelopes have equal bytes."""
    rows = [{"keyid": row.key_id, "sig": _encoded(row.value)} for row in sorted(envelope.signatures)]
    return canonical_json(
        {"payload": _encoded(envelope.payload), "payloadType": envelope.payload_type, "signatures": rows}
    )


def load_envelope(data: bytes) -> Envelope:
    """Parses an envelope. Raises ManifestError of one line, also for a repeated signature."""
    if len(data) > MAX_ENVELOPE_BYTES:
        raise ManifestError(f"signature: has more than {MAX_ENVELOPE_BYTES} bytes")
    try:
        raw = _EnvelopeJson.model_validate_json(data)
    except pydantic.ValidationError as error:
        raise ManifestError(f"signature: {first_problem(error)}") from error
    signatures = tuple(Signature(row.keyid, _decoded(row.sig)) for row in raw.signatures)
    ids = [row.key_id for row in signatures if row.key_id]
    if len(set(ids)) < len(ids) or len({row.value for row in signatures}) < len(signatures):
        raise ManifestError("signature: the same signature, or key id, is there twice")
    return Envelope(_decoded(raw.payload), raw.payloadType, signatures)


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text.translate({ord("-"): "+", ord("_"): "/"}), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ManifestError(f"signature: not base64: {error}") from error


class SubjectDigest(Value):
    """The sha256 of the index's bytes, 64 hex digits."""

    sha256: Sha256


class Subject(Value):
    """The signed file, which is the index. It names everything else."""

    name: Literal["aotgaudi.bundle.json"] = INDEX_NAME
    digest: SubjectDigest


class Predicate(Value):
    """The description of the signed bundle, see the module."""

    manifest_id: str
    manifest: DigestField
    receipt: DigestField
    target: Target
    builder: dict[str, str]
    counts: Counts
    epoch: Literal[0] = 0


class Statement(Document):
    """The signed statement, see the module."""

    type_: Literal["https://in-toto.io/Statement/v1"] = Field(default=STATEMENT_TYPE, alias="_type")
    subject: Annotated[tuple[Subject, ...], Field(min_length=1, max_length=1)]
    predicate_type: Literal["https://github.com/aotgaudi/aotgaudi/bundle/v1"] = Field(
        default=PREDICATE_TYPE, alias="predicateType"
    )
    predicate: Predicate

    @classmethod
    def of(cls, index_bytes: bytes, index: BundleIndex, receipt: SealedReceipt) -> Statement:
        """Returns the statement to sign for the bundle with these documents."""
        return cls(
            subject=(Subject(digest=SubjectDigest(sha256=sha256_bytes(index_bytes))),),
            predicate=Predicate(
                manifest_id=index.manifest_id,
                manifest=index.manifest,
                receipt=index.receipt,
                target=receipt.target,
                builder=receipt.builder,
                counts=index.counts,
            ),
        )

    @property
    def index_sha256(self) -> str:
        """The sha256 of the signed index, 64 hex digits."""
        return self.subject[0].digest.sha256


def load_statement(data: bytes) -> Statement:
    """Parses the canonical bytes of a statement. Raises ManifestError, which names the place of the fault."""
    return load_document(data, Statement, "signed statement")
