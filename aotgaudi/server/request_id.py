"""Which request something is about: the id that its client gave it, else one of ours.

It is in the answer's header, in every line of the log that the request's handling writes, and, as a part, in the answer's
own id, by which the engine knows the request.
"""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar

HEADER = "X-Request-Id"

REQUEST_ID: ContextVar[str | None] = ContextVar("aotgaudi_request_id", default=None)
"""The id of the request that is being handled; None outside of any. Each request has a task of its own, and so a context."""

_SANE = re.compile(r"[A-Za-z0-9._:=@+/-]{1,128}")


def request_id_of(header: str | None) -> str:
    """Returns the id that a client gave in `header`; a new one where it gave none, or one that does not belong in a log.

    A sane one has 1 to 128 letters, digits and ``._:=@+/-``, all of them ASCII.
    """
    return header if header is not None and _SANE.fullmatch(header) else uuid.uuid4().hex


def answer_id(prefix: str, request_id: str) -> str:
    """Returns an id for an answer that no other has, and that holds `request_id`: clients may give one id twice."""
    return f"{prefix}-{request_id}-{uuid.uuid4().hex[:8]}"
