"""What a client asks of /v1/embeddings, up to its token ids, and the form of the answer."""

from __future__ import annotations

import base64
import json
import struct
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.engine.steps import PoolingParams
from aotgaudi.errors import RequestError
from aotgaudi.llm.tokenizer import Tokenizer
from aotgaudi.server.preprocess.embedding_request import MAX_INPUTS, embedding_item
from aotgaudi.server.preprocess.prepare import PreparedRequest, Preparer, ServedModel
from tests.unit.llm.conftest import make_backend, make_grammars

MAX_LEN = 64
BOS_ID = 256
A, B = 64, 65
"""The tokens of these letters."""


@pytest.fixture(scope="module")
def preparer() -> Preparer:
    model = ServedModel(names=("tiny",), max_len=MAX_LEN, defaults={})
    return Preparer(Tokenizer(make_backend()), None, make_grammars(), model)


def prepare(preparer: Preparer, **body: object) -> PreparedRequest:
    return preparer.prepare("embedding", json.dumps(body).encode())


@pytest.mark.parametrize(
    ("given_input", "expected"),
    [
        ("ab", [[BOS_ID, A, B]]),
        (["a", "b"], [[BOS_ID, A], [BOS_ID, B]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
def test_every_form_of_input_becomes_token_ids(
    preparer: Preparer, given_input: object, expected: Sequence[Sequence[int]]
) -> None:
    prepared = prepare(preparer, input=given_input, user="u")

    assert prepared.prompts == expected
    assert (prepared.model, prepared.pooling, prepared.encoding) == ("tiny", PoolingParams(), "float")


def test_parameters_are_passed_on(preparer: Preparer) -> None:
    body = {"dimensions": 8, "encoding_format": "base64", "cache_salt": "s", "add_special_tokens": False}

    prepared = prepare(preparer, input="a", **body)

    assert prepared.prompts == [[A]]
    assert (prepared.pooling, prepared.encoding, prepared.cache_salt) == (PoolingParams(8), "base64", "s")


@pytest.mark.parametrize(("asked", "kept"), [(3, 3), (-1, MAX_LEN)])
def test_a_truncated_input_may_fill_the_model(preparer: Preparer, asked: int, kept: int) -> None:
    prepared = prepare(preparer, input="x" * 900, truncate_prompt_tokens=asked)

    assert len(prepared.prompts[0]) == kept


def test_as_many_inputs_as_openai_takes_are_read(preparer: Preparer) -> None:
    assert len(prepare(preparer, input=["a"] * MAX_INPUTS).prompts) == MAX_INPUTS
    with pytest.raises(RequestError, match="at most 2048 items"):
        prepare(preparer, input=["a"] * (MAX_INPUTS + 1))


@pytest.mark.parametrize("name", ["messages", "embed_dtype", "normalize"])
def test_what_vllm_has_and_we_do_not_is_named(preparer: Preparer, name: str) -> None:
    with pytest.raises(RequestError, match=f"'{name}' is not supported") as refused:
        prepare(preparer, input="a", **{name: "x"})

    assert refused.value.param == name


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20))
def test_both_encodings_hold_the_same_numbers(numbers: list[float]) -> None:
    embedding = array("f", numbers).tobytes()

    plain, encoded = (json.loads(embedding_item(3, embedding, form)) for form in ("float", "base64"))

    assert (plain["object"], plain["index"], plain["embedding"]) == ("embedding", 3, numbers)
    assert list(struct.unpack(f"<{len(numbers)}f", base64.b64decode(encoded["embedding"]))) == numbers
