"""Attention of prompts by our template, compiled: against exact attention, for heads and sizes of all kinds."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from aotgaudi.backends.inductor.levels import ISA_LEVELS
from aotgaudi.backends.inductor.probe import cpu_features
from aotgaudi.graphs.masks import prompt_mask
from tests.integration.units import Calls

LEVEL = "avx512+bf16"
pytestmark = pytest.mark.skipif(
    not cpu_features() >= set(ISA_LEVELS[LEVEL].features), reason=f"this machine has no {LEVEL}"
)

CASES = {
    "heads that share keys, after a context": (2, 40, 96, 2, 3, 64, None),
    "a head for each, no context": (1, 130, 0, 4, 1, 32, None),
    "one query": (1, 1, 16, 1, 4, 16, None),
    "odd sizes": (3, 7, 5, 2, 2, 21, None),
    "a window": (1, 33, 64, 1, 2, 64, 20),
    "more keys than a chunk, several rows": (2, 150, 300, 1, 5, 80, None),
}
"""Rows, queries, cached tokens, KV heads, query heads of each, head size, window."""


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    turned, scale = query.transpose(1, 2), query.shape[-1] ** -0.5
    out = F.scaled_dot_product_attention(turned, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def shapes(name: str) -> list[tuple[int, ...]]:
    b, q, c, heads, group, size, _ = CASES[name]
    return [(b, q, heads * group, size), (b, heads, c + q, size), (b, heads, c + q, size), (b, 1, q, c + q)]


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Calls:
    def inputs(name: str) -> list[torch.Tensor]:
        *numbers, mask = shapes(name)
        zeros = [torch.zeros(shape, dtype=torch.bfloat16) for shape in numbers]
        return [*zeros, torch.ones(mask, dtype=torch.bool)]

    made = Calls({name: (attend, inputs(name)) for name in CASES}, tmp_path_factory.mktemp("unit"), LEVEL)
    assert b"dot_product" not in made.unit.code  # Torch's own kernel is not called.
    return made


@pytest.mark.parametrize("name", CASES)
def test_it_is_exact_but_for_rounding_and_padding_sees_nothing(name: str, calls: Calls) -> None:
    b, q, c, _, _, size, window = CASES[name]
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        query, keys, values = (
            torch.randn(shape, generator=generator).bfloat16() for shape in shapes(name)[:3]
        )
        spans = [
            (
                int(torch.randint(0, c + 1, (), generator=generator)),
                int(torch.randint(0 if row else 1, q + 1, (), generator=generator)),
            )
            for row in range(b)
        ]
        mask = prompt_mask(spans, q, c, window)

        (got,) = calls.run(name, [query, keys, values, mask])

        exact = attention(query, keys, values, mask, size)
        torch.testing.assert_close(got.double(), exact, rtol=2**-6, atol=2e-2)
        for row, (_, number) in enumerate(spans):
            assert not got[row, number:].any()


def attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, size: int
) -> torch.Tensor:
    """In float64, written out; zeros where nothing is seen."""
    group = query.shape[2] // keys.shape[1]
    keys, values = (one.double().repeat_interleave(group, dim=1) for one in (keys, values))
    scores = query.double().transpose(1, 2) @ keys.transpose(2, 3) / math.sqrt(size)
    weights = torch.softmax(scores.masked_fill(~mask, -math.inf), dim=-1).nan_to_num(0.0)
    return (weights @ values).transpose(1, 2)
