"""Which kind of bundle a directory says it is. Imports little: `aotgaudi serve` asks before it starts anything."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from aotgaudi.files import MAX_DOCUMENT_BYTES
from aotgaudi.store.cas import Fault, read_bounded

RECEIPT_NAME = "receipt.json"
CAPTURE_SCHEMA: Literal["aotgaudi.capture/1"] = "aotgaudi.capture/1"

_CAPTURE = f'"schema":"{CAPTURE_SCHEMA}"'.encode()
"""What the canonical bytes of a capture's receipt hold. Where others hold it, too, they are refused for what they are."""


def says_capture(receipt: bytes) -> bool:
    """Whether these bytes, if they are a receipt, are a capture's."""
    return _CAPTURE in receipt


def is_capture(path: Path) -> bool:
    """Whether the bundle at `path` says that it holds a capture; False if there is none, which opening it explains.

    Decides only who opens it: nothing is verified.
    """
    data = read_bounded(path / RECEIPT_NAME, MAX_DOCUMENT_BYTES)
    return not isinstance(data, Fault) and says_capture(data)
