"""A launch: everything that decides what a wrapped server compiles, and what its caches take for granted.

The canonical JSON (RFC 8785) of `Launch`, schema ``aotgaudi.launch/1``, is the manifest of a bundle that holds a capture;
docs/formats/launch.md has the grammar. Servers mix two classes of components, so that their users cannot tell why a cache is
not used. A launch keeps them apart (docs/adr/0041-launch.md):

* The **key** (`Launch.components`) is what changes code. A flag or a variable counts unless the server's adapter gives a
  reason why it does not. We put no path, host, user or port into it, but the value of a flag may contain one. Its sha256 is
  the launch's id.
* The **conditions** (`Launch.conditions`) change no code, but the server's own hash or its files hold them, such as the
  path of its cache or of its packages. `aotgaudi run` makes them what they were, or names the one that it cannot.

A server compiles more on the first request of a kind, after it says that it is ready. (Measured on vLLM 0.32: the first
request with ``logprobs`` compiles a graph.) So a launch also has **warm-up requests** (`WarmUp`, the JSON key
``exercise``). The same requests are sent in the build, in the proof, and before a restored server is ready, so they are
part of the key. `aotgaudi.wrap.exercise` makes them.

Versions: 1 (first).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, JsonValue

from aotgaudi.backends.base import Target
from aotgaudi.digest import Key, canonical_json, sha256_bytes
from aotgaudi.document import DigestField, Document, Value, load_document

WarmUpLevel = Literal["none", "smoke", "sampler", "shapes"]


class WarmUpRequest(Value):
    """One kind of request.

    Attributes:
        name: The kind's name, unique in its launch.
        path: The path of the HTTP request, a POST.
        body: Its JSON without ``model``, which the sender adds.
        copies: How many are sent at once. All are answered before the next kind is sent; where several answers are streamed,
            all have run at the same time.
        is_greedy: The text of the answer is the same in every run, and is compared.
        beside: The bodies of other requests that are sent at the same time. Not written if there is none.
    """

    name: str
    path: str
    body: dict[str, JsonValue]
    copies: Annotated[int, Field(ge=1, le=4096)] = 1
    is_greedy: bool = False
    beside: tuple[dict[str, JsonValue], ...] = ()

    @pydantic.model_serializer(mode="wrap")
    def _written(self, write: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = write(self)
        if not self.beside:
            del document["beside"]
        return document


class WarmUp(Value):
    """The warm-up requests, in the order in which they are sent."""

    level: WarmUpLevel
    requests: tuple[WarmUpRequest, ...] = ()


LAUNCH_SCHEMA: Literal["aotgaudi.launch/1"] = "aotgaudi.launch/1"

GuestName = Literal["vllm", "vllm-gaudi", "sglang", "fake"]
Count = Annotated[int, Field(ge=1, le=1 << 20)]

WORLD = ("tensor_parallel", "pipeline_parallel", "data_parallel", "nodes")
"""The keys of `Launch.world`; each value is 1 by default."""


class ModelIdentity(Value):
    """The model as far as code depends on it.

    Attributes:
        name: The absolute path of its directory, or its name on the hub. A condition, not part of the key.
        files: The files in its directory that decide graphs: ``config.json`` and the like, and code. No weights.
    """

    name: str
    files: dict[str, DigestField]


class Place(Value):
    """Where a launch takes place. It changes no code, but the server's files or its hash may hold any of it.

    Attributes:
        root: The directory that holds all of the server's caches.
        prefix: ``sys.prefix`` of the server's interpreter.
        site_packages: The directory of the server's packages.
        variables: The variables that the server hashes although they change no code, with their values.
    """

    root: str
    prefix: str
    site_packages: str
    variables: dict[str, str] = Field(default_factory=dict)


class Launch(Document):
    """See the module.

    Attributes:
        guest: The server's name.
        words: The command as it was written, from the interpreter or the script on, without secrets.
        flags: The given flags that count, by name without dashes: a text, several texts, a switch's bool, or a table.
        variables: The variables that count. Never a secret.
        model: The model.
        software: Component -> version, or version and digest.
        target: The machine that code is compiled for.
        world: The number of ranks, by the names in `WORLD`.
        place: Where the launch takes place.
        exercise: The warm-up requests.
        repairs: Ids of the repairs in force, sorted.
        manifest_id: The manifest that decides the shapes, if there is one.
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
    exercise: WarmUp
    repairs: tuple[str, ...] = ()
    manifest_id: str | None = None

    @cached_property
    def key(self) -> Key:
        """The key of the launch."""
        return Key.of(self._components())

    @property
    def id(self) -> str:
        """The sha256 of the key, 64 hex digits. The same wherever the launch takes place."""
        return self.key.hex

    @property
    def is_aliased(self) -> bool:
        """Whether the model is a directory. The server is then given an alias for it, and never sees its path."""
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
        """Returns what the server's own hash or its files take for granted, as ``(name, value)``."""
        variables = ((f"variable.{name}", value) for name, value in sorted(self.place.variables.items()))
        return (
            ("place.root", self.place.root),
            ("place.prefix", self.place.prefix),
            ("place.site_packages", self.place.site_packages),
            ("model.name", self.model.name),
            *variables,
        )


def load_launch(data: bytes) -> Launch:
    """Parses a launch's canonical bytes. Raises ManifestError, which names the faulty part."""
    return load_document(data, Launch, "launch")


def json_text(value: Any) -> str:
    """Returns a flag's value as in a key: canonical JSON, which tells the text ``true`` from the switch."""
    return canonical_json(value).decode()


def _sha256_of(exercise: WarmUp) -> str:
    return sha256_bytes(canonical_json(exercise.model_dump(mode="json")))


def world(flags: Mapping[str, int]) -> dict[str, int]:
    """Returns a launch's `world`: what `flags` says, and 1 for the rest."""
    return {name: flags.get(name, 1) for name in WORLD}
