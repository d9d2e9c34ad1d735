"""``PT_HPU_RECIPE_CACHE_CONFIG``: where the bridge keeps its recipes, and what it may do to them.

``<directory>[,<delete at start>[,<limit in MiB>[,<on a shared file system>]]]``. A process reads it once, when it
acquires the device. Bridges before about 1.22 abort at a fourth field (K-27), so we never write one.
Source: ``recipe_cache_config.cpp`` of the bridge.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aotgaudi.errors import SpecError

VARIABLE = "PT_HPU_RECIPE_CACHE_CONFIG"
DEFAULT_LIMIT_MIB = 1024

_FIELDS = (
    "the directory",
    "whether to delete it at the start",
    "the limit in MiB",
    "on a shared file system",
)
_TRUE = frozenset({"1", "y", "yes", "t", "true", "on"})
_FALSE = frozenset({"0", "n", "no", "f", "false", "off"})


@dataclass(frozen=True, slots=True)
class CacheSetting:
    """What the bridge makes of the variable.

    Attributes:
        directory: Flat; None: nothing is kept on disk.
        delete_at_start: Every process whose LOCAL_RANK is 0 or unset removes what is there when it starts.
        limit_mib: Beyond it the bridge removes the oldest recipes; 0: never.
        is_shared: Files get the writer's name appended, and no locks are taken.
    """

    directory: Path | None
    delete_at_start: bool = False
    limit_mib: int = DEFAULT_LIMIT_MIB
    is_shared: bool = False

    @classmethod
    def parse(cls, text: str) -> CacheSetting:
        """Returns what `text` sets. An empty field is the default; on a shared file system nothing is ever removed.

        Raises:
            SpecError: more than four fields, or a field that cannot be read.
        """
        fields = text.split(",")
        if len(fields) > len(_FIELDS):
            raise SpecError(VARIABLE, f"has {len(fields)} fields", "at most " + ", ".join(_FIELDS))
        path, delete, limit, shared = (*fields, *[""] * (len(_FIELDS) - len(fields)))
        is_shared = _boolean(shared, _FIELDS[3])
        return cls(
            directory=Path(path) if path else None,
            delete_at_start=_boolean(delete, _FIELDS[1]) and not is_shared,
            limit_mib=0 if is_shared else _limit(limit),
            is_shared=is_shared,
        )


def sealed_setting(directory: Path) -> str:
    """Returns the variable's value for a directory that the bridge must leave as it is: nothing is deleted or evicted.

    Raises:
        SpecError: the path has a comma, which the bridge takes for the end of the field.
    """
    if "," in str(directory):
        raise SpecError(str(directory), "has a comma, which ends a field of " + VARIABLE, "another directory")
    return f"{directory},false,0"


def _boolean(text: str, what: str) -> bool:
    word = text.strip().lower()
    if word and word not in _TRUE | _FALSE:
        raise SpecError(VARIABLE, f"{what} is {text!r}", "true or false")
    return word in _TRUE


def _limit(text: str) -> int:
    if not text.strip():
        return DEFAULT_LIMIT_MIB
    if not text.strip().isdecimal():
        raise SpecError(VARIABLE, f"{_FIELDS[2]} is {text!r}", "a whole number; 0: no limit")
    return int(text)
