"""Turns a body into a request for the engine: parses, validates, renders the chat template, and tokenizes.

All of this holds the interpreter's lock: for a second if the body is large, and for ever if the chat template does not end.
So it runs in a worker process (`aotgaudi.server.preprocess.worker`). `answer_to_bytes` and `answer_of_bytes` are the form in
which its answers reach the server.
"""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union

from pydantic import TypeAdapter

from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.errors import AotGaudiError, RequestError
from aotgaudi.server.options import ReplyParsers
from aotgaudi.server.preprocess.body import BodyError, parse_body
from aotgaudi.server.preprocess.messages import ChosenTool
from aotgaudi.server.preprocess.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    StreamUsage,
    TokenizeRequest,
)
from aotgaudi.server.reply.plan import ReplyPlan, Thinks, thinks_after
from aotgaudi.server.reply.tool_calls import Calls

if TYPE_CHECKING:
    from aotgaudi.engine.constraints import Grammars
    from aotgaudi.llm.chat import ChatTemplate
    from aotgaudi.llm.tokenizer import Tokenizer

Kind = Literal["completion", "chat"]
TokenizeKind = Literal["tokenize", "detokenize"]
_ARRAY_TYPE = "I"


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The model that requests are checked against.

    Attributes:
        names: The model's names in the API. An answer carries the name that the request had, or else the first.
        max_len: The model's length in tokens.
        defaults: Sampling parameters of requests that do not state them.
        parsers: How the model writes calls of tools and reasoning.
        root: The directory or the hub id that the model comes from.
    """

    names: tuple[str, ...]
    max_len: int
    defaults: Mapping[str, Any]
    parsers: ReplyParsers = ReplyParsers()  # noqa: RUF009 - a frozen value
    root: str = ""

    def resolve(self, name: str | None) -> str:
        """Returns the name that an answer carries.

        Raises:
            RequestError: 404; this server has no such model.
        """
        if name is None:
            return self.names[0]
        if name not in self.names:
            served = ", ".join(self.names)
            raise RequestError(
                f"The model {name[:256]!r} does not exist; this server has: {served}",
                param="model",
                http_status=404,
            )
        return name


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request that is ready for the engine.

    `model` is the name that the answer carries. `prompts` are token ids. Each gets `num_choices` answers, which begin with
    its text in `echoes`, if there is one, and have generated text if `shows_output`. With `shows_prompt_logprobs`, the
    prompt's log-probabilities are a separate part of the answer, and not only part of an echo. `own_names` maps
    the engine's names of parameters to those of the body. Only requests with the same `cache_salt` share cached prefixes.
    `reply` is how the answer's text is read; None if all of it is content. `ignored` are the
    members of the body that have no effect, as ``Class.name``, and "tools" if the chat template does not show them.
    """

    model: str
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    stream: bool
    stream_usage: StreamUsage
    own_names: Mapping[str, str]
    ignored: tuple[str, ...] = ()
    cache_salt: str = ""
    num_choices: int = 1
    echoes: tuple[str, ...] = ()
    reply: ReplyPlan | None = None
    shows_output: bool = True
    shows_prompt_logprobs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenized:
    """Tokens of a text, or the text of tokens. `strings` has the tokens as the vocabulary writes them, if asked for.

    `ignored` is as in `PreparedRequest`.
    """

    token_ids: Sequence[int] = ()
    strings: tuple[str, ...] | None = None
    text: str = ""
    ignored: tuple[str, ...] = ()

    def as_tokens(self, max_model_len: int) -> Mapping[str, object]:
        """Returns the answer of ``/tokenize``."""
        return {
            "count": len(self.token_ids),
            "max_model_len": max_model_len,
            "tokens": list(self.token_ids),
            "token_strs": None if self.strings is None else list(self.strings),
        }

    def as_text(self) -> Mapping[str, object]:
        """Returns the answer of ``/detokenize``."""
        return {"prompt": self.text}


