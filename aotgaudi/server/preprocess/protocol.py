"""The bodies of ``/v1/completions`` and ``/v1/chat/completions``.

Extensions of OpenAI's protocol have vLLM's names: `top_k`, `min_p`, `repetition_penalty`, `stop_token_ids`, `ignore_eos`,
`cache_salt`, `min_tokens`, `bad_words`, `allowed_token_ids`, and those in `answer_format`. The engine also refuses filters,
penalties, log-probabilities and constraints that the bundle's sampler was built without.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Optional, cast

from pydantic import Discriminator, Field, Tag, create_model, model_validator

from aotgaudi.engine.sampling_params import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_STOP_STRINGS,
    SamplingParams,
    StructuredOutputs,
)
from aotgaudi.errors import RequestError
from aotgaudi.server.preprocess.answer_format import (
    GUIDED,
    JsonSchema,
    ResponseFormat,
    StructuredOutputsOption,
    structured_outputs_of,
)
from aotgaudi.server.preprocess.body import (
    MAX_ECHO_CHARS,
    Body,
    Ignored,
    NoList,
    NoneOnly,
    NoValue,
    OffOnly,
    OneOnly,
    OnOnly,
    TextOnly,
    invalid,
    neutral_only,
    shape_of_text,
)
from aotgaudi.server.preprocess.messages import ChosenTool, Message, ToolChoice, Tools, schema_of_calls
from aotgaudi.spec.sampler_signature import NUM_BIASED_TOKENS, PARAMETERS

MAX_PROMPTS = 64
MAX_CHOICES = 128  # of one prompt; OpenAI's
MAX_MESSAGES = 2048
MAX_METADATA_PAIRS, MAX_METADATA_KEY_CHARS, MAX_METADATA_CHARS = 16, 64, 512  # OpenAI's
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_CACHE_SALT_CHARS = 1024
MAX_TEMPLATE_VARIABLES = 64
DEFAULT_COMPLETION_MAX_TOKENS = 16  # as OpenAI's API has it; a chat runs to the model's length

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""vLLM's. What it means is the chat template's decision."""

StreamUsage = Literal["none", "last", "every"]
"""Which chunks of a stream carry the usage. "last" adds a chunk without choices; "every" includes that chunk."""


class StreamOptions(Body):
    """What a stream carries in addition to text.

    Attributes:
        include_usage: End with a chunk that carries the usage and no choices.
        continuous_usage_stats: With `include_usage`, every chunk carries the usage of its choice so far. vLLM's extension.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: OffOnly = None


Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Field(ge=1, le=2**63 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_CHARS)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
BadWords = Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True)]
LogitBias = Annotated[
    dict[Annotated[TokenId, Field(strict=False)], float], Field(max_length=NUM_BIASED_TOKENS)
]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]


def _shape_of_prompt(value: object) -> str:
    """Tells apart texts and token ids, one or several, for pydantic's unions."""
    if not isinstance(value, list):
        return "<text>"
    first = value[0] if value else 0
    if isinstance(first, list):
        return "<token lists>"
    return "<texts>" if isinstance(first, str) else "<tokens>"


Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=MAX_METADATA_KEY_CHARS)],
        Annotated[str, Field(max_length=MAX_METADATA_CHARS)],
    ],
    Field(max_length=MAX_METADATA_PAIRS),
]
"""Accepted and ignored."""
Stop = Annotated[
    Annotated[StopString, Tag("<text>")] | Annotated[StopStrings, Tag("<list>")],
    Discriminator(shape_of_text),
]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("<texts>")]
    | Annotated[TokenIds, Tag("<tokens>")]
    | Annotated[
        list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("<token lists>")
    ],
    Discriminator(_shape_of_prompt),
]
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
TemplateVariables = Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_VARIABLES)]
NoTemplate = Annotated[
    object, neutral_only(why="templates are programs; give one to `serve --chat-template`")
]


