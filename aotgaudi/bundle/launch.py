"""A launch: all that decides what a server which is not ours will compile, and what its caches take for granted.

The canonical JSON (RFC 8785) of `Launch`, schema ``aotgaudi.launch/1``; docs/formats/launch.md has the grammar. It is the
manifest of a bundle of captured caches.

Two classes of component are kept apart, because the servers mix them and their users then cannot tell why a cache is
not used (docs/adr/0041-launch.md):

* the **key** (`Launch.components`) is what changes code. It is complete by exclusion: a flag or a variable counts unless
  its guest gives a reason why not. It holds no place: no path, host, user or port. Its sha256 is the launch's id.
* the **conditions** (`Launch.conditions`) change no code, but the guest's own hash or its files hold them: where the
  cache lay, where the guest is installed. Whoever restores a capture establishes them, or says which one it cannot.

Versions: 1 (first).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, StringConstraints

from aotgaudi.backends.base import Target
from aotgaudi.bundle.exercise import Exercise
from aotgaudi.digest import Key, canonical_json
from aotgaudi.document import DigestField, Document, Value, load_document

LAUNCH_SCHEMA: Literal["aotgaudi.launch/1"] = "aotgaudi.launch/1"

GuestName = Literal["vllm", "vllm-gaudi", "sglang", "fake"]
Count = Annotated[int, Field(ge=1, le=1 << 20)]
LaunchId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}\z")]

WORLD = ("tensor_parallel", "pipeline_parallel", "data_parallel", "nodes")
"""What `Launch.world` says; each is 1 where nothing was asked for."""


class ModelIdentity(Value):
    """The model as far as code depends on it.

    Attributes:
        name: the absolute path of its directory, or its name on the hub. A condition, not part of the key.
        files: the files of its directory that decide graphs: ``config.json`` and its like, and code. No weights.
    """

    name: str
    files: dict[str, DigestField]


class Place(Value):
    """Where a launch takes place: nothing of it changes code, all of it may stand in the guest's files or its hash.

    Attributes:
        root: the directory that all of the guest's caches lie below.
        prefix: ``sys.prefix`` of the guest's interpreter.
        site_packages: where the guest's packages lie.
        variables: variables that the guest hashes although they change no code, as they are set.
    """

    root: str
    prefix: str
    site_packages: str
    variables: dict[str, str] = Field(default_factory=dict)


class Launch(Document):
    """See the module.

    Attributes:
        guest: which server it is.
        words: the command, the interpreter or the script first, as it was written, without words that are secrets.
        flags: what was given, by the flag's name without dashes: a text, texts, a switch's bool, or a table. Without
            those that the guest has a reason to leave out.
        variables: the variables that count. Never a secret.
        model: which model.
        software: component -> version, or version and digest.
        target: the machine that code is compiled for.
        world: how many ranks, by the names in `WORLD`.
        place: where.
        exercise: what is asked of the server once it answers.
        repairs: ids of the repairs in force, sorted.
        manifest_id: of the shapes, where a manifest decides them.
    """

    schema_: Literal["aotgaudi.launch/1"] = Field(default=LAUNCH_SCHEMA, alias="schema")
    guest: GuestName
    words: Annotated[tuple[str, ...], Field(min_length=1)]
    flags: dict[str, JsonValue]
    variables: dict[str, str]
    model: ModelIdentity
    software: dict[str, str]
    target: Target
    world: dict[str, Count]
    place: Place
    exercise: Exercise
    repairs: tuple[str, ...] = ()
    manifest_id: str | None = None

    @cached_property
    def key(self) -> Key:
        """What the launch is named by."""
        return Key.of(self._components())

    @property
    def id(self) -> str:
        """The sha256 of the key, 64 hex digits. The same wherever the launch takes place."""
        return self.key.hex

    @property
    def is_aliased(self) -> bool:
        """Whether the model is a directory: the guest is then given the place's alias for it, and never sees its path."""
        return self.model.name.startswith("/")

    def components(self) -> tuple[tuple[str, str], ...]:
        """Returns the components of the key, in the key's order, as ``(name, value)``."""
        return self.key.components

    def _components(self) -> Iterator[tuple[str, str]]:
        yield "schema", self.schema_
        yield "guest", self.guest
        yield from ((f"software.{name}", value) for name, value in sorted(self.software.items()))
        yield from self.target.components()
        yield from ((f"world.{name}", str(value)) for name, value in sorted(self.world.items()))
        yield from ((f"model.{name}", str(digest)) for name, digest in sorted(self.model.files.items()))
        yield from ((f"flag.{name}", json_text(value)) for name, value in sorted(self.flags.items()))
        yield from ((f"variable.{name}", value) for name, value in sorted(self.variables.items()))
        yield "exercise", f"{self.exercise.level} {_sha256_of(self.exercise)}"
        yield "repairs", " ".join(self.repairs)
        yield "shapes", self.manifest_id or ""

    def conditions(self) -> tuple[tuple[str, str], ...]:
        """Returns what the guest's own hash or its files take for granted, as ``(name, value)``."""
        variables = ((f"variable.{name}", value) for name, value in sorted(self.place.variables.items()))
        return (
            ("place.root", self.place.root),
            ("place.prefix", self.place.prefix),
            ("place.site_packages", self.place.site_packages),
            ("model.name", self.model.name),
            *variables,
        )


def load_launch(data: bytes) -> Launch:
    """Parses a launch's canonical bytes. Raises ManifestError, which names the place."""
    return load_document(data, Launch, "launch")


def json_text(value: Any) -> str:
    """Returns a flag's value as a key has it: canonical JSON, so that the text ``true`` is not the switch."""
    return canonical_json(value).decode()


def _sha256_of(exercise: Exercise) -> str:
    return hashlib.sha256(canonical_json(exercise.model_dump(mode="json"))).hexdigest()


def world(flags: Mapping[str, int]) -> dict[str, int]:
    """Returns a launch's `world`: what `flags` says of it, and 1 for the rest."""
    return {name: flags.get(name, 1) for name in WORLD}
