"""The body of ``POST /v1/responses``, and the chat that it stands for.

The server stores no conversations. A client sends the whole conversation as `input`, and parameters that need a stored one
are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.server.preprocess.answer_format import BY_FORMAT_TYPE, NamedSchema, StructuredOutputsOption
from aotgaudi.server.preprocess.body import (
    MAX_ECHO_CHARS,
    NOT_SUPPORTED,
    Body,
    Ignored,
    NoList,
    NoValue,
    OffOnly,
    made_body,
    neutral_only,
    shape_of_text,
)
from aotgaudi.server.preprocess.messages import MAX_TEXT_PARTS
from aotgaudi.server.preprocess.protocol import (
    MAX_CACHE_SALT_CHARS,
    MAX_MESSAGES,
    MAX_TEMPLATE_VARIABLES,
    ChatCompletionRequest,
    Count,
    Int64,
    LogitBias,
    Metadata,
    Priority,
    ReasoningEffort,
    Stop,
    StopTokenIds,
)
from aotgaudi.server.preprocess.tools import (
    MAX_TOOLS,
    CallId,
    ToolMode,
    ToolName,
    refuse_other_tools,
    shape_of_choice,
)

CHAT_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""Names of a chat's parameters -> this endpoint's."""

_KEEPS_NOTHING = "the server keeps no responses; send the conversation as 'input'"


def _refuse_other(noun: str, known: Iterable[str], value: object, default: str) -> object:
    """Returns `value`, unless its `type` is not one of `known`: then it is refused."""
    kind = value.get("type", default) if isinstance(value, Mapping) else default
    if isinstance(kind, str) and kind not in known:
        raise PydanticCustomError(
            "unsupported_parameter",
            "{noun} of type '{kind}' {problem} (supported: {known})",
            {
                "name": "type",
                "noun": noun,
                "kind": kind[:MAX_ECHO_CHARS],
                "problem": NOT_SUPPORTED,
                "known": ", ".join(known),
            },
        )
    return value


# Items of the input


class _TextPart(Body):
    """A part of a message's content, or of a call's output."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: NoList = None
    logprobs: NoList = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_types(cls, value: object) -> object:
        return _refuse_other("A content part", ("input_text", "output_text", "text"), value, "text")


_Content = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[_TextPart], Field(max_length=MAX_TEXT_PARTS, fail_fast=True), Tag("<list>")],
    Discriminator(shape_of_text),
]


class _Item(Body):
    """What items have in common. Clients send those of a response back as they got them."""

    id: Ignored = None
    status: Ignored = None


class MessageItem(_Item):
    """A message, by anybody."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content
    phase: Ignored = None


class CallItem(_Item):
    """A call that the model made."""

    not_yet: ClassVar[frozenset[str]] = frozenset({"async", "async_", "caller", "namespace"})

    type: Literal["function_call"]
    call_id: CallId
    name: ToolName
    arguments: str
    parsed_arguments: Ignored = None


class CallOutputItem(_Item):
    """What a call gave."""

    not_yet: ClassVar[frozenset[str]] = frozenset({"caller"})

    type: Literal["function_call_output"]
    call_id: CallId
    output: _Content


class _ReasoningPart(Body):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(_Item):
    """What the model thought."""

    type: Literal["reasoning"]
    summary: Annotated[list[_ReasoningPart], Field(max_length=MAX_TEXT_PARTS)] | None = None
    content: Annotated[list[_ReasoningPart], Field(max_length=MAX_TEXT_PARTS)] | None = None
    encrypted_content: NoValue = None


_ITEMS = ("message", "function_call", "function_call_output", "reasoning")


class _OtherItem(Body):
    """No item that the server knows."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: object) -> object:
        return _refuse_other("An item", _ITEMS, value, "")


def _shape_of_item(value: object) -> str:
    kind = value.get("type", "message") if isinstance(value, Mapping) else "message"
    return f"<{kind}>" if kind in _ITEMS else "<other>"


InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[CallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[_OtherItem, Tag("<other>")],
    Discriminator(_shape_of_item),
]


def _text_of(content: str | list[_TextPart]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]


class _Conversation:
    """Builds the messages of a chat from items. Successive reasoning, text and calls of the assistant are one message."""

    def __init__(self, instructions: str | None) -> None:
        self.messages: list[dict[str, Any]] = []
        if instructions:
            self.messages.append({"role": "system", "content": instructions})

    def add(self, item: object) -> None:
        """Adds an item to the messages."""
        if isinstance(item, MessageItem):
            self._add_message(item)
        elif isinstance(item, CallOutputItem):
            output = {"role": "tool", "tool_call_id": item.call_id, "content": _text_of(item.output)}
            self.messages.append(output)
        elif isinstance(item, ReasoningItem):
            parts = item.content or item.summary or ()
            self.messages.append(
                {"role": "assistant", "content": "", "reasoning": "".join(part.text for part in parts)}
            )
        elif isinstance(item, CallItem):
            function = {"name": item.name, "arguments": item.arguments}
            calls = self._assistant().setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "function": function})

    def _add_message(self, item: MessageItem) -> None:
        content = _text_of(item.content)
        last = self.messages[-1] if self.messages else {}
        if (
            item.role == "assistant"
            and "reasoning" in last
            and not last["content"]
            and "tool_calls" not in last
        ):
            last["content"] = content
        else:
            self.messages.append({"role": item.role, "content": content})

    def _assistant(self) -> dict[str, Any]:
        """Returns the last message if it is the assistant's, or else a new one."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


# Tools and format


