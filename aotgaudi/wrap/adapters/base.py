"""The contract between the servers that we wrap and the code that runs and watches them.

An adapter is one module with a value, a `ServerKind`, that describes a server. It imports nothing of the server and starts
nothing. The caller asks it for commands, environments and paths, gives it the agents' reports, and judges a start by what
the value expects. Another server takes an adapter, a row of `starts.SERVERS`, a module of the agent, and a `GuestName`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, JsonValue

from aotgaudi.backends.base import Target
from aotgaudi.bundle.capture_receipt import Expected, FileKind
from aotgaudi.bundle.launch import GuestName, Launch, WarmUpRequest
from aotgaudi.commands.flags import NEUTRAL_KEYS, NOT_WRAPPED
from aotgaudi.commands.variables import VariableRules, hugging_face_home
from aotgaudi.commands.words import CommandReader
from aotgaudi.document import Sha256, Value
from aotgaudi.errors import SpecError
from aotgaudi.gaudi.live_graphs import LiveGraphs
from aotgaudi.wrap.events import ProcessLog
from aotgaudi.wrap.exercise import Feature, ServerLimits
from aotgaudi.wrap.launch_machine import Device, Installed
from aotgaudi.wrap.starts import Indices
from aotgaudi.wrap.witness import ENTRY_POINT

if TYPE_CHECKING:  # `aotgaudi run` starts servers without a spec and need not import its modules.
    from aotgaudi.spec.build_spec import BuildSpec

Phase = Literal["cold", "load", "measure", "exercise", "live"]
"""``cold``: the build, from empty caches. ``load``: from sealed files, until the server is healthy. ``measure``: like
``load``, but nothing is refused: a proof, and a run that need not be warm. ``exercise``: while the warm-up requests are
sent. ``live``: after that."""

SHAPES_FOLDER = "cache/shapes"
"""The folder for files of shapes, relative to a sandbox's root. They are captured and restored with the caches."""


