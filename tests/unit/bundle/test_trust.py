"""The trust matrix: whatever nobody trusted has vouched for, as it is now, is refused in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from securesystemslib.dsse import Envelope as ReferenceEnvelope
from securesystemslib.signer import SSlibKey

from aotgaudi.bundle.bundle import Bundle, open_bundle
from aotgaudi.bundle.format import INDEX_NAME, MANIFEST_NAME, SIGNATURE_NAME, load_index
from aotgaudi.bundle.kind import RECEIPT_NAME
from aotgaudi.bundle.receipt import loads as load_receipt
from aotgaudi.bundle.signature import (
    MAX_ENVELOPE_BYTES,
    Signature,
    Statement,
    dump_envelope,
    load_envelope,
)
from aotgaudi.bundle.signing import Signing, SigningKey, add_signatures, generate_key, load_signing_key
from aotgaudi.bundle.trust import TrustPolicy
from aotgaudi.bundle.verify import verify_bundle
from aotgaudi.digest import Digest, canonical_json
from aotgaudi.errors import ManifestError, UntrustedError

if TYPE_CHECKING:
    from tests.unit.bundle.conftest import Sealed

Keys = dict[str, SigningKey]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    """Three pairs: two that are trusted here and there, and a stranger's."""
    folder = tmp_path_factory.mktemp("keys")
    names = ("one", "two", "stranger")
    for name in names:
        generate_key(folder / name)
    return {name: load_signing_key(folder / name) for name in names}


def sign(path: Path, *signers: SigningKey) -> bytes:
    """Signs the bundle at `path` anew, and returns the signature file's bytes."""
    bundle = open_bundle(path)
    signed = Signing(signers).sign(bundle.index_bytes, bundle.index, bundle.receipt)
    (path / SIGNATURE_NAME).write_bytes(signed)
    return signed


def policy(*trusted: SigningKey) -> TrustPolicy:
    return TrustPolicy(keys=frozenset(key.public for key in trusted))


def opened(path: Path, trust: TrustPolicy) -> Bundle:
    return open_bundle(path, trust)


def refused(path: Path, trust: TrustPolicy) -> str:
    """The one line with which the bundle is refused."""
    with pytest.raises(UntrustedError) as caught:
        opened(path, trust)
    message = str(caught.value)
    assert message.startswith(f"bundle {path} ")
    assert "\n" not in message
    assert caught.value.exit_code == 4
    return message


def edit_envelope(path: Path, **changes: Any) -> None:
    envelope = load_envelope((path / SIGNATURE_NAME).read_bytes())
    (path / SIGNATURE_NAME).write_bytes(dump_envelope(replace(envelope, **changes)))


def resign_statement(path: Path, key: SigningKey, change: Callable[[dict[str, Any]], None]) -> None:
    """Puts another statement in place of the one that is there, signed by `key`."""
    envelope = load_envelope((path / SIGNATURE_NAME).read_bytes())
    document = json.loads(envelope.payload)
    change(document)
    bare = replace(envelope, payload=canonical_json(document))
    edit_envelope(path, payload=bare.payload, signatures=(Signature("", key.sign(bare.signed_bytes())),))


# What is accepted


def test_a_signed_bundle_is_accepted_with_its_statement(sealed: Sealed, keys: Keys) -> None:
    sign(sealed.path, keys["one"])

    bundle = opened(sealed.path, policy(keys["one"], keys["two"]))

    assert bundle.statement is not None
    assert verify_bundle(bundle).is_intact


def test_without_trusted_keys_a_signature_is_not_even_read(sealed: Sealed) -> None:
    (sealed.path / SIGNATURE_NAME).write_bytes(b"junk")

    assert sealed.open().statement is None


@pytest.mark.parametrize("hint", ["", "any other", "0" * 64])
def test_a_key_id_is_a_hint_only(sealed: Sealed, keys: Keys, hint: str) -> None:
    """A signature by a trusted key counts whatever it says of itself."""
    sign(sealed.path, keys["one"])
    envelope = load_envelope((sealed.path / SIGNATURE_NAME).read_bytes())
    edit_envelope(sealed.path, signatures=(Signature(hint, envelope.signatures[0].value),))

    assert opened(sealed.path, policy(keys["one"])).statement is not None


def test_strangers_signatures_besides_do_no_harm(sealed: Sealed, keys: Keys) -> None:
    sign(sealed.path, keys["stranger"], keys["one"])

    assert opened(sealed.path, policy(keys["one"])).statement is not None