_ANSWER_FORMATS = ("response_format", "structured_outputs", *GUIDED)
_TOOL_CHOICE = re.compile(rb'"tool_choice"\s*:(?!\s*"(?:auto|none)")')
_ESCAPED_LETTER = re.compile(rb"\\u00[4-7]")
_SAMPLING_FIELDS = {
    *PARAMETERS,
    *("seed", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
}
"""Fields that a request and `SamplingParams` have under the same names."""


def may_have_grammar(raw: bytes) -> bool:
    """Returns whether the body `raw` names a parameter with a grammar, as far as its bytes say. Never misses one.

    Costs far less than parsing the body. A letter may be written as an escape, which nobody does without intent.
    """
    names_one = any(name.encode() in raw for name in _ANSWER_FORMATS)
    return names_one or bool(_TOOL_CHOICE.search(raw) or _ESCAPED_LETTER.search(raw))


_NUMBERS: Mapping[str, Any] = {"float32": float, "int64": Int64}
_VALUES: dict[str, Any] = {name: (Optional[_NUMBERS[each.dtype]], None) for name, each in PARAMETERS.items()}

if TYPE_CHECKING:
    SamplingFields = Body
else:
    SamplingFields = create_model("SamplingFields", __base__=Body, **_VALUES)


class GenerationRequest(SamplingFields):
    """What both endpoints share. Ranges of the sampling parameters are checked by `SamplingParams`."""

    not_yet: ClassVar[frozenset[str]] = frozenset(
        {
            *("ec_transfer_params", "kv_transfer_params", "logits_processors"),
            *("guided_decoding_backend", "guided_whitespace_pattern", "structural_tag"),
            *("logprob_token_ids", "media_io_kwargs", "mm_payload", "mm_processor_kwargs"),
            *("prompt_cache_retention", "prompt_embeds", "repetition_detection", "request_id"),
            *("return_mm_kwargs", "return_prompt_text", "return_token_ids", "return_token_offsets"),
            *("return_tokens_as_token_ids", "routed_experts_prompt_start", "session_id"),
            *("stream_interval", "thinking_token_budget", "vllm_xargs", "watermarking"),
        }
    )

    model: str | None = None
    max_tokens: Count | None = None
    seed: int | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_CHARS)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    bad_words: BadWords | None = None
    allowed_token_ids: TokenIds | None = None
    logit_bias: LogitBias | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsOption | None = None
    guided_json: JsonSchema = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Count | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Int64 | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**63 - 1)] | None = None

    user: Ignored = None
    metadata: Metadata | None = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None

    detokenize: OnOnly = None
    length_penalty: OneOnly = None
    priority: Annotated[object, neutral_only(0, why="requests run first come, first served")] = None
    use_beam_search: OffOnly = None
    spaces_between_special_tokens: OnOnly = None
    truncation_side: Annotated[object, neutral_only("left")] = None

    @model_validator(mode="after")
    def _check_combinations(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "'{name}' is only allowed when 'stream' is true")
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs", "'{name}' is only allowed when 'stream' is false")
        if self.best_of is not None and self.best_of != self.num_choices:
            raise invalid(
                "best_of",
                "'{name}' is only allowed to equal 'n', which is {n}: the server returns every choice that it generates",
                n=self.num_choices,
            )
        return self

    @property
    def shows_output(self) -> bool:
        """Whether generated tokens are returned."""
        return True

    @property
    def num_choices(self) -> int:
        """How many answers each prompt gets."""
        return self.n or 1

    @property
    def stream_usage(self) -> StreamUsage:
        """Which chunks of a stream carry the usage."""
        options = self.stream_options
        if options is None or not options.include_usage:
            return "none"
        return "every" if options.continuous_usage_stats else "last"

    @property
    def max_new_tokens(self) -> int | None:
        """The most tokens to generate; None if only the model's length limits them."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens' log-probabilities to return besides the chosen token's; None for none at all."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt's tokens."""
        return self.prompt_logprobs

    def own_names(self) -> Mapping[str, str]:
        """Returns a map from the engine's names of parameters to this body's, where they differ."""
        given = [name for name in _ANSWER_FORMATS if getattr(self, name) is not None]
        return {"structured_outputs": given[0]} if given else {}

    @property
    def structured(self) -> StructuredOutputs | None:
        """The constraint of the answer; None if any text will do.

        Raises:
            RequestError: several parameters constrain the answer, or one cannot be used.
        """
        given = [name for name in _ANSWER_FORMATS if getattr(self, name) is not None]
        found = {name: each for name in given if (each := structured_outputs_of(name, getattr(self, name)))}
        if len(found) > 1:
            first, second, *_ = found
            raise RequestError(
                f"'{first}' and '{second}' both say what the answer must be; give one", param=second
            )
        return next(iter(found.values()), None)

    def sampling_params(self, defaults: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
        """Returns the engine's parameters of this request. `defaults` apply to parameters that it does not state.

        A `max_tokens` in `defaults` also limits what a request can ask for, as in vLLM.

        Raises:
            RequestError: a value is out of range. Names the parameter.
        """
        limits = [n for n in (self.max_new_tokens, defaults.get("max_tokens")) if n is not None]
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        stated = self.model_dump(include=_SAMPLING_FIELDS, exclude_none=True)
        return SamplingParams(
            **{
                **defaults,
                **stated,
                "logprobs": self.num_logprobs,
                "prompt_logprobs": self.num_prompt_logprobs,
                "max_tokens": min(limits, default=None),
                "stop": tuple(stop),
                "stop_token_ids": tuple(self.stop_token_ids or ()),
                "min_tokens": self.min_tokens or 0,
                "bad_words": tuple(self.bad_words or ()),
                "allowed_token_ids": self.allowed_token_ids and tuple(self.allowed_token_ids),
                "logit_bias": tuple((self.logit_bias or {}).items()),
                "structured_outputs": self.structured,
            }
        )


class CompletionRequest(GenerationRequest):
    """The body of ``POST /v1/completions``; `prompt` is one prompt or several, as text or as token ids."""

    prompt: Prompt
    add_special_tokens: bool | None = None
    max_tokens: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    logprobs: Int64 | None = None
    echo: bool | None = None

    suffix: Annotated[object, neutral_only("")] = None

    @model_validator(mode="after")
    def _check_max_tokens(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens", "'{name}' must be greater than or equal to 1, or 0 with 'echo'")
        return self

    @property
    def max_new_tokens(self) -> int | None:
        """The most tokens to generate. OpenAI's default is 16. An echo alone generates one token, which is not returned."""
        return DEFAULT_COMPLETION_MAX_TOKENS if self.max_tokens is None else max(self.max_tokens, 1)

    @property
    def shows_output(self) -> bool:
        """Whether generated tokens are returned."""
        return self.max_tokens != 0

    @property
    def num_prompt_logprobs(self) -> int | None:
        """As in the request. If that states none, an echo gets the number of `logprobs`."""
        return self.logprobs if self.prompt_logprobs is None and self.echo else self.prompt_logprobs

    @property
    def num_logprobs(self) -> int | None:
        """As in the request."""
        return self.logprobs

    def own_names(self) -> Mapping[str, str]:
        """Returns this body's names. `logprobs` also stands for the log-probabilities of an echo."""
        is_echo = self.prompt_logprobs is None and self.num_prompt_logprobs is not None
        return {**super().own_names(), **({"prompt_logprobs": "logprobs"} if is_echo else {})}

    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts as a list."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast("list[str | list[int]]", [self.prompt] if is_one else self.prompt)


class ChatCompletionRequest(GenerationRequest):
    """The body of ``POST /v1/chat/completions``; `max_completion_tokens` is the newer `max_tokens`."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: ReasoningEffort | None = None

    service_tier: Annotated[object, neutral_only("auto", "default")] = None
    store: OffOnly = None
    functions: NoList = None
    function_call: NoneOnly = None
    modalities: TextOnly = None
    audio: NoValue = None
    prediction: NoValue = None
    verbosity: NoValue = None
    enable_thinking: Annotated[
        object, neutral_only(why="give it in 'chat_template_kwargs', as vLLM has it")
    ] = None
    web_search_options: NoValue = None
    chat_template: NoTemplate = None
    documents: NoList = None

    @model_validator(mode="after")
    def _check_combinations_of_chat(self) -> ChatCompletionRequest:
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid(
                "continue_final_message",
                "'{name}' and 'add_generation_prompt' exclude each other: a prompt that opens a message of the assistant "
                "has no open last message",
            )
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "'{name}' is only allowed when 'logprobs' is true")
        names = [tool.function.name for tool in self.tools or ()]
        if isinstance(self.tool_choice, ChosenTool) and self.tool_choice.function.name not in names:
            function = self.tool_choice.function.name[:MAX_ECHO_CHARS]
            message = "'{name}' names the function '{function}', which is not one of 'tools'"
            raise invalid("tool_choice", message, function=function)
        if self.tool_choice == "required" and not names:
            raise invalid("tool_choice", "'{name}' needs 'tools'")
        return self

    @property
    def max_new_tokens(self) -> int | None:
        """The limit under either name; None if only the model's length limits the answer."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """Variables of the chat template. An effort also says whether to think, unless the request itself does.

        Source: build_chat_params in vllm/entrypoints/openai/chat_completion/protocol.py.
        """
        given, effort = self.chat_template_kwargs or {}, self.reasoning_effort
        if effort is None:
            return given
        return {"enable_thinking": effort != "none", **given, "reasoning_effort": effort}

    @property
    def num_logprobs(self) -> int | None:
        """`top_logprobs`, if `logprobs` is true."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def opens_message(self) -> bool:
        """Whether the prompt ends where the assistant's next message begins."""
        return self.add_generation_prompt is not False and not self.continue_final_message

    @property
    def echoed(self) -> str:
        """The text that the answer begins with: the last message if it has the answer's role, as with vLLM's ``echo``."""
        last = self.messages[-1].as_variables()
        is_same_role = not self.opens_message or last["role"] == "assistant"
        return last["content"] if self.echo and is_same_role else ""

    @property
    def structured(self) -> StructuredOutputs | None:
        """The constraint of the answer, which may come from `tool_choice`."""
        asked, is_one = super().structured, self.parallel_tool_calls is False
        schema = schema_of_calls(self.tools or (), self.tool_choice, is_one=is_one)
        if schema is None:
            return asked
        if asked is not None:
            other = super().own_names()["structured_outputs"]
            raise RequestError(
                f"'{other}' and this 'tool_choice' both say what the answer must be; give one",
                param="tool_choice",
            )
        return StructuredOutputs(json=cast("str", schema))

    def own_names(self) -> Mapping[str, str]:
        """Returns this body's names. The prompt is called `messages`, and the limit of tokens has two names."""
        names = {**super().own_names(), "prompt": "messages"}
        if self.tool_choice == "required" or isinstance(self.tool_choice, ChosenTool):
            names["structured_outputs"] = "tool_choice"
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if self.top_logprobs:
            names["logprobs"] = "top_logprobs"
        return names


_OF_CHAT = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class TokenizeRequest(Body):
    """The body of ``POST /tokenize``: a `prompt` as of a completion, or `messages` as of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    tools: Tools | None = None

    chat_template: NoTemplate = None

    @model_validator(mode="after")
    def _check_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "Give either '{name}' or 'messages'")
        return self

    def chat(self) -> ChatCompletionRequest:
        """Returns the chat whose prompt is to be tokenized. Needs `messages`."""
        given = {name: getattr(self, name) for name in _OF_CHAT}
        return ChatCompletionRequest.model_validate({k: v for k, v in given.items() if v is not None})


class DetokenizeRequest(Body):
    """The body of ``POST /detokenize``."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
