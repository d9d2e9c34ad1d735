"""Copies images with skopeo, which speaks to registries and knows their credentials, certificates and mirrors."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

from aotgaudi.errors import RemoteError, SpecError

_STANDARD_ERROR = 2
_MESSAGE = re.compile(r'msg="((?:[^"\\]|\\.)*)"')
_INSTALL = "apt-get install skopeo, dnf install skopeo, or brew install skopeo"


def copy_image(
    source: str, destination: str, *, is_insecure: bool = False, architecture: str | None = None
) -> str:
    """Copies an image between two names of skopeo's, and returns the digest of its manifest at the destination.

    Args:
        source: An image, as ``docker://HOST/NAME:TAG`` or in another of skopeo's transports.
        destination: Where to write it.
        is_insecure: Use plain http and unverified TLS with registries, too.
        architecture: Of an image for several platforms, take the one for Linux on this architecture, not on this machine's.

    Raises RemoteError if skopeo is missing or fails.
    """
    has_terminal = os.isatty(_STANDARD_ERROR)
    with tempfile.TemporaryDirectory() as folder:
        digest = Path(folder, "digest")
        command = ["skopeo"]
        if architecture is not None:
            command += ["--override-os", "linux", "--override-arch", architecture]
        command += ["copy", "--digestfile", str(digest)]
        if not has_terminal:
            command.append("--quiet")
        if is_insecure:
            command += ["--src-tls-verify=false", "--dest-tls-verify=false"]
        try:
            done = subprocess.run(
                [*command, "--", source, destination],
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=_STANDARD_ERROR if has_terminal else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
        except FileNotFoundError as error:
            raise RemoteError(f"skopeo, which copies images, is not installed ({_INSTALL})") from error
        except OSError as error:
            raise RemoteError(f"skopeo cannot be started: {error.strerror}") from error
        if done.returncode:
            raise RemoteError(f"skopeo: {_last_message(done.stderr)}")
        return digest.read_text(encoding="ascii")


def layout_name(root: Path) -> str:
    """Returns skopeo's name of an image layout. Raises SpecError: skopeo takes what follows a colon for a tag."""
    if ":" in str(root):
        raise SpecError(str(root), "skopeo reads no path with a colon", "another directory")
    return f"oci:{root}"


def _last_message(text: str) -> str:
    line = (text.strip().splitlines() or ["it failed without a message"])[-1]
    found = _MESSAGE.search(line)
    return re.sub(r"\\(.)", r"\1", found[1]) if found else line
