"""What code for a Gaudi is compiled for: the named components of its target. Imports neither torch nor habana_frameworks.

``aotgaudi doctor --hpu --write-target FILE`` makes one on a machine with a card and writes it down (docs/formats/target.md):
two of its components only a process that holds a card can learn (`learn`). Elsewhere it is read, to plan with.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import get_args

from aotgaudi.backends.base import Target, version_of
from aotgaudi.child import python_command
from aotgaudi.digest import canonical_json, sha256_bytes
from aotgaudi.errors import AotGaudiError, CardError, CompileError, SpecError, TargetError, store_errors
from aotgaudi.files import make_directories, write_atomic
from aotgaudi.gaudi.environment import ENGINE_RULES, may_change_code, process_environment, sealed_variables
from aotgaudi.gaudi.identity import (
    PLUGIN,
    DeviceType,
    Installation,
    find_cards,
    library_digests,
    python_version,
)
from aotgaudi.gaudi.recipes import require_room

TOOLCHAIN: Mapping[str, str] = MappingProxyType(
    {
        "torch": "its version",
        "python": "its version, major and minor: the bridge's libraries differ by it",
        PLUGIN: "the bridge's version",
        "synapse": "as the device's capability and the names of recipes have it; learnt from a card",
        "bridge": "sha256 of the bridge's libraries",
        "bridge-python": "sha256 of its part of torch.compile",
        "graph-compiler": "sha256 of libSynapse",
        "kernels": "sha256 of the kernels' libraries",
    }
)
"""What the toolchain of a target consists of, all of it, and what each component is."""

KEY_MODE, STABLE = "hpu.key_mode", "stable"
"""The flag that says how the keys of recipes repeat, and its value: by themselves, which is learnt from a card."""
ENVIRONMENT = "env."
"""With this before their names, the variables that may change code are flags."""

LEARNT = frozenset({"toolchain.synapse", f"flags.{KEY_MODE}"})
"""Components that only a process with a card can know; a server compares them once it has one."""

_DIGESTS = ("bridge", "bridge-python", "graph-compiler", "kernels")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def hpu_target(
    device_type: DeviceType,
    synapse: str,
    environment: Mapping[str, str],
    *,
    memory: Path,
    root: Path = Path("/"),
) -> Target:
    """Returns the target of this machine.

    Args:
        device_type: Of its cards.
        synapse: The device's capability, which is also in the names of recipes.
        environment: What a build would inherit.
        memory: Where digests of libraries are remembered.
        root: Stands for the root of the file system.

    Raises:
        TargetError: the software, or a part of it, is not installed.
        SpecError: a variable names a file that cannot be read.
        StoreError: a library cannot be read.
    """
    toolchain, sealed = _software(environment, memory, root)
    return assemble(device_type, {**toolchain, "synapse": synapse}, sealed)


def probe(environment: Mapping[str, str], memory: Path, root: Path = Path("/")) -> Target:
    """Returns the target of this machine. Starts a process that asks a card, unless `memory` has its answer.

    Raises as `hpu_target` does, CardError where no card can be acquired, and CompileError where keys do not repeat.
    """
    device_type = find_cards(root).device_type()
    toolchain, sealed = _software(environment, memory, root)
    learnt = learn({"machine": device_type, **toolchain, **sealed}, environment, memory)
    if learnt.device_type != device_type:
        raise TargetError(f"target.machine: the driver shows {device_type}, the bridge {learnt.device_type}")
    return assemble(device_type, {**toolchain, "synapse": learnt.synapse}, sealed)


def require_satisfied(
    target: Target, environment: Mapping[str, str], machine: Target | None = None, memory: Path | None = None
) -> None:
    """Raises TargetError, naming the component, unless a machine can serve what was compiled for `target`.

    Args:
        target: What was compiled.
        environment: What a server here would inherit.
        machine: Another machine, as it was written down; None: this one, of which `LEARNT` is not known yet.
        memory: Where digests of libraries are remembered.
    """
    try:
        for one in (target,) if machine is None else (target, machine):
            require_whole(one)
        here = _here(environment, memory) if machine is None else {}
    except (SpecError, TargetError) as error:
        raise TargetError(
            f"target: compiled for the backend 'hpu': {str(error).removeprefix('target: ')}"
        ) from error
    if machine is None:
        found, whose, unknown = here, "this machine", LEARNT
    else:
        found, whose, unknown = _named(machine), "that machine", frozenset[str]()
    wanted = _named(target)
    for name in sorted({*wanted, *found} - unknown):
        if wanted.get(name) != found.get(name):
            raise TargetError(
                f"target.{name}: compiled for {wanted.get(name, 'none')}, {whose} has {found.get(name, 'none')}"
            )


def _here(environment: Mapping[str, str], memory: Path | None) -> dict[str, str]:
    toolchain, sealed = _software(environment, memory)
    return {
        "machine": find_cards().device_type(),
        **{f"toolchain.{name}": value for name, value in toolchain.items()},
        **{f"flags.{ENVIRONMENT}{name}": value for name, value in sealed.items()},
    }


def _named(target: Target) -> dict[str, str]:
    names = {name.removeprefix("target."): value for name, value in target.components()}
    return {name: value for name, value in names.items() if name not in ("backend", "isa")}


def _software(
    environment: Mapping[str, str], memory: Path | None, root: Path = Path("/")
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Returns the toolchain but for what only a card says, and the variables that may change code."""
    toolchain = {
        **{package: version_of(package) for package in ("torch", PLUGIN)},
        "python": python_version(),
        **library_digests(Installation.find(environment, root), memory),
    }
    return toolchain, sealed_variables(ENGINE_RULES.applied(environment))


