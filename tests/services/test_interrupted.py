"""A pull that is killed or interrupted goes on where it was; a whole process against a registry that hangs."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.receipt import SealedUnit
from aotgaudi.digest import Digest
from aotgaudi.share.push_pull import push_bundle
from aotgaudi.share.transfer import Conduct
from tests.services.conftest import files
from tests.unit.bundle.conftest import LAYER, Sealed
from tests.unit.share.conftest import remote_of
from tests.unit.share.fake_registry import FakeRegistry, Handler, fake_registry

LARGE = bytes(range(251)) * 40_000
HALF = len(LARGE) // 2
DIGEST = Digest.of(LARGE)


@pytest.fixture
def registry(sealed: Sealed) -> Iterator[FakeRegistry]:
    """Has a bundle with one large object, of which it sends half and then nothing."""
    sealed.objects.put_bytes(LARGE)
    units = {**sealed.receipt.units, LAYER: SealedUnit(artifact={"unit.so": str(DIGEST)}, tolerance=0.0)}
    sealed.pack(receipt=sealed.receipt.model_copy(update={"units": units}))
    with fake_registry() as registry:
        push_bundle(open_bundle(sealed.path), remote_of(registry), "v1", Conduct())
        release = threading.Event()

        def hang(handler: Handler) -> bool:
            if handler.command != "GET" or not handler.path.endswith(DIGEST.sha256):
                return False
            handler.answer(200, LARGE[:HALF], Content_Length=str(len(LARGE)))
            handler.wfile.flush()
            release.wait(60)
            handler.close_connection = True
            return True

        registry.faults.append(hang)
        yield registry
        release.set()


def start(registry: FakeRegistry, out: Path) -> subprocess.Popen[str]:
    arguments = [
        sys.executable,
        "-m",
        "aotgaudi",
        "cache",
        "pull",
        f"{registry.host}/team/bundle:v1",
        "-o",
        str(out),
    ]
    ignoring = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]  # Interrupts, as in a script's background jobs.
    return subprocess.Popen(
        [*ignoring, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_half(out: Path) -> None:
    partial = out.with_name(f".{out.name}.pull") / ".partial" / DIGEST.sha256
    deadline = time.monotonic() + 30
    while not (partial.exists() and partial.stat().st_size == HALF):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_pull_goes_on_where_it_was_ended(
    sealed: Sealed, registry: FakeRegistry, tmp_path: Path, number: signal.Signals
) -> None:
    process = start(registry, tmp_path / "out")
    wait_for_half(tmp_path / "out")
    ended = time.monotonic()
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)

    assert time.monotonic() - ended < 10
    assert process.returncode == (130 if number == signal.SIGINT else -9)
    assert errors == ("interrupted\n" if number == signal.SIGINT else "")
    assert not (tmp_path / "out").exists()

    registry.faults.clear()
    again = start(registry, tmp_path / "out")
    output, errors = again.communicate(timeout=60)

    assert (again.returncode, errors) == (0, "")
    assert "all verified" in output
    assert files(tmp_path / "out") == files(sealed.path)
    assert f"bytes={HALF}-" in registry.ranges
