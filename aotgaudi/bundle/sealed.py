"""What a bundle can hold: programs, which `aotgaudi serve` runs, or the caches of a server that is not ours.

The format is one; the receipt's schema says which it is. Whoever needs one kind asks here, and refuses the other in a line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, Union, cast

from aotgaudi.bundle.capture_receipt import CaptureReceipt, says_capture
from aotgaudi.document import load_document, load_one_of
from aotgaudi.errors import SpecError

if TYPE_CHECKING:
    from aotgaudi.bundle.bundle import Bundle
    from aotgaudi.bundle.receipt import Receipt

SealedReceipt: TypeAlias = "Union[Receipt, CaptureReceipt]"


def load_sealed(data: bytes) -> SealedReceipt:
    """Parses the canonical bytes of a receipt of either kind. Raises ManifestError, which names the place."""
    if says_capture(data):
        return load_document(data, CaptureReceipt, "receipt")
    from aotgaudi.bundle.receipt import Receipt  # Only now: a capture needs none of it.

    return cast("SealedReceipt", load_one_of(data, (Receipt, CaptureReceipt), "receipt"))


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
