"""``aotgaudi key`` and ``sign`` as JSON, in a build and before ``serve``; more is in tests/transcripts/sign.txt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from aotgaudi.backends.base import Target
from aotgaudi.bundle.signing import add_signatures
from aotgaudi.bundle.trust import load_trusted_key
from aotgaudi.manifest.manifest import Manifest
from tests.command import Command
from tests.specs import ONE_SEQUENCE, spec_of
from tests.unit.cli.test_build_commands import Place
from tests.unit.cli.test_verify_command import seal

run = Command()


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return Manifest.of(spec_of(limits=ONE_SEQUENCE))


@pytest.fixture
def bundle(manifest: Manifest, tmp_path: Path) -> Path:
    return seal(manifest, tmp_path, target=Target(backend="fake", machine="none"))


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "ci.key"
    assert run("key", "generate", path).exit_code == 0
    return path


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "release.key"
    assert run("key", "generate", path).exit_code == 0
    return path


def public(path: Path) -> Path:
    return path.with_name(f"{path.name}.pub")


def test_json_says_which_files_were_made_and_who_has_signed(bundle: Path, tmp_path: Path) -> None:
    made = run.document("key", "generate", tmp_path / "k")
    first = run.document("sign", bundle, "--sign-key", tmp_path / "k")
    second = run.document("sign", bundle, "--sign-key", tmp_path / "k")

    assert made == {
        "private_key": str(tmp_path / "k"),
        "public_key": str(tmp_path / "k.pub"),
        "key_id": load_trusted_key(tmp_path / "k.pub").key_id,
    }
    assert first == {
        "bundle": str(bundle),
        "signature": str(bundle / "aotgaudi.signature.json"),
        "is_new": True,
        "key_ids": [made["key_id"]],
    }
    assert second == {**first, "is_new": False}


@pytest.mark.process
def test_serve_has_the_same_options_and_refuses_before_torch(bundle: Path, key: Path, tmp_path: Path) -> None:
    """A refusal of trust comes before anything heavy is imported."""
    code = (
        "import sys\nfrom aotgaudi.cli.main import cli\n"
        "try:\n    cli(sys.argv[1:])\n"
        "finally:\n    print('torch' in sys.modules, 'boto3' in sys.modules)"
    )
    where = ("serve", "--bundle", bundle, "--model", tmp_path, "--port", 0)
    arguments = (*where, "--trusted-key", public(key))
    command = [sys.executable, "-c", code, *map(str, arguments)]

    unsigned = subprocess.run(command, capture_output=True, text=True, check=False)
    run("sign", bundle, "--sign-key", key)
    bundle.chmod(0o777)
    unsafe = subprocess.run(command, capture_output=True, text=True, check=False)
    command.append("--allow-unsafe-permissions")
    unbound = subprocess.run(command, capture_output=True, text=True, check=False)
    signed = subprocess.run([*command, "--allow-unbound-model"], capture_output=True, text=True, check=False)

    assert (unsigned.returncode, unsigned.stdout) == (4, "False False\n")
    assert "is not signed" in unsigned.stderr
    assert (unsafe.returncode, unsafe.stdout) == (4, "False False\n")
    assert "can be written to by everybody" in unsafe.stderr
    assert (unbound.returncode, unbound.stdout) == (4, "False False\n")
    assert "does not bind its model" in unbound.stderr
    assert signed.returncode == 5, signed.stderr
    assert "compiled for the backend 'fake'" in signed.stderr


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    return Place(tmp_path)


@pytest.mark.process
def test_building_signed_twice_gives_the_same_bytes_and_the_second_does_nothing(
    place: Place, key: Path, other: Path
) -> None:
    signing = ("--sign-key", key, "--sign-key", other)
    first = run("build", place.spec, "--store", place.store, "-j", 1, *signing)
    assert first.exit_code == 0, first.output
    path = place.folder / "tiny.bundle" / "aotgaudi.signature.json"
    before = (path.read_bytes(), path.stat().st_ino)

    run("build", place.spec, "--store", place.store, "-j", 1, *signing)
    assert (path.read_bytes(), path.stat().st_ino) == before
    elsewhere = run("build", "bundle", place.spec, "-o", "again", "--store", place.store, *signing)

    assert elsewhere.exit_code == 0, elsewhere.output
    assert (place.folder / "again" / path.name).read_bytes() == before[0]
    assert run("verify", "--no-target", "again", "--trusted-key", public(other)).exit_code == 0


def test_of_two_signers_at_once_the_second_is_refused(
    bundle: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second: list[Result] = []

    def meanwhile(*arguments: Any) -> bytes:
        second.append(run("sign", bundle, "--sign-key", key))
        return add_signatures(*arguments)

    monkeypatch.setattr("aotgaudi.cli.sign.add_signatures", meanwhile)

    assert run("sign", bundle, "--sign-key", key).exit_code == 0
    assert second[0].exit_code == 2
    assert "another process holds its lock (sign again when it has ended)" in second[0].output
