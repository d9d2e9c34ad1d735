"""Linear layers over weights in panels, compiled: against exact products, and each row by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from aotgaudi.backends.inductor.levels import ISA_LEVELS
from aotgaudi.backends.inductor.probe import cpu_features
from aotgaudi.backends.inductor.runtime import PACKED
from tests.integration.units import Calls, Compiled

LEVEL = "avx512+bf16"
pytestmark = pytest.mark.skipif(
    not cpu_features() >= set(ISA_LEVELS[LEVEL].features), reason=f"this machine has no {LEVEL}"
)

CASES = {
    "one row": ((1, 64, 96), False),
    "as many rows as fit into registers, and more": ((37, 32, 48), True),
    "all sizes of what is left": ((31, 16, 32), False),
    "an odd number of inputs and of outputs": ((5, 21, 7), True),
    "one of each": ((1, 1, 1), True),
    "one panel and one output": ((16, 17, 64), False),
}


def zeros(rows: int, num_out: int, num_in: int, *, has_bias: bool) -> list[torch.Tensor]:
    """Inputs of a layer: rows, weight, bias."""
    shapes = [(rows, num_in), (num_out, num_in), *([(num_out,)] if has_bias else [])]
    return [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Calls:
    given = {name: zeros(*shape, has_bias=has_bias) for name, (shape, has_bias) in CASES.items()}
    made = Calls(
        {name: (linear, inputs) for name, inputs in given.items()}, tmp_path_factory.mktemp("unit"), LEVEL
    )
    assert set(made.unit.layouts.values()) == {PACKED}
    assert len(made.unit.layouts) == len(CASES)
    return made


@pytest.mark.parametrize("name", CASES)
def test_products_are_exact_but_for_rounding_and_each_row_is_as_alone(name: str, layers: Calls) -> None:
    (rows, num_out, num_in), has_bias = CASES[name]
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, num_in, generator=generator).bfloat16()
        weight = torch.randn(num_out, num_in, generator=generator).bfloat16()
        bias = [torch.randn(num_out, generator=generator).bfloat16()] if has_bias else []

        (got,) = layers.run(name, [x, weight, *bias])

        exact = linear(x.double(), weight.double(), *(one.double() for one in bias))
        torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-3)
        for row in {0, rows // 2, rows - 1}:
            company = torch.zeros_like(x)
            company[row] = x[row]
            (alone,) = layers.run(name, [company, weight, *bias])
            assert torch.equal(alone[row], got[row])


def test_what_follows_a_product_is_computed_as_well(tmp_path: Path) -> None:
    def block(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return x + linear(torch.nn.functional.silu(linear(x, up)), down)

    generator = torch.Generator().manual_seed(2)
    inputs = [torch.randn(shape, generator=generator).bfloat16() for shape in ((3, 32), (64, 32), (32, 64))]

    (got,) = Compiled(block, inputs, tmp_path, LEVEL).run(*inputs)

    torch.testing.assert_close(got, block(*inputs), rtol=2**-6, atol=2**-3)


def test_a_row_is_the_same_among_any_number_of_rows(tmp_path: Path) -> None:
    """What batch a request comes into is nothing that its answer may depend on."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 80, generator=generator).bfloat16()
    weight = torch.randn(48, 80, generator=generator).bfloat16()
    given = {str(rows): [x[:rows].contiguous(), weight] for rows in (1, 3, 16, 40)}
    layers = Calls({rows: (linear, inputs) for rows, inputs in given.items()}, tmp_path, LEVEL)

    texts = {rows: layers.run(rows, inputs)[0] for rows, inputs in given.items()}

    for rows, got in texts.items():
        assert torch.equal(got, texts["40"][: int(rows)])


def test_eight_rows_of_zeros_at_an_end_are_left_out(tmp_path: Path) -> None:
    """What is padding costs nothing: weights that would make NaN of it are not read for it."""
    unit = Compiled(linear, zeros(69, 32, 48, has_bias=True), tmp_path, LEVEL)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(69, 48, generator=generator).bfloat16()
    x[16:32], x[40:48] = 0.0, -0.0
    x[48:56] = 0.0  # Somebody's follow.
    weight = torch.randn(32, 48, generator=generator).bfloat16()
    weight[5] = torch.inf
    bias = torch.randn(32, generator=generator).bfloat16()

    (got,) = unit.run(x, weight, bias)

    left_out = torch.zeros(69, dtype=torch.bool)
    left_out[16:32] = left_out[40:48] = True
    assert torch.equal(got[left_out], bias.expand(24, -1))
    expected = linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(
        got[~left_out].double(), expected[~left_out], rtol=2**-8, atol=1e-3, equal_nan=True
    )


@pytest.mark.parametrize(("num_embeddings", "size"), [(96, 64), (37, 33), (5, 1)])
def test_embeddings_read_their_table_from_panels(num_embeddings: int, size: int, tmp_path: Path) -> None:
    """So a table that is the head's weight too is in memory once."""

    def embed(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(ids, table) * 2

    generator = torch.Generator().manual_seed(3)
    table = torch.randn(num_embeddings, size, generator=generator).bfloat16()
    ids = torch.randint(0, num_embeddings, (1, 19), generator=generator)

    unit = Compiled(embed, (ids, table), tmp_path, LEVEL)

    assert unit.layouts == {1: PACKED}
    assert torch.equal(unit.run(ids, table)[0], table[ids] * 2)
    with pytest.raises(RuntimeError):
        unit.run(ids + num_embeddings, table)
