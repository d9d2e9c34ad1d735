"""The envelope of a signature: DSSE v1 (secure-systems-lab/dsse, protocol.md and envelope.md).

::

    {"payload":     base64 of the signed bytes,
     "payloadType": what they are,
     "signatures":  [{"keyid": hint, "sig": base64}, ...]}

What is signed is not this JSON but the pre-authentication encoding of payload and type. As DSSE asks, keys that we
do not know are ignored, base64 may be of either alphabet, and a ``keyid`` is a hint that decides nothing.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Annotated

import pydantic
from pydantic import Field

from aotgaudi.digest import canonical_json
from aotgaudi.document import ForeignValue, first_problem
from aotgaudi.errors import ManifestError

MAX_ENVELOPE_BYTES = 1 << 20
MAX_SIGNATURES = 64


@dataclass(frozen=True, slots=True, order=True)
class Signature:
    """A signature, and the id of the key that is said to have made it."""

    key_id: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Envelope:
    """Signed bytes, what they are, and the signatures over both."""

    payload: bytes
    payload_type: str
    signatures: tuple[Signature, ...]

    def signed_bytes(self) -> bytes:
        """Returns what the signatures are over: the pre-authentication encoding (PAE) of type and payload."""
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
    """Returns the envelope's JSON in canonical form, signatures sorted: equal envelopes have equal bytes."""
    rows = [{"keyid": row.key_id, "sig": _encoded(row.value)} for row in sorted(envelope.signatures)]
    return canonical_json(
        {"payload": _encoded(envelope.payload), "payloadType": envelope.payload_type, "signatures": rows}
    )


def load_envelope(data: bytes) -> Envelope:
    """Parses an envelope. Raises ManifestError in one line; also where one signature is there twice."""
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
