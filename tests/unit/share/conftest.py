"""Sealed bundles."""

from tests.unit.bundle.conftest import Sealed, captured, sealed

__all__ = ["Sealed", "captured", "sealed"]
