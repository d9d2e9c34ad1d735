"""Who is told of events."""

from habana_frameworks.bridge.events import LISTENERS

__all__ = ["LISTENERS"]