AnswerT = TypeVar("AnswerT", "PreparedRequest", Tokenized)
Answer = Union[PreparedRequest, Tokenized, RequestError, str]
"""A worker's answer: what a body asks for, why it is refused, or how the worker failed, without content of the body."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A RequestError. `is_of_body` tells a `BodyError`."""

    message: str
    param: str | None
    http_status: int
    is_of_body: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """An answer without its token ids: one of the first four is set. `lens` are the numbers of token ids of the prompts."""

    prepared: PreparedRequest | None = None
    tokenized: Tokenized | None = None
    refusal: _Refusal | None = None
    failure: str = ""
    lens: tuple[int, ...] = ()


@functools.cache
def answer_codec() -> TypeAdapter[_Head]:
    """Returns what writes and reads answers. The first call takes 10 ms, which a request should not wait for."""
    return TypeAdapter(_Head)


def answer_to_bytes(answer: Answer) -> bytes:
    """Returns an answer as a line of JSON, and all token ids as one array of native 32-bit integers."""
    prompts: Sequence[Sequence[int]] = ()
    if isinstance(answer, PreparedRequest):
        prompts = answer.prompts
        head = _Head(prepared=replace(answer, prompts=()), lens=tuple(map(len, prompts)))
    elif isinstance(answer, Tokenized):
        prompts = [answer.token_ids]
        head = _Head(tokenized=replace(answer, token_ids=()), lens=(len(answer.token_ids),))
    elif isinstance(answer, RequestError):
        message = str(answer).encode(errors="replace").decode()
        is_of_body = isinstance(answer, BodyError)
        head = _Head(refusal=_Refusal(message, answer.param, answer.http_status, is_of_body))
    else:
        head = _Head(failure=answer)
    ids = (array(_ARRAY_TYPE, prompt).tobytes() for prompt in prompts)
    return b"".join((answer_codec().dump_json(head), b"\n", *ids))


def answer_of_bytes(kind: type[AnswerT], data: bytes) -> AnswerT:
    """Returns the answer in `data`, which is of `kind`.

    Raises:
        RequestError: the worker refused the request.
        AotGaudiError: the worker failed, or this is not such an answer.
    """
    line, _, ids = data.partition(b"\n")
    try:
        head, token_ids = answer_codec().validate_json(line), array(_ARRAY_TYPE, ids)
    except ValueError as error:
        raise AotGaudiError("a preprocessor worker sent something that is not an answer") from error
    if head.refusal is not None:
        refusal = head.refusal
        raise (BodyError if refusal.is_of_body else RequestError)(
            refusal.message, param=refusal.param, http_status=refusal.http_status
        )
    ends = tuple(itertools.accumulate(head.lens))
    prompts = [token_ids[end - size : end].tolist() for end, size in zip(ends, head.lens, strict=True)]
    if kind is PreparedRequest and head.prepared is not None:
        return replace(head.prepared, prompts=prompts)
    if kind is Tokenized and head.tokenized is not None:
        return replace(head.tokenized, token_ids=prompts[0])
    raise AotGaudiError(f"the preprocessor could not prepare a request: {head.failure}")


def get_ready(tokenizer: Tokenizer) -> None:
    """Builds what the first request would build, so that workers that are forked afterwards share it."""
    for body in (CompletionRequest, ChatCompletionRequest, TokenizeRequest, DetokenizeRequest):
        body.model_rebuild()
    answer_codec()
    _ = tokenizer.max_token_chars


