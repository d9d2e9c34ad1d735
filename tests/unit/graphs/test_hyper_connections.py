"""The graphs of hyper-connections: against transformers, the order of the sums, and what is traced."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from aotgaudi.entries import DecodeEntry, MhcEntry, PromptEntry, StepEntry
from aotgaudi.errors import SpecError
from aotgaudi.graphs.canonical import from_text
from aotgaudi.graphs.hyper_connections import HcPreGraph, split_sums
from aotgaudi.graphs.trace import TracedProgram, trace
from aotgaudi.spec.hyper_connections import HyperConnections
from aotgaudi.spec.model import ModelSpec
from tests.integration.models import reference, spec_of
from tests.specs import ONE_BLOCK, limits_of

pytestmark = pytest.mark.slow

LIMITS = limits_of(**ONE_BLOCK)
TOLERANCE = 1e-5
T, H, D = 5, 4, 48
FAMILIES = [("deepseek_v4", "DeepseekV4"), ("glm5_next", "Glm5NextText")]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def theirs(family: str, prefix: str, part: str, **config: Any) -> Any:
    """Returns transformers' module with random weights; it leaves them uninitialised."""
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    configuration = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    made = getattr(configuration, f"{prefix}Config")(hidden_size=D, hc_mult=H, **config)
    module = getattr(modeling, f"{prefix}{part}")(made)
    for seed, parameter in enumerate(module.parameters()):
        parameter.data = random(*parameter.shape, seed=seed)
    return module


@pytest.mark.parametrize("iters", [1, 2, 20])
@pytest.mark.parametrize(("family", "prefix"), FAMILIES)
def test_hc_pre_is_transformers_hyper_connection(family: str, prefix: str, iters: int) -> None:
    """With an epsilon that is large enough to be seen where it belongs."""
    module = theirs(family, prefix, "HyperConnection", hc_sinkhorn_iters=iters, hc_eps=0.05, rms_norm_eps=0.5)
    streams = HyperConnections(H, D, iters, hc_eps=0.05, rms_eps=0.5)
    residual = random(T, H, D, seed=9)

    with torch.no_grad():
        expected = [value[0] for value in module(residual[None])]
        actual = HcPreGraph(streams, 2)(residual, module.fn, module.scale, module.base)

    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


