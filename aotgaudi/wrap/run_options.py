"""The options of ``aotgaudi run``: what is demanded of the server, and where we answer. Imported first, so it is light."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from aotgaudi.bundle.trust import ANY_BUNDLE, TrustPolicy
from aotgaudi.errors import SpecError

if TYPE_CHECKING:
    from aotgaudi.wrap.starts import Asking

OnCompile = Literal["report", "exit"]

START_SECONDS = 1800.0
"""How long a server may take until it serves."""
TERMINATION_SECONDS = 10.0
"""How long a server has to end after SIGTERM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is demanded, and what follows from a compilation after ready.

    Attributes:
        require_warm: End a server that is not warm.
        on_compile: Count and log it; or also end the server.
        start_seconds: How long the server may take until it serves.
        termination_seconds: How long it has after SIGTERM, if we end it.
    """

    require_warm: bool = False
    on_compile: OnCompile = "report"
    start_seconds: float = START_SECONDS
    termination_seconds: float = TERMINATION_SECONDS


@dataclass(frozen=True, slots=True)
class Listen:
    """Where the supervisor answers."""

    host: str = "0.0.0.0"  # noqa: S104 - a kubelet asks from outside; our answers are no secret
    port: int = 9400
    report_public: bool = False

    def __str__(self) -> str:
        """``HOST:PORT``, as on the command line."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_listen(text: str, *, report_public: bool = False) -> Listen:
    """Parses ``HOST:PORT``, ``:PORT`` (all addresses) or ``[IPV6]:PORT``. Port 0 means any free one. Raises SpecError."""
    host, separator, port = text.rpartition(":")
    remedy = "HOST:PORT, for example 127.0.0.1:9400"
    if not separator or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise SpecError("--listen", f"{text!r} names no port", remedy)
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not host.isprintable() or " " in host:
        raise SpecError("--listen", f"{text!r} names no host", remedy)
    return Listen(host or Listen().host, int(port), report_public)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of ``aotgaudi run``.

    Attributes:
        bundle: The bundle of a capture.
        words: The server's command; empty for the sealed one.
        environ: The environment that the server would have without us.
        acceptance: Which bundles may be used.
        policy: What is demanded.
        exercises: Whether the sealed warm-up requests are sent before ready.
        repairs: Whether the sealed repairs are made.
        root: Where the server sees its files; None: where it saw them in the build.
        listen: Where we answer.
        began: `time.monotonic` at the process's start.
        asking: The question to the interpreter of `words`, if it has been asked already.
    """

    bundle: Path
    environ: Mapping[str, str]
    words: tuple[str, ...] = ()
    acceptance: TrustPolicy = ANY_BUNDLE
    policy: Policy = field(default_factory=Policy)
    exercises: bool = True
    repairs: bool = True
    root: Path | None = None
    listen: Listen = field(default_factory=Listen)
    began: float = 0.0
    asking: Asking | None = None
