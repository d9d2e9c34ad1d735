"""Commands as OpenShift runs containers: an arbitrary uid, group 0, no home, a read-only root file system.

The uid has no entry in the password file. Nothing can be written anywhere, not even to a temporary directory. It takes
root and mount namespaces to arrange that.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType

import pytest

import aotgaudi

UID = 1000650000
_READ_ONLY = "mount --make-rprivate / && mount -o remount,bind,ro / && umask 077 && cd / && exec "
_READ_ANYTHING = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
"""For an interpreter that lies in root's home, as pyenv's may."""


def contained(
    command: Sequence[str], environment: Mapping[str, str], volumes: Mapping[Path, int] = MappingProxyType({})
) -> list[str]:
    """Returns what runs `command` so, with `environment` and nothing else. Skips the test where that cannot be.

    `volumes` are directories where root's memory is mounted with a mode, as an ``emptyDir`` is.
    """
    variables = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(Path(aotgaudi.__file__).parents[1]),
        **environment,
    }
    settings = [f"{name}={value}" for name, value in variables.items()]
    inner = shlex.join([*drop_privileges(), "env", "-i", *settings, *command])
    mounted = (f"mount -t tmpfs -o mode={mode:o} none {path} && " for path, mode in volumes.items())
    return ["unshare", "-m", "bash", "-c", _reachable() + "".join(mounted) + _READ_ONLY + inner]


def _reachable() -> str:
    """Mounts this interpreter, if it lies in a home that others may not enter, so that they may run it."""
    base = Path(sys.base_prefix)
    private = [path for path in base.parents if not path.stat().st_mode & 0o001]
    if not private:
        return ""
    return (
        f"mount --bind {base} /mnt && mount -t tmpfs -o mode=0755 none {private[-1]} && mkdir -p {base}"
        f" && mount --bind /mnt {base} && "
    )


@cache
def can_mount() -> bool:
    """Whether a mount namespace of one's own is permitted here."""
    return subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode == 0


@cache
def drop_privileges(uid: int = UID, gid: int = 0) -> tuple[str, ...]:
    """Returns what goes before a command that is to run as that user. Skips the test where that cannot be."""
    setpriv = ("setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups")
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "setpriv", "mount"))):
        pytest.skip("needs root, unshare and setpriv")
    code = f"import os; assert os.geteuid() == {uid}; assert not os.access('/', os.W_OK)"
    for extra in ((), _READ_ANYTHING):
        inner = shlex.join([*setpriv, *extra, "env", sys.executable, "-c", code])
        probe = ["unshare", "-m", "bash", "-c", _READ_ONLY + inner]
        if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
            return (*setpriv, *extra)
    pytest.skip("needs mount namespaces")
