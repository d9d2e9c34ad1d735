"""Loops of compiled units that threads share: which they are, and that nothing depends on how many threads there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.integration.units import Compiled

ROWS, SIZE = 256, 1536


def gated(x: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.silu(x) * y


def normed(x: Tensor, y: Tensor) -> Tensor:
    return x * torch.rsqrt((x.float() ** 2).mean(-1, keepdim=True) + 1e-5).to(x.dtype) * y


def summed(x: Tensor, y: Tensor) -> Tensor:
    return (x.float() * y.float()).sum()


def placed(x: Tensor, y: Tensor) -> Tensor:
    """Adds the rows of `y` to two rows of `x`, each many times: in another order they give other sums."""
    return x.float().index_add(0, torch.arange(y.shape[0]) % 2, y.float())


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def inputs(rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(rows, SIZE, generator=generator).to(torch.bfloat16) for _ in range(2)]


@pytest.mark.parametrize("what", [gated, normed])
@pytest.mark.usefixtures("two_threads")
def test_a_prompts_loops_are_shared_and_give_what_one_thread_gives(
    what: Callable[[Tensor, Tensor], Tensor], tmp_path: Path
) -> None:
    unit = Compiled(what, inputs(ROWS), tmp_path)
    assert b"GOMP_parallel" in unit.code

    (by_two,) = unit.run(*inputs(ROWS))
    torch.set_num_threads(1)
    (by_one,) = unit.run(*inputs(ROWS))
    assert torch.equal(by_two, by_one)


@pytest.mark.parametrize(
    ("what", "rows"),
    [
        pytest.param(gated, 16, id="a decode step's loops"),
        pytest.param(summed, ROWS, id="a sum"),
        pytest.param(placed, ROWS, id="what adds to what is stored"),
    ],
)
def test_what_is_small_and_what_depends_on_an_order_is_one_threads(
    what: Callable[[Tensor, Tensor], Tensor], rows: int, tmp_path: Path
) -> None:
    assert b"GOMP_parallel" not in Compiled(what, inputs(rows), tmp_path).code
