"""Who is told of events."""

from habana_frameworks.bridge.journal import LISTENERS

__all__ = ["LISTENERS"]
