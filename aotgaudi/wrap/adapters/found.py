"""Which guest a command starts, by which interpreter, and what that has installed.

``vllm serve MODEL`` and ``python -m vllm.entrypoints.openai.api_server --model MODEL`` are the same launch.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import cast

from aotgaudi.bundle.launch import GuestName
from aotgaudi.errors import SpecError
from aotgaudi.wrap.adapters.asking import Asking, question_of
from aotgaudi.wrap.adapters.base import Flags, Guest
from aotgaudi.wrap.adapters.identity import Installed, installed_of
from aotgaudi.wrap.adapters.model import find_model
from aotgaudi.wrap.adapters.starts import assignments, find_start, working_directory
from aotgaudi.wrap.adapters.variables import is_secret, without_credentials

_ADAPTERS: Mapping[str, str] = MappingProxyType(
    {
        "vllm": "aotgaudi.wrap.adapters.vllm.guest:Vllm",
        "vllm-gaudi": "aotgaudi.wrap.adapters.vllm_gaudi.guest:VllmGaudi",
        "sglang": "aotgaudi.wrap.adapters.sglang.guest:Sglang",
        "fake": "aotgaudi.wrap.adapters.fake:FakeGuest",
    }
)
"""Guest -> where its adapter is. Imported when it is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A command, understood.

    Attributes:
        guest: the server that it starts.
        interpreter: the path of the Python that runs it.
        words: the command, as it was given.
        flags: its flags.
        installed: what the interpreter has.
        model: the directory of the model.
        is_local: the command names that directory; else the model has a name on the hub.
        environ: the environment that the command was given, with what it assigns itself (``env NAME=VALUE``).
    """

    guest: Guest
    interpreter: str
    words: tuple[str, ...]
    flags: Flags
    installed: Installed
    model: Path
    is_local: bool
    environ: Mapping[str, str]


def guest_named(name: GuestName) -> Guest:
    """Returns the adapter of a guest. Raises SpecError for one that this version has none for."""
    if name not in _ADAPTERS:
        raise SpecError("guest", f"is {name!r}", f"one of {', '.join(sorted(_ADAPTERS))}")
    module, _, adapter = _ADAPTERS[name].partition(":")
    guest: Guest = getattr(importlib.import_module(module), adapter)()
    return guest


def find_guest(
    words: Sequence[str],
    environ: Mapping[str, str],
    cwd: Path | None = None,
    *,
    is_whole: bool = True,
    asking: Asking | None = None,
) -> Found:
    """Returns what a command starts. Starts nothing but the interpreter, which is asked what it has.

    Args:
        words: the command.
        environ: the environment that it would be started in.
        cwd: where it would be started; None is here.
        is_whole: whether it is refused if it cannot be watched; else something is still to be added (`Guest.shapes`).
        asking: the interpreter, which has been asked ahead of time. Of use if that is the question of this command.

    Raises:
        SpecError: it starts no server that we know, or one that cannot be watched; or its model is not to be found.
        TargetError: its interpreter does not run.
    """
    directory = working_directory() if cwd is None else cwd
    start = find_start(words, environ)
    family = guest_named(cast("GuestName", start.family))
    flags = family.read(words[start.after :], start.environ)
    question = question_of(words, start, directory)
    with asking if asking is not None and asking.question == question else Asking(question) as asked:
        model = find_model(flags, start.environ, directory)
        installed = installed_of(asked)
    guest = _among(family, installed)
    if is_whole:
        guest.require_witnessed(flags, start.environ)
    return Found(
        guest=guest,
        interpreter=question.interpreter,
        words=tuple(words),
        flags=flags,
        installed=installed,
        model=model,
        is_local=os.path.isdir(directory / flags.model),
        environ=start.environ,
    )


def public_words(words: Sequence[str], flags: Flags, guest: Guest) -> tuple[str, ...]:
    """Returns a whole command without its secrets."""
    found = guest.starts_at(words)
    head = words[: found[1]] if found else ()
    public = (word for word in head if not any(is_secret(name) for name, _ in assignments([word])))
    return (*map(without_credentials, public), *flags.words)


def _among(family: Guest, installed: Installed) -> Guest:
    """Returns the guest that a family's server is with what is installed: vLLM's plugin for Gaudi makes it another one."""
    if family.name == "vllm" and "vllm-gaudi" in installed.names:
        return guest_named("vllm-gaudi")
    return family