@dataclass(frozen=True)
class Preparer:
    """Prepares requests for one model.

    `on_grammar` is called with the name of the parameter before its grammar is compiled, since compiling may kill the
    process. `ignored` collects what one request has and the server ignores.
    """

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    grammars: Grammars
    model: ServedModel
    on_grammar: Callable[[str], None] = lambda _: None
    ignored: list[str] = field(default_factory=list)

    def prepare(self, kind: Kind | TokenizeKind, raw: bytes) -> PreparedRequest | Tokenized:
        """Returns what the body `raw` asks for: a request for the engine, or tokens or text, which have no limit.

        Raises:
            RequestError: 400, or 404 for another model's name. Says what is wrong, and where.
        """
        own = replace(self, ignored=[])
        preparations: Mapping[str, Callable[[bytes], PreparedRequest | Tokenized]] = {
            "completion": own._completion,
            "chat": own._chat,
            "tokenize": own._tokenized,
            "detokenize": own._detokenized,
        }
        return replace(preparations[kind](raw), ignored=tuple(own.ignored))

    def _completion(self, raw: bytes) -> PreparedRequest:
        completion = parse_body(CompletionRequest, raw, self.ignored)
        name, params = self.model.resolve(completion.model), self._params(completion)
        token_ids = self._token_ids(completion, "prompt")
        return self._prepared(completion, name, params, token_ids, self._echoes(completion, token_ids))

    def _chat(self, raw: bytes) -> PreparedRequest:
        chat = parse_body(ChatCompletionRequest, raw, self.ignored)
        name, params = self.model.resolve(chat.model), self._params(chat)
        text = self._rendered(chat)
        prompts = self._encoded(chat, [text], bool(chat.add_special_tokens), "messages")
        is_constrained = params.structured_outputs is not None
        reply = plan_reply(chat, text, self.model.parsers, is_constrained=is_constrained)
        if reply is not None and reply.has_special_markers:
            params = replace(params, skip_special_tokens=False)
        return self._prepared(chat, name, params, prompts, [chat.echoed] if chat.echoed else [], reply)

    def _detokenized(self, raw: bytes) -> Tokenized:
        body = parse_body(DetokenizeRequest, raw, self.ignored)
        self.model.resolve(body.model)
        return Tokenized(text=self.tokenizer.decode_all(body.tokens))

    def _tokenized(self, raw: bytes) -> Tokenized:
        body = parse_body(TokenizeRequest, raw, self.ignored)
        self.model.resolve(body.model)
        if body.prompt is None:
            text, with_special = self._rendered(body.chat()), bool(body.add_special_tokens)
        else:
            text, with_special = body.prompt, body.add_special_tokens is not False
        ids = self.tokenizer.encode(text, with_special)
        return Tokenized(
            token_ids=ids, strings=tuple(self.tokenizer.strings(ids)) if body.return_token_strs else None
        )

    def _params(self, body: GenerationRequest) -> SamplingParams:
        """Returns the sampling parameters of a body. Checks its grammar, whose time and memory are limited here."""
        try:
            params = body.sampling_params(self.model.defaults)
            if params.structured_outputs is not None:
                self.on_grammar(body.own_names().get("structured_outputs", "structured_outputs"))
                self.grammars.compile(params.structured_outputs)
        except RequestError as error:
            raise error.renamed(body.own_names()) from error
        return params

    def _prepared(
        self,
        body: GenerationRequest,
        model: str,
        params: SamplingParams,
        prompts: Sequence[Sequence[int]],
        echoes: Sequence[str],
        reply: ReplyPlan | None = None,
    ) -> PreparedRequest:
        return PreparedRequest(
            model=model,
            prompts=prompts,
            params=params,
            stream=bool(body.stream),
            stream_usage=body.stream_usage,
            own_names=body.own_names(),
            cache_salt=body.cache_salt or "",
            num_choices=body.num_choices,
            echoes=tuple(echoes),
            reply=reply,
            shows_output=body.shows_output,
            shows_prompt_logprobs=body.prompt_logprobs is not None,
        )

    def _token_ids(self, body: CompletionRequest, param: str) -> Sequence[Sequence[int]]:
        """Returns the token ids of the prompts. Text gets the model's special tokens unless the request says otherwise."""
        prompts = body.prompts()
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if texts:
            return self._encoded(body, texts, body.add_special_tokens is not False, param)
        max_len = self._truncated_len(body)
        return [self._bounded(ids[-max_len:], param) for ids in prompts if not isinstance(ids, str)]

    def _echoes(self, body: CompletionRequest, prompts: Sequence[Sequence[int]]) -> Sequence[str]:
        """Returns the text of each prompt (the client's, or decoded from its tokens), if answers begin with it."""
        if not body.echo:
            return ()
        if body.truncate_prompt_tokens is None:
            texts = [prompt for prompt in body.prompts() if isinstance(prompt, str)]
            if texts:
                return texts
        return list(map(self.tokenizer.decode_all, prompts))

    def _bounded(self, token_ids: list[int], param: str) -> list[int]:
        """Returns `token_ids`. Refuses them if they are too many, so that they need not be sent to the server."""
        if len(token_ids) > self.model.max_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens; max_model_len = {self.model.max_len}", param=param
            )
        return token_ids

    def _truncated_len(self, body: GenerationRequest) -> int:
        """Returns how many of a prompt's last tokens are kept. 0 keeps all, as ``ids[-0:]`` does."""
        asked, max_len = body.truncate_prompt_tokens, self.model.max_len
        if asked is None:
            return 0
        if asked == -1:
            return max(1, max_len - (body.max_new_tokens or 1))
        if not 1 <= asked <= max_len:
            raise RequestError(
                f"truncate_prompt_tokens must be -1 (as many as fit), or 1 to max_model_len = {max_len}, not {asked}",
                param="truncate_prompt_tokens",
            )
        return asked

    def _rendered(self, body: ChatCompletionRequest) -> str:
        """Returns the prompt, including the special tokens, which the template writes."""
        template, variables = self.chat_template, body.template_variables
        if template is None:
            raise RequestError(
                f"The model {self.model.names[0]!r} has no chat template: start the server with --chat-template FILE, or "
                "use /v1/completions",
                param="messages",
            )
        messages = [message.as_variables() for message in body.messages]
        tools = [tool.as_variables() for tool in body.tools or ()]
        if tools and not template.takes_tools:
            self.ignored.append("tools")
        if body.continue_final_message:
            return template.render_open(messages, variables, tools)
        opens_message = body.opens_message
        return template.render(messages, tools, add_generation_prompt=opens_message, variables=variables)

    def _encoded(
        self,
        body: GenerationRequest,
        texts: Sequence[str],
        with_special: bool,
        param: str,
    ) -> list[list[int]]:
        max_len = self._truncated_len(body)
        if max_len:
            return self.tokenizer.encode_ends(texts, with_special, max_len)
        num_chars = max(map(len, texts), default=0)
        bound = self.model.max_len * self.tokenizer.max_token_chars
        if num_chars > bound:
            raise RequestError(
                f"The text is {num_chars} characters long; max_model_len = {self.model.max_len} tokens "
                f"hold at most {bound}",
                param=param,
            )
        return [self._bounded(ids, param) for ids in self.tokenizer.encode_batch(texts, with_special)]


