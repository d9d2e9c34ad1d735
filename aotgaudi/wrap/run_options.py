"""How long a guest has to end.

What a supervisor is asked for: what is demanded of a guest, and where it answers. Light: it is read first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aotgaudi.errors import SpecError

TERMINATION_SECONDS = 10.0
"""After SIGTERM, where its user says nothing."""


OnCompile = Literal["report", "drain", "exit", "refuse"]

START_SECONDS = 1800.0
"""How long a guest may take until it serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is demanded, and what becomes of a live compile.

    Attributes:
        require_warm: End a guest that is not warm.
        on_compile: After ready: count and log it; answer not ready besides; end the guest; or have it raise in place.
        start_seconds: How long the guest may take until it serves.
        grace_seconds: How long it has after SIGTERM, where we end it.
    """

    require_warm: bool = False
    on_compile: OnCompile = "report"
    start_seconds: float = START_SECONDS
    grace_seconds: float = TERMINATION_SECONDS

    @property
    def live_byte(self) -> str:
        """The state byte after ready."""
        return "r" if self.on_compile == "refuse" else "v"


@dataclass(frozen=True, slots=True)
class Listen:
    """Where the supervisor answers."""

    host: str = "0.0.0.0"  # noqa: S104 - a kubelet asks from outside; what it is told is no secret
    port: int = 9400
    report_public: bool = False

    def __str__(self) -> str:
        """``HOST:PORT``, as it is written on the command line."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_listen(text: str, *, report_public: bool = False) -> Listen:
    """Parses ``HOST:PORT``, ``:PORT`` (all addresses) or ``[IPV6]:PORT``; port 0 is any free one. Raises SpecError."""
    host, separator, port = text.rpartition(":")
    remedy = "HOST:PORT, for example 127.0.0.1:9400"
    if not separator or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise SpecError("--listen", f"{text!r} names no port", remedy)
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not host.isprintable() or " " in host:
        raise SpecError("--listen", f"{text!r} names no host", remedy)
    return Listen(host or Listen().host, int(port), report_public)
