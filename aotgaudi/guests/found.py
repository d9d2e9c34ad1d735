"""Which guest a command starts, by which interpreter, and what that has installed.

``vllm serve MODEL`` and ``python -m vllm.entrypoints.openai.api_server --model MODEL`` are the same launch. Programs that
only set something up and then become the command (`WRAPPERS`) may stand in front of it; a shell may not, for what it starts
is not to be seen in its words.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from aotgaudi.errors import SpecError
from aotgaudi.guests.base import Flags, Guest
from aotgaudi.guests.identity import Installed, ask_interpreter
from aotgaudi.guests.launch import GuestName
from aotgaudi.guests.model import find_model
from aotgaudi.vllm.values import shown

WHERE = "the command"
WRAPPERS = frozenset(
    {"env", "nice", "ionice", "chrt", "taskset", "numactl", "stdbuf", "tini", "dumb-init", "setpriv", "exec"}
)
"""Programs that may stand in front of a server's command."""

FAKE_SWITCH = "AOTGAUDI_FAKE_GUEST"
"""The variable that has the fake guest found."""

_ADAPTERS: Mapping[str, str] = MappingProxyType(
    {
        "vllm": "aotgaudi.guests.vllm.guest:Vllm",
        "vllm-gaudi": "aotgaudi.guests.vllm_gaudi.guest:VllmGaudi",
        "sglang": "aotgaudi.guests.sglang.guest:Sglang",
        "fake": "aotgaudi.guests.fake:FakeGuest",
    }
)
"""Guest -> where its adapter is. Imported when it is asked for: that of Gaudi brings all rules of bucketing with it."""

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_PYTHON = re.compile(r"python(\d+(\.\d+)*)?")
_EXEC_LINE = re.compile(rb"^'''exec' +(.+?) +\"\$0\"", re.MULTILINE)
_HEAD_BYTES = 4096
_REMEDY = "vllm serve MODEL ..., or python -m vllm.entrypoints.openai.api_server --model MODEL ..."


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
        environ: the environment that the command was given, with what it assigns itself (``env NAME=VALUE``).
    """

    guest: Guest
    interpreter: str
    words: tuple[str, ...]
    flags: Flags
    installed: Installed
    model: Path
    environ: Mapping[str, str]


def guest_named(name: GuestName) -> Guest:
    """Returns the adapter of a guest. Raises SpecError for one that this version has none for."""
    if name not in _ADAPTERS:
        raise SpecError("guest", f"is {name!r}", f"one of {', '.join(sorted(_ADAPTERS))}")
    module, _, adapter = _ADAPTERS[name].partition(":")
    guest: Guest = getattr(importlib.import_module(module), adapter)()
    return guest


def find_guest(
    words: Sequence[str], environ: Mapping[str, str], cwd: Path | None = None, *, is_whole: bool = True
) -> Found:
    """Returns what a command starts. Starts nothing but the interpreter, which is asked what it has.

    Args:
        words: the command.
        environ: the environment that it would be started in.
        cwd: where it would be started; None is here.
        is_whole: whether it is refused if it cannot be watched; else something is still to be added (`Guest.shapes`).

    Raises:
        SpecError: it starts no server that we know, or one that cannot be watched; or its model is not to be found.
        TargetError: its interpreter does not run.
    """
    directory = Path.cwd() if cwd is None else cwd
    _require_text(words)
    start, after, family = _server(words, environ)
    assigned = {**environ, **dict(_assignments(words[:start]))}
    flags = family.read(words[after:], assigned)
    interpreter = _interpreter(words, start, assigned, directory)
    ahead = (str(directory),) if words[start] == "-m" else ()
    installed = ask_interpreter(interpreter, family.distributions, assigned, ahead=ahead)
    guest = _among(family, installed)
    if is_whole:
        guest.require_witnessed(flags, assigned)
    return Found(
        guest=guest,
        interpreter=interpreter,
        words=tuple(words),
        flags=flags,
        installed=installed,
        model=find_model(flags, assigned, directory),
        environ=MappingProxyType(assigned),
    )


def public_words(words: Sequence[str], flags: Flags, guest: Guest) -> tuple[str, ...]:
    """Returns a whole command without its secrets."""
    found = guest.starts_at(words)
    head = words[: found[1]] if found else words
    rules = guest.variable_rules
    public = (w for w in head if not ((m := _ASSIGNMENT.fullmatch(w)) and rules.reason(m[1]) == "a secret"))
    return (*public, *flags.words)


def _server(words: Sequence[str], environ: Mapping[str, str]) -> tuple[int, int, Guest]:
    names: tuple[GuestName, ...] = ("vllm", "sglang")
    if environ.get(FAKE_SWITCH) == "1":
        names = (*names, "fake")
    for family in map(guest_named, names):
        found = family.starts_at(words)
        if found is not None:
            _require_wrappers(words[: found[0]])
            return (*found, family)
    if not words:
        raise SpecError(WHERE, "is empty", _REMEDY)
    raise SpecError(WHERE, f"{shown(' '.join(words))} starts no server that is known", _REMEDY)


def _require_text(words: Sequence[str]) -> None:
    """Raises SpecError for a word that no document can hold: bytes that are not UTF-8 come as lone surrogates."""
    for word in words:
        if not word.isascii() and word.encode(errors="replace").decode() != word:
            raise SpecError(WHERE, f"has {word!a:.100}, which is not UTF-8", "UTF-8 throughout")


def _require_wrappers(head: Sequence[str]) -> None:
    if not head:
        return
    program = head[0].rpartition("/")[2]
    if program == "env" and len(head) > 1 and head[1].startswith("-"):
        raise SpecError(
            WHERE, "has options of env, which change what is read here", "env NAME=VALUE ... alone"
        )
    if program in WRAPPERS or _PYTHON.fullmatch(program) or _ASSIGNMENT.fullmatch(head[0]):
        return
    remedy = f"the server's own command; one of {', '.join(sorted(WRAPPERS))} may stand in front of it"
    raise SpecError(WHERE, f"begins with {shown(head[0])}, which may start something else", remedy)


def _assignments(head: Sequence[str]) -> Iterator[tuple[str, str]]:
    for word in head:
        found = _ASSIGNMENT.fullmatch(word)
        if found:
            yield found[1], found[2]


def _among(family: Guest, installed: Installed) -> Guest:
    """Returns the guest that a family's server is with what is installed: vLLM's plugin for Gaudi makes it another one."""
    if family.name == "vllm" and "vllm-gaudi" in installed.names:
        return guest_named("vllm-gaudi")
    return family


def _interpreter(words: Sequence[str], start: int, environ: Mapping[str, str], cwd: Path) -> str:
    """Returns the Python that runs a command whose server starts at `start`."""
    before = [word for word in words[:start] if not word.startswith("-")]
    if before and _PYTHON.fullmatch(before[-1].rpartition("/")[2]):
        return _program(before[-1], environ, cwd)
    if words[start] == "-m":
        raise SpecError(WHERE, "names no interpreter before -m", "python -m ...")
    return _of_script(_program(words[start], environ, cwd), environ, cwd)


def _program(word: str, environ: Mapping[str, str], cwd: Path) -> str:
    found = str(cwd / word) if "/" in word else shutil.which(word, path=environ.get("PATH", os.defpath))
    if found is None or not os.access(found, os.X_OK):
        raise SpecError(
            WHERE, f"{shown(word)} is no program on this machine", "its path, or activate its environment"
        )
    return found


def _of_script(path: str, environ: Mapping[str, str], cwd: Path) -> str:
    """Returns the interpreter of a console script, by its first line; or by its second where the first would be too long."""
    try:
        with Path(path).open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise SpecError(WHERE, f"{path} cannot be read: {error.strerror}", "python -m ...") from error
    first = head.partition(b"\n")[0]
    exec_line = _EXEC_LINE.search(head)
    if exec_line is not None:
        return os.fsdecode(exec_line[1].strip(b'"'))
    if not first.startswith(b"#!"):
        raise SpecError(WHERE, f"{path} is no script of Python's", "python -m ...")
    program, *arguments = os.fsdecode(first[2:]).split() or [""]
    if program.rpartition("/")[2] == "env":
        named = [word for word in arguments if not word.startswith("-")]
        return _program(named[0] if named else "", environ, cwd)
    if not _PYTHON.fullmatch(program.rpartition("/")[2]):
        raise SpecError(WHERE, f"{path} is run by {shown(program)}, which is no Python", "python -m ...")
    return program
