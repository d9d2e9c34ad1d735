"""Answers of a worker arrive as they were sent; bodies with a grammar are told from others."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.engine.sampling_params import SamplingParams, StructuredOutputs
from aotgaudi.errors import AotGaudiError, RequestError
from aotgaudi.server.preprocess.body import BodyError
from aotgaudi.server.preprocess.prepare import PreparedRequest, answer_of_bytes, answer_to_bytes
from aotgaudi.server.preprocess.protocol import may_have_grammar
from aotgaudi.server.reply.plan import ReplyPlan
from tests.unit.server.conftest import prepared

PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_p=st.floats(1e-9, 1),
    top_k=st.integers(-1, 2**63 - 1),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    stop=st.lists(st.text(min_size=1), max_size=3).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    min_tokens=st.integers(0, 9),
    bad_words=st.lists(st.text(min_size=1), max_size=3).map(tuple),
    allowed_token_ids=st.none() | st.lists(st.integers(0, 9), min_size=1).map(tuple),
    logit_bias=st.dictionaries(st.integers(0, 9), st.floats(-100, 100)).map(lambda bias: tuple(bias.items())),
    structured_outputs=st.none()
    | st.builds(StructuredOutputs, regex=st.text())
    | st.builds(StructuredOutputs, choice=st.lists(st.text(), min_size=1).map(tuple))
    | st.just(StructuredOutputs(json_object=True)),
    include_stop_str_in_output=st.booleans(),
    skip_special_tokens=st.booleans(),
)
PREPARED = st.builds(
    PreparedRequest,
    model=st.text(),
    prompts=st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=20), max_size=5),
    params=PARAMS,
    stream=st.booleans(),
    stream_usage=st.sampled_from(["none", "last", "every"]),
    own_names=st.dictionaries(st.text(), st.text(), max_size=2),
    ignored=st.lists(st.text(), max_size=2).map(tuple),
    cache_salt=st.text(),
    num_choices=st.integers(1, 128),
    echoes=st.lists(st.text(), max_size=2).map(tuple),
    reply=st.none()
    | st.builds(ReplyPlan, calls=st.sampled_from([None, "hermes", "one"]), function=st.text()),
    shows_output=st.booleans(),
    shows_prompt_logprobs=st.booleans(),
)


@given(PREPARED)
def test_prepared_request_crosses_as_it_is(sent: PreparedRequest) -> None:
    assert answer_of_bytes(PreparedRequest, answer_to_bytes(sent)) == sent


def test_long_answer_crosses() -> None:
    long = prepared(list(range(300_000)), [], [7])

    assert answer_of_bytes(PreparedRequest, answer_to_bytes(long)) == replace(long, prompts=[*long.prompts])


@given(
    st.sampled_from([RequestError, BodyError]), st.text(), st.none() | st.text(), st.sampled_from([400, 404])
)
def test_refusal_crosses_as_it_is(
    kind: type[RequestError], text: str, param: str | None, status: int
) -> None:
    with pytest.raises(RequestError) as caught:
        answer_of_bytes(PreparedRequest, answer_to_bytes(kind(text, param=param, http_status=status)))

    assert type(caught.value) is kind
    assert (str(caught.value), caught.value.param, caught.value.http_status) == (text, param, status)


def test_a_refusal_with_half_a_surrogate_pair_crosses() -> None:
    with pytest.raises(RequestError, match=r"^no \?$"):
        answer_of_bytes(PreparedRequest, answer_to_bytes(RequestError("no \ud800")))


def test_failure_is_an_error_of_ours() -> None:
    with pytest.raises(AotGaudiError, match="could not prepare a request: ZeroDivisionError") as caught:
        answer_of_bytes(PreparedRequest, answer_to_bytes("ZeroDivisionError at x.py:3"))

    assert not isinstance(caught.value, RequestError)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"null", b"7", b"{}", b'{"prepared": {}}', b'{"lens": "x"}', b'{"lens": [1]}\n123']
)
def test_answer_that_lacks_something_is_an_error_and_no_request(data: bytes) -> None:
    with pytest.raises(AotGaudiError):
        answer_of_bytes(PreparedRequest, data)


def _escaped(text: str, letters: frozenset[int]) -> str:
    return "".join(f"\\u{ord(c):04x}" if at in letters else c for at, c in enumerate(text))


@given(
    st.sampled_from(
        [
            ("response_format", {"type": "json_object"}),
            ("structured_outputs", {"regex": "a"}),
            ("guided_json", {}),
            ("guided_regex", "a"),
            ("guided_choice", ["a"]),
            ("guided_grammar", "a"),
            ("tool_choice", "required"),
            ("tool_choice", {"type": "function"}),
        ]
    ),
    st.frozensets(st.integers(0, 20)),
    st.sampled_from(["", " ", "\n\t"]),
    st.text(),
)
def test_no_grammar_is_overlooked(
    given: tuple[str, object], letters: frozenset[int], space: str, text: str
) -> None:
    name, value = given
    raw = f'{{"prompt": {json.dumps(text)}, "{_escaped(name, letters)}"{space}:{space}{json.dumps(value)}}}'
    assert name in json.loads(raw)

    assert may_have_grammar(raw.encode())


@pytest.mark.parametrize(
    "body",
    [{"prompt": "hi"}, {"prompt": "Ünïcödé 漢字 \n"}, {"tool_choice": "auto"}, {"tool_choice": "none"}],
)
def test_an_ordinary_body_has_no_grammar(body: dict[str, str]) -> None:
    assert not may_have_grammar(json.dumps(body).encode())
    assert not may_have_grammar(json.dumps(body, ensure_ascii=False).encode())
