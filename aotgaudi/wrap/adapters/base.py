"""The contract between the servers that we wrap and the code that runs and watches them.

An adapter is one module that describes a server. It imports nothing of the server and starts nothing. The caller asks it for
commands, environments and paths, gives it the agents' reports, and judges a start by what the adapter expects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal, Protocol

from pydantic import JsonValue

from aotgaudi.backends.base import Target
from aotgaudi.bundle.capture_receipt import Expected, FileKind
from aotgaudi.bundle.launch import GuestName, Launch, WarmUpRequest
from aotgaudi.commands.variables import VariableRules
from aotgaudi.document import Sha256, Value
from aotgaudi.errors import SpecError
from aotgaudi.gaudi.live_graphs import LiveGraphs
from aotgaudi.wrap.events import ProcessLog
from aotgaudi.wrap.exercise import Feature, Room
from aotgaudi.wrap.launch_machine import Device, Installed

if TYPE_CHECKING:  # `aotgaudi run` starts servers without a spec and need not import its modules.
    from aotgaudi.spec.build_spec import BuildSpec

Phase = Literal["cold", "load", "measure", "exercise", "live"]
"""``cold``: the build, from empty caches. ``load``: from sealed files, until the server is healthy. ``measure``: like
``load``, but nothing is refused. ``exercise``: while the warm-up requests are sent. ``live``: after that."""

SHAPES_FOLDER = "cache/shapes"
"""The folder for files of shapes, relative to a sandbox's root. They are captured and restored with the caches."""


