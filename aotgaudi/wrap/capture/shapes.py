"""``--shapes SPEC``: a command that is captured with the shapes of a spec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aotgaudi.bundle.exercise import Exercise, ExerciseLevel, exercise
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.wrap.adapters.base import PlaceRoot
from aotgaudi.wrap.adapters.found import Found, find_guest
from aotgaudi.wrap.adapters.shapes import Shapes


@dataclass(frozen=True)
class Shaped:
    """A command with what its shapes add. `shapes` is None where no spec was given."""

    found: Found
    shapes: Shapes | None = None

    @property
    def manifest_id(self) -> str | None:
        """Of the shapes."""
        return None if self.shapes is None else self.shapes.manifest_id

    @property
    def files(self) -> Mapping[str, str]:
        """Path below the place's root -> text: what has to lie there before the cold run."""
        return {} if self.shapes is None else self.shapes.files

    def asked(self, level: ExerciseLevel) -> Exercise:
        """Returns the exercise of a level; ``shapes`` asks for what the shapes need, too."""
        guest, flags = self.found.guest, self.found.flags
        requests = () if self.shapes is None else self.shapes.requests
        return exercise(level, flags.room, (*guest.shape_requests(flags), *requests))


def shaped_command(
    words: Sequence[str], environ: Mapping[str, str], spec: BuildSpec | None, root: Path
) -> Shaped:
    """Returns what a command starts, with the shapes of `spec` if there is one.

    Raises:
        SpecError: as ``guests.found.find_guest``; or the guest takes no shapes, or not those of another command.
        CoverageError: the guest would meet shapes that it was not told.
        TargetError: its interpreter does not run.
    """
    if spec is None:
        return Shaped(find_guest(words, environ))
    found = find_guest(words, environ, is_whole=False)
    shapes = found.guest.shapes(spec, found.flags, found.environ)
    more = shapes.environ(environ, PlaceRoot(str(root)))
    return Shaped(find_guest((*words, *shapes.words), more), shapes)
