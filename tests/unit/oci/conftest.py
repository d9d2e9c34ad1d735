"""The fixtures of bundles and of a registry in this process."""

from __future__ import annotations

from tests.unit.bundle.conftest import sealed
from tests.unit.remotes.conftest import conduct, registry, remote, waits, warnings

__all__ = ["conduct", "registry", "remote", "sealed", "waits", "warnings"]
