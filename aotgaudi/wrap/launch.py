"""Turns a command line into a launch: which server it starts, with which Python, model, software and machine.

``vllm serve MODEL`` and ``python -m vllm.entrypoints.openai.api_server --model MODEL`` are the same launch.

The configurations in the model's directory (`KEYED_FILES`) are part of the launch by their content, and its ``.py`` files
by their bytes. Servers read no other JSON that decides a graph. A name on the hub is looked up in the hub's local cache.
Nothing is fetched.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from pydantic import JsonValue

from aotgaudi.bundle.launch import (
    API_SERVERS,
    GuestName,
    Launch,
    ModelIdentity,
    Place,
    WarmUp,
    WarmUpLevel,
    WarmUpRequest,
    world,
)
from aotgaudi.commands.starts import REMEDY, assignments, has_one_api_server
from aotgaudi.commands.variables import hugging_face_home, is_secret, without_credentials
from aotgaudi.commands.words import one_text
from aotgaudi.digest import Digest, canonical_json, sha256_bytes
from aotgaudi.errors import SpecError, shown
from aotgaudi.files import read_regular
from aotgaudi.gaudi.live_graphs import LiveGraphs, unrequested
from aotgaudi.wrap.adapters.base import Flags, ServerKind, Shapes, as_sealed
from aotgaudi.wrap.exercise import Feature, exercise
from aotgaudi.wrap.launch_machine import Installed, compiler_version, installed_of
from aotgaudi.wrap.starts import (
    SERVERS,
    WHERE,
    Asking,
    find_start,
    plain_command,
    question_of,
    working_directory,
)

if TYPE_CHECKING:  # `aotgaudi run` starts servers without a spec and need not import its modules.
    from aotgaudi.spec.build_spec import BuildSpec

KEYED_FILES: Mapping[str, str] = MappingProxyType(
    {
        "*config*.json": "the model, its quantization, its processors, its poolers",
        "*quant*.json": "quantization, by the names that quantizers give it",
        "params.json": "the model, in Mistral's form",
        "modules.json": "which poolers follow the model",
    }
)
"""JSON files that decide graphs -> what they say. No graph depends on a tokenizer's files."""

_CONFIGS = ("config.json", "params.json")
_DEPTH = 2
_LARGEST_BYTES = 32 << 20
_COMMIT_BYTES = 200
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """A parsed command that starts a server.

    Attributes:
        adapter: the kind of server.
        interpreter: the path of the Python that runs the server.
        words: the command, without what stood around it.
        flags: the command's flags.
        installed: what the interpreter has installed.
        model: the model's directory.
        is_local: whether the command names that directory. If not, it names the model on the hub.
        environ: the environment of the command, including the command's own assignments (``env NAME=VALUE``).
        notes: how the command was read, if it stood in another form.
    """

    adapter: ServerKind
    interpreter: str
    words: tuple[str, ...]
    flags: Flags
    installed: Installed
    model: Path
    is_local: bool
    environ: Mapping[str, str]
    notes: tuple[str, ...] = ()


def server_kind(name: GuestName) -> ServerKind:
    """Returns a kind of server. Raises SpecError for one that this version does not know."""
    if name not in SERVERS:
        raise SpecError("guest", f"is {name!r}", f"one of {', '.join(sorted(SERVERS.keys() - {'fake'}))}")
    module, _, value = SERVERS[name].value.partition(":")
    kind: ServerKind = getattr(importlib.import_module(module), value)
    return kind


def find_server(
    words: Sequence[str],
    environ: Mapping[str, str],
    cwd: Path | None = None,
    *,
    is_whole: bool = True,
    asking: Asking | None = None,
) -> ServerCommand:
    """Returns the server that a command starts. Runs only the interpreter, to ask what it has installed.

    Args:
        words: the command, in any form that `aotgaudi.commands.forms` reads.
        environ: the environment that the command would run in.
        cwd: the directory that it would run in; None is the current one.
        is_whole: False while words are still to be added (`ServerKind.shapes`). A whole command that cannot be watched is
            refused.
        asking: a question that the interpreter was asked ahead of time; used if it fits this command.

    Raises:
        SpecError: the command starts no known server, or one that cannot be watched, or its model is not found.
        TargetError: the interpreter does not run.
    """
    directory = working_directory() if cwd is None else cwd
    plain = plain_command(words, environ, directory)
    words = plain.words
    start = find_start(words, {**environ, **plain.variables})
    started = server_kind(cast("GuestName", start.server))
    flags = started.read(words[start.after :], start.environ)
    if has_one_api_server(words):
        if "model" not in flags.values:
            raise SpecError(WHERE, "names no model", REMEDY)
        flags = replace(flags, world={**flags.world, API_SERVERS: 1})
    question = question_of(words, start, directory)
    with asking if asking is not None and asking.question == question else Asking(question) as asked:
        model = find_model(flags, start.environ, directory)
        installed = installed_of(asked)
    if installed.missing & {*SERVERS[start.server].packages}:
        raise SpecError(WHERE, f"{question.interpreter} has no {start.server}", "name the Python that has it")
    variant = started.variant(installed)
    adapter = started if variant is None else server_kind(variant)
    if is_whole:
        adapter.require_witnessed(flags, start.environ)
    return ServerCommand(
        adapter=adapter,
        interpreter=question.interpreter,
        words=tuple(words),
        flags=flags,
        installed=installed,
        model=model,
        is_local=os.path.isdir(directory / flags.model),
        environ=start.environ,
        notes=plain.notes,
    )


