"""Hyper-connections against float64 answers of an implementation of its own (tests/golden/data/mhc/README.md)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from aotgaudi.graphs.hyper_connections import HcPreGraph, mixing_weights, split_sums
from aotgaudi.spec.hyper_connections import HyperConnections
from tests.golden.rows import GOLDENS, OURS, Row, read_rows

ROWS = [pytest.param(row, id=row["id"]) for row in read_rows("mhc/numeric_cases.jsonl")]
FLOAT32, BFLOAT16 = 1e-5, 1 / 128
"""Largest errors, of the largest value of an array, or of 1. bfloat16 keeps 8 bits."""


class Case:
    def __init__(self, row: Row) -> None:
        path = GOLDENS / "mhc" / row["file"]
        if not path.exists() and GOLDENS != OURS:
            pytest.skip(f"no {row['file']} among the goldens")
        arrays = np.load(path)
        assert (row["sinkhorn_eps"], row["post_mult"]) == (row["hc_eps"], 2.0)
        self.tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        self.streams = HyperConnections(
            hc_mult=row["hc_mult"],
            hidden_size=row["hidden_size"],
            sinkhorn_iters=row["sinkhorn_iters"],
            hc_eps=row["hc_eps"],
            rms_eps=row["rms_eps"],
        )

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


def written_back(layer_output: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The next streams, by transformers' formula in float32: what a model does with the results."""
    mixed = torch.matmul(comb.transpose(-1, -2), residual.float())
    return (post[..., None] * layer_output.float()[:, None] + mixed).to(residual.dtype)


NUM_SPLITS = (1, 2, 3, 16)


def check(actual: Tensor, expected: Tensor, tolerance: float = FLOAT32) -> None:
    assert actual.shape == expected.shape
    assert (actual.double() - expected).abs().max().item() < tolerance * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("row", ROWS)
def test_the_split_projection_and_what_follows_from_it(row: Row) -> None:
    case = Case(row)
    x = case["residual"].flatten(1)

    for n_splits in NUM_SPLITS:
        product, squares = split_sums(x, case["fn"], n_splits)
        mix = product * torch.rsqrt(squares / x.shape[1] + case.streams.rms_eps)[:, None]
        pre, post, comb = mixing_weights(mix, case["scale"], case["base"], case.streams)

        check(product, case["gemm_out"])
        check(squares, case["sqrsum"])
        check(pre, case["pre"])
        check(post, case["post"])
        check(comb, case["comb"])


@pytest.mark.parametrize("row", ROWS)
def test_the_graphs_in_float32(row: Row) -> None:
    case = Case(row)

    for n_splits in NUM_SPLITS:
        post, comb, layer_input = HcPreGraph(case.streams, n_splits)(
            case["residual"], case["fn"], case["scale"], case["base"]
        )
        written = written_back(case["layer_output"], case["residual"], post, comb)

        check(post, case["post"])
        check(comb, case["comb"])
        check(layer_input, case["layer_input"])
        check(written, case["new_residual"])


@pytest.mark.parametrize("row", ROWS)
def test_the_graphs_on_bfloat16_streams(row: Row) -> None:
    """The inputs are bfloat16 numbers, so only the last rounding of what goes back to the streams is coarse."""
    case = Case(row)
    residual, layer_output = case["residual"].bfloat16(), case["layer_output"].bfloat16()
    assert torch.equal(residual.float(), case["residual"])

    post, comb, layer_input = HcPreGraph(case.streams, 2)(residual, case["fn"], case["scale"], case["base"])
    written = written_back(layer_output, residual, post, comb)

    check(post, case["post"])
    check(comb, case["comb"])
    for actual, name in ((layer_input, "layer_input"), (written, "new_residual")):
        assert actual.dtype is torch.bfloat16
        check(actual, case[name], BFLOAT16)