@dataclass(frozen=True, slots=True)
class SandboxRoot:
    """The root directory of one run's sandbox, as the server sees it."""

    root: str

    def below(self, *parts: str) -> str:
        """Returns a path below the root."""
        return str(PurePosixPath(self.root, *parts))

    @property
    def home(self) -> str:
        """``HOME`` during a build, so that caches which the adapter does not know are found."""
        return self.below("home")

    @property
    def model(self) -> str:
        """A link to the model's directory. The server sees and hashes this path."""
        return self.below("model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """The parsed command line of a server.

    Attributes:
        values: every flag except secrets, by its name without dashes: a text, texts, a switch's bool or a table.
        model: as written: a directory, or a name on the hub.
        words: the command's words without secrets.
        revision: of the model on the hub.
        download_dir: where the server keeps models from the hub.
        host: where a client on this machine reaches the server.
        port: the server's port.
        uds: the unix socket that the server listens on instead of a port.
        served_name: the model's name in requests.
        world: number of ranks by the names of `launch.WORLD`; absent names mean 1.
        room: how long a sequence may be, and how many the server takes.
        authorization: the value of the ``Authorization`` header; "" for none. A secret: never store it.
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
    """How a server's environment differs from ours."""

    set: Mapping[str, str]
    unset: tuple[str, ...] = ()

    def applied(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns `environ` with these changes."""
        kept = {name: value for name, value in environ.items() if name not in self.unset}
        return {**kept, **self.set}


@dataclass(frozen=True, slots=True)
class Repair:
    """A defect of some server versions, which the agent mends where it finds it.

    A repair lets the server load what it should have loaded anyway. It neither changes what is computed nor relaxes a hash.

    Attributes:
        id: ``SERVER.NAME``; part of the launch's key.
        defect: what goes wrong without the repair.
        feature: how the agent detects the defect; never by version.
        action: what the agent does.
        upstream: where the defect is reported.
    """

    id: str
    defect: str
    feature: str
    action: str
    upstream: str


class Shapes(Value):
    """What a server is given so that it compiles the shapes of a manifest.

    Attributes:
        manifest_id: the manifest.
        files: path below the sandbox's root -> text. Written before the build, and captured with the rest.
        words: words added to the command.
        variables: variables added to the environment.
        paths: variable -> the path below the root that it names.
        requests: the requests that make the server compile the shapes.
        live_graphs: whether traffic compiles graphs of a kind all the same.
    """

    manifest_id: Sha256
    files: dict[str, str]
    words: tuple[str, ...]
    variables: dict[str, str]
    paths: dict[str, str]
    requests: tuple[WarmUpRequest, ...] = ()
    live_graphs: tuple[LiveGraphs, ...] = ()

    def environ(self, environ: Mapping[str, str], root: SandboxRoot) -> dict[str, str]:
        """Returns `environ` with the variables added, for a sandbox at `root`."""
        return {
            **environ,
            **self.variables,
            **{name: root.below(path) for name, path in self.paths.items()},
        }


class Adapter(Protocol):
    """One kind of server. Stateless: one value serves every launch, from any thread."""

    @property
    def name(self) -> GuestName:
        """The server's name in a launch."""
        ...

    @property
    def neutral_flags(self) -> Mapping[str, str]:
        """Flags that change no code, each with the reason."""
        ...

    def defaults(self, device: str) -> Mapping[str, JsonValue]:
        """Returns each flag's default on a target's backend. A flag that is given its default does not count."""
        ...

    @property
    def variable_rules(self) -> VariableRules:
        """Which variables count, and which are conditions."""
        ...

    @property
    def left_out(self) -> tuple[tuple[str, str], ...]:
        """Patterns of paths below the root that are not captured, with the reason (fnmatch, so ``*`` matches ``/`` too)."""
        ...

    @property
    def repairs(self) -> tuple[Repair, ...]:
        """The server's known defects."""
        ...

    @property
    def hooks(self) -> tuple[str, ...]:
        """The hooks that the agent needs in each process that makes compiled code or loads it."""
        ...

    @property
    def shape_names(self) -> frozenset[str]:
        """Flags and variables that `shapes` may add. See `as_sealed`."""
        ...

    def starts_at(self, words: Sequence[str]) -> tuple[int, int] | None:
        """Returns where a command starts this server: the indices of the first word that does, and of the first after it."""
        ...

    def read(self, words: Sequence[str], environ: Mapping[str, str]) -> Flags:
        """Reads the words after what starts the server. Raises SpecError for words that cannot be read."""
        ...

    def features(self, flags: Flags, config: Mapping[str, JsonValue], device: Device) -> tuple[Feature, ...]:
        """Returns what to ask a launch of a model with this configuration, so that it compiles everything that it serves."""
        ...

    def require_witnessed(self, flags: Flags, environ: Mapping[str, str]) -> None:
        """Raises SpecError, with the reason, for a launch that cannot be watched completely."""
        ...

    def roots(self, root: SandboxRoot) -> dict[str, str]:
        """Returns the variables that name the server's caches, each with a path below the sandbox's root."""
        ...

    def environment(self, root: SandboxRoot, phase: Phase, environ: Mapping[str, str]) -> Environment:
        """Returns the server's environment in a phase, with `roots` and without the agent's variables."""
        ...

    def command(
        self, words: Sequence[str], flags: Flags, root: SandboxRoot, *, is_aliased: bool
    ) -> tuple[str, ...]:
        """Returns the complete command to run.

        Args:
            words: the complete command, as the user wrote it.
            flags: the command's flags.
            root: the sandbox that it runs in.
            is_aliased: whether the command names the sandbox's link instead of the model's directory. The model is then
                served under the name that requests expect.
        """
        ...

    def kind_of(self, path: str) -> FileKind:
        """Returns what a captured file is, by its path relative to the sandbox's root."""
        ...

    def target(self, installed: Installed) -> Target:
        """Returns this machine as the server's target. Raises TargetError if the server's device is not there."""
        ...

    def roles(self, launch: Launch) -> dict[str, int]:
        """Returns how many processes of each role must check in. Other processes may check in too."""
        ...

    def expected(self, launch: Launch, processes: Iterable[ProcessLog]) -> Expected:
        """Returns what every warm start must show, except the answers, from what the processes reported in the proof."""
        ...

    def residuals(self, launch: Launch) -> tuple[str, ...]:
        """Returns what the server does at every start, whatever its caches hold, in sentences for people."""
        ...

    def build_steps(self, launch: Launch) -> tuple[tuple[str, ...], ...]:
        """Returns commands to run before the cold run, in its environment: compilers that come with the server."""
        ...

    def shapes(
        self, spec: BuildSpec, flags: Flags, environ: Mapping[str, str], installed: Installed | None = None
    ) -> Shapes:
        """Returns what makes the server compile the shapes of `spec`, so that it meets no others while it serves.

        Raises:
            SpecError: the server takes no shapes, or `spec` is for another command or for another version than the
                `installed` one.
            CoverageError: the server would meet shapes that `spec` does not have.
        """
        ...

    def slices(self, files: Mapping[str, str], num: int) -> tuple[Mapping[str, str], ...]:
        """Returns the files of `Shapes` for each of `num` servers that share the shapes. Raises SpecError."""
        ...

    def settle(self, root: Path) -> None:
        """Puts the caches below `root` in order. Called after the server has ended and before the capture.

        Raises CompileError if the server left something unfinished.
        """
        ...


def as_sealed(
    adapter: Adapter, sealed: Launch, words: Sequence[str], environ: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Returns a command and its environment, with what `Shapes` added to the sealed launch.

    Users serve with the command that they gave to the build, which lacks what the build added for the shapes. Other
    differences stay, and comparing the launches finds them. Raises SpecError for a command that cannot be read.
    """
    names = adapter.shape_names
    found = adapter.starts_at(words)
    if sealed.manifest_id is None or found is None:
        return tuple(words), dict(environ)
    given = adapter.read(words[found[1] :], environ).values
    missing = sorted(name for name in names if name in sealed.flags and name not in given)
    more = [word for name in missing for word in flag_words(name, sealed.flags[name])]
    variables = {
        name: value for name, value in sealed.variables.items() if name in names and name not in environ
    }
    return (*words, *more), {**environ, **variables}


def flag_words(name: str, value: JsonValue) -> tuple[str, ...]:
    """Returns the words that give a flag a value."""
    if isinstance(value, bool):
        return (f"--{name}" if value else f"--no-{name}",)
    return f"--{name}", str(value)


def no_slices(server: str) -> SpecError:
    """Returns the error for a server whose shapes cannot be cut into slices."""
    return SpecError("--shards", f"is of no use to {server}", "leave it out: only buckets can be cut")


def no_shapes(server: str) -> SpecError:
    """Returns the error for a server that takes no shapes."""
    return SpecError(
        "--shapes", f"is of no use to {server}", "leave it out: its graphs are not listed by shape"
    )