@dataclass(frozen=True)
class Shaped:
    """A command with what ``--shapes`` adds: nothing without that option."""

    found: ServerCommand
    shapes: Shapes = field(default_factory=Shapes)

    def live_graphs(self, asked: WarmUp) -> tuple[LiveGraphs, ...]:
        """Returns whether traffic compiles graphs of a kind although the shapes are captured; nothing without shapes."""
        rows, level = self.shapes.live_graphs, asked.level
        return rows if level == "shapes" else unrequested(rows, f"--exercise {level}")

    def asked(self, level: WarmUpLevel, own: Sequence[WarmUpRequest] = ()) -> WarmUp:
        """Returns the warm-up requests of a level, and the owner's. The level ``shapes`` adds those that the shapes need."""
        return exercise(level, features_of(self.found), shapes=self.shapes.requests, own=own)


def shaped_command(
    words: Sequence[str], environ: Mapping[str, str], spec: BuildSpec | None, root: Path
) -> Shaped:
    """Returns the server that a command starts, with the shapes of `spec` if there is one.

    Raises:
        SpecError: The command cannot be wrapped, the server takes no shapes, or `spec` is for another command.
        CoverageError: The server would meet shapes that `spec` does not have.
        TargetError: The server's interpreter does not run.
    """
    if spec is None:
        return Shaped(find_server(words, environ))
    found = find_server(words, environ, is_whole=False)
    shapes = found.adapter.shapes(spec, found.flags, found.environ, found.installed)
    whole = find_server((*found.words, *shapes.words), shapes.environ(found.environ, root))
    return Shaped(replace(whole, notes=found.notes), shapes)


def public_words(words: Sequence[str], flags: Flags, adapter: ServerKind) -> tuple[str, ...]:
    """Returns a complete command without its secrets."""
    found = adapter.starts_at(words)
    head = words[: found[1]] if found else ()
    public = (word for word in head if not any(is_secret(name) for name, _ in assignments([word])))
    return (*map(without_credentials, public), *flags.words)


def describe(
    found: ServerCommand,
    *,
    root: str,
    asked: WarmUp | WarmUpLevel = "sampler",
    repairs: tuple[str, ...] | None = None,
    manifest_id: str | None = None,
) -> Launch:
    """Returns the launch of a command.

    Args:
        found: the command.
        root: the directory that the server's caches lie below, as the server sees it.
        asked: the warm-up requests, or their level. To compare with a sealed launch, pass the sealed requests.
        repairs: ids of the repairs in force; None means all that the adapter has.
        manifest_id: the manifest that decides the shapes, if any.

    Raises:
        SpecError: the model's files cannot be read.
        TargetError: the machine lacks the device that the server is for.
    """
    adapter, flags, installed = found.adapter, found.flags, found.installed
    known = tuple(sorted(repair.id for repair in adapter.repairs))
    if isinstance(asked, str):
        asked = exercise(asked, features_of(found))
    target = adapter.target(installed)
    return Launch(
        guest=adapter.name,
        words=public_words(found.words, flags, adapter),
        flags=adapter.counted_flags(flags, target.backend),
        variables=adapter.variable_rules.keyed(found.environ),
        model=identify(os.path.abspath(found.model) if found.is_local else flags.model, found.model),
        software={
            "python": installed.python,
            "libc": installed.libc,
            "compiler": compiler_version(found.environ),
            **installed.distributions,
        },
        target=target,
        world=world(flags.world),
        place=Place(
            root=root,
            prefix=installed.prefix,
            site_packages=installed.site_packages,
            variables=adapter.variable_rules.conditions(found.environ),
        ),
        exercise=asked,
        repairs=known if repairs is None else repairs,
        manifest_id=manifest_id,
    )


def features_of(found: ServerCommand) -> tuple[Feature, ...]:
    """Returns what to ask a launch so that it compiles everything that it serves."""
    config: Mapping[str, JsonValue] = {}
    with contextlib.suppress(OSError, ValueError, SpecError, RecursionError):
        read = json.loads(read_regular(found.model / _CONFIGS[0], _LARGEST_BYTES))
        config = read if isinstance(read, dict) else {}
    return found.adapter.features(found.flags, config, found.adapter.device(found.installed))


