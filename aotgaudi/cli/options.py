"""Click options from dataclasses: a command receives each group of options as one frozen value.

Each field of a group contains, in `option`, its ``--help`` text. Its type and default give the rest::

    @dataclass(frozen=True, kw_only=True)
    class Workers:
        jobs: int | None = option("Worker processes  [default: one a core]", "-j", "--jobs", metavar="N")

    @click.command()
    @options_of(Workers, "workers")
    def build(workers: Workers) -> None: ...

For a dataclass of another layer, which knows nothing of options, the texts are given where it is used:
``options_of(Workers, "workers", jobs=said("Worker processes", "-j", "--jobs"))``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click

from aotgaudi.bundle.trust import TrustPolicy
from aotgaudi.cli import leave_out_of_path
from aotgaudi.errors import SpecError
from aotgaudi.machine import available_cores
from aotgaudi.store.location import default_store_root

if TYPE_CHECKING:
    from aotgaudi.store.store import Store

Command = Callable[..., Any]
CommandT = TypeVar("CommandT", bound=Command)
Settings = Mapping[str, Any]

_SAID = "option"
_BYTE_COUNT = re.compile(
    r"(?P<number>[0-9]{1,15}(\.[0-9]{1,9})?)\s*(?P<unit>[KMGT]i?B|B?)", re.IGNORECASE | re.ASCII
)
_POWERS = types.MappingProxyType({"": 0, "k": 1, "m": 2, "g": 3, "t": 4})

POSITIVE = click.IntRange(min=1)


def said(text: str, *names: str, **settings: Any) -> Settings:
    """Returns the description of an option: its help, its `names` unless the field's will do, settings of ``click.option``.

    One setting is not click's: `parse` turns the given text into the value, and raises ValueError for a wrong text.
    """
    return {"help": text, "names": names, **settings}


def option(text: str, *names: str, default: Any = None, **settings: Any) -> Any:
    """Returns a field of a group of options, with its default. A callable default is called each time the command runs."""
    if callable(default):
        settings["default"], default = default, dataclasses.MISSING
    return dataclasses.field(default=default, metadata={_SAID: said(text, *names, **settings)})


def options_of(
    kind: type[Any],
    argument: str,
    *,
    made: Callable[[Any], Any] | None = None,
    **others: Settings,
) -> Callable[[CommandT], CommandT]:
    """Adds an option for each field of the dataclass `kind`. The command gets a value of `kind` as `argument`.

    `others` adds to or replaces the descriptions of single fields. With `made`, the command gets the result of `made`
    instead of the value.
    """
    hints = get_type_hints(kind)
    described = {
        field.name: {**field.metadata.get(_SAID, {}), **others.get(field.name, {})}
        for field in dataclasses.fields(kind)
        if _SAID in field.metadata or field.name in others
    }
    options = [
        _click_option(field, hints[field.name], described[field.name])
        for field in dataclasses.fields(kind)
        if field.name in described
    ]

    def decorate(function: CommandT) -> CommandT:
        @functools.wraps(function)
        def with_group(*arguments: Any, **values: Any) -> Any:
            group = kind(**{name: values.pop(name) for name in described})
            return function(*arguments, **values, **{argument: made(group) if made else group})

        command: Command = with_group
        for one in reversed(options):
            command = one(command)
        return command  # type: ignore[return-value] # It takes the options in place of the group.

    return decorate


def _click_option(field: dataclasses.Field[Any], hint: Any, given: Settings) -> Callable[[Command], Command]:
    settings = dict(given)
    names = settings.pop("names") or (f"--{field.name.replace('_', '-')}",)
    parse = settings.pop("parse", None)
    if parse is not None:
        settings["callback"] = parsed_by(parse)
    is_many = get_origin(hint) is tuple
    hint = get_args(hint)[0] if is_many else _without_none(hint)
    if hint is bool:
        settings.setdefault("is_flag", True)
    elif parse is None:
        settings.setdefault("type", _click_type(hint))
    settings.setdefault("multiple", is_many)
    if "default" not in settings and field.default is not dataclasses.MISSING and not is_many:
        settings["default"] = field.default
    default = settings.get("default")
    has_default = default is not None and default is not False and not callable(default)
    settings.setdefault("show_default", has_default and "[default:" not in settings["help"])
    return click.option(*names, field.name, **settings)


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (one for one in get_args(hint) if one is not types.NoneType)
    return hint


def _click_type(hint: Any) -> Any:
    if get_origin(hint) is Literal:
        return click.Choice(get_args(hint))
    if hint is Path:
        return click.Path(path_type=Path)
    return FiniteRange() if hint is float else hint


def parsed_by(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Returns a callback of click for an option whose text `parse` turns into its value."""

    def callback(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        try:
            return None if value is None else parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error), context, parameter) from error

    return callback


class CommandWithWords(click.Command):
    """Gives its callback ``words``: everything after the first ``--``, unchanged; () if there is no ``--``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses everything before ``--``."""
        at = args.index("--") if "--" in args else len(args)
        rest = super().parse_args(ctx, args[:at])
        ctx.params["words"] = tuple(args[at + 1 :])
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Returns the parts of the usage line."""
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


class FiniteRange(click.FloatRange):
    """A number in a range. Refuses ``nan`` and ``inf``, which click accepts in any range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Converts a value. Called by click."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


ABOVE_ZERO = FiniteRange(min=0, min_open=True)


