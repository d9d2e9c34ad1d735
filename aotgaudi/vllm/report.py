"""What became of a command and an environment, for the person who gave them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from aotgaudi.vllm.ignored import IgnoredVariable


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that the spec itself does not say.

    Attributes:
        notes: what the person should know.
        assumed: defaults that were filled in.
        ignored: variables that upstream does not heed, each with the reason.
        changing_code: variables that change compiled code but no shape; a spec has no place for them.
        without_effect: flags and variables that change no graph.
    """

    notes: tuple[str, ...]
    assumed: tuple[str, ...]
    ignored: tuple[IgnoredVariable, ...]
    changing_code: tuple[str, ...]
    without_effect: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """Yields the report as text, one line a statement."""
        yield from (f"note: {note}" for note in self.notes)
        yield from (f"assumed: {default}" for default in self.assumed)
        yield from (f"ignored: {one.name}={one.value}: {one.reason}" for one in self.ignored)
        if self.changing_code:
            yield (
                "not in the spec: "
                f"{', '.join(self.changing_code)} change compiled code; set them alike for building and serving"
            )
        if self.without_effect:
            yield f"no effect on what is warm: {', '.join(self.without_effect)}"
