"""The fixtures of bundles and of a registry in this process."""

from __future__ import annotations

from tests.unit.bundle.conftest import captured, sealed
from tests.unit.remotes.conftest import conduct, registry, remote, waits, warnings

__all__ = ["captured", "conduct", "registry", "remote", "sealed", "waits", "warnings"]
