"""Linear layers over weights in panels, compiled: against exact products, and each row by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aotgaudi.backends.base import Executable, Unit
from aotgaudi.backends.inductor.compiler import InductorCompiler
from aotgaudi.backends.inductor.levels import ISA_LEVELS
from aotgaudi.backends.inductor.probe import cpu_features, probe
from aotgaudi.backends.inductor.runtime import PACKED, InductorRuntime
from aotgaudi.digest import Key
from aotgaudi.graphs.canonical import to_text

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


def compiled(rows: int, num_out: int, num_in: int, has_bias: bool, folder: Path) -> Executable:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, weight, *bias)

    shapes = [(rows, num_in), (num_out, num_in), *([(num_out,)] if has_bias else [])]
    inputs = tuple(torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
    unit = Unit(
        to_text(torch.export.export(Layer(), inputs, strict=False).graph), Key.of([("text", "x")]), "linear"
    )
    made = InductorCompiler(probe(LEVEL)).compile(unit, folder)
    assert made.layouts == {1: PACKED}
    return InductorRuntime(probe(LEVEL)).load(made.files)


@pytest.mark.parametrize("name", CASES)
def test_products_are_exact_but_for_rounding_and_each_row_is_as_alone(name: str, tmp_path: Path) -> None:
    (rows, num_out, num_in), has_bias = CASES[name]
    unit = compiled(rows, num_out, num_in, has_bias, tmp_path)
    prepare = InductorRuntime(probe(LEVEL)).prepare
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, num_in, generator=generator).bfloat16()
        weight = torch.randn(num_out, num_in, generator=generator).bfloat16()
        bias = [torch.randn(num_out, generator=generator).bfloat16()] if has_bias else []

        (got,) = unit.run([x, prepare(PACKED, weight), *bias])

        exact = torch.nn.functional.linear(x.double(), weight.double(), *(one.double() for one in bias))
        torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-3)
        for row in {0, rows // 2, rows - 1}:
            company = torch.zeros_like(x)
            company[row] = x[row]
            (alone,) = unit.run([company, prepare(PACKED, weight), *bias])
            assert torch.equal(alone[row], got[row])


def test_what_follows_a_product_is_computed_as_well(tmp_path: Path) -> None:
    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
            hidden = torch.nn.functional.silu(torch.nn.functional.linear(x, up))
            return x + torch.nn.functional.linear(hidden, down)

    generator = torch.Generator().manual_seed(2)
    shapes = ((3, 32), (64, 32), (32, 64))
    inputs = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    exported = torch.export.export(Block(), tuple(inputs), strict=False)
    unit = Unit(to_text(exported.graph), Key.of([("text", "x")]), "block")
    made = InductorCompiler(probe(LEVEL)).compile(unit, tmp_path)
    runtime = InductorRuntime(probe(LEVEL))

    (got,) = runtime.load(made.files).run([inputs[0], *(runtime.prepare(PACKED, one) for one in inputs[1:])])

    torch.testing.assert_close(got, Block()(*inputs), rtol=2**-6, atol=2**-3)


def test_a_row_is_the_same_among_any_number_of_rows(tmp_path: Path) -> None:
    """What batch a request comes into is nothing that its answer may depend on."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 80, generator=generator).bfloat16()
    weight = InductorRuntime(probe(LEVEL)).prepare(
        PACKED, torch.randn(48, 80, generator=generator).bfloat16()
    )
    units = {rows: compiled(rows, 48, 80, False, tmp_path / str(rows)) for rows in (1, 3, 16, 40)}

    texts = {rows: unit.run([x[:rows].contiguous(), weight])[0] for rows, unit in units.items()}

    for rows, got in texts.items():
        assert torch.equal(got, texts[40][:rows])


def test_eight_rows_of_zeros_at_an_end_are_left_out(tmp_path: Path) -> None:
    """What is padding costs nothing: weights that would make NaN of it are not read for it."""
    unit = compiled(69, 32, 48, True, tmp_path)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(69, 48, generator=generator).bfloat16()
    x[16:32], x[40:48] = 0.0, -0.0
    x[48:56] = 0.0  # Somebody's follow.
    weight = torch.randn(32, 48, generator=generator).bfloat16()
    weight[5] = torch.inf
    bias = torch.randn(32, generator=generator).bfloat16()

    (got,) = unit.run([x, InductorRuntime(probe(LEVEL)).prepare(PACKED, weight), bias])

    left_out = torch.zeros(69, dtype=torch.bool)
    left_out[16:32] = left_out[40:48] = True
    assert torch.equal(got[left_out], bias.expand(24, -1))
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(
        got[~left_out].double(), expected[~left_out], rtol=2**-8, atol=1e-3, equal_nan=True
    )


@pytest.mark.parametrize(("num_embeddings", "size"), [(96, 64), (37, 33), (5, 1)])
def test_embeddings_read_their_table_from_panels(num_embeddings: int, size: int, tmp_path: Path) -> None:
    """So a table that is the head's weight too is in memory once."""

    class Embedding(torch.nn.Module):
        def forward(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.embedding(ids, table) * 2

    generator = torch.Generator().manual_seed(3)
    table = torch.randn(num_embeddings, size, generator=generator).bfloat16()
    ids = torch.randint(0, num_embeddings, (1, 19), generator=generator)
    exported = torch.export.export(Embedding(), (ids, table), strict=False)
    unit = Unit(to_text(exported.graph), Key.of([("text", "x")]), "embedding")
    made = InductorCompiler(probe(LEVEL)).compile(unit, tmp_path)
    runtime = InductorRuntime(probe(LEVEL))

    assert made.layouts == {1: PACKED}
    loaded = runtime.load(made.files)
    assert torch.equal(loaded.run([ids, runtime.prepare(PACKED, table)])[0], table[ids] * 2)
    with pytest.raises(RuntimeError):
        loaded.run([ids + num_embeddings, runtime.prepare(PACKED, table)])
