"""The fake target: the same everywhere."""

from __future__ import annotations

from aotgaudi.backends.base import Target


def probe(flags: dict[str, str] | None = None) -> Target:
    """Returns the fake target; `flags` become part of it, and of every key."""
    return Target(backend="fake", machine="any", toolchain={"fake": "1", "torch": "none"}, flags=flags or {})
