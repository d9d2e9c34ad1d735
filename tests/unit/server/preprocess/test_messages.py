"""Messages between the server and a worker arrive as they were sent."""

from __future__ import annotations

import json
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.engine.structured_outputs import StructuredOutputs
from aotgaudi.errors import AotGaudiError, RequestError
from aotgaudi.server.preprocess.body import BodyError
from aotgaudi.server.preprocess.prepare import PreparedRequest
from aotgaudi.server.preprocess.worker import (
    LENGTHS_BYTES,
    Message,
    WorkerGoneError,
    answer,
    failure,
    lengths_of,
    message_of,
    prepared_of,
    receive,
    refusal,
)
from aotgaudi.server.reply.plan import ReplyPlan

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


def over_a_socket(message: Message) -> Message:
    here, there = socket.socketpair()
    with here, there:
        sender = threading.Thread(target=here.sendall, args=(bytes(message),))
        sender.start()
        received = receive(there)
        sender.join()
    return received


@given(PREPARED)
def test_prepared_request_crosses_as_it_is(prepared: PreparedRequest) -> None:
    assert prepared_of(over_a_socket(answer(prepared))) == prepared


def test_long_answer_crosses() -> None:
    prepared = PreparedRequest(
        model="m",
        prompts=[list(range(300_000)), [], [7]],
        params=SamplingParams(),
        stream=False,
        stream_usage="none",
        own_names={},
    )

    assert prepared_of(over_a_socket(answer(prepared))) == prepared


@given(
    st.sampled_from([RequestError, BodyError]), st.text(), st.none() | st.text(), st.sampled_from([400, 404])
)
def test_refusal_crosses_as_it_is(
    kind: type[RequestError], text: str, param: str | None, status: int
) -> None:
    with pytest.raises(RequestError) as caught:
        prepared_of(over_a_socket(refusal(kind(text, param=param, http_status=status))))

    assert type(caught.value) is kind
    assert (str(caught.value), caught.value.param, caught.value.http_status) == (text, param, status)


def test_failure_is_an_error_of_ours() -> None:
    with pytest.raises(AotGaudiError, match="could not prepare a request: ZeroDivisionError") as caught:
        prepared_of(over_a_socket(failure("ZeroDivisionError at x.py:3")))

    assert not isinstance(caught.value, RequestError)


def test_worker_that_closes_its_connection_is_gone() -> None:
    here, there = socket.socketpair()
    with there:
        with here:
            here.sendall(bytes(Message({"a": 1}, b"tail"))[:-1])
        with pytest.raises(WorkerGoneError):
            receive(there)


@pytest.mark.parametrize("opening", [b"\xff" * LENGTHS_BYTES, b"\0\0\0\1\xff\xff\xff\xff"])
def test_length_that_cannot_be_is_not_waited_for(opening: bytes) -> None:
    with pytest.raises(WorkerGoneError, match="a message of"):
        lengths_of(opening)


@pytest.mark.parametrize("head", [b"[]", b"null", b"7"])
def test_head_that_is_no_object_is_refused(head: bytes) -> None:
    with pytest.raises(WorkerGoneError, match="not a JSON object"):
        message_of(head, b"")


@pytest.mark.parametrize("head", [{}, {"refusal": []}, {"params": {}}, {"lengths": "x", "params": []}])
def test_answer_that_lacks_something_is_an_error_and_no_request(head: dict[str, object]) -> None:
    with pytest.raises((KeyError, ValueError, TypeError)):
        prepared_of(message_of(json.dumps(head).encode(), b""))
