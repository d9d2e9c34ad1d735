"""Decode attention as units have it, compiled, against its definition."""

from __future__ import annotations

import pytest
import torch

from aotgaudi.graphs.paged_decode import PAGED_DECODE
from tests.integration.units import Calls

ROWS, NUM_BLOCKS, KV_HEADS = 3, 7, 2
CACHE_BLOCKS = 11


class Case:
    """One call, and inputs for it. With a `value_dim`, values are the first columns of keys."""

    def __init__(
        self,
        size: int,
        group: int,
        block_size: int,
        dtype: torch.dtype,
        *,
        sinks: bool,
        softcap: float,
        value_dim: int = 0,
    ) -> None:
        self.size, self.group, self.block_size, self.dtype = size, group, block_size, dtype
        self.has_sinks, self.softcap, self.value_dim = sinks, softcap, value_dim
        self.planes, self.kv_heads = (1, 1) if value_dim else (2, KV_HEADS)

    def inputs(self, seed: int) -> list[torch.Tensor]:
        """Row 0 has blocks 0 and 3 and part of 5, row 1 one token, row 2 a window; block 6 is padding."""
        generator = torch.Generator().manual_seed(seed)
        heads = self.kv_heads * self.group
        query = torch.randn(ROWS, heads, self.size, generator=generator)
        sizes = self.planes, CACHE_BLOCKS, self.kv_heads, self.block_size, self.size
        cache = torch.randn(*sizes, generator=generator)
        seen = torch.zeros(NUM_BLOCKS, self.block_size, dtype=torch.bool)
        seen[[0, 3]] = True
        seen[5, : self.block_size // 2 + 1] = True
        seen[1, 0] = True
        seen[2, 1:] = True
        seen[4, :-1] = True
        rows = torch.tensor([0, 1, 2, 0, 2, 0, 0])
        blocks = torch.randperm(CACHE_BLOCKS - 1, generator=generator)[:NUM_BLOCKS] + 1
        sinks = [torch.randn(heads, generator=generator).to(self.dtype)] if self.has_sinks else []
        return [query.to(self.dtype), cache.to(self.dtype), blocks, rows, seen, *sinks]

    def call(self, *inputs: torch.Tensor) -> torch.Tensor:
        sinks = inputs[5] if self.has_sinks else None
        narrow = [self.value_dim] if self.value_dim else []
        result: torch.Tensor = PAGED_DECODE(*inputs[:5], sinks, self.size**-0.5, self.softcap, *narrow)
        return result


CASES = {
    "as in SmolLM2": Case(64, 3, 16, torch.bfloat16, sinks=False, softcap=0.0),
    "float32, one query head a KV head": Case(32, 1, 8, torch.float32, sinks=False, softcap=0.0),
    "sinks and a softcap": Case(64, 8, 16, torch.bfloat16, sinks=True, softcap=30.0),
    "sizes that no vector divides": Case(20, 5, 6, torch.float32, sinks=True, softcap=5.0),
    "float16, wide heads": Case(256, 2, 4, torch.float16, sinks=False, softcap=0.0),
    "bfloat16, wide heads": Case(128, 4, 32, torch.bfloat16, sinks=True, softcap=0.0),
    "bfloat16, one query head a KV head, an odd number of registers": Case(
        96, 1, 16, torch.bfloat16, sinks=False, softcap=0.0
    ),
    "bfloat16, sizes that no register divides": Case(20, 3, 6, torch.bfloat16, sinks=False, softcap=0.0),
    "latent, as in DeepSeek V3, a quarter of its heads": Case(
        576, 32, 16, torch.bfloat16, sinks=False, softcap=0.0, value_dim=512
    ),
    "latent, float32, 24 heads": Case(40, 24, 16, torch.float32, sinks=False, softcap=0.0, value_dim=32),
    "latent, sizes that no vector divides": Case(
        29, 17, 6, torch.float32, sinks=True, softcap=5.0, value_dim=21
    ),
    "latent, bfloat16, sizes that no register divides": Case(
        40, 5, 16, torch.bfloat16, sinks=False, softcap=0.0, value_dim=20
    ),
}


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Calls:
    given = {name: (case.call, case.inputs(0)) for name, case in CASES.items()}
    return Calls(given, tmp_path_factory.mktemp("unit"))


@pytest.mark.parametrize("name", CASES)
def test_units_attend_as_defined_and_each_row_by_itself(name: str, calls: Calls) -> None:
    case = CASES[name]
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[case.dtype]

    for seed in range(5):
        inputs = case.inputs(seed)
        (got,) = calls.run(name, inputs)
        torch.testing.assert_close(got, case.call(*inputs), atol=tolerance, rtol=tolerance)

        query = inputs[0].clone()
        query[1:] = 0
        (alone,) = calls.run(name, [query, *inputs[1:]])
        assert torch.equal(alone[0], got[0])


def test_what_nobody_sees_of_a_context_is_not_read(calls: Calls) -> None:
    name = "as in SmolLM2"
    case = CASES[name]
    inputs = case.inputs(0)
    (before,) = calls.run(name, inputs)

    blocks, seen = inputs[2], inputs[4]
    inputs[1][:, [0, *(set(range(CACHE_BLOCKS)) - set(blocks.tolist())), int(blocks[6])]] = torch.nan
    inputs[1][:, blocks[5], :, case.block_size // 2 + 1 :] = torch.nan
    assert not seen[6].any()

    assert torch.equal(calls.run(name, inputs)[0], before)
