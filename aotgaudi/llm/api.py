"""The Python API: generate text from a bundle in this process, without a server.

::

    from aotgaudi import LLM, SamplingParams

    with LLM("chat.bundle", "my-model") as llm:
        for output in llm.generate(["The sea is", "The sky is"], SamplingParams(temperature=0, max_tokens=16)):
            print(output.text)
"""

from __future__ import annotations

import os
import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal, Union, cast

from aotgaudi.bundle.trust import TrustPolicy
from aotgaudi.engine.output import ErrorEvent, Event, TokenEvent
from aotgaudi.engine.request import FinishReason, NewRequest
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.engine.steps import TokenLogprobs
from aotgaudi.errors import AotGaudiError, RequestError, SpecError
from aotgaudi.llm.chat import ChatTemplate
from aotgaudi.llm.model_files import GenerationConfig
from aotgaudi.llm.running import ModelOptions, Observers, RunningModel, Warmth
from aotgaudi.llm.start import start
from aotgaudi.machine import available_cores

Prompts = Union[str, Sequence[str], Sequence[int], Sequence[Sequence[int]]]
"""One prompt or several, each as text or as token ids."""

Conversation = Sequence[Mapping[str, str]]
"""Messages, each with ``role`` and ``content``."""

_CLOSE_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The model's answer to one prompt.

    Attributes:
        prompt_token_ids: The prompt as the model saw it.
        text: The answer, without special tokens and without the stop string that ended it.
        token_ids: All generated tokens, including the one that ended the answer.
        finish_reason: "stop" (a stop string, a stop token or the end of the sequence) or "length".
        logprobs: One item per generated token if `SamplingParams.logprobs` was set, else None.
        prompt_logprobs: One item per token of the prompt except the first, if `SamplingParams.prompt_logprobs` was set.
    """

    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


class LLM:
    """A model that runs in this process, from a verified bundle. Safe to use from several threads.

    The bundle is verified exactly as by ``aotgaudi serve``, with the same errors. One thread computes, and batches the
    requests of all threads together.

    The process belongs to the caller, so by default the guard against compiling covers only the engine's thread. With
    ``guard="process"``, nothing in the whole process may start a process or import a compiler until `close`, as in the
    server. With ``guard="kernel"``, the kernel also refuses to start processes, for any code, until the process ends. Two
    settings affect the whole process: freed memory is kept (glibc's ``mallopt``), and the limit of open files grows by the
    number of the bundle's objects, which are open while it loads.

    Args:
        bundle: Directory of the sealed bundle.
        model: Model directory with config.json, safetensors and tokenizer.json.
        require_warm: Hash the whole bundle, demand that every possible step has an entry, and guard against compiling.
            False skips all three, except that with `trusted_keys` the bundle is hashed.
        threads: Threads of matrix products. None uses one for each core that this process may use.
        trusted_keys: Public keys (PEM files), one of which must have signed the bundle and its model. Empty accepts any.
        allow_unbound_model: With `trusted_keys`, also accept a bundle that is not bound to a model.
        generation_config: Where sampling defaults come from, as ``--generation-config``: "auto", "vllm" or a directory.
        guard: What may not compile: "engine" (the engine's thread), "process" (anything in this process), or "kernel" (the
            same, enforced for good by a seccomp filter; only with `require_warm`).
        enable_prefix_caching: Whether prompts start after their cached prefix. None takes the setting of the bundle's spec.

    Raises:
        SpecError: the model does not exist or is not the bundle's, or an argument cannot be used.
        StoreError, ManifestError: there is no bundle, or it cannot be read.
        NotWarmError, CorruptError, UntrustedError, TargetError: the bundle cannot be used; nothing was mapped.
        TargetError: the kernel cannot refuse processes.
        CoverageError: under `require_warm`, a possible step has no entry.
    """

    def __init__(  # noqa: PLR0913 - one argument a setting
        self,
        bundle: str | os.PathLike[str],
        model: str | os.PathLike[str],
        *,
        require_warm: bool = True,
        threads: int | None = None,
        trusted_keys: Sequence[str | os.PathLike[str]] = (),
        allow_unbound_model: bool = False,
        generation_config: str = "auto",
        guard: Literal["engine", "process", "kernel"] = "engine",
        enable_prefix_caching: bool | None = None,
    ) -> None:
        if guard == "kernel" and not require_warm:
            raise SpecError("guard", "is 'kernel', and require_warm=False has no guard", "require_warm=True")
        options = ModelOptions(
            bundle=Path(bundle),
            acceptance=TrustPolicy.demanding(trusted_keys),
            allow_unbound_model=allow_unbound_model,
            model_dir=Path(model),
            require_warm=require_warm,
            num_threads=threads or available_cores(),
            generation_config=GenerationConfig(generation_config),
            prefix_caching=enable_prefix_caching,
            policy="throughput",  # No answer is streamed, and equal calls run in equal steps.
        )
        self._model: RunningModel = start(options, Observers())
        try:
            self._chat_template = ChatTemplate.load(self._model.directory)
            if require_warm:
                self._model.guard.arm(
                    self._model.engine.thread_ident if guard == "engine" else None,
                    seccomp="require" if guard == "kernel" else "off",
                )
        except AotGaudiError:
            self.close()
            raise
        self._numbers = count()

    @property
    def manifest_id(self) -> str:
        """The id of the bundle's manifest."""
        return self._model.manifest_id

    @property
    def max_model_len(self) -> int:
        """How many tokens a prompt and its answer may have together."""
        return self._model.max_model_len

    @property
    def default_params(self) -> SamplingParams:
        """The default sampling parameters, from the model's generation_config.json."""
        return SamplingParams(**self._model.defaults)

    @property
    def warmth(self) -> Warmth:
        """How many entries are warm, and what was compiled since the start, by cause."""
        return self._model.warmth()

    def generate(
        self, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Output]:
        """Returns the answers to all prompts, in order. The prompts run in one batch as far as there is room.

        Args:
            prompts: One prompt or several. Text gets the model's special tokens. Token ids are used unchanged.
            params: For all prompts, or one for each. None uses `default_params`.

        Raises:
            RequestError: A prompt or a parameter cannot be served. Names the limit. Nothing is generated then.
            AotGaudiError: A step failed, or this model was closed.
        """
        return self._run(self._encoded(prompts), params)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Output]:
        """Returns the assistant's next message for one conversation or several. Raises what `generate` does.

        Raises:
            RequestError: The model has no chat template, or the template refuses the messages.
        """
        template = self._chat_template
        if template is None:
            raise RequestError("the model has no chat template; use generate", param="messages")
        conversations = _conversations(messages)
        texts = [template.render(conversation) for conversation in conversations]
        return self._run(self._model.tokenizer.encode_batch(texts, add_special_tokens=False), params)

    def close(self) -> None:
        """Aborts all requests, ends the engine's thread and disarms the guard. Idempotent."""
        self._model.engine.shutdown(_CLOSE_TIMEOUT_SECONDS)
        self._model.guard.disarm()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encoded(self, prompts: Prompts) -> list[list[int]]:
        if isinstance(prompts, str):
            prompts = [prompts]
        elif prompts and isinstance(prompts[0], int):
            prompts = [cast("Sequence[int]", prompts)]
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if texts and len(texts) != len(prompts):
            raise RequestError("prompts must all be text, or all be token ids", param="prompts")
        if texts:
            return self._model.tokenizer.encode_batch(texts, add_special_tokens=True)
        return [list(prompt) for prompt in cast("Sequence[Sequence[int]]", prompts)]

    def _run(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Output]:
        given = [params or self.default_params] * len(prompts) if not isinstance(params, Sequence) else params
        if len(given) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts were given, and {len(given)} params", param="params")
        found = self._events(list(zip(prompts, given, strict=True)))
        return [_output(*each) for each in zip(prompts, found, given, strict=True)]

    def _events(self, asked: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[TokenEvent]:
        """Runs all prompts to their end, and returns the joined events of each."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        ids = [f"llm-{next(self._numbers)}" for _ in asked]
        requests = [NewRequest(name, *each) for name, each in zip(ids, asked, strict=True)]
        try:
            self._model.engine.add(self._model.rules.resolve(requests), events.put)
            return _collected(events, ids)
        except BaseException:  # After a refusal, a failed step or Ctrl-C, no request may go on.
            self._model.engine.abort(*ids)
            raise


def _collected(events: queue.SimpleQueue[Event], ids: Sequence[str]) -> list[TokenEvent]:
    """Waits for all requests, and returns the joined events of each."""
    found: dict[str, list[TokenEvent]] = {request_id: [] for request_id in ids}
    num_open = len(ids)
    while num_open:
        event = events.get()
        if isinstance(event, ErrorEvent):
            raise event.error
        if event.finish_reason == "abort":
            raise AotGaudiError("the model was closed while it generated")
        found[event.request_id].append(event)
        num_open -= event.finish_reason is not None
    return [TokenEvent.joined(found[request_id]) for request_id in ids]


def _output(prompt: Sequence[int], event: TokenEvent, params: SamplingParams) -> Output:
    return Output(
        prompt_token_ids=tuple(prompt),
        text=event.text,
        token_ids=event.token_ids,
        finish_reason=event.finish_reason or "stop",
        logprobs=None if params.logprobs is None else event.logprobs,
        prompt_logprobs=None if event.prompt is None else event.prompt.logprobs,
    )


def _conversations(messages: Conversation | Sequence[Conversation]) -> Sequence[Conversation]:
    is_one = bool(messages) and isinstance(messages[0], Mapping)
    conversations = cast("Sequence[Conversation]", [messages] if is_one else messages)
    for message in (message for conversation in conversations for message in conversation):
        if not all(isinstance(message.get(name), str) for name in ("role", "content")):
            raise RequestError("a message needs a role and a content, both text", param="messages")
    return conversations