def assemble(device_type: DeviceType, toolchain: Mapping[str, str], variables: Mapping[str, str]) -> Target:
    """Returns the target that has the components of `TOOLCHAIN`, and `variables` as flags.

    Raises SpecError where one is missing, unknown, or not of its form.
    """
    flags = {KEY_MODE: STABLE, **{f"{ENVIRONMENT}{name}": value for name, value in variables.items()}}
    target = Target(
        backend="hpu",
        machine=device_type,
        toolchain=dict(sorted(toolchain.items())),
        flags=dict(sorted(flags.items())),
    )
    require_whole(target)
    return target


def require_whole(target: Target) -> None:
    """Raises SpecError, naming the component, unless `target` is one that this version makes."""
    for where, problem in _problems(target):
        raise SpecError(
            where, problem, "written anew by `aotgaudi doctor --hpu --write-target FILE` on a Gaudi"
        )


def _problems(target: Target) -> Iterator[tuple[str, str]]:
    if target.machine not in get_args(DeviceType):
        yield "machine", f"is {target.machine!r}, none of {', '.join(get_args(DeviceType))}"
    if target.isa:
        yield "isa", "is not empty, but a Gaudi has no instruction sets to choose from"
    for name in sorted(TOOLCHAIN.keys() ^ target.toolchain.keys()):
        yield f"toolchain.{name}", "is missing" if name in TOOLCHAIN else "is not known to this version"
    for name in _DIGESTS:
        if not _SHA256.fullmatch(target.toolchain[name]):
            yield f"toolchain.{name}", "is not a sha256, 64 hexadecimal digits"
    if target.flags.get(KEY_MODE) != STABLE:
        yield f"flags.{KEY_MODE}", f"is {target.flags.get(KEY_MODE)!r}, not {STABLE!r}"
    for name in sorted(target.flags.keys() - {KEY_MODE}):
        if not (name.startswith(ENVIRONMENT) and may_change_code(name.removeprefix(ENVIRONMENT))):
            yield f"flags.{name}", "is not known to this version"


# What only a process with a card can learn

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
    with store_errors("make a directory in", Path(tempfile.gettempdir())):
        made = tempfile.TemporaryDirectory(prefix="aotgaudi-learn-")
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