@given(st.integers(1, 7), st.integers(1, 700), st.integers(1, 12))
def test_the_parts_of_a_sum_are_all_of_it(num_tokens: int, width: int, n_splits: int) -> None:
    x, fn = random(num_tokens, width), random(6, width, seed=1)

    product, squares = split_sums(x, fn, n_splits)

    torch.testing.assert_close(product.double(), x.double() @ fn.double().T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(squares.double(), (x.double() ** 2).sum(1), rtol=1e-5, atol=1e-5)


BIG = 2.0**24
"""The first float32 to which 1 cannot be added."""


@pytest.mark.parametrize(
    ("blocks", "n_splits", "total"),
    [
        ((1, 1, BIG), 3, BIG + 2),  # (1 + 1) + BIG: from the first part to the last
        ((BIG, 1, 1), 3, BIG),  # (BIG + 1) + 1
        ((1, 1, BIG), 2, BIG + 2),  # (1 + 1) + BIG: the first part is the longer one
        ((BIG, 1, 1), 2, BIG),
    ],
)
def test_parts_are_whole_blocks_the_longer_first_and_added_in_order(
    blocks: tuple[float, ...], n_splits: int, total: float
) -> None:
    x = torch.zeros(1, 64 * len(blocks))
    x[0, ::64] = torch.tensor(blocks)

    product, _ = split_sums(x, torch.ones_like(x), n_splits)

    assert product.item() == total


def test_streams_of_no_tokens_stay_empty() -> None:
    streams = HyperConnections(H, D, 20, 1e-6, 1e-6)
    residual, fn = torch.zeros(0, H, D), random(24, H * D)

    post, comb, layer_input = HcPreGraph(streams, 3)(residual, fn, torch.ones(3), torch.zeros(24))

    assert (post.shape, comb.shape, layer_input.shape) == ((0, H), (0, H, H), (0, D))


def model_of(dtype: Any = "bfloat16", **config: Any) -> ModelSpec:
    tiny = {"model_type": "deepseek_v4", "hidden_size": D, "hc_mult": H, **config}
    return ModelSpec(name="tiny", dtype=dtype, config=tiny)


def run(program: TracedProgram, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Runs a traced program without compiling it."""
    values = {f"step:{name}": value for name, value in inputs.items()}
    for piece in program.pieces:
        graph, _ = from_text(piece.text)
        results = graph(*[values[name] for name in piece.inputs])
        values.update({f"tmp:{n}": r for n, r in zip(piece.outputs, results, strict=True)})
    return [values[f"tmp:{name}"] for name in program.outputs]


def step_inputs(program: TracedProgram) -> dict[str, Tensor]:
    return {
        spec.name: random(*spec.shape, seed=seed).to(getattr(torch, spec.dtype))
        for seed, spec in enumerate(program.inputs)
    }


@pytest.mark.parametrize("n_splits", [1, 2, 3])
def test_a_traced_program_computes_the_graphs(n_splits: int) -> None:
    program = trace(MhcEntry(T, n_splits, "attn"), model_of(), LIMITS)
    given_ = step_inputs(program)

    actual = run(program, given_)

    pre = HcPreGraph(HyperConnections(H, D, 20, 1e-6, 1e-6), n_splits)
    residual, *weights = (given_[name] for name in ("residual", "fn", "scale", "base"))
    for got, want in zip(actual, pre(residual[0], *weights), strict=True):
        assert torch.equal(got[0], want)
    assert [got.dtype for got in actual] == [torch.float32, torch.float32, torch.bfloat16]


def test_all_weights_are_inputs_of_the_program_and_nothing_is_a_constant() -> None:
    """Small ones too: a compiler bakes those into code where they are not inputs."""
    program = trace(MhcEntry(T, 2, "ffn"), model_of(), LIMITS)

    shapes = {spec.name: (spec.shape, spec.dtype) for spec in program.inputs}
    assert shapes == {
        "residual": ((1, T, H, D), "bfloat16"),
        "fn": ((24, H * D), "float32"),
        "scale": ((3,), "float32"),
        "base": ((24,), "float32"),
    }
    assert (program.weights, program.caches, program.constants) == ((), (), None)
    assert program.pieces[0].inputs == ("step:residual", "step:fn", "step:scale", "step:base")
    for piece in program.pieces:
        inputs = [line for line in piece.text.splitlines() if json.loads(line)[0] == "input"]
        assert len(inputs) == len(piece.inputs)


def texts(entry: MhcEntry, **config: Any) -> list[str]:
    return [piece.text for piece in trace(entry, model_of(**config), LIMITS).pieces]


def test_attention_and_ffn_share_their_units() -> None:
    assert texts(MhcEntry(T, 2, "attn")) == texts(MhcEntry(T, 2, "ffn"))


def test_what_a_unit_depends_on_is_in_its_text_and_the_number_of_tokens_is_not() -> None:
    (pre,) = texts(MhcEntry(T, 2, "attn"))

    for entry, config in (
        (MhcEntry(T, 3, "attn"), {}),
        (MhcEntry(T, 2, "attn"), {"hc_eps": 1e-5}),
        (MhcEntry(T, 2, "attn"), {"rms_norm_eps": 1e-5}),
        (MhcEntry(T, 2, "attn"), {"hc_sinkhorn_iters": 19}),
    ):
        assert texts(entry, **config) != [pre]
    assert texts(MhcEntry(T + 1, 2, "attn")) == texts(MhcEntry(1, 2, "attn")) == [pre]


def test_a_model_without_hyper_connections_is_refused() -> None:
    llama = ModelSpec(name="m", dtype="float32", config={"model_type": "llama", "hidden_size": 8})

    with pytest.raises(SpecError, match="'llama' has no hyper-connections"):
        trace(MhcEntry(1, 1, "attn"), llama, LIMITS)


@pytest.mark.parametrize("entry", [PromptEntry(1, 32, 1), DecodeEntry(2, 1, 4)])
def test_a_step_of_another_class_differs_in_the_unit_that_the_classs_entry_names_and_in_nothing_else(
    entry: StepEntry,
) -> None:
    spec = spec_of(reference("deepseek_v4"))
    steps = [trace(entry, spec.model, spec.limits, n_splits=n).pieces for n in (1, 2)]

    others = [[piece for piece in pieces if piece.label != "hc_pre"] for pieces in steps]
    assert others[0] == others[1]
    for n_splits, pieces in zip((1, 2), steps, strict=True):
        called = [piece.text for piece in pieces if piece.label == "hc_pre"]
        (named,) = trace(MhcEntry(7, n_splits, "ffn"), spec.model, spec.limits).pieces
        assert called == [named.text] * (2 * spec.model.num_layers)