def test_securesystemslib_accepts_what_we_sign(sealed: Sealed, keys: Keys) -> None:
    document = json.loads(sign(sealed.path, keys["one"], keys["two"]))
    known = [
        SSlibKey.from_crypto(Ed25519PublicKey.from_public_bytes(key.public.raw)) for key in keys.values()
    ]

    accepted = ReferenceEnvelope.from_dict(document).verify(known, 2)

    assert set(accepted) == {keys["one"].public.key_id, keys["two"].public.key_id}


# What is refused


def signature_of(path: Path) -> bytes:
    (first,) = load_envelope((path / SIGNATURE_NAME).read_bytes()).signatures
    return first.value


def as_the_trusted_one(path: Path, keys: Keys) -> None:
    sign(path, keys["stranger"])
    edit_envelope(path, signatures=(Signature(keys["one"].public.key_id, signature_of(path)),))


def over_another_type(path: Path, keys: Keys) -> None:
    other = replace(load_envelope((path / SIGNATURE_NAME).read_bytes()), payload_type="application/json")
    signature = Signature("", keys["one"].sign(other.signed_bytes()))
    edit_envelope(path, payload_type=other.payload_type, signatures=(signature,))


def signed_twice(path: Path, keys: Keys) -> None:
    signatures = (Signature(name, signature_of(path)) for name in (keys["one"].public.key_id, "another name"))
    edit_envelope(path, signatures=tuple(signatures))


def behind_a_link(path: Path, _: Keys) -> None:
    (path / SIGNATURE_NAME).rename(path / "elsewhere")
    (path / SIGNATURE_NAME).symlink_to(path / "elsewhere")


def huge(path: Path, _: Keys) -> None:
    with (path / SIGNATURE_NAME).open("wb") as file:
        file.truncate(1 << 40)


def junk(data: bytes) -> Callable[[Path, Keys], object]:
    return lambda path, _: (path / SIGNATURE_NAME).write_bytes(data)


SPOILT: list[tuple[Callable[[Path, Keys], object], str]] = [
    (
        lambda path, _: (path / SIGNATURE_NAME).unlink(),
        "is not signed, and a trusted key is demanded (sign it: ",
    ),
    (as_the_trusted_one, "names a trusted key and was not made by it"),
    (lambda path, _: (path / INDEX_NAME).write_bytes(b"[" * 1000), "is not what was signed"),
    (over_another_type, "is over 'application/json', should be 'application/vnd.in-toto+json'"),
    (signed_twice, "is there twice"),
    (behind_a_link, "not a regular file"),
    (huge, f"has more than {MAX_ENVELOPE_BYTES} bytes"),
    *(
        (junk(data), "is not to be trusted: signature: ")
        for data in (
            b"",
            b"junk",
            b"\xff\xfe",
            b"[[[[",
            b"null",
            b'{"payload":"","payloadType":"","signatures":[]}',
        )
    ),
]


@pytest.mark.parametrize(("spoil", "words"), SPOILT)
def test_a_signature_that_is_spoilt(
    sealed: Sealed, keys: Keys, spoil: Callable[[Path, Keys], object], words: str
) -> None:
    sign(sealed.path, keys["one"])

    spoil(sealed.path, keys)

    assert words in refused(sealed.path, policy(keys["one"]))


def test_a_strangers_key(sealed: Sealed, keys: Keys) -> None:
    sign(sealed.path, keys["stranger"])

    message = refused(sealed.path, policy(keys["one"]))

    assert "no trusted key has signed it (signed by" in message
    assert f"signed by {keys['stranger'].public.key_id[:12]}" in message
    assert f"trusted: {keys['one'].public.key_id[:12]}" in message


def test_everything_edited_consistently(sealed: Sealed, keys: Keys) -> None:
    """Manifest, receipt and index agree with each other, as after sealing; the signature is another's."""
    sign(sealed.path, keys["one"])
    receipt = load_receipt((sealed.path / RECEIPT_NAME).read_bytes())
    evil = receipt.model_copy(update={"builder": {"aotgaudi": "evil"}}).dumps()
    index = load_index((sealed.path / INDEX_NAME).read_bytes())
    changes = {"receipt": str(Digest.of(evil)), "manifest": str(Digest.of(b"evil"))}
    (sealed.path / RECEIPT_NAME).write_bytes(evil)
    (sealed.path / MANIFEST_NAME).write_bytes(b"evil")
    (sealed.path / INDEX_NAME).write_bytes(index.model_copy(update=changes).dumps())

    assert open_bundle(sealed.path).receipt.builder == {"aotgaudi": "evil"}
    assert "is not what was signed: its index has sha256" in refused(sealed.path, policy(keys["one"]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("manifest_id", "other"),
        ("manifest", str(Digest.of(b"other"))),
        ("receipt", str(Digest.of(b"other"))),
        ("target", {"backend": "cpu", "machine": "vax", "isa": [], "toolchain": {}, "flags": {}}),
        ("builder", {}),
        ("counts", {"programs": 0, "units": 0, "objects": 0, "object_bytes": 0}),
    ],
)
def test_a_statement_that_says_something_else_of_the_same_index(
    sealed: Sealed, keys: Keys, name: str, value: object
) -> None:
    sign(sealed.path, keys["one"])
    resign_statement(sealed.path, keys["one"], lambda document: document["predicate"].update({name: value}))

    assert refused(sealed.path, policy(keys["one"])).endswith(f"the statement has another {name}")


