"""The sampler computes the exact filtered softmax of penalised logits, and noise alone decides the draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aotgaudi.engine.constraints import Constraint
from aotgaudi.engine.sampler import ConstraintTensors
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.graphs.sampler import SamplerGraph
from aotgaudi.graphs.step_inputs import CONSTRAINT_INPUTS, sampler_inputs
from aotgaudi.spec.sampler import SamplerSetting
from aotgaudi.spec.sampler_signature import SamplerSignature, SamplerWork, join_all

VOCAB = 97
NUM_DRAWS = 20_000
EVERY_SIGNATURE = [
    SamplerSignature(work, *others) for work in SamplerWork for others in product((False, True), repeat=3)
]
Values = float | Sequence[float]


def setting_of(temperature: float, top_p: float = 1.0, top_k: int = 0, **others: float) -> SamplerSetting:
    return SamplerSetting(temperature=temperature, top_p=top_p, top_k=top_k, **others)


def run(
    signature: SamplerSignature,
    logits: torch.Tensor,
    noise: torch.Tensor | None = None,
    num_logprobs: int = 3,
    output_counts: torch.Tensor | None = None,
    prompt_mask: torch.Tensor | None = None,
    constraints: Sequence[SamplingParams] = (),
    **values: Values,
) -> tuple[torch.Tensor, ...]:
    """Runs a graph on rows that have neutral values of everything that is not given."""
    b, vocab = logits.shape
    neutral: dict[str, Values] = {"temperature": 1, "top_p": 1, "repetition_penalty": 1}
    given_tensors = {
        "logits": logits,
        "noise": torch.full((b,), 0.5, dtype=torch.float64) if noise is None else noise,
        "output_counts": torch.zeros(b, vocab) if output_counts is None else output_counts,
        "prompt_mask": torch.zeros(b, vocab, dtype=torch.bool) if prompt_mask is None else prompt_mask,
    }
    tensors = ConstraintTensors(b, vocab)
    tensors.update([Constraint(params, (), vocab) for params in constraints])
    given_tensors |= {name: getattr(tensors, name) for name in CONSTRAINT_INPUTS}
    inputs = []
    for spec in sampler_inputs(b, signature, vocab, "float32"):
        if spec.name not in given_tensors:
            value = values.get(spec.name, neutral.get(spec.name, 0))
            dtype = getattr(torch, spec.dtype)
            given_tensors[spec.name] = torch.as_tensor(value, dtype=dtype).expand(b).contiguous()
        inputs.append(given_tensors[spec.name])
    outputs = SamplerGraph(signature, num_logprobs)(*inputs)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def draw(logits: torch.Tensor, setting: SamplerSetting, noise: torch.Tensor) -> torch.Tensor:
    """Draws once for each noise from the distribution of one row of logits, in the setting's own graph."""
    rows = logits.expand(len(noise), -1)
    return run(setting.signature, rows, noise, **setting.model_dump(exclude={"num_logprobs", "constraints"}))[
        0
    ]


