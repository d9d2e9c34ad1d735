"""What a bundle can hold: programs, which `aotgaudi serve` runs, or the caches of a server that is not ours.

The format is one; the receipt's schema says which it is. Whoever needs one kind asks here, and refuses the other in a line.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, Union, cast

from pydantic_core import from_json

from aotgaudi.bundle.capture_receipt import CAPTURE_SCHEMA, CaptureReceipt
from aotgaudi.bundle.format import RECEIPT_NAME
from aotgaudi.document import MAX_DOCUMENT_BYTES, load_document, load_one_of
from aotgaudi.errors import SpecError
from aotgaudi.store.blobs import Fault, read_bounded

if TYPE_CHECKING:
    from aotgaudi.bundle.bundle import Bundle
    from aotgaudi.bundle.receipt import Receipt

SealedReceipt: TypeAlias = "Union[Receipt, CaptureReceipt]"


_CAPTURE = f'"schema":"{CAPTURE_SCHEMA}"'.encode()
"""What the canonical bytes of a capture's receipt hold. Where others hold it, too, they are refused for what they are."""


def load_sealed(data: bytes) -> SealedReceipt:
    """Parses the canonical bytes of a receipt of either kind. Raises ManifestError, which names the place."""
    if _CAPTURE in data:
        return load_document(data, CaptureReceipt, "receipt")
    from aotgaudi.bundle.receipt import Receipt  # Only now: a capture needs none of it.

    return cast("SealedReceipt", load_one_of(data, (Receipt, CaptureReceipt), "receipt"))


def is_capture(path: Path) -> bool:
    """Whether the bundle at `path` says that it holds a capture; False where there is none, which opening it explains.

    Decides only who opens it: nothing is verified.
    """
    data = read_bounded(path / RECEIPT_NAME, MAX_DOCUMENT_BYTES)
    try:
        raw = None if isinstance(data, Fault) else from_json(data)
    except ValueError:
        return False
    return isinstance(raw, dict) and raw.get("schema") == CAPTURE_SCHEMA


def programs_of(bundle: Bundle) -> Receipt:
    """Returns the receipt of a bundle of programs. Raises SpecError for a capture."""
    if not isinstance(bundle.receipt, CaptureReceipt):
        return bundle.receipt
    raise SpecError(
        f"bundle {bundle.path}",
        "holds the caches of another server, no programs",
        f"aotgaudi run --bundle {bundle.path} -- COMMAND",
    )


def capture_of(bundle: Bundle) -> CaptureReceipt:
    """Returns the receipt of a bundle that holds a capture. Raises SpecError for programs."""
    if isinstance(bundle.receipt, CaptureReceipt):
        return bundle.receipt
    raise SpecError(
        f"bundle {bundle.path}",
        "holds programs, not the caches of another server",
        f"aotgaudi serve --bundle {bundle.path}, or make one with: aotgaudi build capture -o DIR -- COMMAND",
    )
