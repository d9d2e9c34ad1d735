from __future__ import annotations

from random import Random

import pytest

from aotgaudi.engine.request import Request, RequestState
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.engine.steps import SamplingRow
from tests.driving import request_of


def _request(**params: object) -> Request:
    return request_of((5, 6, 7), 8, SamplingParams(**params), seed=11)  # type: ignore[arg-type]


def test_a_life_with_a_preemption() -> None:
    request = _request()
    assert request.state is RequestState.WAITING
    assert not request.is_prefilled

    request.admit([1, 2])
    assert request.num_prefill_tokens == 3
    assert not request.is_prefilled
    request.num_computed_tokens = 3
    assert request.is_prefilled

    request.append_token(9)
    assert request.preempt() == [1, 2]
    assert (request.num_computed_tokens, request.num_preemptions) == (0, 1)
    assert request.token_ids == [5, 6, 7, 9]

    request.admit([4])
    assert request.num_prefill_tokens == 4
    assert request.finish("stop") == [4]
    assert request.is_finished
    assert request.finish_reason == "stop"
    assert not request.is_prefilled
    assert request.block_table == []


@pytest.mark.parametrize("step", ["preempt", "append"])
def test_only_a_running_request_can_be_preempted_or_grow(step: str) -> None:
    request = _request()

    with pytest.raises(RuntimeError, match="request 'r' is waiting"):
        request.preempt() if step == "preempt" else request.append_token(1)


def test_a_request_ends_once() -> None:
    request = _request()
    request.finish("abort")

    with pytest.raises(RuntimeError, match="is finished"):
        request.finish("abort")


def test_the_ith_token_uses_the_ith_draw_whatever_happens_between() -> None:
    draws = Random(11)
    request = _request(temperature=0.5, top_p=0.9, top_k=3)

    for _ in range(4):
        noise = draws.random()
        assert request.sampling == SamplingRow(request.params, noise)
        assert request.sampling == SamplingRow(request.params, noise)
        request.admit([1])
        request.append_token(0)
        request.preempt()
