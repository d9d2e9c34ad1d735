"""A launch: everything that decides what a wrapped server compiles, and everything that its caches assume.

The canonical JSON (RFC 8785) of `Launch`, schema ``aotgaudi.launch/1``, is the manifest of a bundle that holds a capture.
docs/formats/launch.md has the grammar. Servers mix two classes of components, so their users cannot tell why a cache is not
used. A launch keeps the classes apart (docs/adr/0020-capture.md):

* The **key** (`Launch.components`) changes the compiled code. A flag or a variable is part of it unless the server's adapter
  gives a reason why it is not. We put no path, host, user or port into it, but the value of a flag may contain one. Its
  sha256 is the launch's id.
* The **conditions** (`Launch.conditions`) change no code, but the server's own hash or its files contain them, such as the
  path of its cache or of its packages. `aotgaudi run` recreates them, or names the one that it cannot recreate.

A server compiles more on the first request of a kind, after it has reported that it is ready. (Measured on vLLM 0.32: the
first request with ``logprobs`` compiles a graph.) So a launch also has **warm-up requests** (`WarmUp`, the JSON key
``exercise``). They are sent in the build and in the proof, and, unless marked otherwise, before a restored server is ready,
so they are part of the key. `aotgaudi.wrap.exercise` makes them.

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
    """One kind of warm-up request.

    Attributes:
        name: The kind's name, unique in its launch.
        path: The path of the HTTP request, a POST.
        body: Its JSON without ``model``, which the sender adds.
        copies: How many are sent at once. All are answered before the next kind is sent. If several answers are streamed,
            all of them have run at the same time.
        is_greedy: Whether the text of the answer is the same in every run. If so, it is compared.
        beside: The bodies of other requests that are sent at the same time. Not written if empty.
        at_start: Whether each start sends it, and not only the build, which proves that a start does without. Written only
            if false.
    """

    name: str
    path: str
    body: dict[str, JsonValue]
    copies: Annotated[int, Field(ge=1, le=4096)] = 1
    is_greedy: bool = False
    beside: tuple[dict[str, JsonValue], ...] = ()
    at_start: bool = True

    @pydantic.model_serializer(mode="wrap")
    def _written(self, write: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = write(self)
        if not self.beside:
            del document["beside"]
        if self.at_start:
            del document["at_start"]
        return document

    @property
    def bodies(self) -> tuple[dict[str, JsonValue], ...]:
        """The bodies of all HTTP requests that are sent at once."""
        return (*[self.body] * self.copies, *self.beside)


class WarmUp(Value):
    """The warm-up requests, in the order in which they are sent."""

    level: WarmUpLevel
    requests: tuple[WarmUpRequest, ...] = ()


LAUNCH_SCHEMA: Literal["aotgaudi.launch/1"] = "aotgaudi.launch/1"

GuestName = Literal["vllm", "vllm-gaudi", "sglang", "fake"]
Count = Annotated[int, Field(ge=1, le=1 << 20)]

WORLD = ("tensor_parallel", "pipeline_parallel", "data_parallel", "nodes")
"""The keys of `Launch.world`. Each value is 1 by default."""
API_SERVERS = "api_servers"
"""The key of `Launch.world` with the number of API servers; only there if a launch has several."""


class ModelIdentity(Value):
    """The model, as far as compiled code depends on it.

    Attributes:
        name: The absolute path of its directory, or its name on the hub. A condition, not part of the key.
        files: The files in its directory that decide graphs, such as ``config.json`` and code, but not weights.
    """

    name: str
    files: dict[str, DigestField]


class Place(Value):
    """Where a launch takes place. It changes no code, but the server's files or its hash may contain any of it.

    Attributes:
        root: The directory that holds all of the server's caches.
        prefix: ``sys.prefix`` of the server's interpreter.
        site_packages: The directory of the server's packages.
        variables: The variables, with values, that the server hashes although they change no code.
    """

    root: str
    prefix: str
    site_packages: str
    variables: dict[str, str] = Field(default_factory=dict)


class Launch(Document):
    """A launch, see the module.

    Attributes:
        guest: The server's name.
        words: The command as it was written, from the interpreter or the script on, without secrets.
        flags: The given flags that are part of the key, by name without dashes. A value is a text, several texts, a switch's
            bool, or a table.
        variables: The variables that are part of the key. Never a secret.
        model: The model.
        software: Component -> version, or version and digest.
        target: The machine that the code is compiled for.
        world: The number of ranks, by the names in `WORLD`, and of API servers, by `API_SERVERS`.
        place: Where the launch takes place.
        exercise: The warm-up requests.
        repairs: Ids of the repairs in force, sorted.
        manifest_id: The id of the manifest that decides the shapes, if there is one.
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
        """The sha256 of the key, 64 hex digits. It does not depend on where the launch takes place."""
        return self.key.hex

    @property
    def is_aliased(self) -> bool:
        """Whether the model is a directory. The server then gets an alias for it and never sees its path."""
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
        exercise = sha256_bytes(canonical_json(self.exercise.model_dump(mode="json")))
        yield "exercise", f"{self.exercise.level} {exercise}"
        yield "repairs", " ".join(self.repairs)
        yield "shapes", self.manifest_id or ""

    def conditions(self) -> tuple[tuple[str, str], ...]:
        """Returns the conditions that the server's own hash or its files contain, as ``(name, value)``."""
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
    """Returns a flag's value as it is in a key: canonical JSON, which distinguishes the text ``true`` from the switch."""
    return canonical_json(value).decode()


def world(flags: Mapping[str, int]) -> dict[str, int]:
    """Returns a launch's `world`: the numbers in `flags`, and 1 for the rest."""
    servers = {API_SERVERS: flags[API_SERVERS]} if flags.get(API_SERVERS, 1) > 1 else {}
    return {**{name: flags.get(name, 1) for name in WORLD}, **servers}
