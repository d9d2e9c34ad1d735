"""The sampler computes the exact filtered softmax, and noise alone decides the draw."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aotgaudi.graphs.sampler import SamplerGraph
from aotgaudi.graphs.sampler_signature import SamplerSignature, signature_of

VOCAB = 97
NUM_DRAWS = 20_000


def filtered_softmax(logits: torch.Tensor, temperature: float, top_p: float, top_k: int) -> torch.Tensor:
    """Returns the distribution that transformers' warpers give: temperature, then top-k, then top-p."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = TemperatureLogitsWarper(temperature)(None, logits[None].float().clone())
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return torch.softmax(scores.double(), -1)[0]


def draw(
    logits: torch.Tensor, temperature: float, top_p: float, top_k: int, noise: torch.Tensor
) -> torch.Tensor:
    n = len(noise)
    rows = logits.expand(n, -1)
    graph = SamplerGraph(signature_of([(temperature, top_p, top_k)]))
    return graph(
        rows,
        torch.full((n,), temperature),
        torch.full((n,), top_p),
        torch.full((n,), top_k, dtype=torch.int64),
        noise,
    )


def even_noise(n: int) -> torch.Tensor:
    """Evenly spaced noise: the counts of the draws are the distribution, up to one draw a token."""
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [
        (1.0, 1.0, 0),
        (0.7, 0.9, 50),
        (0.3, 0.95, 20),
        (1.2, 0.8, 100),
        (0.8, 0.85, 0),
        (1.0, 1.0, 5),
        (1.5, 0.1, 3),
    ],
)
def test_draws_have_the_exact_filtered_distribution(temperature: float, top_p: float, top_k: int) -> None:
    logits = 3 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))

    tokens = draw(logits, temperature, top_p, top_k, even_noise(NUM_DRAWS))

    counts = torch.bincount(tokens, minlength=VOCAB)
    wanted = filtered_softmax(logits, temperature, top_p, min(top_k, VOCAB)) * NUM_DRAWS
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
    logits = scale * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))

    tokens = draw(logits, temperature, top_p, top_k, even_noise(257))

    order = logits.argsort(descending=True)
    probabilities = torch.softmax(logits / temperature, -1)
    if top_k:
        probabilities[order[min(top_k, VOCAB) :]] = 0
    kept = probabilities[order].cumsum(0) - probabilities[order] < top_p * probabilities.sum() * (1 + 1e-5)
    assert set(tokens.tolist()) <= set(order[kept].tolist())


def test_temperature_zero_is_greedy_in_every_graph() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    zeros, ones = torch.zeros(4), torch.ones(4)
    noise = torch.tensor([0.0, 0.3, 0.7, 0.999999], dtype=torch.float64)

    for signature in SamplerSignature:
        tokens = SamplerGraph(signature)(logits, zeros, ones, torch.zeros(4, dtype=torch.int64), noise)
        assert tokens.tolist() == logits.argmax(-1).tolist()


def test_a_mixed_batch_treats_each_row_by_its_own_setting() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2)).expand(3, -1)
    noise = torch.full((3,), 0.99, dtype=torch.float64)
    graph = SamplerGraph(SamplerSignature.FILTERED)

    tokens = graph(
        logits, torch.tensor([0.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0, 1, 0]), noise
    )

    best = logits[0].argmax().item()
    alone = draw(logits[0], 1.0, 1.0, 0, noise[:1])
    assert tokens.tolist() == [best, best, alone.item()]


def test_the_same_noise_draws_the_same_token_whatever_the_batch() -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(4))
    noise = torch.tensor([0.1, 0.5, 0.9, 0.2, 0.7], dtype=torch.float64)
    graph = SamplerGraph(SamplerSignature.FILTERED)
    settings_ = (torch.full((5,), 0.8), torch.full((5,), 0.9), torch.full((5,), 40))

    together = graph(logits, *settings_, noise)
    alone = [graph(logits[i : i + 1], *(s[:1] for s in settings_), noise[i : i + 1]).item() for i in range(5)]

    assert together.tolist() == alone


@pytest.mark.parametrize("noise", [0.0, 1 - 2**-53])
def test_the_ends_of_the_noise_draw_kept_tokens(noise: float) -> None:
    logits = 5 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(5))

    token = draw(logits, 1.0, 0.5, 10, torch.tensor([noise], dtype=torch.float64)).item()

    assert filtered_softmax(logits, 1.0, 0.5, 10)[token] > 0


def test_tokens_tied_with_the_last_kept_one_are_kept() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])

    tokens = draw(logits, 1.0, 1.0, 2, even_noise(1000))

    assert set(tokens.tolist()) == {0, 1, 2, 3}


def test_the_signature_is_the_cheapest_that_serves_all_rows() -> None:
    assert signature_of([]) is SamplerSignature.GREEDY
    assert signature_of([(0.0, 0.5, 10)]) is SamplerSignature.GREEDY
    assert signature_of([(0.0, 1.0, 0), (1.0, 1.0, 0)]) is SamplerSignature.RANDOM
    assert signature_of([(1.0, 1.0, 0), (0.5, 0.9, 0)]) is SamplerSignature.FILTERED
    assert signature_of([(1.0, 1.0, 3)]) is SamplerSignature.FILTERED
