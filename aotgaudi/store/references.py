"""What refers to what in a store: records name objects by their digests, anywhere in their values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from aotgaudi.digest import Digest


def digests_in(value: Any) -> Iterator[Digest]:
    """Yields every digest (``sha256:<hex>:<size>``) among the strings of a JSON value, also in keys of objects.

    The store knows nothing of what the results of its callers mean: what reads like a digest is one.
    """
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending.extend(item)
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, str) and item.startswith("sha256:"):
            digest = _parsed(item)
            if digest is not None:
                yield digest


def _parsed(text: str) -> Digest | None:
    try:
        return Digest.parse(text)
    except ValueError:
        return None
