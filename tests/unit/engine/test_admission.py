"""What is refused, with which status, and how often it counts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.engine.admission import Admission, RequestRules, check_token_ids, resolve_max_tokens
from aotgaudi.engine.limits import SMALL_BODY_BYTES, UNLIMITED, AdmissionLimits
from aotgaudi.engine.request import NewRequest
from aotgaudi.engine.sampling_params import SamplingParams, StructuredOutputs
from aotgaudi.errors import RequestError
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.sampler import DEFAULT_SETTINGS, SamplerSpec

LIMITS = ServingLimits(
    max_num_seqs=2, max_num_batched_tokens=64, max_model_len=32, block_size=4, num_blocks=8
)
SMALL_CACHE = LIMITS.model_copy(update={"num_blocks": 3})
RULES = RequestRules(LIMITS, vocab_size=100)


def asked(*lens: int, name: str = "r") -> list[NewRequest]:
    """Requests with prompts of these lengths."""
    return [NewRequest(f"{name}-{i}", [1] * length, SamplingParams()) for i, length in enumerate(lens)]


def admission(
    max_requests: int = 16, max_prompt_tokens: int = 160, max_body_bytes: int = 100_000
) -> Admission:
    limits = AdmissionLimits(
        max_requests=max_requests, max_prompt_tokens=max_prompt_tokens, max_body_bytes=max_body_bytes
    )
    return Admission(RULES, limits)


def refusal(admission: Admission, requests: Sequence[NewRequest]) -> tuple[int, str, dict[str, int]]:
    """Returns status and message of a refusal, and what it counted."""
    before, num_open = admission.num_refused, admission.num_open
    with pytest.raises(RequestError) as refused:
        admission.enter(requests)
    assert admission.num_open == num_open
    now = admission.num_refused
    return (
        refused.value.http_status,
        str(refused.value),
        {k: now[k] - before[k] for k in now if now[k] != before[k]},
    )


# What may run at all


def _resolve(num_prompt_tokens: int, max_tokens: int | None, limits: ServingLimits = LIMITS) -> int:
    return resolve_max_tokens(num_prompt_tokens, SamplingParams(max_tokens=max_tokens), limits)


def test_max_tokens_is_taken_as_it_is_if_it_fits() -> None:
    assert _resolve(10, 22) == 22
    assert _resolve(31, 1) == 1
    assert _resolve(10, 3, SMALL_CACHE) == 3


def test_absent_max_tokens_is_clipped_to_the_model_length() -> None:
    assert _resolve(10, None) == 22


def test_absent_max_tokens_is_clipped_to_the_cache() -> None:
    assert _resolve(10, None, SMALL_CACHE) == 3
    assert _resolve(12, None, SMALL_CACHE) == 1


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "limits", "param", "message"),
    [
        (0, 1, LIMITS, "prompt", "the prompt is empty"),
        (32, None, LIMITS, "prompt", "the prompt has 32 tokens; max_model_len = 32 leaves room for 31"),
        (10, 23, LIMITS, "max_tokens", "max_model_len = 32 tokens; 33 tokens were asked for"),
        (13, None, SMALL_CACHE, "prompt", "13 tokens, which takes 4 KV blocks of 4 tokens.*num_blocks = 3"),
        (10, 4, SMALL_CACHE, "max_tokens", "14 tokens.*takes 4 KV blocks of 4 tokens.*num_blocks = 3"),
    ],
)
def test_a_refusal_names_the_limit_and_the_numbers(
    num_prompt_tokens: int, max_tokens: int | None, limits: ServingLimits, param: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        _resolve(num_prompt_tokens, max_tokens, limits)

    assert (refused.value.param, refused.value.http_status) == (param, 400)


@pytest.mark.parametrize("token_ids", [[-1], [10], [1.0], [True], ["1"]])
def test_token_ids_outside_the_vocabulary_are_refused(token_ids: list[int]) -> None:
    with pytest.raises(RequestError, match="below the vocabulary's size 10"):
        check_token_ids([0, 9, *token_ids], 10)


def test_a_token_id_too_long_to_be_written_is_refused_in_few_words() -> None:
    with pytest.raises(RequestError, match="not a number that is too long"):
        check_token_ids([10**5000], 10)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (SamplingParams(allowed_token_ids=(3, 10)), "allowed_token_ids"),
        (SamplingParams(logit_bias=((10, 1.0),)), "logit_bias"),
        (SamplingParams(stop_token_ids=(3, 10)), "stop_token_ids"),
    ],
)
def test_tokens_outside_the_vocabulary_cannot_be_constrained(params: SamplingParams, param: str) -> None:
    with pytest.raises(RequestError, match="below the vocabulary's size 10") as refused:
        RequestRules(LIMITS, vocab_size=10).check([1], params)

    assert refused.value.param == param


@pytest.mark.parametrize("param", ["bad_words", "structured_outputs", "min_tokens", "logit_bias"])
def test_a_constraint_is_refused_where_the_sampler_has_none(param: str) -> None:
    value = {
        "bad_words": ("a",),
        "structured_outputs": StructuredOutputs(regex="a"),
        "min_tokens": 3,
        "logit_bias": ((0, 0.0),),
    }[param]

    with pytest.raises(RequestError, match=r"sampler\.settings .* has constraints = true") as refused:
        RULES.check([1], SamplingParams(**{param: value}))

    assert refused.value.param == param


def test_a_least_length_that_does_not_fit_is_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens must be at most 22, not 23") as refused:
        RULES.check([1] * 10, SamplingParams(min_tokens=23, ignore_eos=True))

    assert refused.value.param == "min_tokens"


def test_resolved_requests_state_how_many_tokens_they_may_generate() -> None:
    (resolved,) = RULES.resolve(asked(10))
    assert resolved.max_tokens == 22

    with pytest.raises(RequestError):
        RULES.resolve([*asked(10), *asked(32)])


# What fits now


def test_all_prompts_of_a_request_enter_or_none() -> None:
    it = admission(max_requests=4)
    it.enter(asked(1, 1, 1))

    status, message, counted = refusal(it, asked(1, 1, name="late"))

    assert (status, counted) == (429, {"server_requests": 1})
    assert message == "the server is full: 3 prompts of 4 wait or run; try again later"
    it.enter(asked(1, name="late"))


def test_prompts_leave_room_when_they_end() -> None:
    it = admission(max_requests=2, max_prompt_tokens=40)
    it.enter(asked(30, 10))
    assert refusal(it, asked(1, name="late"))[0] == 429

    it.leave("r-0")

    assert refusal(it, asked(31, name="late"))[2] == {"server_tokens": 1}
    it.enter(asked(30, name="late"))


def test_a_name_is_refused_while_it_is_in_use() -> None:
    it = admission()
    it.enter(asked(1))
    assert refusal(it, asked(1))[:2] == (400, "request id 'r-0' is in use")
    assert refusal(it, [*asked(1, name="a"), *asked(1, name="a")])[0] == 400

    it.leave("r-0")

    it.enter(asked(1))


@pytest.mark.parametrize("lens", [[1] * 3, [30, 30, 31]])
def test_what_an_empty_server_would_refuse_is_the_clients_mistake(lens: list[int]) -> None:
    status, message, counted = refusal(admission(max_requests=2, max_prompt_tokens=90), asked(*lens))

    assert (status, counted) == (400, {})
    assert "that this server takes at once" in message


def test_an_empty_server_takes_the_longest_prompt() -> None:
    admission(max_requests=1, max_prompt_tokens=1).enter(asked(LIMITS.max_model_len))
    Admission(RULES, UNLIMITED).enter(asked(*[10_000] * 10_000))


def test_a_closed_admission_gives_its_first_reason_and_lets_open_requests_leave() -> None:
    it = admission()
    it.enter(asked(1))
    it.close("it rains")
    it.close("it snows")

    assert refusal(it, asked(1, name="late")) == (503, "it rains", {})
    with pytest.raises(RequestError, match="it rains"), it.preparing():
        pass
    it.leave("r-0")
    assert it.num_open == 0


# What is prepared, and its bytes


def test_requests_count_while_they_are_prepared() -> None:
    it = admission(max_requests=2)
    it.enter(asked(1))
    with it.preparing():
        with pytest.raises(RequestError, match="2 prompts of 2") as refused, it.preparing():
            pass
        assert refusal(it, asked(1, name="late"))[0] == 429

    assert refused.value.http_status == 429
    assert it.num_refused["server_requests"] == 2
    it.enter(asked(1, name="late"))


def test_a_request_that_cannot_be_prepared_gives_its_place_back() -> None:
    it = admission(max_requests=1)
    for _ in range(3):
        with suppress(KeyError), it.preparing():
            raise KeyError

    it.enter(asked(1))


def test_large_bodies_are_bounded_together_and_small_ones_never_refused() -> None:
    it = admission(max_body_bytes=40_000)
    it.hold(30_000, 0)

    with pytest.raises(RequestError, match="as many bytes") as refused:
        it.hold(20_000, 0)
    it.hold(SMALL_BODY_BYTES, 0)
    with pytest.raises(RequestError):
        it.hold(1, SMALL_BODY_BYTES)

    assert refused.value.http_status == 429
    assert it.num_refused["body_bytes"] == 2
    it.release(30_000)
    it.hold(20_000, 0)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("enter"), st.lists(st.integers(1, 40), min_size=1, max_size=6)),
            st.tuples(st.just("leave"), st.integers(0, 20)),
            st.tuples(st.just("prepare"), st.none()),
            st.tuples(st.just("prepared"), st.none()),
        )
    )
)
def test_limits_hold_and_each_refusal_counts_once(actions: list[tuple[str, object]]) -> None:
    it, held, preparing, num_refused = admission(), dict[str, int](), list[ExitStack](), 0
    for number, (action, value) in enumerate(actions):
        try:
            if action == "enter":
                requests = asked(*value, name=str(number))  # type: ignore[misc]
                it.enter(requests)
                held |= {request.request_id: len(request.prompt_token_ids) for request in requests}
            elif action == "prepare":
                stack = ExitStack()
                stack.enter_context(it.preparing())
                preparing.append(stack)
        except RequestError as error:
            num_refused += error.http_status == 429
        if action == "leave" and held:
            name = sorted(held)[value % len(held)]  # type: ignore[operator]
            it.leave(name)
            del held[name]
        if action == "prepared" and preparing:
            preparing.pop().close()
        assert it.num_open == len(held)
        assert len(held) + len(preparing) <= 16
        assert sum(held.values()) <= 160
    assert sum(it.num_refused.values()) == num_refused


def test_a_model_without_a_head_apart_gives_no_log_probabilities_of_prompts() -> None:
    rules = RequestRules(LIMITS, 100, sampler=SamplerSpec(settings=DEFAULT_SETTINGS), scores_prompts=False)

    with pytest.raises(RequestError, match="the head takes more than the last layer's result") as refusal:
        rules.check([1], SamplingParams(prompt_logprobs=1))

    assert refusal.value.param == "prompt_logprobs"
    assert (
        replace(rules, scores_prompts=True).check([1], SamplingParams(prompt_logprobs=1, max_tokens=2)) == 2
    )