def test_the_signature_of_another_bundle(sealed: Sealed, keys: Keys, tmp_path: Path) -> None:
    """An older bundle's, say, of the same signer."""
    other = tmp_path / "other"
    sealed.pack(other, sealed.receipt.model_copy(update={"builder": {"aotgaudi": "0"}}))
    sign(other, keys["one"])
    shutil.copy(other / SIGNATURE_NAME, sealed.path / SIGNATURE_NAME)

    assert "(it was edited, or is another bundle's)" in refused(sealed.path, policy(keys["one"]))


def test_every_flipped_bit_of_a_signature_is_refused_or_means_nothing(sealed: Sealed, keys: Keys) -> None:
    """A flip can hit what decides nothing: the key id, a name. What is accepted then says the same."""
    data = sign(sealed.path, keys["one"])
    trust = policy(keys["one"])
    expected = opened(sealed.path, trust).statement

    for position in range(0, len(data) * 8, 41):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        (sealed.path / SIGNATURE_NAME).write_bytes(flipped)
        try:
            assert opened(sealed.path, trust).statement == expected
        except UntrustedError:
            continue


# Adding signatures


def statement_of(path: Path) -> Statement:
    bundle = open_bundle(path)
    return Statement.of(bundle.index_bytes, bundle.index, bundle.receipt)


def test_a_signature_added_later_is_as_if_both_had_signed_at_once(sealed: Sealed, keys: Keys) -> None:
    together = sign(sealed.path, keys["one"], keys["two"])
    alone = sign(sealed.path, keys["one"])

    later = add_signatures(alone, (keys["two"],), statement_of(sealed.path))

    assert later == together
    assert add_signatures(later, (keys["one"], keys["two"]), statement_of(sealed.path)) == together


def test_a_forged_signature_in_our_name_is_replaced(sealed: Sealed, keys: Keys) -> None:
    honest = sign(sealed.path, keys["one"])
    edit_envelope(sealed.path, signatures=(Signature(keys["one"].public.key_id, b"forged"),))
    forged = (sealed.path / SIGNATURE_NAME).read_bytes()

    assert add_signatures(forged, (keys["one"],), statement_of(sealed.path)) == honest


def test_nothing_is_added_to_another_bundles_signature(sealed: Sealed, keys: Keys, tmp_path: Path) -> None:
    signed = sign(sealed.path, keys["one"])
    other = tmp_path / "other"
    sealed.pack(other, sealed.receipt.model_copy(update={"builder": {"aotgaudi": "0"}}))

    with pytest.raises(ManifestError, match="is of another bundle"):
        add_signatures(signed, (keys["two"],), statement_of(other))


# Sealing


def test_sealing_twice_gives_the_same_signature(sealed: Sealed, keys: Keys, tmp_path: Path) -> None:
    signing = Signing((keys["two"], keys["one"], keys["one"]))

    sealed.pack(tmp_path / "a", signing=signing)
    sealed.pack(tmp_path / "b", signing=Signing((keys["one"], keys["two"])))

    a, b = ((tmp_path / name / SIGNATURE_NAME).read_bytes() for name in "ab")
    assert a == b
    assert len(load_envelope(a).signatures) == 2
    assert (tmp_path / "a" / SIGNATURE_NAME).stat().st_mode & 0o777 == 0o644
    assert opened(tmp_path / "a", policy(keys["two"])).statement is not None


def test_sealing_unsigned_leaves_an_identical_signed_bundle_alone(sealed: Sealed, keys: Keys) -> None:
    sealed.pack(signing=Signing((keys["one"],)))

    sealed.pack()

    assert opened(sealed.path, policy(keys["one"])).statement is not None
