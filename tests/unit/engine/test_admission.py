from __future__ import annotations

import pytest

from aotgaudi.engine.admission import check_token_ids, resolve_max_tokens
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.errors import RequestError
from aotgaudi.spec.limits import ServingLimits

LIMITS = ServingLimits(
    max_num_seqs=2, max_num_batched_tokens=64, max_model_len=32, block_size=4, num_blocks=8
)
SMALL_CACHE = LIMITS.model_copy(update={"num_blocks": 3})


def _resolve(num_prompt_tokens: int, max_tokens: int | None, limits: ServingLimits = LIMITS) -> int:
    return resolve_max_tokens(num_prompt_tokens, SamplingParams(max_tokens=max_tokens), limits)


def test_max_tokens_is_taken_as_it_is_where_it_fits() -> None:
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
    with pytest.raises(RequestError, match=message) as refusal:
        _resolve(num_prompt_tokens, max_tokens, limits)

    assert (refusal.value.param, refusal.value.http_status) == (param, 400)


@pytest.mark.parametrize("token_ids", [[-1], [10], [1.0], [True], ["1"]])
def test_token_ids_outside_the_vocabulary_are_refused(token_ids: list[int]) -> None:
    with pytest.raises(RequestError, match="below the vocabulary's size 10"):
        check_token_ids([0, 9, *token_ids], 10)


def test_a_token_id_too_long_to_be_written_is_refused_in_few_words() -> None:
    with pytest.raises(RequestError, match="not a number that is too long"):
        check_token_ids([10**5000], 10)


def test_without_a_vocabulary_size_there_is_no_upper_bound() -> None:
    check_token_ids([10**9], None)
    with pytest.raises(RequestError):
        check_token_ids([-1], None)
