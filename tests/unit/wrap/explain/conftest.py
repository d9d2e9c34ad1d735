from __future__ import annotations

from tests.unit.compile.conftest import store

__all__ = ["store"]
