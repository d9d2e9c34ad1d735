"""`verify` and `serve` in a container that may write nowhere and does not know its user."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from aotgaudi.backends.base import Target
from aotgaudi.bundle.pack import pack_bundle
from aotgaudi.bundle.receipt import Receipt, SealedUnit
from aotgaudi.bundle.signing import Signing, generate_key, load_signing_key
from aotgaudi.entries import Entry
from aotgaudi.graphs.program import Call, Program
from aotgaudi.manifest.manifest import Manifest, dumps
from aotgaudi.store.cas import ObjectStore
from tests.container import UID, contained
from tests.specs import FOUR, ONE_SEQUENCE, outputs_for, spec_of


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that everybody may read: a signed bundle of the fake backend, a key, an empty model directory."""
    with tempfile.TemporaryDirectory(prefix="aotgaudi-container-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        _furnish(folder)
        yield folder


def _furnish(folder: Path) -> None:
    manifest = Manifest.of(spec_of(limits=ONE_SEQUENCE))
    objects = ObjectStore(folder / "store")
    program = Program(
        inputs=(),
        weights=(),
        caches=(),
        calls=(Call(unit="a" * 64, inputs=(), outputs=FOUR),),
        outputs=(),
    )

    def digest(entry: Entry) -> str:
        return str(objects.put_bytes(program.model_copy(update={"outputs": outputs_for(entry)}).dumps()))

    receipt = Receipt(
        manifest_id=manifest.id,
        target=Target(backend="fake", machine="none"),
        programs={entry.id: digest(entry) for entry in manifest.entries},
        units={"a" * 64: SealedUnit(artifact={"unit.so": str(objects.put_bytes(b"code"))}, tolerance=0.0)},
        builder={},
    )
    generate_key(folder / "key")
    signing = Signing((load_signing_key(folder / "key"),))
    pack_bundle(dumps(manifest), manifest.id, receipt, objects, folder / "bundle", signing)
    (folder / "model").mkdir(mode=0o755)


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = contained([sys.executable, "-m", "aotgaudi", *map(str, arguments)], environment)
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "environment", [{}, {"HOME": "/"}, {"HOME": "/nowhere"}], ids=["none", "root", "bad"]
)
def test_verifying(place: Path, environment: dict[str, str]) -> None:
    done = run("verify", "--no-target", place / "bundle", "--trusted-key", place / "key.pub", **environment)

    assert (done.returncode, done.stderr) == (0, "")
    assert "signed    by one of 1 trusted keys" in done.stdout


def test_a_refused_start(place: Path) -> None:
    done = run(
        "serve", "--bundle", place / "bundle", "--model", place / "model", "--require-warm", "--port", "0"
    )

    assert done.returncode == 5
    assert done.stderr.startswith("error: target: compiled for the backend 'fake'")
    assert "Traceback" not in done.stderr


def test_a_bundle_of_somebody_elses(place: Path) -> None:
    """Neither ours nor root's."""
    copy = Path(shutil.copytree(place / "bundle", place / "foreign"))
    for path in (copy, *copy.rglob("*")):
        os.chown(path, 12345, 0)

    done = run("serve", "--bundle", copy, "--model", place / "model", "--require-warm", "--port", "0")

    assert done.returncode == 4
    assert f"belongs to uid 12345, who can change it; it must belong to root, or to uid {UID}" in done.stderr
    assert run("verify", "--no-target", copy, "--allow-unsafe-permissions").returncode == 0


def test_nothing_can_be_written_and_the_refusal_is_a_line() -> None:
    done = run("key", "generate", "/key")

    assert done.returncode == 2
    assert "cannot be written: Read-only file system" in done.stderr or "Permission denied" in done.stderr
    assert "Traceback" not in done.stderr
