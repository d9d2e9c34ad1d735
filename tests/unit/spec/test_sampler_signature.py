"""Signatures are a lattice: any batch has one, and it serves every row."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.spec.sampler import SamplerSetting, SamplerSpec
from aotgaudi.spec.sampler_signature import SamplerSignature, SamplerWork, join_all, missing_joins

GREEDY, RANDOM = SamplerSignature(), SamplerSignature(SamplerWork.RANDOM)
FILTERED, MIN_P = SamplerSignature(SamplerWork.FILTERED), SamplerSignature(SamplerWork.MIN_P)
PENALISED, LOGGED = SamplerSignature(penalties=True), SamplerSignature(logprobs=True)

signatures = st.builds(
    SamplerSignature, st.sampled_from(SamplerWork), st.booleans(), st.booleans(), st.booleans()
)


@pytest.mark.parametrize(
    ("values", "signature"),
    [
        ({"temperature": 0}, GREEDY),
        ({"temperature": 0, "top_p": 0.5, "top_k": 10, "min_p": 0.5}, GREEDY),
        ({"temperature": 1}, RANDOM),
        ({"temperature": 0.5, "top_p": 0.9}, FILTERED),
        ({"temperature": 1, "top_k": 3}, FILTERED),
        ({"temperature": 1, "min_p": 0.1}, MIN_P),
        ({"temperature": 1, "top_k": 3, "min_p": 0.1}, MIN_P),
        ({"temperature": 1, "top_n_sigma": 1.5, "min_p": 0.1}, SamplerSignature(SamplerWork.TOP_N_SIGMA)),
        ({"temperature": 0, "top_n_sigma": 1.5}, GREEDY),
        ({"temperature": 0, "presence_penalty": -1}, PENALISED),
        ({"temperature": 0, "frequency_penalty": 0.1}, PENALISED),
        ({"temperature": 0, "repetition_penalty": 1.1}, PENALISED),
        ({"temperature": 0, "num_logprobs": 1}, LOGGED),
        ({"temperature": 0, "constraints": True}, SamplerSignature(constraints=True)),
    ],
)
def test_the_signature_of_a_setting_is_the_cheapest_that_serves_it(
    values: dict[str, float], signature: SamplerSignature
) -> None:
    assert SamplerSetting(**{"top_p": 1.0, "top_k": 0, **values}).signature == signature


def test_the_default_settings_have_three_signatures_and_miss_none() -> None:
    spec = SamplerSpec()

    assert {setting.signature for setting in spec.settings} == {GREEDY, RANDOM, FILTERED}
    assert missing_joins(setting.signature for setting in spec.settings) == ()
    assert (spec.signature, spec.num_logprobs) == (FILTERED, 0)


def test_a_signature_is_written_as_what_it_does() -> None:
    assert [str(s) for s in (GREEDY, MIN_P, SamplerSignature(SamplerWork.RANDOM, True, True, True))] == [
        "greedy",
        "min_p",
        "random+penalties+logprobs+constraints",
    ]


@given(signatures, signatures, signatures)
def test_join_is_the_least_upper_bound(a: SamplerSignature, b: SamplerSignature, c: SamplerSignature) -> None:
    joined = a.join(b)

    assert joined == b.join(a)
    assert joined.serves(a)
    assert joined.serves(b)
    assert c.serves(joined) == (c.serves(a) and c.serves(b))


@given(st.lists(signatures, max_size=5))
def test_the_signature_of_a_batch_serves_every_row_and_no_order_changes_it(
    rows: list[SamplerSignature],
) -> None:
    joined = join_all(rows)

    assert all(joined.serves(row) for row in rows)
    assert joined == join_all(reversed(rows)) == join_all([*rows, *rows, GREEDY])


@given(st.sets(signatures, max_size=6))
def test_what_is_missing_is_every_join_that_is_not_given_and_nothing_else(
    given_: set[SamplerSignature],
) -> None:
    joins = {join_all(subset) for n in range(1, len(given_) + 1) for subset in combinations(given_, n)}

    missing = missing_joins(given_)

    assert set(missing) == joins - given_
    assert list(missing) == sorted(missing)
