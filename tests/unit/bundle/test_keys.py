"""Key files: made once, kept secret, and read as nothing else than what they are."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from securesystemslib.signer import SSlibKey

from aotgaudi.bundle.signing import generate_key, load_signing_key
from aotgaudi.bundle.trust import TrustedKey, load_trusted_key
from aotgaudi.errors import AotGaudiError, SpecError, UntrustedError


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o077, 0o000])
def test_a_pair_is_written_and_only_we_can_read_the_secret(tmp_path: Path, umask: int) -> None:
    previous = os.umask(umask)
    try:
        made = generate_key(tmp_path / "k")
    finally:
        os.umask(previous)

    assert (mode(tmp_path / "k"), mode(tmp_path / "k.pub")) == (0o600, 0o644)
    assert load_signing_key(tmp_path / "k").public == load_trusted_key(tmp_path / "k.pub") == made


@pytest.mark.parametrize("name", ["k", "k.pub"])
def test_nothing_is_overwritten_and_no_half_pair_is_left(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"mine")

    with pytest.raises(SpecError, match=f"{name}: is there already"):
        generate_key(tmp_path / "k")

    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == b"mine"


def test_a_place_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"none/k\.pub: cannot be written: No such file"):
        generate_key(tmp_path / "none" / "k")


def test_signatures_are_deterministic_and_only_over_those_bytes(tmp_path: Path) -> None:
    public = generate_key(tmp_path / "k")
    key = load_signing_key(tmp_path / "k")

    signature = key.sign(b"data")

    assert signature == load_signing_key(tmp_path / "k").sign(b"data")
    assert public.has_signed(signature, b"data")
    assert not public.has_signed(signature, b"datA")
    assert not public.has_signed(signature[:-1], b"data")
    assert not public.has_signed(b"", b"data")
    assert not generate_key(tmp_path / "other").has_signed(signature, b"data")


def test_the_key_id_is_securesystemslibs(tmp_path: Path) -> None:
    made = generate_key(tmp_path / "k")
    public = ed25519.Ed25519PublicKey.from_public_bytes(made.raw)

    assert made.key_id == SSlibKey.from_crypto(public).keyid
    assert TrustedKey(made.raw) == made


def test_a_secret_is_not_printed(tmp_path: Path) -> None:
    generate_key(tmp_path / "k")

    assert "rivate" not in repr(load_signing_key(tmp_path / "k"))


@pytest.mark.parametrize("wrong", [0o640, 0o604, 0o660, 0o644, 0o610])
def test_a_secret_that_others_may_read_is_refused(tmp_path: Path, wrong: int) -> None:
    generate_key(tmp_path / "k")
    (tmp_path / "k").chmod(wrong)

    with pytest.raises(UntrustedError, match=f"others may read this key .mode {wrong:04o}. .chmod 600"):
        load_signing_key(tmp_path / "k")


def private_pem(key: ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey, password: bytes = b"") -> bytes:
    encryption = BestAvailableEncryption(password) if password else NoEncryption()
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)


def public_pem(key: ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


ED, EC = ed25519.Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP256R1())


@pytest.mark.parametrize(
    ("load", "data", "message"),
    [
        (load_signing_key, b"junk", "is not a private key in PEM"),
        (load_signing_key, b"", "is not a private key in PEM"),
        (load_signing_key, public_pem(ED), "is not a private key in PEM"),
        (load_signing_key, private_pem(ED, b"secret"), "is encrypted"),
        (load_signing_key, private_pem(EC), "is not an ed25519 key"),
        (load_trusted_key, b"junk", "is not a public key in PEM"),
        (load_trusted_key, private_pem(ED), "is a private key"),
        (load_trusted_key, public_pem(EC), "is not an ed25519 key"),
        (load_trusted_key, b"x" * (1 << 20), "is too large for a key"),
        (load_trusted_key, public_pem(ED) * 2, "holds 2 PEM blocks"),
        (load_signing_key, private_pem(ED) + private_pem(EC), "holds 2 PEM blocks"),
    ],
)
def test_what_is_no_key_is_refused_in_one_line(
    tmp_path: Path, load: object, data: bytes, message: str
) -> None:
    path = tmp_path / "k"
    path.write_bytes(data)
    path.chmod(0o600)

    with pytest.raises(AotGaudiError, match=f"{path}: {message}") as caught:
        load(path)  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_a_fifo_or_a_device_is_no_key_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")

    for load in (load_signing_key, load_trusted_key):
        for path, kind in ((tmp_path / "fifo", "a FIFO"), (Path("/dev/zero"), "a device")):
            with pytest.raises(SpecError, match=f"{path}: cannot be read: it is {kind}"):
                load(path)


def test_a_key_that_is_not_there_is_named(tmp_path: Path) -> None:
    for load in (load_signing_key, load_trusted_key):
        with pytest.raises(SpecError, match=r"none: cannot be read: No such file .*aotgaudi key generate"):
            load(tmp_path / "none")
