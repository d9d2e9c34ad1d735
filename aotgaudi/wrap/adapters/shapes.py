"""Shapes that a spec decides for a guest: what its command, its environment and its caches have more for them.

A guest that compiles one graph for each shape lists its shapes by rules of its own. Given a spec it can be told them
instead: then they are known before it starts, the steps that they do not cover are named, and the launch names their
manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aotgaudi.bundle.launch import Launch, LaunchId, WarmUpRequest
from aotgaudi.document import Value
from aotgaudi.errors import SpecError
from aotgaudi.wrap.adapters.base import Guest, PlaceRoot

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
    guest: Guest, sealed: Launch, words: Sequence[str], environ: Mapping[str, str]
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