@dataclass(frozen=True)
class Address:
    """Where a server listens, and what its clients must know.

    Attributes:
        host: the host, as a client on this machine reaches it.
        port: the port.
        uds: the unix socket that it listens on instead of a port, as we see it.
        served_name: the model's name in requests.
        certificate: the PEM file with the certificate that it shows; None for a server without TLS.
        pinned: that certificate as it was when the server was started, DER; empty if it was not read yet.
        ranks: data-parallel ranks, each of which must get every request.
        authorization: the value of the ``Authorization`` header; empty for none. A secret: never store or show it.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    served_name: str = ""
    certificate: str | None = None
    pinned: bytes = field(default=b"", repr=False)
    ranks: int = 1
    authorization: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """The parsed command line of a server.

    Attributes:
        values: every flag except secrets, by its name without dashes: a text, texts, a switch's bool or a table.
        model: as written: a directory, or a name on the hub.
        words: the command's words without secrets.
        address: where the server listens.
        world: number of ranks, and of API servers, by the names that `launch.world` takes; absent names mean 1.
        room: how long a sequence may be, and how many the server takes.
    """

    values: Mapping[str, JsonValue]
    model: str
    words: tuple[str, ...]
    address: Address = field(default_factory=Address)
    world: Mapping[str, int] = field(default_factory=dict)
    room: ServerLimits = field(default_factory=ServerLimits)


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
    """What a server is given so that it compiles the shapes of a manifest; by default nothing.

    Attributes:
        manifest_id: the manifest, if there is one.
        files: path below the sandbox's root -> text. Written before the build, and captured with the rest.
        words: words added to the command.
        variables: variables added to the environment.
        paths: variable -> the path below the root that it names.
        requests: the requests that make the server compile the shapes.
        live_graphs: whether traffic compiles graphs of a kind all the same.
    """

    manifest_id: Sha256 | None = None
    files: dict[str, str] = Field(default_factory=dict)
    words: tuple[str, ...] = ()
    variables: dict[str, str] = Field(default_factory=dict)
    paths: dict[str, str] = Field(default_factory=dict)
    requests: tuple[WarmUpRequest, ...] = ()
    live_graphs: tuple[LiveGraphs, ...] = ()

    def environ(self, environ: Mapping[str, str], root: Path) -> dict[str, str]:
        """Returns `environ` with the variables added, for a sandbox at `root`."""
        return {
            **environ,
            **self.variables,
            **{name: str(root / path) for name, path in self.paths.items()},
        }


def nothing(*_: object) -> tuple[()]:
    """Returns nothing, whatever it is asked."""
    return ()


@dataclass(frozen=True, kw_only=True)
class ServerKind:
    """One kind of server, as a value. Stateless: it serves every launch, from any thread.

    Attributes:
        name: the server's name in a launch.
        starts_at: returns where a command starts this server (`starts.Indices`); None if it does not.
        reader: reads the words of its command.
        model_flag: the flag that names the model.
        read: reads the words after what starts the server, in an environment. Raises SpecError.
        neutral_flags: flags that change no code, each with the reason.
        defaults: returns each flag's default on a target's backend. A flag that is given its default does not count.
        refuse: raises SpecError, with the reason, for any other launch that cannot be watched completely.
        variable_rules: which variables count, and which are conditions.
        cache_roots: cache variables -> where the caches lie below a sandbox's root.
        settings: returns the variables that it gets besides in a phase; None for one that is unset.
        left_out: patterns of paths below the root that are not captured, with the reason (fnmatch, so ``*`` matches ``/``
            too).
        kinds: patterns of captured paths, with ``/`` in front -> what such a file is. The first that fits counts.
        repairs: the server's known defects.
        hooks: the hooks that the agent needs in each process that makes compiled code or loads it.
        counted: the server's counters whose values a warm start must repeat.
        zeros: the server's counters that must stay 0 in a warm start.
        device: returns the device that an installation is for. Raises TargetError for one that is not known.
        target: returns this machine as the server's target. Raises TargetError if the device is not there.
        roles: returns how many processes of each role must check in. Other processes may check in too.
        features: returns what to ask a launch of a model with a configuration, so that it compiles everything that it
            serves.
        residuals: returns what the server does at every start, whatever its caches hold, in sentences for people.
        variant: returns the kind that an installation of this server is, such as vLLM with a plugin; None for this one.
        build_steps: returns commands to run before the cold run, in its environment: compilers that come with the server.
        settle: puts the caches below a root in order, after the server has ended and before the capture. Raises
            CompileError if the server left something unfinished.
        shape_names: flags and variables that `shapes` may add. See `as_sealed`.
        make_shapes: see `shapes`; None if the server takes none.
        cut_shapes: see `slices`; None if they cannot be cut.
    """

    name: GuestName
    starts_at: Callable[[Sequence[str]], Indices | None]
    reader: CommandReader
    model_flag: str
    read: Callable[[Sequence[str], Mapping[str, str]], Flags]
    neutral_flags: Mapping[str, str]
    defaults: Callable[[str], Mapping[str, JsonValue]]
    refuse: Callable[[Flags, Mapping[str, str]], None]
    variable_rules: VariableRules
    cache_roots: Mapping[str, str]
    settings: Callable[[Path, Phase, Mapping[str, str]], Mapping[str, str | None]]
    left_out: tuple[tuple[str, str], ...]
    kinds: tuple[tuple[str, FileKind], ...]
    repairs: tuple[Repair, ...]
    hooks: tuple[str, ...]
    counted: tuple[str, ...]
    zeros: tuple[str, ...]
    device: Callable[[Installed], Device]
    target: Callable[[Installed], Target]
    roles: Callable[[Launch], dict[str, int]]
    features: Callable[[Flags, Mapping[str, JsonValue], Device], tuple[Feature, ...]]
    residuals: Callable[[Launch], tuple[str, ...]]
    variant: Callable[[Installed], GuestName | None] = lambda _: None
    build_steps: Callable[[Launch], tuple[tuple[str, ...], ...]] = nothing
    settle: Callable[[Path], object] = nothing
    shape_names: frozenset[str] = frozenset()
    make_shapes: Callable[[BuildSpec, Flags, Mapping[str, str], Installed | None], Shapes] | None = None
    cut_shapes: Callable[[Mapping[str, str], int], tuple[Mapping[str, str], ...]] | None = None

    def require_witnessed(self, flags: Flags, environ: Mapping[str, str]) -> None:
        """Raises SpecError, with the reason, for a launch that cannot be watched completely."""
        for name, reason in NOT_WRAPPED.items():
            if flags.values.get(name, False) is not False:
                raise SpecError(f"--{name}", "cannot be wrapped", reason)
        if flags.world["nodes"] > 1:
            raise SpecError(
                "--nnodes", "is more than 1", "ranks on other machines cannot be watched from here"
            )
        self.refuse(flags, environ)

    def environment(self, root: Path, phase: Phase, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns `environ` as the server gets it in a phase, without the agent's variables.

        LOGNAME is fixed, because torch puts the user's name into a path. In the build, home is in the sandbox; the hub's
        cache stays where the user has it.
        """
        values: dict[str, str | None] = {name: str(root / path) for name, path in self.cache_roots.items()}
        values["LOGNAME"] = "aotgaudi"
        if phase == "cold":
            values |= {"HOME": str(root / "home"), "XDG_CACHE_HOME": str(root / "home/.cache")}
            values["HF_HOME"] = hugging_face_home(environ)
        changed = {**environ, **values, **self.settings(root, phase, environ)}
        return {name: value for name, value in changed.items() if value is not None}

    def command(self, words: Sequence[str], flags: Flags, root: Path, *, is_aliased: bool) -> tuple[str, ...]:
        """Returns the complete command to run.

        Args:
            words: the complete command, as the user wrote it.
            flags: the command's flags.
            root: the sandbox that it runs in.
            is_aliased: whether the command names the sandbox's link instead of the model's directory. The model is then
                served under the name that requests expect.
        """
        if not is_aliased:
            return tuple(words)
        found = self.starts_at(words)
        after = len(words) if found is None else found[1]
        renamed = self.reader.renamed(words[after:], self.model_flag, flags.model, str(root / "model"))
        served = () if "served-model-name" in flags.values else ("--served-model-name", flags.model)
        return (*words[:after], *renamed, *served)

    def counted_flags(self, flags: Flags, backend: str) -> dict[str, JsonValue]:
        """Returns the flags that are part of a launch's key, without what of their tables changes no code."""
        defaults = self.defaults(backend)
        return {
            name: _without(value, NEUTRAL_KEYS[name]) if name in NEUTRAL_KEYS else value
            for name, value in flags.values.items()
            if name not in self.neutral_flags and not (name in defaults and value == defaults[name])
        }

    def kind_of(self, path: str) -> FileKind:
        """Returns what a captured file is, by its path relative to the sandbox's root."""
        return next((kind for pattern, kind in self.kinds if fnmatchcase(f"/{path}", pattern)), "other")

    def expected(self, launch: Launch, processes: Iterable[ProcessLog]) -> Expected:
        """Returns what every warm start must show, except the answers, from what the processes reported in the proof."""
        loads: Counter[str] = Counter()
        counters = Counter(dict.fromkeys(self.zeros, 0))
        for process in processes:
            loads.update(process.loads)
            counters.update({n: v for n, v in process.counters.items() if n in self.counted and v})
        return Expected(
            loads=dict(loads), counters=dict(counters), roles=self.roles(launch), hooks=self.hooks
        )

    def shapes(
        self, spec: BuildSpec, flags: Flags, environ: Mapping[str, str], installed: Installed | None = None
    ) -> Shapes:
        """Returns what makes the server compile the shapes of `spec`, so that it meets no others while it serves.

        Raises:
            SpecError: the server takes no shapes, or `spec` is for another command or for another version than the
                `installed` one.
            CoverageError: the server would meet shapes that `spec` does not have.
        """
        if self.make_shapes is None:
            raise no_shapes(self.name)
        return self.make_shapes(spec, flags, environ, installed)

    def slices(self, files: Mapping[str, str], num: int) -> tuple[Mapping[str, str], ...]:
        """Returns the files of `Shapes` for each of `num` servers that share the shapes. Raises SpecError."""
        if self.cut_shapes is None:
            raise SpecError(
                "--shards", f"is of no use to {self.name}", "leave it out: only buckets can be cut"
            )
        return self.cut_shapes(files, num)


