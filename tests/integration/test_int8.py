"""Weights in 8 bits: compiled products against their definition, and whole models against transformers."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from aotgaudi.backends.inductor.probe import levels_within, this_machine
from aotgaudi.backends.inductor.quantized_linear import MOST_ROWS
from aotgaudi.engine.runner import ProgramRunner
from aotgaudi.engine.steps import DecodeRow, DecodeStep, PromptRow, PromptStep, SamplingRow
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.graphs.quantization import INT8
from aotgaudi.graphs.quantized_linear import INT8_LINEAR
from aotgaudi.store.store import Store
from tests.integration.models import build, reference, save_checkpoint, spec_of
from tests.integration.units import Calls
from tests.parallel import nightly

LEVELS = [level.name for level in levels_within(frozenset(this_machine().isa))]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Relative to the largest result of a row."""


def product(
    rows: int, outputs: int, width: int, dtype: torch.dtype, *, has_bias: bool, seed: int
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    integers, scales = INT8.pack(torch.randn(outputs, width, generator=generator), "w")
    bias = [torch.randn(outputs, generator=generator).to(dtype)] if has_bias else []
    return [torch.randn(1, rows, width, generator=generator).to(dtype), integers, scales, *bias]


def call(*inputs: Tensor) -> Tensor:
    result: Tensor = INT8_LINEAR(*inputs[:3], inputs[3] if len(inputs) > 3 else None)
    return result


CASES = {
    "one row": (1, 96, 64, torch.bfloat16, False),
    "sizes that no vector divides": (3, 67, 45, torch.bfloat16, True),
    "more than sums can hold at once": (7, 9, 4131, torch.bfloat16, False),
    "float16": (6, 130, 70, torch.float16, True),
    "float32": (5, 33, 48, torch.float32, True),
    "as many rows as are ours": (MOST_ROWS, 70, 64, torch.bfloat16, False),
    "one more": (MOST_ROWS + 1, 70, 64, torch.bfloat16, True),
    **{f"{rows} together": (rows, 100, 80, torch.bfloat16, True) for rows in (1, 2, 3, 16)},
}


def after(result: Tensor) -> Tensor:
    """What a compiler would like to compute together with a product."""
    return torch.nn.functional.silu(result) * result + 1


class Products:
    """A unit of all cases, compiled for one level."""

    def __init__(self, level: str, folder: Path) -> None:
        self._given = {
            name: product(*case[:4], has_bias=case[4], seed=sum(case[1:3])) for name, case in CASES.items()
        }

        def call_and_go_on(*inputs: Tensor) -> list[Tensor]:
            return [result := call(*inputs), after(result)]

        calls = {name: (call_and_go_on, inputs) for name, inputs in self._given.items()}
        self._calls = Calls(calls, folder, level)

    def inputs(self, name: str) -> list[Tensor]:
        return [tensor.clone() for tensor in self._given[name]]

    def run(self, name: str, inputs: list[Tensor]) -> Tensor:
        """Returns the product of one case, after seeing that what comes after it reads the same."""
        result, following = self._calls.run(name, inputs)
        torch.testing.assert_close(following, after(result), equal_nan=True)
        return result


@pytest.fixture(scope="module", params=LEVELS)
def products(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Products:
    return Products(request.param, tmp_path_factory.mktemp("products"))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1.0, 1e-3, 300.0])
def test_units_compute_what_is_defined(name: str, size: float, products: Products) -> None:
    inputs = products.inputs(name)
    inputs[0] *= size

    got, wanted = products.run(name, inputs), call(*inputs)

    error = (got.float() - wanted.float()).abs().amax(-1)
    assert got.dtype == wanted.dtype
    assert bool((error <= TOLERANCES[got.dtype] * wanted.float().abs().amax(-1)).all())


def test_a_row_is_the_same_bits_in_any_company(products: Products) -> None:
    together = products.inputs("16 together")
    wanted = products.run("16 together", together)[0]

    for rows in (1, 2, 3):
        for first in range(0, 17 - rows, rows):
            alone = [together[0][:, first : first + rows].contiguous(), *together[1:]]
            assert torch.equal(products.run(f"{rows} together", alone)[0], wanted[first : first + rows])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_spoils_itself_alone(number: float, products: Products) -> None:
    inputs = products.inputs("3 together")
    before = products.run("3 together", inputs)
    inputs[0][0, 1, 5] = number

    got = products.run("3 together", inputs)

    assert not bool(got[0, 1].isfinite().any())
    assert torch.equal(got[0, [0, 2]], before[0, [0, 2]])


