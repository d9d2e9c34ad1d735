"""Finds where a command starts vLLM, and the variables that it assigns, from the words alone. Imports almost nothing.

Commands are also kept in other forms, as a shell's script or behind docker: see `forms`.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")
"""The modules with which ``python -m`` starts a vLLM server."""

_COMMAND_MODULE = "vllm.entrypoints.cli.main"
"""The module behind the command ``vllm``."""

REMEDY = f"vllm serve MODEL ..., or python -m {_MODULES[0]} --model MODEL ..."
"""Examples of a command that starts a server."""

WRAPPERS = frozenset(
    {"env", "nice", "ionice", "chrt", "taskset", "numactl", "stdbuf", "tini", "dumb-init", "setpriv", "exec"}
)
"""Programs that may precede a server's command."""

SHELLS = frozenset({"sh", "bash", "dash", "ash"})
ENGINES = frozenset({"docker", "podman", "nerdctl"})
FORMS = SHELLS | ENGINES | {"aotgaudi"}
"""Programs that are given a command, in words or in a script."""

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


def find_vllm(words: Sequence[str]) -> tuple[int, int] | None:
    """Returns where `words` start a vLLM server: the indices of the first word that does, and of the first after it."""
    for index, word in enumerate(words):
        after = words[index + 1] if index + 1 < len(words) else None
        is_serve = word.rpartition("/")[2] == "vllm" and after == "serve"
        is_module = word == "-m" and after in _MODULES
        if is_serve or is_module:
            return index, index + 2
        if word == "-m" and after == _COMMAND_MODULE and list(words[index + 2 : index + 3]) == ["serve"]:
            return index, index + 3
    return None


def has_one_api_server(words: Sequence[str]) -> bool:
    """Returns whether `words` start the module that has one API server, whatever its flags say.

    Source: ``main`` of vllm/entrypoints/launchers/api_server/entry.py. ``vllm serve`` starts several.
    """
    return any(word == "-m" and after in _MODULES for word, after in itertools.pairwise(words))


def assignments(head: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the name and the value of each word that assigns a variable."""
    for word in head:
        found = _ASSIGNMENT.fullmatch(word)
        if found:
            yield found[1], found[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainCommand:
    """A server's command without what stood around it.

    Attributes:
        words: the command. It may still begin with `WRAPPERS` and assignments.
        variables: what a container, or what else stood around it, sets for the command.
        is_contained: whether it is a container's: it then has only these variables, not those of the caller.
        folder: where relative paths begin, if the container says so.
        mounts: path in the container -> path on this machine.
        notes: what its user should know, one sentence each.
    """

    words: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    is_contained: bool = False
    folder: str = ""
    mounts: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def on_this_machine(self, path: str) -> str:
        """Returns where a path of the command lies: elsewhere if its directory is mounted from there."""
        whole = os.path.normpath(os.path.join(self.folder, path))
        for mounted in sorted(self.mounts, key=len, reverse=True):
            if whole == mounted or whole.startswith(mounted.rstrip("/") + "/"):
                return os.path.join(self.mounts[mounted], os.path.relpath(whole, mounted))
        return whole if self.folder else path