def _without(value: JsonValue, keys: frozenset[str]) -> JsonValue:
    """Returns a table without these keys, at any depth."""
    text = json.dumps(value)
    kept: JsonValue = json.loads(
        text, object_hook=lambda row: {n: v for n, v in row.items() if n not in keys}
    )
    return kept


def with_agent(variable: str, plugins: str) -> dict[str, str | None]:
    """Returns the variable that names the plugins to load, with the agent among them."""
    names = list(filter(None, plugins.split(",")))
    return {} if ENTRY_POINT in names else {variable: ",".join([*names, ENTRY_POINT])}


def captures_graphs(eager_flag: str) -> Callable[[Launch], tuple[str, ...]]:
    """Returns the residuals of a server that captures CUDA graphs on a GPU, unless `eager_flag` is given."""

    def residuals(launch: Launch) -> tuple[str, ...]:
        is_eager = launch.flags.get(eager_flag, False) is not False
        return () if is_eager or launch.target.backend != "cuda" else ("CUDA graphs are captured",)

    return residuals


def as_sealed(
    kind: ServerKind, sealed: Launch, words: Sequence[str], environ: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Returns a command and its environment, with what `Shapes` added to the sealed launch.

    Users serve with the command that they gave to the build, which lacks what the build added for the shapes. Other
    differences stay, and comparing the launches finds them. Raises SpecError for a command that cannot be read.
    """
    names = kind.shape_names
    found = kind.starts_at(words)
    if sealed.manifest_id is None or found is None:
        return tuple(words), dict(environ)
    given = kind.read(words[found[1] :], environ).values
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


def no_shapes(server: str) -> SpecError:
    """Returns the error for a server that takes no shapes."""
    return SpecError(
        "--shapes", f"is of no use to {server}", "leave it out: its graphs are not listed by shape"
    )
