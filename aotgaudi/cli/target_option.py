"""``--target FILE``: a machine other than this one, described in a file (docs/formats/target.md)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import pydantic

from aotgaudi.backends.base import Target
from aotgaudi.cli.options import path_option
from aotgaudi.document import first_problem
from aotgaudi.errors import SpecError

if TYPE_CHECKING:
    from aotgaudi.spec.build_spec import BuildSpec

_WRITTEN_BY = "what `aotgaudi doctor --hpu --write-target FILE` wrote on a Gaudi"


def read_target(path: Path, remedy: str) -> Target:
    """Returns the target that a file describes. Raises SpecError with `remedy`."""
    try:
        return Target.model_validate_json(path.read_bytes())
    except OSError as error:
        raise SpecError(str(path), f"cannot be read: {error.strerror}", remedy) from error
    except pydantic.ValidationError as error:
        raise SpecError(str(path), f"does not describe a machine: {first_problem(error)}", remedy) from error


def refuse_other_target(described: Target | None, *specs: BuildSpec) -> None:
    """Raises SpecError unless the given target is one of all `specs`. For commands on which it has no effect."""
    from aotgaudi.backends.offline import (
        find_target,  # Only here: few calls of these commands need it.
    )

    if described is not None:
        for spec in specs:
            find_target(spec.target, described)


def _to_target(context: click.Context, parameter: click.Parameter, path: Path | None) -> Target | None:
    return None if path is None or context.resilient_parsing else read_target(path, _WRITTEN_BY)


def _refuse(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None and not context.resilient_parsing:
        from aotgaudi.backends.offline import HPU_NEEDS

        raise SpecError("--target", f"plans, and compiles nothing: {HPU_NEEDS}", "leave it out")


planned_target_option = path_option(
    "--target",
    "described",
    callback=_to_target,
    metavar="FILE",
    help=f"For an hpu spec, where there is no Gaudi: {_WRITTEN_BY}.",
)
"""``--target FILE`` of a Gaudi. The command gets `described`, a `Target`, or None for this machine."""

refused_target_option = click.option(
    "--target",
    hidden=True,
    expose_value=False,
    callback=_refuse,
    help="Refused: says what compiling takes.",
)
"""``--target FILE`` of a command that compiles, which refuses it and says what compiling takes."""
