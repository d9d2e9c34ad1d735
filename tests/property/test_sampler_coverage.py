"""Every mix of legal requests in one batch lands on an enumerated sampler entry; what is not legal is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.engine.admission import check_sampling
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.errors import RequestError
from aotgaudi.manifest.enumerate import sampler_entries
from aotgaudi.runtime.executables import ExecutableTable
from aotgaudi.spec.sampler import SamplerSetting, SamplerSpec
from aotgaudi.spec.sampler_signature import join_all

BATCH_SIZES = (1, 2, 7)


def often(neutral: float, others: st.SearchStrategy[float]) -> st.SearchStrategy[float]:
    return st.just(neutral) | others


VALUES = {
    "temperature": often(0.0, st.floats(0, 2)),
    "top_p": often(1.0, st.floats(0, 1, exclude_min=True)),
    "top_k": st.just(0) | st.integers(0, 1000),
    "min_p": often(0.0, st.floats(0, 1)),
    "presence_penalty": often(0.0, st.floats(-2, 2)),
    "frequency_penalty": often(0.0, st.floats(-2, 2)),
    "repetition_penalty": often(1.0, st.floats(0.01, 100)),
    "top_n_sigma": often(0.0, st.floats(0, 100)),
}
requests = st.builds(
    SamplingParams,
    **VALUES,
    logprobs=st.none() | st.integers(0, 20),
    seed=st.none() | st.integers(0, 9),
    bad_words=st.just(()) | st.just(("x",)),
)
specs = st.lists(
    st.builds(
        SamplerSetting, **VALUES, num_logprobs=st.just(0) | st.integers(0, 20), constraints=st.booleans()
    ),
    min_size=1,
    max_size=5,
    unique=True,
).map(lambda settings: SamplerSpec(settings=tuple(settings)))


def refusal_of(params: SamplingParams, sampler: SamplerSpec) -> RequestError | None:
    try:
        check_sampling(params, sampler)
    except RequestError as error:
        return error
    return None


@given(
    specs | st.just(SamplerSpec()), st.lists(requests, min_size=1, max_size=7), st.sampled_from(BATCH_SIZES)
)
def test_every_mix_of_legal_requests_has_an_entry(
    sampler: SamplerSpec, batch: list[SamplingParams], batch_size: int
) -> None:
    entries = sampler_entries(BATCH_SIZES, sampler)
    table = ExecutableTable()
    table.declare_samplers(entries)
    legal = [params for params in batch if refusal_of(params, sampler) is None]

    needed = join_all(params.signature for params in legal)
    found = table.sampler(batch_size, needed)

    assert found in entries
    assert found.batch_size == batch_size
    assert found.signature.serves(needed)
    assert all((params.logprobs or 0) <= found.num_logprobs for params in legal)
    if {params.signature for params in legal} <= {entry.signature for entry in entries} and legal:
        assert found.signature == needed, "closed under joins: nobody pays for more than the mix needs"


@given(specs | st.just(SamplerSpec()), requests)
def test_only_what_no_entry_could_serve_is_refused(sampler: SamplerSpec, params: SamplingParams) -> None:
    entries = sampler_entries((), sampler)
    could = any(
        entry.signature.serves(params.signature) and (params.logprobs or 0) <= entry.num_logprobs
        for entry in entries
    )

    refusal = refusal_of(params, sampler)

    assert (refusal is None) == could
    if refusal is not None:
        assert refusal.http_status == 400
        assert refusal.param in SamplingParams.__dataclass_fields__
        assert "sampler.settings" in str(refusal)


@given(specs)
def test_the_set_of_signatures_is_closed_under_joins(sampler: SamplerSpec) -> None:
    signatures = {entry.signature for entry in sampler_entries((), sampler)}

    assert {a.join(b) for a in signatures for b in signatures} == signatures
    assert {setting.signature for setting in sampler.settings} <= signatures


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"min_p": 0.1}, "min_p"),
        ({"top_n_sigma": 1.0}, "top_n_sigma"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"frequency_penalty": -0.1}, "frequency_penalty"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"logprobs": 0}, "logprobs"),
    ],
)
def test_a_default_server_refuses_what_upstream_does_not_warm(asked: dict[str, float], param: str) -> None:
    with pytest.raises(RequestError, match=r"not supported by this server.*sampler\.settings") as caught:
        check_sampling(SamplingParams(**asked), SamplerSpec())

    assert caught.value.param == param
