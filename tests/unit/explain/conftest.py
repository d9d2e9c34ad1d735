from __future__ import annotations

from tests.unit.build.conftest import store

__all__ = ["store"]