def describe_here(
    sealed: Launch,
    words: Sequence[str],
    environ: Mapping[str, str],
    *,
    root: str | None = None,
    asking: Asking | None = None,
) -> tuple[ServerCommand, Launch]:
    """Returns the server that a command starts on this machine, and its launch, for comparison with a sealed one.

    Args:
        sealed: the launch of a capture. Its warm-up requests, repairs and manifest are used.
        words: the command; empty means the sealed one.
        environ: the environment that the command would run in.
        root: see `describe`; None means the sealed root.
        asking: see `find_server`.

    Raises:
        SpecError: the command starts no known server, or its model is not found.
        TargetError: the interpreter does not run, or the machine lacks the device.
    """
    plain = plain_command(words or sealed.words, environ, working_directory())
    variables = {**environ, **plain.variables}
    words, environ = as_sealed(server_kind(sealed.guest), sealed, plain.words, variables)
    found = replace(find_server(words, environ, asking=asking), notes=plain.notes)
    return found, describe(
        found,
        root=sealed.place.root if root is None else root,
        asked=sealed.exercise,
        repairs=sealed.repairs,
        manifest_id=sealed.manifest_id,
    )


def find_model(flags: Flags, environ: Mapping[str, str], cwd: Path) -> Path:
    """Returns the directory of a launch's model. Raises SpecError if the name is no directory and not in the hub's cache."""
    path = cwd / flags.model
    if os.path.isdir(path):
        return path
    if os.path.exists(path):
        raise SpecError("model", f"is the file {shown(flags.model)}", "a directory with a config.json")
    if not _HUB_NAME.fullmatch(flags.model):
        raise SpecError(
            "model",
            f"there is no directory {shown(flags.model)}",
            "a model's directory, or a name on the hub",
        )
    revision = one_text(flags.values, "revision")
    for cache in _hub_caches(flags, environ):
        found = _snapshot(cache / f"models--{flags.model.replace('/', '--')}", revision or "main")
        if found is not None:
            return found
    wanted = f" --revision {revision}" if revision else ""
    raise SpecError(
        "model",
        f"{shown(flags.model)} is neither a directory nor in the hub's cache on this machine",
        f"fetch it first: hf download {flags.model}{wanted}",
    )


def identify(name: str, directory: Path) -> ModelIdentity:
    """Returns the identity of a model. Raises SpecError if it has no configuration, or if a file cannot be read."""
    try:
        files = {str(path.relative_to(directory)): path for path in _keyed_files(directory)}
    except OSError as error:
        raise SpecError(str(directory), f"cannot be read: {error.strerror}", "a model's directory") from error
    if not any(config in files for config in _CONFIGS):
        raise SpecError(str(directory), f"has no {_CONFIGS[0]}", "a model's directory, whole")
    digests = {path: _digest(read_regular(file, _LARGEST_BYTES)) for path, file in files.items()}
    return ModelIdentity(name=name, files=dict(sorted(digests.items())))


def _digest(data: bytes) -> Digest:
    """Returns the digest of a JSON document's canonical form, since servers hash its content; else that of the bytes."""
    try:
        return Digest.of(canonical_json(json.loads(data)))
    except (ValueError, RecursionError):  # It is no JSON, or has no canonical form (NaN).
        return Digest.of(data)


def weights_stamp(directory: Path) -> str:
    """Returns a text that changes if somebody replaces files of a model's directory. Reads none of the files."""
    stamps = []
    for parent, folders, names in os.walk(directory):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(parent, name)
            with contextlib.suppress(OSError):
                status = os.stat(path)
                stamps.append([os.path.relpath(path, directory), status.st_size, status.st_mtime_ns])
    return sha256_bytes(canonical_json([[name, str(size), str(time)] for name, size, time in stamps]))


def _keyed_files(directory: Path, depth: int = _DEPTH) -> Iterator[Path]:
    for path in sorted(directory.iterdir()):
        if path.name.startswith(".") or path.name == "__pycache__":
            continue
        if path.suffix in (".json", ".py") and path.is_file():
            is_keyed = any(fnmatch.fnmatchcase(path.name, pattern) for pattern in KEYED_FILES)
            if path.suffix == ".py" or (is_keyed and not path.name.startswith("tokenizer")):
                yield path
        elif depth and path.is_dir():
            yield from _keyed_files(path, depth - 1)


def _hub_caches(flags: Flags, environ: Mapping[str, str]) -> Iterator[Path]:
    """Yields where models may lie: vLLM's ``--download-dir``, then the order of huggingface_hub/constants.py."""
    if folder := one_text(flags.values, "download-dir"):
        yield Path(folder)
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(name):
            yield Path(environ[name])
    yield Path(hugging_face_home(environ)) / "hub"


def _snapshot(repository: Path, revision: str) -> Path | None:
    try:
        commit = read_regular(repository / "refs" / revision, _COMMIT_BYTES).decode().strip()
    except (OSError, ValueError, SpecError):
        commit = revision  # A commit has no reference.
    found = repository / "snapshots" / commit
    return found if any(os.path.exists(found / name) for name in _CONFIGS) else None
