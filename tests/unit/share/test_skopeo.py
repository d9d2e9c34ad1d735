"""What skopeo is asked, and what is said where it is missing or fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aotgaudi.errors import RemoteError, SpecError
from aotgaudi.share.image import copy_image, layout_name

pytestmark = pytest.mark.process

DIGEST = f"sha256:{'a' * 64}"


@pytest.fixture
def skopeo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only program on the path: it writes down its arguments, and runs a line of shell (SKOPEO_DOES)."""
    path = tmp_path / "bin" / "skopeo"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/arguments\neval "$SKOPEO_DOES"\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent))
    monkeypatch.setenv(
        "SKOPEO_DOES", f'while [ "$1" != --digestfile ]; do shift; done; printf {DIGEST} > "$2"'
    )
    return path


def test_an_image_is_copied(skopeo: Path, tmp_path: Path) -> None:
    assert copy_image("docker://a/b:c", "-odd") == DIGEST

    plain = (tmp_path / "arguments").read_text().split()
    copy_image("docker://a/b:c", "-odd", is_insecure=True, architecture="arm64")
    more = (tmp_path / "arguments").read_text().split()

    assert plain[0] == "copy"
    assert plain[-3:] == ["--", "docker://a/b:c", "-odd"]
    assert not [word for word in plain if "tls" in word or "override" in word]
    assert more[:5] == ["--override-os", "linux", "--override-arch", "arm64", "copy"]
    assert {"--src-tls-verify=false", "--dest-tls-verify=false"} < set(more)


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("echo first >&2; echo the last >&2; exit 1", "skopeo: the last"),
        ("exit 3", "skopeo: it failed without a message"),
        (
            'echo \'time="2026" level=fatal msg="reading \\"x\\": unauthorized"\' >&2; exit 1',
            'skopeo: reading "x": unauthorized',
        ),
    ],
)
def test_its_last_line_is_ours(skopeo: Path, monkeypatch: pytest.MonkeyPatch, does: str, said: str) -> None:
    monkeypatch.setenv("SKOPEO_DOES", does)

    with pytest.raises(RemoteError) as caught:
        copy_image("docker://a/b", "oci:x")
    assert str(caught.value) == said


def test_where_it_is_missing_it_is_said_how_it_is_installed(skopeo: Path) -> None:
    skopeo.chmod(0o644)
    with pytest.raises(RemoteError, match="cannot be started: Permission denied"):
        copy_image("docker://a/b", "oci:x")

    skopeo.unlink()
    with pytest.raises(RemoteError, match=r"is not installed \(apt-get install skopeo, dnf install skopeo, "):
        copy_image("docker://a/b", "oci:x")


def is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it(skopeo: Path, tmp_path: Path, number: int) -> None:
    # A second, in which `subprocess` hears that the program has begun: before that, nobody could end it.
    does = f"/bin/sleep 1; echo $$ > {tmp_path}/id; exec /bin/sleep 60"
    words = [sys.executable, "-m", "aotgaudi", "pull", "docker://a/b:c", "-o", "out"]
    # Interrupts are ignored, as in a script's background jobs.
    process = subprocess.Popen(
        ["/bin/sh", "-c", "trap '' INT; exec \"$@\"", "sh", *words],
        cwd=tmp_path,
        env={**os.environ, "SKOPEO_DOES": does},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "id").exists() or not (tmp_path / "id").read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)

    assert (process.returncode, errors) == (130, "interrupted\n")
    while is_running(int((tmp_path / "id").read_text())):  # Until init has reaped it.
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not list(tmp_path.glob("*out*"))


def test_a_path_that_skopeo_would_read_otherwise_is_refused() -> None:
    assert layout_name(Path("a/b")) == "oci:a/b"
    with pytest.raises(SpecError, match="no path with a colon"):
        layout_name(Path("a:b/c"))
