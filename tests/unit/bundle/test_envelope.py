"""The envelope: DSSE as others write it, and nothing that could be read in two ways."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from securesystemslib.dsse import Envelope as ReferenceEnvelope

from aotgaudi.bundle.signature import (
    MAX_ENVELOPE_BYTES,
    MAX_SIGNATURES,
    Envelope,
    Signature,
    dump_envelope,
    load_envelope,
)
from aotgaudi.errors import ManifestError

ENVELOPE = Envelope(b"payload", "text/plain", (Signature("a", b"one"), Signature("b", b"two")))
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def edited(**changes: Any) -> bytes:
    return json.dumps({**json.loads(dump_envelope(ENVELOPE)), **changes}).encode()


def row(sig: str, keyid: str = "") -> dict[str, str]:
    return {"keyid": keyid, "sig": sig}


def test_the_signed_bytes_are_those_of_the_protocol() -> None:
    """The example in protocol.md of secure-systems-lab/dsse."""
    envelope = Envelope(b"hello world", "http://example.com/HelloWorld", ())

    assert envelope.signed_bytes() == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"


@given(payload=st.binary(max_size=200), kind=TEXT)
def test_the_signed_bytes_are_securesystemslibs(payload: bytes, kind: str) -> None:
    assert Envelope(payload, kind, ()).signed_bytes() == ReferenceEnvelope(payload, kind, {}).pae()


@given(
    payload=st.binary(max_size=200),
    values=st.sets(st.binary(min_size=1, max_size=64), min_size=1, max_size=5),
)
def test_what_is_written_is_read_again(payload: bytes, values: set[bytes]) -> None:
    signatures = tuple(sorted(Signature(f"key {n}", value) for n, value in enumerate(values)))
    envelope = Envelope(payload, "text/plain", signatures)

    assert load_envelope(dump_envelope(envelope)) == envelope
    assert dump_envelope(load_envelope(dump_envelope(envelope))) == dump_envelope(envelope)


def test_the_order_of_signing_is_not_seen() -> None:
    assert dump_envelope(Envelope(b"payload", "text/plain", ENVELOPE.signatures[::-1])) == dump_envelope(
        ENVELOPE
    )


def test_other_tools_envelopes_are_read() -> None:
    """Unknown keys, no key id, white space, base64url."""
    payload = b"\xfb\xef\xff"
    text = json.dumps(
        {
            "payload": base64.urlsafe_b64encode(payload).decode(),
            "payloadType": "x",
            "signatures": [{"sig": base64.b64encode(payload).decode(), "cert": "..."}],
            "more": 1,
        },
        indent=2,
    )

    assert load_envelope(text.encode()) == Envelope(payload, "x", (Signature("", payload),))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "signature: document: Invalid JSON"),
        (b"\x00\xff junk", "signature: document: Invalid JSON"),
        (b"[" * 100_000, "signature: document: Invalid JSON"),
        (b"[]", "signature: document: "),
        (b"{}", "signature: payload: Field required"),
        (edited(payload=1), "signature: payload: "),
        (edited(payload="not base64!"), "signature: not base64"),
        (edited(payload="YQ"), "signature: not base64"),
        (edited(payload="YQ==\u00e9"), "signature: not base64"),
        (edited(payloadType=None), "signature: payloadType: "),
        (edited(signatures=[]), "signature: signatures: "),
        (edited(signatures=[row("YQ==")] * 2), "is there twice"),
        (edited(signatures=[row("YQ==", "k"), row("Yg==", "k")]), "is there twice"),
        (edited(signatures=[row(f"{n:04}") for n in range(MAX_SIGNATURES + 1)]), "signature: signatures: "),
        (b" " * (MAX_ENVELOPE_BYTES + 1), f"has more than {MAX_ENVELOPE_BYTES} bytes"),
    ],
)
def test_a_malformed_envelope_is_refused_in_one_line(data: bytes, message: str) -> None:
    with pytest.raises(ManifestError, match=message) as caught:
        load_envelope(data)
    assert "\n" not in str(caught.value)


@given(data=st.binary(max_size=300))
def test_no_bytes_are_a_traceback(data: bytes) -> None:
    with pytest.raises(ManifestError):
        load_envelope(data)
