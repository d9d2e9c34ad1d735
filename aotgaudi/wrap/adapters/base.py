"""What a guest must say of itself: the contract between the servers that we wrap and whoever runs and watches them.

A guest is one folder (or module) that describes a server; it imports nothing of that server and starts nothing. Whoever
runs it asks for words, environment and places, hands the events of the witness back, and judges by what is expected.

Shapes that a spec decides for a guest: what its command, its environment and its caches have more for them.

A guest that compiles one graph for each shape lists its shapes by rules of its own. Given a spec it can be told them
instead: then they are known before it starts, the steps that they do not cover are named, and the launch names their
manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal, Protocol

from pydantic import JsonValue

from aotgaudi.bundle.capture_receipt import FileKind
from aotgaudi.bundle.launch import Launch, LaunchId, Room, WarmUpRequest
from aotgaudi.document import Value
from aotgaudi.errors import SpecError

if TYPE_CHECKING:
    from aotgaudi.backends.base import Target
    from aotgaudi.bundle.capture_receipt import Expected
    from aotgaudi.bundle.launch import GuestName, Launch
    from aotgaudi.spec.build_spec import BuildSpec
    from aotgaudi.wrap.events import ProcessLog
    from aotgaudi.wrap.launch_machine import Installed
    from aotgaudi.wrap.variables import Hashed, VariableRules


Phase = Literal["cold", "load", "measure", "exercise", "live"]
"""``cold``: the build, from empty caches; ``load``: from sealed files, up to health; ``measure``: as ``load``, and nothing
is refused; ``exercise``: while the exercise is sent; ``live``: after that."""

Role = Literal["APIServer", "EngineCore", "Worker", "Registry", "other"]
"""What a process of a guest is, as the witness names it."""


@dataclass(frozen=True, slots=True)
class PlaceRoot:
    """The directory that everything of one run lies below, as the guest sees it."""

    root: str

    def below(self, *parts: str) -> str:
        """Returns the path of something below the root."""
        return str(PurePosixPath(self.root, *parts))

    @property
    def cache(self) -> str:
        """Where the guest's caches lie: what is captured and restored."""
        return self.below("cache")

    @property
    def tmp(self) -> str:
        """``TMPDIR``; short, for servers put sockets there (a socket's path has at most 107 bytes)."""
        return self.below("tmp")

    @property
    def home(self) -> str:
        """``HOME`` while building, so that a cache that nobody knew of is found."""
        return self.below("home")

    @property
    def model(self) -> str:
        """A link to the model's directory: the path of the model that the guest sees and hashes."""
        return self.below("model")

    @property
    def witness(self) -> str:
        """What is put on ``PYTHONPATH``."""
        return self.below("witness")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """A guest's command line, read.

    Attributes:
        values: every flag given but secrets, by its name without dashes: a text, texts, a switch's bool or a table.
        model: as written: a directory, or a name on the hub.
        revision: of the model on the hub, where one is given.
        download_dir: where models from the hub are kept, where that is given.
        host: that the server listens on, as a client on this machine reaches it.
        port: that it listens on.
        uds: the unix socket that it listens on in place of a port.
        served_name: what requests call the model.
        world: ranks by the names of `launch.WORLD`; those that are not given are 1.
        room: what fits in.
        authorization: what a request must send in the header of that name; "" for nothing. A secret: never to be kept.
        words: the command's words without secrets.
    """

    values: Mapping[str, JsonValue]
    model: str
    words: tuple[str, ...]
    revision: str | None = None
    download_dir: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    served_name: str = ""
    world: Mapping[str, int] = field(default_factory=dict)
    room: Room = field(default_factory=Room)
    authorization: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Environment:
    """What a guest's environment has more, and less, than ours."""

    set: Mapping[str, str]
    unset: tuple[str, ...] = ()

    def applied(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns `environ` with this done to it."""
        kept = {name: value for name, value in environ.items() if name not in self.unset}
        return {**kept, **self.set}


@dataclass(frozen=True, slots=True)
class Repair:
    """A defect of some versions of a guest that the witness mends, where it finds it.

    A repair lets a load succeed that the guest itself meant to do. It changes nothing that is computed, and relaxes no hash.

    Attributes:
        id: ``GUEST.NAME``; in the launch's key.
        defect: what goes wrong without it.
        feature: by what the witness finds that it is needed; never by a version.
        action: what it does.
        upstream: where it is known.
    """

    id: str
    defect: str
    feature: str
    action: str
    upstream: str


class Adapter(Protocol):
    """One kind of server. Stateless: one value serves every launch, from any thread."""

    @property
    def name(self) -> GuestName:
        """What it is called."""
        ...

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Beginnings of the variables that it, or what it stands on, may read; see guests/variables.py."""
        ...

    @property
    def neutral_flags(self) -> Mapping[str, str]:
        """Flags that change no code, each with the reason."""
        ...

    @property
    def neutral_variables(self) -> Mapping[str, str]:
        """Variables (or patterns of them) that change no code, each with the reason."""
        ...

    @property
    def hashed_variables(self) -> Mapping[str, Hashed]:
        """Variables that change no code, and that its own hash holds: conditions."""
        ...

    @property
    def variable_rules(self) -> VariableRules:
        """How its variables are told apart: the three above."""
        ...

    def starts_at(self, words: Sequence[str]) -> tuple[int, int] | None:
        """Returns where a command starts this server: the indices of the first word of that and of the first after it."""
        ...

    @property
    def left_out(self) -> tuple[tuple[str, str], ...]:
        """Patterns (fnmatch: ``*`` matches ``/``, too) of paths below the root that are not captured, with the reason."""
        ...

    @property
    def repairs(self) -> tuple[Repair, ...]:
        """Its known defects."""
        ...

    def read(self, words: Sequence[str], environ: Mapping[str, str]) -> Flags:
        """Reads the words after what starts the server. Raises SpecError for what cannot be read, or is refused."""
        ...

    def roots(self, place: PlaceRoot) -> dict[str, str]:
        """Returns the variables that name its caches, each with a path below the place's root."""
        ...

    def environment(self, place: PlaceRoot, phase: Phase, environ: Mapping[str, str]) -> Environment:
        """Returns what its environment must be in a phase, `roots` included, the witness's own variables not."""
        ...

    def command(
        self, words: Sequence[str], flags: Flags, place: PlaceRoot, *, is_aliased: bool
    ) -> tuple[str, ...]:
        """Returns the whole command to run.

        Args:
            words: the whole command, as the user wrote it.
            flags: the same, read.
            place: where it runs.
            is_aliased: the command names the place's alias for the model's directory instead, and serves it under the name
                that requests expect.
        """
        ...

    def kind_of(self, path: str) -> FileKind:
        """Returns what a captured file is, by its path relative to the place's root."""
        ...

    def target(self, installed: Installed) -> Target:
        """Returns what this machine is to it. Raises TargetError where there is no device that it is for."""
        ...

    def roles(self, launch: Launch) -> dict[str, int]:
        """Returns how many processes of each role must check in; `Role` has others that may."""
        ...

    @property
    def hooks(self) -> tuple[str, ...]:
        """Hooks that the witness must have in each process that makes code, or loads what was made."""
        ...

    def expected(self, launch: Launch, processes: Iterable[ProcessLog]) -> Expected:
        """Returns what every warm start must show, given what the processes reported in the proof; without the answers."""
        ...

    def residuals(self, launch: Launch) -> tuple[str, ...]:
        """Returns what it does at every start, whatever is in its caches: sentences for people."""
        ...

    def health_path(self) -> str:
        """Returns the path of a GET that answers 200 once the server serves."""
        ...

    def build_steps(self, launch: Launch) -> tuple[tuple[str, ...], ...]:
        """Returns commands to run before the cold run, in its environment: compilers that the guest brings."""
        ...

    def shape_requests(self, flags: Flags) -> Iterable[WarmUpRequest]:
        """Returns what the level ``shapes`` asks more."""
        ...

    @property
    def shape_names(self) -> frozenset[str]:
        """Flags and variables that `shapes` may add: whoever serves need not repeat them (`shapes.as_sealed`)."""
        ...

    def shapes(self, spec: BuildSpec, flags: Flags, environ: Mapping[str, str]) -> Shapes:
        """Returns what it is given so that it compiles the shapes of `spec`, and no others while it serves.

        Raises:
            SpecError: it takes no shapes, or the command is not that of the spec.
            CoverageError: it would meet shapes that it was not told.
        """
        ...

    def settle(self, root: Path) -> None:
        """Puts its caches below `root`, as we see it, in order: once it has ended, before they are captured.

        Raises CompileError for what it left unfinished.
        """
        ...

    def require_witnessed(self, flags: Flags, environ: Mapping[str, str]) -> None:
        """Raises SpecError, with the reason, for a launch that cannot be watched whole."""
        ...


FOLDER = "cache/shapes"
"""Where files of shapes lie below a place's root: what is there is captured, and restored."""


class Shapes(Value):
    """What is done for the shapes of a manifest.

    Attributes:
        manifest_id: of the shapes that the guest will warm up.
        files: path below the place's root -> text; written before the guest is built, and captured with the rest.
        words: what the command has more.
        variables: what the environment has more.
        paths: variable -> the path below the root that it names.
        requests: what is asked of the guest so that it compiles them.
    """

    manifest_id: LaunchId
    files: dict[str, str]
    words: tuple[str, ...]
    variables: dict[str, str]
    paths: dict[str, str]
    requests: tuple[WarmUpRequest, ...] = ()

    def environ(self, environ: Mapping[str, str], place: PlaceRoot) -> dict[str, str]:
        """Returns `environ` with the variables, in a place."""
        return {
            **environ,
            **self.variables,
            **{name: place.below(path) for name, path in self.paths.items()},
        }


def as_sealed(
    guest: Adapter, sealed: Launch, words: Sequence[str], environ: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Returns a command and its environment with what `Shapes` had added to them when the launch was sealed.

    Who serves gives the command that was given to the build, without what the build added for the shapes. What it says
    otherwise is left as it is: it is a difference, for whoever compares the launches.

    Raises:
        SpecError: the command cannot be read.
    """
    names = guest.shape_names
    found = guest.starts_at(words)
    if sealed.manifest_id is None or found is None:
        return tuple(words), dict(environ)
    given = guest.read(words[found[1] :], environ).values
    missing = sorted(name for name in names if name in sealed.flags and name not in given)
    more = [word for name in missing for word in _flag(sealed, name)]
    variables = {
        name: value for name, value in sealed.variables.items() if name in names and name not in environ
    }
    return (*words, *more), {**environ, **variables}


def no_shapes(guest: str) -> SpecError:
    """Returns the error of a guest that takes no shapes."""
    return SpecError(
        "--shapes", f"is of no use to {guest}", "leave it out: its graphs are not listed by shape"
    )


def _flag(sealed: Launch, name: str) -> tuple[str, ...]:
    value = sealed.flags[name]
    if isinstance(value, bool):
        return (f"--{name}" if value else f"--no-{name}",)
    return f"--{name}", str(value)