def plan_reply(
    body: ChatCompletionRequest, prompt: str, parsers: ReplyParsers, *, is_constrained: bool
) -> ReplyPlan | None:
    """Returns how the reply to `prompt`, the rendered `body`, is read; None if all of it is content.

    With `is_constrained`, the constraint holds from the first token, so the reply has no reasoning.

    Raises:
        RequestError: 400; the server was started without the format in which this model calls tools.
    """
    calls = _calls_of(body, parsers)
    if calls is None and parsers.reasoning_parser is None:
        return None
    thinks: Thinks = "no"
    if parsers.reasoning_parser is not None and not is_constrained:
        thinks = thinks_after(prompt, parsers.reasoning_parser)
    return ReplyPlan(
        calls=calls,
        function=body.tool_choice.function.name if isinstance(body.tool_choice, ChosenTool) else "",
        has_parallel_calls=body.parallel_tool_calls is not False,
        thinks=thinks,
        has_reasoning=parsers.reasoning_parser is not None,
        shows_reasoning=body.include_reasoning is not False,
    )


def _calls_of(body: ChatCompletionRequest, parsers: ReplyParsers) -> Calls | None:
    if not body.tools or body.tool_choice == "none":
        return None
    if isinstance(body.tool_choice, ChosenTool):
        return "one"
    if body.tool_choice == "required":
        return "list"
    if not parsers.enable_auto_tool_choice or parsers.tool_call_parser is None:
        raise RequestError(
            "tool_choice 'auto', the default with 'tools', needs a server that was started with --enable-auto-tool-choice "
            "and --tool-call-parser",
            param="tool_choice",
        )
    return parsers.tool_call_parser
