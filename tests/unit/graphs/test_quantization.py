"""Quantizations: how weights are packed, and what products over them compute."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.errors import SpecError
from aotgaudi.graphs.quantization import INT8, Int8

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@given(
    st.integers(1, 9),
    st.integers(1, 40),
    st.sampled_from(DTYPES),
    st.floats(1e-3, 1e3),
    st.integers(0, 99),
)
def test_every_number_is_within_half_a_step(
    rows: int, columns: int, dtype: torch.dtype, size: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, columns, generator=generator) * size).to(dtype)

    before = weight.clone()

    integers, scales = INT8.pack(weight, "w")

    assert torch.equal(weight, before)
    assert (integers.dtype, scales.dtype) == (torch.int8, torch.float32)
    assert int(integers.abs().max()) == INT8.largest
    error = (integers.double() * scales.double()[:, None] - weight.double()).abs()
    assert bool((error <= 0.5001 * scales.double()[:, None]).all())


def test_rows_do_not_depend_on_one_another_nor_on_how_many_are_done_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = torch.randn(50, 33, generator=torch.Generator().manual_seed(0))
    whole = INT8.pack(weight, "w")

    monkeypatch.setattr(Int8, "bytes_at_once", 1)

    for one, other in zip(INT8.pack(weight, "w"), whole, strict=True):
        assert torch.equal(one, other)
    parts = [INT8.pack(part, "w") for part in weight.split(7)]
    for number in (0, 1):
        assert torch.equal(torch.cat([part[number] for part in parts]), whole[number])


def test_a_row_of_zeros_stays_zero() -> None:
    integers, scales = INT8.pack(torch.tensor([[0.0, 0.0], [1.0, -2.0]]), "w")

    assert integers.tolist() == [[0, 0], [64, -127]]
    assert scales.tolist() == [1.0, pytest.approx(2 / 127)]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused_by_name(number: float) -> None:
    with pytest.raises(SpecError, match=r"layers\.1\.w: holds numbers that are not finite"):
        INT8.pack(torch.tensor([[1.0], [number]]), "layers.1.w")
