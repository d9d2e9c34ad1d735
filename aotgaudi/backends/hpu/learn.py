"""Finds out what only a process with a card can know: its type, Synapse's version, and that the keys of recipes repeat.

`learn` starts such a process (``main`` of `frontend`) once for each installation of the software, and keeps the answer.
Imports no torch.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import get_args

from aotgaudi.child import python_command
from aotgaudi.digest import canonical_json, sha256_bytes
from aotgaudi.errors import AotGaudiError, CardError, CompileError, TargetError, store_error
from aotgaudi.files import make_directories, write_atomic
from aotgaudi.gaudi.environment import process_environment
from aotgaudi.gaudi.identity import DeviceType
from aotgaudi.gaudi.recipes import require_room

_SECONDS = 300.0
_ERRORS: Mapping[str, type[AotGaudiError]] = MappingProxyType(
    {error.__name__: error for error in (CardError, CompileError, TargetError)}
)


@dataclass(frozen=True, slots=True)
class Learnt:
    """What a card said."""

    device_type: DeviceType
    synapse: str


def learn(software: Mapping[str, str], environment: Mapping[str, str], memory: Path) -> Learnt:
    """Returns what is known of this machine's cards, from `memory` if a process has asked one with the same `software`.

    Raises:
        CardError: no card can be acquired; two processes have tried.
        StoreError: there is no room for temporary files.
        CompileError: keys do not repeat.
        TargetError: what the card says cannot be understood, or the bridge cannot be imported.
    """
    path = memory / f"learnt-{sha256_bytes(canonical_json(dict(software)))[:16]}.json"
    try:
        return Learnt(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        try:
            found = _ask(environment)
        except CardError:  # A driver that does not answer one process may answer the next.
            found = _ask(environment)
    make_directories(memory)
    write_atomic(path, canonical_json(asdict(found)))
    return found


def _ask(environment: Mapping[str, str]) -> Learnt:
    try:
        made = tempfile.TemporaryDirectory(prefix="aotgaudi-learn-")
    except OSError as error:
        raise store_error("make a directory in", Path(tempfile.gettempdir()), error) from error
    with made as scratch:
        result = Path(scratch, "result.json")
        try:
            done = subprocess.run(
                python_command("aotgaudi.backends.hpu.frontend", str(result)),
                env=process_environment(environment, Path(scratch, "recipes")),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=_SECONDS,
                check=False,
                text=True,
                errors="replace",
            )
        except subprocess.TimeoutExpired as error:
            raise CardError(f"target: a process that asks a card took more than {_SECONDS:g} s") from error
        try:
            found = json.loads(result.read_bytes())
        except (OSError, ValueError) as error:
            require_room(Path(scratch), "what a card said")
            last = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise TargetError(f"target: no card could be asked: {last[-1][:500]}") from error
    if "problem" in found:
        raise _ERRORS[found["error"]](str(found["problem"]))
    if found["device_type"] not in get_args(DeviceType):
        raise TargetError(f"target.machine: the card is called {found['device_type']!r}, which is not known")
    return Learnt(**found)
