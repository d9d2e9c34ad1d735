"""What a server serves: an engine, a tokenizer and a name; whether it is ready; how it comes to rest."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from aotgaudi.errors import RequestError
from aotgaudi.llm.chat import ChatTemplate
from aotgaudi.llm.running import Warmth
from aotgaudi.llm.tokenizer import Tokenizer
from aotgaudi.server.generation import EngineLike
from aotgaudi.server.metrics import Metrics
from aotgaudi.server.protocol import ChatCompletionRequest, CompletionRequest

DEFAULT_MAX_BODY_BYTES = 4 * 1024 * 1024
DEFAULT_STALL_SECONDS = 60.0
_INLINE_ENCODE_CHARS = 16 * 1024  # A few milliseconds; a longer text is encoded on another thread.


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """What ``/ready`` answers; `reason` is empty when ready, `guard` is "seccomp+hook" or "hook".

    `model` says whether the bundle binds the model directory: "bound (6 files)", "not bound".
    """

    ready: bool
    reason: str
    entries_warm: int
    entries_total: int
    manifest_id: str
    compilations: int
    guard: str
    model: str


@dataclass(frozen=True, kw_only=True)
class Service:
    """One model being served. Thread-safe as far as its parts are.

    `model_names` are the names that requests may use; an answer carries the one that was asked for, or else the first.
    `max_model_len` is in tokens. `defaults` are the sampling parameters of requests that do not state them. An engine that
    has had work for `stall_seconds` and has not ended a step counts as stuck. `clock` counts seconds from any start,
    `now` is the time of day.
    """

    engine: EngineLike
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    model_names: tuple[str, ...]
    max_model_len: int
    manifest_id: str
    warmth: Callable[[], Warmth]
    version: str
    binding: str = "not bound"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    stall_seconds: float = DEFAULT_STALL_SECONDS
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = lambda: datetime.now(timezone.utc)
    _draining: threading.Event = field(default_factory=threading.Event, init=False, repr=False)
    _started_at: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.model_names:
            raise ValueError("a service needs at least one model name")
        object.__setattr__(self, "_started_at", self.unix_seconds())
        self.metrics.watch(self.engine.stats, self.warmth, lambda: self.readiness().ready)

    @property
    def started_at(self) -> int:
        """When the service was made, in seconds since 1970."""
        return self._started_at

    @property
    def trouble(self) -> str:
        """Why the process should be restarted; empty while the engine lives and advances. Waits for nothing."""
        if self.engine.failure is not None:
            return "the engine has died"
        seconds = self.engine.stalled_seconds
        if seconds > self.stall_seconds:
            return f"the engine is stuck: requests wait, and no step has ended for {seconds:.0f} s"
        return ""

    def unix_seconds(self) -> int:
        """Returns the time of day in whole seconds since 1970."""
        return int(self.now().timestamp())

    def readiness(self) -> Readiness:
        """Returns whether requests are taken now, and if not, why."""
        warmth = self.warmth()
        reason = self.trouble or ("draining" if self._draining.is_set() else "")
        return Readiness(
            ready=not reason,
            reason=reason,
            entries_warm=warmth.num_warm,
            entries_total=warmth.num_total,
            manifest_id=self.manifest_id,
            compilations=sum(warmth.compilations.values()),
            guard="+".join(warmth.layers),
            model=self.binding,
        )

    def resolve_model(self, name: str | None) -> str:
        """Returns the name that an answer carries.

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
        """Returns the token ids of each prompt; text gets the model's special tokens unless the request says otherwise.

        Raises:
            RequestError: 400; a prompt is longer than any that fits.
        """
        prompts = request.prompts()
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = await self._encode(texts, request.add_special_tokens is not False, "prompt")
        return encoded if texts else [self._bounded(ids) for ids in prompts if not isinstance(ids, str)]

    def _bounded(self, token_ids: list[int]) -> list[int]:
        """Refuses what is far too long before the engine checks each id, which it does on the event loop."""
        if len(token_ids) > self.max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens; max_model_len = {self.max_model_len}",
                param="prompt",
            )
        return token_ids

    async def encode_chat(self, request: ChatCompletionRequest) -> list[list[int]]:
        """Returns the token ids of the conversation, as one list; the template writes the special tokens itself.

        Raises:
            RequestError: 400; the model has no chat template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise RequestError(
                f"The model {self.model_names[0]!r} has no chat template; use /v1/completions",
                param="messages",
            )
        text = self.chat_template.render([message.as_variables() for message in request.messages])
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

    def has_drained(self) -> bool:
        """Returns whether no request runs any more. Refuses new ones, as `begin_drain` does. Does not block."""
        self.begin_drain()
        return self.engine.drain(0)

    def has_ended(self) -> bool:
        """Aborts what still runs, and returns whether the engine has ended. Does not block."""
        return self.engine.shutdown(0)