class FunctionTool(Body):
    """A function tool, in the flat form of this endpoint."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_types(cls, value: object) -> object:
        refuse_other_tools(value)
        return value


class _ChosenTool(Body):
    type: Literal["function"]
    name: ToolName

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_types(cls, value: object) -> object:
        refuse_other_tools(value)
        return value


class _TextFormat(Body):
    type: Literal["text"]


class _ObjectFormat(Body):
    type: Literal["json_object"]


class _SchemaFormat(NamedSchema):
    type: Literal["json_schema"]


_Format = Annotated[
    Annotated[_TextFormat, Tag("<text>")]
    | Annotated[_ObjectFormat, Tag("<json_object>")]
    | Annotated[_SchemaFormat, Tag("<json_schema>")],
    BY_FORMAT_TYPE,
]


class TextOptions(Body):
    """The format of the answer's text."""

    format: _Format | None = None
    verbosity: Annotated[object, neutral_only("medium")] = None


class ReasoningOptions(Body):
    """How the model should reason, as far as its chat template has variables for that."""

    effort: ReasoningEffort | None = None
    summary: NoValue = None
    generate_summary: NoValue = None


class _StreamOptions(Body):
    include_obfuscation: OffOnly = None


# The request


class ResponsesRequest(Body):
    """The body of ``POST /v1/responses``."""

    not_yet: ClassVar[frozenset[str]] = frozenset(
        {
            *("background", "context_management", "max_tool_calls", "moderation", "prompt_cache_retention"),
            *("ec_transfer_params", "enable_response_messages", "kv_transfer_params", "media_io_kwargs"),
            *(
                "mm_payload",
                "mm_processor_kwargs",
                "previous_input_messages",
                "request_id",
                "return_mm_kwargs",
            ),
            *("session_id", "top_logprobs", "vllm_xargs", "watermarking"),
        }
    )

    input: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[
            list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), Tag("<list>")
        ],
        Discriminator(shape_of_text),
    ]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: (
        Annotated[
            Annotated[ToolMode, Tag("<mode>")] | Annotated[_ChosenTool, Tag("<tool>")],
            Discriminator(shape_of_choice),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    metadata: Metadata | None = None
    reasoning: ReasoningOptions | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Stop | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    include_reasoning: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: LogitBias | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputsOption | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_CHARS)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_VARIABLES)] | None = None

    user: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    include: NoList = None
    priority: Priority = None
    prompt: NoValue = None
    service_tier: Annotated[object, neutral_only("auto", "default")] = None
    truncation: Annotated[object, neutral_only("disabled")] = None
    store: Annotated[object, neutral_only(False, why=_KEEPS_NOTHING)] = None
    previous_response_id: Annotated[object, neutral_only(why=_KEEPS_NOTHING)] = None
    conversation: Annotated[object, neutral_only(why=_KEEPS_NOTHING)] = None

    def as_chat(self) -> ChatCompletionRequest:
        """Returns the equivalent chat. Raises RequestError with the names of a chat's parameters."""
        conversation = _Conversation(self.instructions)
        for item in (
            [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        ):
            conversation.add(item)
        same = self.model_dump(include=_SAME_IN_CHAT, exclude_none=True)
        return made_body(
            ChatCompletionRequest,
            {
                **same,
                "messages": conversation.messages,
                "max_tokens": self.max_output_tokens,
                "tools": [_chat_tool(tool) for tool in self.tools or ()] or None,
                "tool_choice": self._chat_choice(),
                "response_format": self._chat_format(),
                "reasoning_effort": self._effort,
            },
        )

    def repeated(self, params: SamplingParams) -> dict[str, Any]:
        """Returns what a response repeats from its request, with the effective values."""
        format_ = None if self.text is None else self.text.format
        text = {"type": "text"} if format_ is None else format_.model_dump(by_alias=True, exclude_none=True)
        return {
            "background": False,
            "frequency_penalty": params.frequency_penalty,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": None,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "presence_penalty": params.presence_penalty,
            "previous_response_id": None,
            "prompt_cache_key": None,
            "reasoning": {"effort": self._effort, "summary": None},
            "safety_identifier": None,
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": text},
            "tool_choice": _dumped(self.tool_choice) or "auto",
            "tools": [
                {
                    "description": None,
                    "parameters": None,
                    "strict": None,
                    **tool.model_dump(exclude_none=True),
                }
                for tool in self.tools or ()
            ],
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": "disabled",
        }

    @property
    def _effort(self) -> ReasoningEffort | None:
        return None if self.reasoning is None else self.reasoning.effort

    def _chat_choice(self) -> object:
        choice = self.tool_choice
        if not isinstance(choice, _ChosenTool):
            return choice
        return {"type": "function", "function": {"name": choice.name}}

    def _chat_format(self) -> object:
        format_ = None if self.text is None else self.text.format
        if not isinstance(format_, _SchemaFormat):
            return None if format_ is None else {"type": format_.type}
        schema = format_.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
        return {"type": "json_schema", "json_schema": schema}


_SAME_IN_CHAT = {
    *("model", "temperature", "top_p", "stream", "parallel_tool_calls", "top_k", "min_p", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "seed", "stop", "ignore_eos", "cache_salt"),
    *("chat_template_kwargs", "include_reasoning", "include_stop_str_in_output", "logit_bias"),
    *("skip_special_tokens", "stop_token_ids", "structured_outputs"),
}


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
    function = tool.model_dump(exclude={"type"}, exclude_none=True)
    return {"type": "function", "function": function}


def _dumped(choice: object) -> object:
    return choice.model_dump() if isinstance(choice, Body) else choice
