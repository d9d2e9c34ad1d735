"""The service behind a server: engine, preprocessor and model, and whether they are ready, healthy or draining."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone

from aotgaudi.errors import RequestError
from aotgaudi.llm.running import Warmth
from aotgaudi.server.engine.client import EngineClient
from aotgaudi.server.metrics import Metrics
from aotgaudi.server.preprocess.pool import DEFAULT_STALL_SECONDS, PreprocessorPool
from aotgaudi.server.preprocess.prepare import ServedModel
from aotgaudi.spec.limits import ServingLimits

DEFAULT_MAX_BODY_BYTES = 4 * 1024 * 1024
_MAX_TOLD = 100
"""How many ignored members the log names, since clients choose the names."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Service:
    """One model being served. It is as thread-safe as its parts.

    An engine that has had work for `DEFAULT_STALL_SECONDS` without ending a step counts as stuck. `clock` returns seconds
    from an arbitrary start, `now` the time of day. `engine.refresh` updates the snapshot that `engine` and `warmth` report.
    """

    engine: EngineClient
    preprocessor: PreprocessorPool
    model: ServedModel
    manifest_id: str
    warmth: Callable[[], Warmth]
    version: str
    binding: str = "not bound"
    limits: ServingLimits | None = None
    metrics: Metrics = field(default_factory=Metrics)
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = lambda: datetime.now(timezone.utc)
    _is_draining: bool = field(default=False, init=False, repr=False)
    _started_at: int = field(default=0, init=False, repr=False)
    _told: set[str] = field(default_factory=set, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_started_at", self.unix_seconds())
        self.metrics.watch(self.engine.stats, self.warmth, lambda: bool(self.readiness()["ready"]))

    @property
    def started_at(self) -> int:
        """When the service was made, in seconds since 1970."""
        return self._started_at

    @property
    def fingerprint(self) -> str:
        """Names the bundle in answers."""
        return f"aotgaudi-{self.manifest_id[:12]}"

    @property
    def trouble(self) -> str:
        """Why the process should be restarted; empty while engine and preprocessor live and the engine advances.

        Never blocks.
        """
        if self.engine.failure is not None:
            return "the engine has died"
        if self.preprocessor.failure is not None:
            return "the preprocessor pool has died"
        seconds = self.engine.stalled_seconds
        if seconds > DEFAULT_STALL_SECONDS:
            return f"the engine is stuck: requests wait, and no step has ended for {seconds:.0f} s"
        if self.preprocessor.is_stuck:
            return "the preprocessor pool is stuck: requests wait, and no request worker answers"
        return ""

    @property
    def _reason(self) -> str:
        """Why the server refuses requests; empty if it accepts them."""
        return self.trouble or ("draining" if self._is_draining else "")

    def unix_seconds(self) -> int:
        """Returns the time of day in whole seconds since 1970."""
        return int(self.now().timestamp())

    def readiness(self) -> Mapping[str, object]:
        """Returns the answer of ``/ready``. Its `reason` is empty when ready.

        `guard` is "seccomp+hook" or "hook". `model` says whether the bundle is bound to its model directory: "bound (6
        files)" or "not bound".
        """
        warmth = self.warmth()
        reason = self._reason or _compiled(warmth)
        return {
            "ready": not reason,
            "reason": reason,
            "entries_warm": warmth.num_warm,
            "entries_total": warmth.num_total,
            "manifest_id": self.manifest_id,
            "compilations": sum(warmth.compilations.values()),
            "guard": "+".join(warmth.layers),
            "model": self.binding,
            "limits": {} if self.limits is None else _shown_limits(self.limits),
        }

    def tell_ignored(self, members: Sequence[str]) -> None:
        """Counts what a request has and the server ignores (see `PreparedRequest`). The log names each once."""
        self.metrics.ignored_members.inc(len(members))
        for member in members:
            if member in self._told or len(self._told) >= _MAX_TOLD:
                continue
            self._told.add(member)
            if member == "tools":
                logger.warning(
                    "the model's chat template shows the model no tools, so requests that have some get calls by "
                    "constraint only (`serve --chat-template FILE` gives it another template)"
                )
            else:
                name = member.encode("unicode_escape").decode("ascii")
                logger.warning("requests have %s, which is unknown here and ignored (named once)", name)

    def check_open(self) -> None:
        """Raises RequestError (503) if the server refuses requests."""
        reason = self._reason
        if reason:
            raise RequestError(f"The server takes no requests: {reason}", http_status=503)

    @property
    def failure(self) -> Exception | None:
        """The error of an engine or preprocessor pool that has died, for which the server must end; else None."""
        return self.engine.failure or self.preprocessor.failure

    def has_failed(self) -> bool:
        """Returns whether there is a `failure`, so that the server must end."""
        return self.failure is not None

    def begin_drain(self) -> None:
        """Refuses new requests from now on. Running ones go on. Any thread may call it, and signal handlers too.

        It takes no lock: a second signal may interrupt it in the thread that would hold that.
        """
        object.__setattr__(self, "_is_draining", True)

    def has_drained(self) -> bool:
        """Refuses new requests as `begin_drain` does, and returns whether all others have ended. Does not block."""
        self.begin_drain()
        return self.engine.drain()

    def has_ended(self) -> bool:
        """Aborts all requests, and returns whether the engine has ended. Does not block."""
        return self.engine.shutdown()


def _compiled(warmth: Warmth) -> str:
    """Says how many graphs a device's compiler, which the guard cannot stop, has compiled; empty for none."""
    num = warmth.compilations.get("backend", 0)
    return f"the device has compiled {num} graphs since the server was ready" if num else ""


def _shown_limits(limits: ServingLimits) -> Mapping[str, int]:
    names = ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "num_blocks")
    return {name: getattr(limits, name) for name in names}
