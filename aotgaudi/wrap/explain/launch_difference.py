"""What differs between two captures: the launches by component and condition, then the files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aotgaudi.bundle.bundle import Bundle
from aotgaudi.bundle.sealed import capture_of
from aotgaudi.wrap.adapters.compare import Comparison, compare
from aotgaudi.wrap.adapters.found import guest_named


@dataclass(frozen=True, slots=True)
class CaptureDifference:
    """What B has otherwise than A.

    Attributes:
        launches: components and conditions.
        added, removed, changed: paths of files, sorted; `changed` have other bytes.
    """

    launches: Comparison
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]

    def __bool__(self) -> bool:
        """Whether anything differs."""
        launches = self.launches
        return bool(launches.components or launches.unmet or launches.established or self.num_files)

    @property
    def num_files(self) -> int:
        """How many files differ."""
        return len(self.added) + len(self.removed) + len(self.changed)


def capture_difference(old: Bundle, new: Bundle) -> CaptureDifference:
    """Returns what differs between two bundles of captures. Raises SpecError where one is of programs."""
    before, after = _files(old), _files(new)
    rules = guest_named(old.launch.guest).variable_rules
    return CaptureDifference(
        launches=compare(old.launch, new.launch, rules),
        added=tuple(sorted(after.keys() - before.keys())),
        removed=tuple(sorted(before.keys() - after.keys())),
        changed=tuple(sorted(path for path in before.keys() & after.keys() if before[path] != after[path])),
    )


def _files(bundle: Bundle) -> Mapping[str, str]:
    return {file.path: str(file.digest) for file in capture_of(bundle).files}
