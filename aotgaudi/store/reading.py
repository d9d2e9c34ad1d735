"""Reading a file that a digest names, in pieces, through the descriptor by which it was verified."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, store_error
from aotgaudi.store.blobs import Fault, hold_blob

_CHUNK_BYTES = 1 << 20


def verified_chunks(path: Path, digest: Digest, remedy: str = "") -> Iterator[bytes]:
    """Yields exactly the bytes that `digest` names. Raises CorruptError, with the `remedy`, and StoreError.

    The file is verified before the first piece is given, and again with the last, for it may change meanwhile.
    """
    found = hold_blob(path, digest)
    if isinstance(found, Fault):
        raise CorruptError(f"{path}: {found.reason}" + (f" ({remedy})" if remedy else ""))
    state = hashlib.sha256()
    try:
        for start in range(0, digest.size_bytes, _CHUNK_BYTES):
            chunk = os.pread(found, min(_CHUNK_BYTES, digest.size_bytes - start), start)
            state.update(chunk)
            yield chunk
    except OSError as error:
        raise store_error("read", path, error) from error
    finally:
        os.close(found)
    if state.hexdigest() != digest.sha256:
        raise CorruptError(f"{path}: was changed while it was read")
