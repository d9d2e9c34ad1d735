"""The body and the answer of ``/v1/embeddings``, in OpenAI's form with vLLM's extensions."""

from __future__ import annotations

import base64
import json
import sys
from array import array
from typing import Annotated, ClassVar, Literal, cast

from pydantic import Discriminator, Field, Tag

from aotgaudi.server.preprocess.body import Body, Ignored, neutral_only
from aotgaudi.server.preprocess.protocol import MAX_CACHE_SALT_CHARS, Count, TokenIds, shape_of_prompt

EncodingFormat = Literal["float", "base64"]
MAX_INPUTS = 2048
"""OpenAI's limit. A server may take fewer at once (`AdmissionLimits.max_requests`)."""

Inputs = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True), Tag("<texts>")]
    | Annotated[TokenIds, Tag("<tokens>")]
    | Annotated[
        list[TokenIds], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True), Tag("<token lists>")
    ],
    Discriminator(shape_of_prompt),
]


class EmbeddingRequest(Body):
    """The body of ``POST /v1/embeddings``; `input` is one text or several, or their token ids."""

    not_yet: ClassVar[frozenset[str]] = frozenset(
        {
            *("messages", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
            *("embed_dtype", "endianness", "mm_processor_kwargs", "normalize", "request_id", "softmax", "activation"),
            *("use_activation", "truncation_side"),
        }
    )  # fmt: skip

    input: Inputs
    model: str | None = None
    encoding_format: EncodingFormat | None = None
    dimensions: Count | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**63 - 1)] | None = None
    add_special_tokens: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_CHARS)] | None = None

    user: Ignored = None
    priority: Annotated[object, neutral_only(0, why="requests run first come, first served")] = None

    def prompts(self) -> list[str | list[int]]:
        """Returns the inputs, one for each embedding."""
        is_one = isinstance(self.input, str) or isinstance(self.input[0], int)
        return cast("list[str | list[int]]", [self.input] if is_one else self.input)


def embedding_item(index: int, embedding: bytes, encoding: EncodingFormat) -> bytes:
    """Returns one item of an answer's ``data`` as JSON. `embedding` is float32 in this machine's byte order."""
    numbers = array("f", embedding)
    value: object
    if encoding == "base64":  # OpenAI's client reads little-endian float32.
        if sys.byteorder == "big":
            numbers.byteswap()
        value = base64.b64encode(numbers).decode()
    else:
        value = numbers.tolist()
    item = {"object": "embedding", "index": index, "embedding": value}
    return json.dumps(item, allow_nan=False, separators=(",", ":")).encode()