def test_a_row_of_zeros_gives_the_bias(products: Products) -> None:
    inputs = products.inputs("2 together")
    inputs[0][0, 0] = 0

    assert torch.equal(products.run("2 together", inputs)[0, 0], inputs[3])


FRESH, CHUNK, DECODE, ALONE = (
    PromptEntry(1, 32, 0),
    PromptEntry(1, 64, 2),
    DecodeEntry(4, 1, 16),
    DecodeEntry(1, 1, 4),
)
"""CHUNK has more rows than our own products take, the others fewer."""


def dequantized(architecture: str) -> torch.nn.Module:
    """The reference model with every linear layer's weight as integers and scales have it, but for routers."""
    model = reference(architecture)
    model.config.tie_word_embeddings = False
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "router" not in name:
            integers, scales = INT8.pack(module.weight.data, name)
            module.weight = torch.nn.Parameter(integers.float() * scales[:, None])
    return model


class Talk:
    """A sequence whose logits are compared with those of a model."""

    def __init__(self, runner: ProgramRunner) -> None:
        self._runner = runner
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(3, 320, (40,), generator=generator).tolist()

    def logits(self) -> Tensor:
        """Logits after tokens 32, 36 and 37: fresh, after a context, decoded alone."""
        blocks = (5, 9, 2, 7)
        steps = [
            PromptStep(FRESH, (PromptRow(tuple(self.tokens[:32]), 0, blocks, None),)),
            PromptStep(CHUNK, (PromptRow(tuple(self.tokens[32:36]), 32, blocks, None),)),
            DecodeStep(ALONE, (DecodeRow(self.tokens[36], 36, blocks, SamplingRow()),)),
        ]
        return torch.cat([self._runner.logits(step)[:1] for step in steps])


@pytest.mark.parametrize("architecture", ["llama", *nightly("qwen2", "mixtral")])
def test_models_compute_what_transformers_does_over_rounded_weights(
    architecture: str, store: Store, tmp_path: Path
) -> None:
    model = reference(architecture)
    built = build(spec_of(model, dtype="float32", quantization="int8"), (FRESH, CHUNK, DECODE, ALONE), store)
    talk = Talk(built.runner(save_checkpoint(model, tmp_path)))

    got = talk.logits()

    tokens = torch.tensor([talk.tokens[:37]])
    rounded, exact = (m(tokens).logits[0, [31, 35, 36]].detach() for m in (dequantized(architecture), model))
    assert (got - rounded).abs().max() < 1e-3
    assert (got - exact).abs().max() > 1e-3


def test_in_bfloat16_a_text_is_as_likely_as_over_weights_as_they_are_stored(
    store: Store, tmp_path: Path
) -> None:
    model = reference("llama")
    folder = save_checkpoint(model, tmp_path)
    text = Path(__file__).parents[2].joinpath("LICENSE").read_bytes()[:24]
    perplexities = {}
    for name, spec in {
        "int8": spec_of(model, dtype="bfloat16", quantization="int8"),
        "bfloat16": spec_of(model, dtype="bfloat16"),
    }.items():
        perplexities[name] = perplexity(build(spec, (ALONE,), store).runner(folder), list(text))

    assert perplexities["int8"] == pytest.approx(perplexities["bfloat16"], rel=0.05)


def perplexity(runner: ProgramRunner, tokens: list[int]) -> float:
    losses = []
    for position, (token, following) in enumerate(itertools.pairwise(tokens)):
        step = DecodeStep(ALONE, (DecodeRow(token, position, (5, 9, 2, 7), SamplingRow()),))
        losses.append(-runner.logits(step)[0].float().log_softmax(-1)[following].item())
    return math.exp(sum(losses) / len(losses))


def test_each_weight_is_there_once_and_keys_differ(store: Store, tmp_path: Path) -> None:
    model = reference("llama")
    plain, int8 = (
        build(spec, (ALONE,), store)
        for spec in (spec_of(model, dtype="bfloat16"), spec_of(model, dtype="bfloat16", quantization="int8"))
    )

    assert not set(plain.artifacts.receipt.programs.values()) & set(int8.artifacts.receipt.programs.values())
    folder = save_checkpoint(model, tmp_path)
    assert int8.allocated(folder)[0] < 0.62 * plain.allocated(folder)[0]
