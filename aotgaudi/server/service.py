"""What a server serves: an engine, a tokenizer and a name, bound together, and whether it is ready."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone

from aotgaudi.errors import RequestError
from aotgaudi.server.chat import ChatTemplate
from aotgaudi.server.generation import EngineLike
from aotgaudi.server.metrics import Metrics, WarmCounts
from aotgaudi.server.protocol import ChatCompletionRequest, CompletionRequest
from aotgaudi.server.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DEFAULT_DRAIN_TIMEOUT_SECONDS = 30.0
DEFAULT_MAX_BODY_BYTES = 4 * 1024 * 1024
_INLINE_ENCODE_CHARS = 16 * 1024  # A few milliseconds; a longer text is encoded on another thread.
_ABORT_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """What ``/ready`` tells; `reason` is empty when ready."""

    ready: bool
    reason: str
    entries_warm: int
    entries_total: int
    manifest_id: str
    compilations: int


@dataclass(frozen=True, kw_only=True)
class Service:
    """One model being served. Thread-safe as far as its parts are.

    `model_names` are the names that requests may use; answers carry the first one, or the one that was asked
    for. `max_model_len` is in tokens. `warm_counts` is asked whenever readiness is. `clock` counts seconds
    from anywhere, `now` is the time of day.
    """

    engine: EngineLike
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    model_names: tuple[str, ...]
    max_model_len: int
    manifest_id: str
    warm_counts: Callable[[], WarmCounts]
    version: str
    metrics: Metrics = field(default_factory=Metrics)
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = lambda: datetime.now(timezone.utc)
    _draining: threading.Event = field(default_factory=threading.Event, init=False, repr=False)
    _started_at: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.model_names:
            raise ValueError("a service needs at least one model name")
        object.__setattr__(self, "_started_at", self.unix_seconds())
        self.metrics.watch_engine(self.engine.stats)
        self.metrics.watch_readiness(lambda: self.readiness().ready, self.warm_counts)

    @property
    def started_at(self) -> int:
        """When the service was made, in seconds since 1970."""
        return self._started_at

    @property
    def is_alive(self) -> bool:
        """Whether the engine works."""
        return self.engine.failure is None

    def unix_seconds(self) -> int:
        """Now, in whole seconds since 1970."""
        return int(self.now().timestamp())

    def readiness(self) -> Readiness:
        """Whether requests are taken now, and if not, why."""
        warm = self.warm_counts()
        reason = "draining" if self._draining.is_set() else ""
        reason = reason if self.is_alive else "the engine has died"
        return Readiness(
            ready=not reason,
            reason=reason,
            entries_warm=warm.num_warm,
            entries_total=warm.num_total,
            manifest_id=self.manifest_id,
            compilations=self.metrics.num_compilations,
        )

    def resolve_model(self, name: str | None) -> str:
        """The name that an answer carries.

        Raises:
            RequestError: 404; no such model is served here.
        """
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            served = ", ".join(self.model_names)
            raise RequestError(
                f"The model {name[:256]!r} does not exist; this server has: {served}",
                param="model",
                http_status=404,
            )
        return name

    def check_open(self) -> None:
        """Raises RequestError (503) unless requests are taken."""
        reason = self.readiness().reason
        if reason:
            raise RequestError(f"The server takes no requests: {reason}", http_status=503)

    async def encode_prompts(self, request: CompletionRequest) -> list[list[int]]:
        """Token ids of each prompt; text gets the model's special tokens unless the request says otherwise.

        Raises:
            RequestError: 400; a prompt is longer than any that fits.
        """
        prompts = request.prompts()
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = await self._encode(texts, request.add_special_tokens is not False, "prompt")
        return encoded if texts else [self._bounded(ids) for ids in prompts if not isinstance(ids, str)]

    def _bounded(self, token_ids: list[int]) -> list[int]:
        """Refuses here what is far too long, before the engine looks at each id on the event loop."""
        if len(token_ids) > self.max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens; max_model_len = {self.max_model_len}",
                param="prompt",
            )
        return token_ids

    async def encode_chat(self, request: ChatCompletionRequest) -> list[list[int]]:
        """Token ids of the conversation, one list; the template writes the special tokens itself.

        Raises:
            RequestError: 400; the model has no chat template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise RequestError(
                f"The model {self.model_names[0]!r} has no chat template; use /v1/completions",
                param="messages",
            )
        text = self.chat_template.render(request.messages)
        return await self._encode([text], False, "messages")

    async def _encode(self, texts: Sequence[str], with_special: bool, param: str) -> list[list[int]]:
        num_chars = [len(text) for text in texts]
        bound = self.max_model_len * self.tokenizer.max_token_chars
        if max(num_chars, default=0) > bound:
            raise RequestError(
                f"The text is {max(num_chars)} characters long; max_model_len = {self.max_model_len} tokens "
                f"hold at most {bound}",
                param=param,
            )
        if sum(num_chars) <= _INLINE_ENCODE_CHARS:
            return self.tokenizer.encode_batch(texts, with_special)
        return await asyncio.to_thread(self.tokenizer.encode_batch, texts, with_special)

    def begin_drain(self) -> None:
        """Refuses new requests from now on; those that run go on. Any thread, signal handlers included."""
        self._draining.set()

    def close(self, drain_timeout_seconds: float) -> None:
        """Refuses new requests, waits for the others, aborts what is left, and ends the engine. Blocks."""
        self.begin_drain()
        if not self.engine.drain(drain_timeout_seconds):
            logger.warning("requests still ran after %s seconds and are aborted", drain_timeout_seconds)
        if not self.engine.shutdown(_ABORT_TIMEOUT_SECONDS):
            logger.warning("the engine did not end within %s seconds", _ABORT_TIMEOUT_SECONDS)
