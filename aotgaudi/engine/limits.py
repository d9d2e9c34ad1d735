"""Limits on open requests. Imports none of our modules, since the command line reads the defaults before it loads any."""

from __future__ import annotations

import sys
from dataclasses import dataclass

SMALL_BODY_BYTES = 16 * 1024
"""Admission never refuses bodies up to this size for lack of room. Most requests are smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """How much may be open at once, each at least 1.

    `max_requests` limits the prompts that the server prepares, queues or runs, and `max_prompt_tokens` their tokens, once
    they are known. `max_body_bytes` limits the bodies that the server reads or prepares; only those above `SMALL_BODY_BYTES`
    are refused for it.
    """

    max_requests: int = 1024
    max_prompt_tokens: int = 524_288
    max_body_bytes: int = 64 * 1024 * 1024


UNLIMITED = AdmissionLimits(
    max_requests=sys.maxsize, max_prompt_tokens=sys.maxsize, max_body_bytes=sys.maxsize
)
"""For callers that limit their requests themselves, such as users of the Python API."""
