"""What code for a Gaudi is compiled for: the named components of its target. Imports neither torch nor habana_frameworks.

``aotgaudi doctor --hpu --write-target FILE`` makes one on a machine with a card and writes it down (docs/formats/target.md):
two of its components only a process that holds a card can learn. Elsewhere it is read, to plan with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

from aotgaudi.backends.base import Target, version_of
from aotgaudi.errors import SpecError
from aotgaudi.gaudi.environment import ENGINE_RULES, may_change_code, sealed_variables
from aotgaudi.gaudi.identity import (
    PLUGIN,
    DeviceType,
    DigestMemory,
    Installation,
    LibraryDigests,
    python_version,
)

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

KEY_MODE = "hpu.key_mode"
"""The flag that says how the keys of recipes repeat, which is learnt from a card."""
KeyMode = Literal["stable", "pinned"]
"""By themselves; or with FX's counter pinned (K-09)."""
ENVIRONMENT = "env."
"""With this before their names, the variables that may change code are flags."""

_DIGESTS = ("bridge", "bridge-python", "graph-compiler", "kernels")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def hpu_target(
    device_type: DeviceType,
    synapse: str,
    key_mode: KeyMode,
    environment: Mapping[str, str],
    *,
    memory: Path,
    root: Path = Path("/"),
) -> Target:
    """Returns the target of this machine.

    Args:
        device_type: Of its cards.
        synapse: The device's capability, which is also in the names of recipes.
        key_mode: How the keys of recipes repeat here.
        environment: What a build would inherit.
        memory: Where digests of libraries are remembered.
        root: Stands for the root of the file system.

    Raises:
        TargetError: the software, or a part of it, is not installed.
        SpecError: a variable names a file that cannot be read.
        StoreError: a library cannot be read.
    """
    libraries = LibraryDigests.of(Installation.find(environment, root).components(), DigestMemory(memory))
    toolchain = {
        **{package: version_of(package) for package in ("torch", PLUGIN)},
        "python": python_version(),
        "synapse": synapse,
        **libraries.components,
    }
    return assemble(device_type, toolchain, key_mode, sealed_variables(ENGINE_RULES.applied(environment)))


def assemble(
    device_type: DeviceType, toolchain: Mapping[str, str], key_mode: str, variables: Mapping[str, str]
) -> Target:
    """Returns the target that has the components of `TOOLCHAIN`, and `variables` as flags.

    Raises SpecError where one is missing, unknown, or not of its form.
    """
    flags = {KEY_MODE: key_mode, **{f"{ENVIRONMENT}{name}": value for name, value in variables.items()}}
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
    if target.flags.get(KEY_MODE) not in get_args(KeyMode):
        yield (
            f"flags.{KEY_MODE}",
            f"is {target.flags.get(KEY_MODE)!r}, none of {', '.join(get_args(KeyMode))}",
        )
    for name in sorted(target.flags.keys() - {KEY_MODE}):
        if not (name.startswith(ENVIRONMENT) and may_change_code(name.removeprefix(ENVIRONMENT))):
            yield f"flags.{name}", "is not known to this version"