def expected_softmax(logits: torch.Tensor, setting: SamplerSetting) -> torch.Tensor:
    """Returns the distribution that transformers' warpers give in vLLM's order: min-p, then top-k, then top-p."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = TemperatureLogitsWarper(setting.temperature)(None, logits[None].float().clone())
    if setting.min_p:
        scores = MinPLogitsWarper(setting.min_p)(None, scores)
    if setting.top_k:
        scores = TopKLogitsWarper(min(setting.top_k, VOCAB))(None, scores)
    if setting.top_p < 1:
        scores = TopPLogitsWarper(setting.top_p)(None, scores)
    return torch.softmax(scores.double(), -1)[0]


def even_noise(n: int) -> torch.Tensor:
    """Evenly spaced noise: the counts of the draws are the distribution, up to one draw a token."""
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


def random_logits(seed: int, rows: int = 1, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "setting",
    [
        setting_of(1.0),
        setting_of(0.7, 0.9, 50),
        setting_of(0.3, 0.95, 20),
        setting_of(1.2, 0.8, 100),
        setting_of(0.8, 0.85),
        setting_of(1.0, 1.0, 5),
        setting_of(1.5, 0.1, 3),
        setting_of(1.0, min_p=0.05),
        setting_of(1.4, 0.8, 30, min_p=0.02),
        setting_of(1.0, min_p=1.0),
    ],
    ids=str,
)
def test_draws_have_the_exact_filtered_distribution(setting: SamplerSetting) -> None:
    logits = random_logits(3)[0]

    tokens = draw(logits, setting, even_noise(NUM_DRAWS))

    counts = torch.bincount(tokens, minlength=VOCAB)
    wanted = expected_softmax(logits, setting) * NUM_DRAWS
    assert (counts - wanted).abs().max() < 2.5
    assert not counts[wanted == 0].any()


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    scale=st.floats(0.01, 20),
    temperature=st.floats(0.05, 2.0),
    top_p=st.floats(0.01, 1.0),
    top_k=st.integers(0, 2 * VOCAB),
)
def test_only_kept_tokens_are_drawn(
    seed: int, scale: float, temperature: float, top_p: float, top_k: int
) -> None:
    logits = random_logits(seed, scale=scale)[0]

    tokens = draw(logits, setting_of(temperature, top_p, top_k), even_noise(257))

    order = logits.argsort(descending=True)
    probabilities = torch.softmax(logits / temperature, -1)
    if top_k:
        probabilities[order[min(top_k, VOCAB) :]] = 0
    kept = probabilities[order].cumsum(0) - probabilities[order] < top_p * probabilities.sum() * (1 + 1e-5)
    assert set(tokens.tolist()) <= set(order[kept].tolist())


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), temperature=st.floats(0.2, 2.0), min_p=st.floats(0, 1))
def test_tokens_below_the_share_of_the_likeliest_are_never_drawn(
    seed: int, temperature: float, min_p: float
) -> None:
    logits = random_logits(seed)[0]

    tokens = draw(logits, setting_of(temperature, min_p=min_p), even_noise(257))

    p = torch.softmax(logits / temperature, -1)
    assert (p[tokens] >= min_p * p.max() * (1 - 1e-6)).all()


def within_sigmas(logits: np.ndarray, num_sigmas: float, slack: float) -> set[int]:
    """The tokens that top-n-sigma keeps, in float64; `slack` moves the bound by so many sigmas."""
    sigma = np.std(logits[np.isfinite(logits)])
    return set(np.flatnonzero(logits >= logits.max() - (num_sigmas + slack) * sigma).tolist())


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    scale=st.floats(0.01, 20),
    temperature=st.floats(0.05, 2.0),
    num_sigmas=st.floats(0.01, 8),
    num_forbidden=st.integers(0, VOCAB - 1),
)
def test_top_n_sigma_keeps_the_logits_near_the_largest_whatever_the_temperature_is(
    seed: int, scale: float, temperature: float, num_sigmas: float, num_forbidden: int
) -> None:
    logits = random_logits(seed, scale=scale)[0]
    logits[torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:num_forbidden]] = -torch.inf
    reference = logits.double().numpy()

    tokens = set(
        draw(logits, setting_of(temperature, top_n_sigma=num_sigmas), even_noise(NUM_DRAWS)).tolist()
    )

    assert tokens <= within_sigmas(reference, num_sigmas, 1e-4)
    likely = torch.softmax(logits.double() / temperature, -1) > 2 / NUM_DRAWS
    assert {at for at in within_sigmas(reference, num_sigmas, -1e-4) if likely[at]} <= tokens


def test_top_n_sigma_comes_before_the_other_filters() -> None:
    logits = torch.tensor([4.0, 3.0, 2.0, -3.0, -6.0])  # sigma is 3.85, the bound 0.15.

    tokens = draw(logits, setting_of(1.0, 0.99, 4, top_n_sigma=1.0), even_noise(1000))

    assert set(tokens.tolist()) == {0, 1, 2}
    assert set(draw(logits.expand(5), setting_of(1.0, top_n_sigma=0.0), even_noise(100)).tolist()) >= {0, 1}
    equal = torch.zeros(VOCAB)
    assert len(set(draw(equal, setting_of(1.0, top_n_sigma=0.5), even_noise(VOCAB)).tolist())) == VOCAB


@pytest.mark.parametrize("signature", EVERY_SIGNATURE, ids=str)
def test_temperature_zero_is_greedy_in_every_graph(signature: SamplerSignature) -> None:
    logits = random_logits(1, rows=4)
    noise = torch.tensor([0.0, 0.3, 0.7, 0.999999], dtype=torch.float64)

    assert run(signature, logits, noise, temperature=0)[0].tolist() == logits.argmax(-1).tolist()


CONSTRAINED = [signature for signature in EVERY_SIGNATURE if signature.constraints]
token_ids = st.integers(0, VOCAB - 1)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    signature=st.sampled_from(CONSTRAINED),
    allowed=st.lists(token_ids, min_size=1, max_size=8),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_a_token_that_is_not_allowed_is_never_drawn(
    seed: int, signature: SamplerSignature, allowed: list[int], temperature: float
) -> None:
    params = SamplingParams(allowed_token_ids=tuple(allowed))
    logits = random_logits(seed, scale=20.0).expand(32, -1)

    tokens = run(
        signature,
        logits,
        even_noise(32),
        constraints=[params] * 32,
        temperature=temperature,
        presence_penalty=-2.0,
        output_counts=torch.ones(32, VOCAB),
    )[0]

    assert set(tokens.tolist()) <= set(allowed)
    if temperature == 0:
        best = max(sorted(set(allowed)), key=logits[0].tolist().__getitem__)
        assert set(tokens.tolist()) == {best}


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    biases=st.dictionaries(token_ids, st.floats(-100, 100, width=32), min_size=1, max_size=20),
)
def test_a_bias_is_added_to_the_logit(seed: int, biases: dict[int, float]) -> None:
    params = SamplingParams(logit_bias=tuple(biases.items()))
    logits, noise = random_logits(seed), even_noise(64)
    expected = logits.clone()
    expected[0, list(biases)] += torch.tensor(list(biases.values()))

    tokens = run(
        SamplerSignature(SamplerWork.RANDOM, constraints=True),
        logits.expand(64, -1),
        noise,
        constraints=[params] * 64,
    )[0]

    plain = run(SamplerSignature(SamplerWork.RANDOM), expected.expand(64, -1), noise)[0]
    assert torch.equal(tokens, plain)


def test_log_probabilities_are_those_before_constraints() -> None:
    signature = SamplerSignature(logprobs=True, constraints=True)
    params = SamplingParams(allowed_token_ids=(3,), logit_bias=((3, 7.0),))
    logits = random_logits(4)

    tokens, chosen, ids, _ = run(signature, logits, constraints=[params])

    assert tokens.tolist() == [3]
    assert chosen.item() == pytest.approx(torch.log_softmax(logits[0], -1)[3].item(), abs=1e-5)
    assert ids[0, 0] == logits.argmax()


def test_a_mixed_batch_treats_each_row_by_its_own_setting() -> None:
    logits = random_logits(2).expand(3, -1)
    noise = torch.full((3,), 0.99, dtype=torch.float64)

    signature = SamplerSignature(SamplerWork.FILTERED)
    tokens = run(signature, logits, noise, temperature=[0, 1, 1], top_k=[0, 1, 0])[0]

    best = logits[0].argmax().item()
    alone = draw(logits[0], setting_of(1.0), noise[:1])
    assert tokens.tolist() == [best, best, alone.item()]


def rows_of_settings() -> st.SearchStrategy[list[SamplerSetting]]:
    setting = st.builds(
        SamplerSetting,
        temperature=st.sampled_from([0.0, 0.5, 1.3]),
        top_p=st.sampled_from([1.0, 0.7]),
        top_k=st.sampled_from([0, 4]),
        min_p=st.sampled_from([0.0, 0.2]),
        presence_penalty=st.sampled_from([0.0, 1.5]),
        frequency_penalty=st.sampled_from([0.0, -0.8]),
        repetition_penalty=st.sampled_from([1.0, 1.6]),
        top_n_sigma=st.sampled_from([0.0, 0.8]),
        num_logprobs=st.sampled_from([0, 3]),
        constraints=st.booleans(),
    )
    return st.lists(setting, min_size=1, max_size=5)


@settings(max_examples=60)
@given(rows_of_settings(), st.integers(0, 2**31))
def test_a_row_gets_the_token_in_any_batch_that_it_gets_alone(rows: list[SamplerSetting], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    b = len(rows)
    logits = random_logits(seed, rows=b)
    tensors = {
        "noise": torch.rand(b, generator=generator, dtype=torch.float64),
        "output_counts": torch.randint(0, 3, (b, VOCAB), generator=generator).float(),
        "prompt_mask": torch.rand(b, VOCAB, generator=generator) < 0.3,
    }
    names = SamplerSetting.model_fields.keys() - {"num_logprobs", "constraints"}
    columns = {name: [getattr(row, name) for row in rows] for name in names}
    some = SamplingParams(allowed_token_ids=tuple(range(0, VOCAB, 3)), logit_bias=((3, 4.0), (4, 9.0)))
    constraints = [some if row.constraints else SamplingParams() for row in rows]
    signature = join_all(row.signature for row in rows)

    together = run(signature, logits, constraints=constraints, **tensors, **columns)

    for r, row in enumerate(rows):
        own = {name: value[r : r + 1] for name, value in tensors.items()}
        values = row.model_dump(exclude={"constraints"})
        alone = run(row.signature, logits[r : r + 1], constraints=constraints[r : r + 1], **own, **values)
        assert together[0][r] == alone[0][0]
        for batch, single in zip(together[1:], alone[1:], strict=False):
            torch.testing.assert_close(batch[r : r + 1], single)


@pytest.mark.parametrize("noise", [0.0, 1 - 2**-53])
def test_the_ends_of_the_noise_draw_kept_tokens(noise: float) -> None:
    logits = random_logits(5, scale=5.0)[0]
    setting = setting_of(1.0, 0.5, 10)

    token = draw(logits, setting, torch.tensor([noise], dtype=torch.float64)).item()

    assert expected_softmax(logits, setting)[token] > 0


def test_tokens_tied_with_the_last_kept_one_are_kept() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])

    tokens = draw(logits, setting_of(1.0, 1.0, 2), even_noise(1000))

    assert set(tokens.tolist()) == {0, 1, 2, 3}


def penalised(
    logits: list[float], prompt: list[int], output: list[int], setting: SamplerSetting
) -> list[float]:
    """Token by token: what OpenAI's and vLLM's documentation say of the three penalties."""
    scores = list(logits)
    for token in {*prompt, *output}:
        repetition = setting.repetition_penalty
        scores[token] = scores[token] / repetition if scores[token] > 0 else scores[token] * repetition
    for token, count in Counter(output).items():
        scores[token] -= setting.frequency_penalty * count + setting.presence_penalty
    return scores


tokens_ = st.lists(st.integers(0, VOCAB - 1), max_size=12)
penalties = st.builds(
    setting_of,
    st.just(0.0),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.5, 3),
)


def history(prompt: list[int], output: list[int]) -> dict[str, torch.Tensor]:
    counts, mask = torch.zeros(1, VOCAB), torch.zeros(1, VOCAB, dtype=torch.bool)
    for token in output:
        counts[0, token] += 1
    mask[0, prompt] = True
    return {"output_counts": counts, "prompt_mask": mask}


@settings(max_examples=60)
@given(st.integers(0, 2**31), tokens_, tokens_, penalties)
def test_greedy_rows_take_the_likeliest_penalised_token(
    seed: int, prompt: list[int], output: list[int], setting: SamplerSetting
) -> None:
    logits = random_logits(seed, scale=1.0)
    signature = SamplerSignature(penalties=True)

    token = run(signature, logits, **history(prompt, output), **setting.model_dump(exclude={"constraints"}))[
        0
    ].item()

    wanted = penalised(logits[0].tolist(), prompt, output, setting)
    assert wanted[token] == pytest.approx(max(wanted), abs=1e-5)


def test_a_repetition_penalty_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, prompt, output = random_logits(8), [3, 5, 5, 9], [1, 2, 3]
    setting = setting_of(1.0, repetition_penalty=1.7)
    scores = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), logits.clone())

    noise = even_noise(NUM_DRAWS)
    rows = {name: value.expand(NUM_DRAWS, -1) for name, value in history(prompt, output).items()}
    tokens = run(setting.signature, logits.expand(NUM_DRAWS, -1), noise, repetition_penalty=1.7, **rows)[0]

    counts = torch.bincount(tokens, minlength=VOCAB)
    assert (counts - torch.softmax(scores[0].double(), -1) * NUM_DRAWS).abs().max() < 2.5


@pytest.mark.parametrize("signature", [s for s in EVERY_SIGNATURE if s.logprobs], ids=str)
def test_log_probabilities_are_those_of_the_logits_whatever_is_sampled(signature: SamplerSignature) -> None:
    logits = random_logits(6, rows=4)

    tokens, chosen, ids, values = run(
        signature,
        logits,
        temperature=0.6,
        top_k=3,
        presence_penalty=2.0,
        output_counts=torch.ones(4, VOCAB),
        num_logprobs=5,
    )

    expected = torch.log_softmax(logits.double(), -1)
    best = expected.topk(5)
    assert torch.equal(ids, best.indices)
    torch.testing.assert_close(values.double(), best.values, atol=1e-5, rtol=0)
    torch.testing.assert_close(chosen.double(), expected.gather(1, tokens[:, None])[:, 0], atol=1e-5, rtol=0)


def test_more_log_probabilities_than_tokens_are_all_tokens() -> None:
    signature = SamplerSignature(logprobs=True)

    *_, ids, values = run(signature, torch.tensor([[1.0, 3.0, 2.0]]), num_logprobs=20)

    assert ids.tolist() == [[1, 2, 0]]
    assert values.exp().sum().item() == pytest.approx(1.0)