def parse_byte_count(text: str) -> int:
    """Returns the bytes for a number with a unit: ``96GiB``, ``1.5 TB``, ``4096``.

    Raises:
        ValueError: `text` is not a size, or is less than a byte.
    """
    match = _BYTE_COUNT.fullmatch(text.strip())
    num_bytes = 0
    if match:
        unit = match["unit"].lower().removesuffix("b")
        base = 1024 if unit.endswith("i") else 1000
        num_bytes = int(Decimal(match["number"]) * base ** _POWERS[unit.removesuffix("i")])
    if num_bytes < 1:
        raise ValueError(f"{text!r} is not a size: a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB")
    return num_bytes


def path_option(*names: str, **settings: Any) -> Callable[[CommandT], CommandT]:
    """Returns an option whose value is a path. `settings` are those of ``click.option``, or `dir_okay`."""
    return click.option(*names, type=_path_type(settings), **settings)


def path_argument(name: str, **settings: Any) -> Callable[[CommandT], CommandT]:
    """Returns an argument whose value is a path; see `path_option`."""
    return click.argument(name, type=_path_type(settings), **settings)


def _path_type(settings: dict[str, Any]) -> click.Path:
    return click.Path(path_type=Path, dir_okay=settings.pop("dir_okay", True))


def json_option(text: str) -> Callable[[CommandT], CommandT]:
    """Returns the option ``--json``, passed as `as_json`; see `aotgaudi.cli.show.emit`."""
    return click.option("--json", "as_json", is_flag=True, help=text)


STORE = said(
    "The store  [default: $AOTGAUDI_STORE or ~/.cache/aotgaudi]",
    "--store",
    envvar="AOTGAUDI_STORE",
    default=default_store_root,
    metavar="DIR",
)

jobs_option = click.option(
    "-j",
    "--jobs",
    type=POSITIVE,
    default=available_cores,
    metavar="N",
    help="Worker processes  [default: one a core]",
)
"""``-j N``: worker processes, one a core by default."""


@dataclass(frozen=True)
class StorePlace:
    """The store that the user named, its read-only layers, and whether other users may own them."""

    root: Path
    lower: tuple[Path, ...] = option(
        "A read-only layer below the store: another store, or a bundle (repeatable).",
        default=(),
        envvar="AOTGAUDI_STORE_LOWER",
        metavar="DIR",
    )
    trust_others: bool = option(
        "Use a store that other users own or may write to: they then decide what code runs.",
        "--allow-unsafe-store",
        default=False,
    )

    def open(self, *, create: bool = True) -> Store:
        """Opens the store. It is read-only if we cannot write to it, which is enough while nothing is missing.

        Raises StoreError like `Store.open`.
        """
        from aotgaudi.store.store import Store

        is_writable = not self.root.is_dir() or os.access(self.root, os.W_OK | os.X_OK)
        return Store.open(
            self.root,
            create=create,
            lower=self.lower,
            read_only=not is_writable,
            trust_others=self.trust_others,
        )

    def read(self) -> Store:
        """Opens the store to look into it. One that is not there, or is empty, is an empty one, and nothing is made.

        Raises StoreError like `Store.open`.
        """
        if self.root.is_dir() and any(self.root.iterdir()):
            return self.open(create=False)
        from aotgaudi.store.store import Store

        return Store.open_absent(self.root, self.lower, trust_others=self.trust_others)


store_options = options_of(StorePlace, "place", root=STORE)
"""``--store``, ``--lower`` and ``--allow-unsafe-store``. The command gets `place`, a `StorePlace`."""


def parse_store_size(text: str) -> int:
    """Returns the bytes in a text, which may be ``0``. Raises ValueError."""
    return 0 if text.strip() == "0" else parse_byte_count(text)


store_limit_option = click.option(
    "--store-limit",
    callback=parsed_by(parse_store_size),
    envvar="AOTGAUDI_STORE_LIMIT",
    metavar="SIZE",
    help="After the build, shrink the store as `cache gc --max-size SIZE` does; what this build needs is kept.",
)
"""``--store-limit SIZE``. The command gets `store_limit`, in bytes; None for no limit."""


@dataclass(frozen=True, kw_only=True)
class _Demands:
    trusted_keys: tuple[Path, ...] = option(
        "Public key, one of which must have signed the bundle (repeatable).",
        "--trusted-key",
        default=(),
        metavar="PEM",
    )
    allow_unsafe_permissions: bool = option(
        "Accept files that users other than you and root own or may write to.", default=False
    )

    def acceptance(self) -> TrustPolicy:
        """Returns what is accepted. Raises SpecError like `TrustPolicy.demanding`."""
        return TrustPolicy.demanding(
            self.trusted_keys, allow_unsafe_permissions=self.allow_unsafe_permissions
        )


acceptance_options = options_of(_Demands, "acceptance", made=_Demands.acceptance)
"""Which bundles a command accepts. It gets `acceptance`, a `TrustPolicy`."""


LOG_FORMAT = said("Lines of the log: text, or one JSON object each.")


def find_model(model: str) -> Path:
    """Returns a model directory: the path itself, or a snapshot of a hub id. Raises SpecError and RemoteError.

    Modules are not searched in a directory.
    """
    path = Path(model)
    if path.is_dir():
        leave_out_of_path(path)
        return path
    from aotgaudi.share.hub import fetch_model, is_hub_id

    if path.exists() or not is_hub_id(model):
        raise SpecError(
            model, "is not a model directory", "a directory with config.json and safetensors, or a hub id"
        )
    return fetch_model(model, ["*.json", "*.safetensors", "*.jinja"])
