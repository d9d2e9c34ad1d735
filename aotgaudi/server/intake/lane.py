"""A lane of the intake: a process that prepares one request after the other, under limits that the kernel keeps.

However a chat template or a tokenizer hangs or grows, the lane dies of it and nobody else does. What a limit is by:

==================  =============================================================================================
processor time      a timer of the process (``ITIMER_PROF``), whose signal ends it: also inside of C code that holds
                    the interpreter's lock. Time that others take from it does not count
memory              ``RLIMIT_AS``, what the process had when it began and so much more: Python raises MemoryError, the
                    tokenizer aborts
processes           seccomp, by the companion, where there is it: a lane starts none
priority            a lane of large bodies is nice to the engine and to the other lanes
==================  =============================================================================================
"""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import extract_tb
from typing import NoReturn

from aotgaudi.errors import RequestError
from aotgaudi.server.intake.prepare import Preparer
from aotgaudi.server.intake.wire import Message, answer, failure, receive, refusal, send

_SECONDS_PER_BYTE = 1e-6
_KEPT_BYTES = 16 << 20
"""A lane that has grown by more ends, which gives the memory back."""


@dataclass(frozen=True, kw_only=True)
class LaneLimits:
    """What one lane may use.

    Attributes:
        seconds: Of processor time, for a request with a body of no length.
        memory_bytes: More than what it began with, for a model that reads no tokens.
        memory_bytes_per_token: So much more for each token that the model reads: a tokenizer takes some 200 bytes a
            character, and a token has four or five.
        niceness: As of nice(2).
        wall_seconds: A lane that is not done by then is stopped, or starved: what it does itself takes a few seconds.
    """

    seconds: float
    memory_bytes: int
    memory_bytes_per_token: int = 0
    niceness: int = 0
    wall_seconds: float = 60.0

    def for_model(self, max_len: int) -> LaneLimits:
        """Returns what the lane may use for a model that reads `max_len` tokens."""
        num_bytes = self.memory_bytes + max_len * self.memory_bytes_per_token
        return replace(self, memory_bytes=num_bytes, memory_bytes_per_token=0)

    def seconds_for(self, num_bytes: int) -> float:
        """Returns how much processor time a request with a body of `num_bytes` may take: a second more for each MB."""
        return self.seconds + num_bytes * _SECONDS_PER_BYTE


LARGE_BODY_BYTES = 64 * 1024
"""Larger bodies have a lane of their own."""

LANES: Mapping[str, LaneLimits] = {
    "completion": LaneLimits(seconds=2.0, memory_bytes=32 << 20),
    "chat": LaneLimits(seconds=2.0, memory_bytes=32 << 20),
    "large": LaneLimits(seconds=2.0, memory_bytes=64 << 20, memory_bytes_per_token=1024, niceness=10),
}
"""One lane each: so no chat template delays a completion, and no large body a small one. 136 MiB in all at 8,192 tokens."""


def run_lane(connection: socket.socket, preparer: Preparer, limits: LaneLimits) -> NoReturn:
    """Answers what comes over `connection` until it is closed, and ends this process."""
    _confine(limits)
    size_at_start = _peak_bytes()
    with suppress(OSError):  # The server is gone: nobody is left to be told.
        is_last = False
        while not is_last:
            asked = receive(connection)
            signal.setitimer(signal.ITIMER_PROF, limits.seconds_for(len(asked.tail)))
            answered = _answer(preparer, asked, limits)
            signal.setitimer(signal.ITIMER_PROF, 0)
            is_last = _peak_bytes() - size_at_start > _KEPT_BYTES
            send(connection, Message({**answered.head, "is_last": is_last}, answered.tail))
    os._exit(0)


def _confine(limits: LaneLimits) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.nice(limits.niceness)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = num_pages * resource.getpagesize() + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _answer(preparer: Preparer, asked: Message, limits: LaneLimits) -> Message:
    try:
        return answer(preparer.prepare(asked.head["kind"], asked.tail))
    except RequestError as error:
        return refusal(error)
    except MemoryError:
        return refusal(too_large(limits))
    except Exception as error:
        place = extract_tb(error.__traceback__)[-1]
        return failure(f"{type(error).__name__} at {place.filename}:{place.lineno}")
    except BaseException:  # A panic: Rust code that runs out of memory panics where it does not abort.
        os.abort()


def too_large(limits: LaneLimits) -> RequestError:
    """Returns the refusal of a request that asks for more memory than its lane has."""
    return RequestError(
        f"This request needs more than {limits.memory_bytes >> 20} MiB of memory to prepare: "
        "the model's chat template grows without end, or the body has too much in it"
    )


def too_slow(limits: LaneLimits, num_bytes: int) -> RequestError:
    """Returns the refusal of a request that asks for more time than its lane has."""
    return RequestError(
        f"This request took more than {limits.seconds_for(num_bytes):.3g} s of processor time to prepare: "
        "the model's chat template runs without end, or the body has too much in it"
    )
