"""Tells which kind of bundle a directory claims to be. Imports little, since `aotgaudi serve` asks first of all."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from aotgaudi.files import MAX_DOCUMENT_BYTES
from aotgaudi.store.cas import Fault, read_bounded

RECEIPT_NAME = "receipt.json"
CAPTURE_SCHEMA: Literal["aotgaudi.capture/1"] = "aotgaudi.capture/1"

_CAPTURE = f'"schema":"{CAPTURE_SCHEMA}"'.encode()
"""Text that the canonical bytes of a capture's receipt contain. Other files that contain it are refused later."""


def says_capture(receipt: bytes) -> bool:
    """Returns whether these bytes, if they are a receipt, are a capture's."""
    return _CAPTURE in receipt


def is_capture(path: Path) -> bool:
    """Returns whether the bundle at `path` claims to hold a capture. False if there is no bundle, which opening it explains.

    This only decides which code opens the bundle. Nothing is verified.
    """
    data = read_bounded(path / RECEIPT_NAME, MAX_DOCUMENT_BYTES)
    return not isinstance(data, Fault) and says_capture(data)
