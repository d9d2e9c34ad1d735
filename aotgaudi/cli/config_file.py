"""``--config FILE``: options of a command in a TOML file, under the names that they have on the command line.

::

    bundle = "/srv/chat.bundle"
    require-warm = true
    served-model-name = ["chat", "chat-small"]     # what may be repeated
    override-generation-config = { temperature = 0.6 }     # what takes JSON

The environment and the command line take precedence over the file. Paths are relative to the working directory, as on the
command line. Each value is converted to its text on the command line, so both are parsed in the same way.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from aotgaudi.errors import SpecError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def config_option(unsupported: Mapping[str, str]) -> Callable[[CommandT], CommandT]:
    """Adds ``--config FILE`` to a command. `unsupported`: options of other programs -> what to do instead."""

    def take(context: click.Context, parameter: click.Parameter, path: Path | None) -> None:
        if path is None:
            return
        options = {
            name.removeprefix("--"): option
            for option in context.command.params
            if isinstance(option, click.Option) and option is not parameter
            for name in option.opts
        }
        defaults: dict[str, Any] = {}
        for name, value in _read(path).items():
            where = f"{path}: {name}"
            if name not in options:
                raise _unknown(where, name, list(options), unsupported.get(f"--{name}"))
            option = options[name]
            try:
                defaults[str(option.name)] = texts = _texts(option, value)
                option.process_value(context, texts)  # Here, so that an error names the file.
            except ValueError as error:
                raise SpecError(where, str(error)) from error
            except click.BadParameter as error:
                raise SpecError(where, error.message) from error
        context.default_map = defaults

    return click.option(
        "--config",
        type=click.Path(path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=take,
        metavar="FILE",
        help="TOML file of these options, by their names without dashes in front; the command line wins.",
    )


def _unknown(where: str, name: str, options: list[str], reason: str | None) -> SpecError:
    if reason is not None:
        return SpecError(where, "is not supported", reason)
    close = difflib.get_close_matches(name.replace("_", "-"), options, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "`--help` lists all"
    return SpecError(where, "is not an option of this command", hint)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(str(path), f"cannot be read: {error.strerror}", "a TOML file of options") from error
    except ValueError as error:
        raise SpecError(str(path), f"is not TOML: {error}", "lines such as `max-requests = 64`") from error
    return found


def _texts(option: click.Option, value: Any) -> Any:
    """Returns the texts that `value` would be on the command line. Raises ValueError if it is not of the option's type."""
    if option.is_flag:
        if not isinstance(value, bool):
            raise ValueError("must be true or false")
        return value
    if option.multiple:
        return tuple(_text(one) for one in (value if isinstance(value, list) else [value]))
    if isinstance(value, dict) and option.metavar == "JSON":
        return json.dumps(value)
    return _text(value)


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError("must be a text or a number")
    return str(value)
