"""The batch-invariant forms: they compute what torch computes, and nothing that depends on company gets past them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from aotgaudi.entries import DecodeEntry, PromptEntry, SamplerEntry
from aotgaudi.errors import SpecError
from aotgaudi.graphs.canonical import from_text
from aotgaudi.graphs.invariant import batch_invariant, linear, require_invariant, row_sum
from aotgaudi.graphs.trace import trace
from tests.integration.models import reference, spec_of

pytestmark = pytest.mark.slow


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "function",
    [
        lambda: F.linear(random(5, 7, 20), random(9, 20, seed=1), random(9, seed=2)),
        lambda: F.linear(random(11, 20), random(9, 20, seed=1)),
        lambda: random(2, 3, 5, 20) @ random(2, 1, 20, 6, seed=1),
        lambda: torch.matmul(random(3, 5, 20), random(3, 6, 20, seed=1).transpose(1, 2)),
        lambda: torch.bmm(random(3, 5, 20), random(3, 20, 1, seed=1)),
        lambda: torch.matmul(random(3, 5, 1), random(3, 1, 6, seed=1)),
        lambda: torch.addmm(random(6), random(5, 20, seed=1), random(20, 6, seed=2)),
        lambda: random(4, 37).mean(-1, keepdim=True),
        lambda: random(4, 37).sum(1),
        lambda: torch.softmax(random(4, 37), dim=-1),
        lambda: (
            torch.exp(torch.linspace(-87, 88, 1001)) / torch.linspace(-87, 88, 1001).exp().clamp_min(1e-38)
        ),
        lambda: torch.tanh(random(4, 37)) + random(4, 37).sigmoid(),
        lambda: F.silu(random(4, 37)) + F.gelu(random(4, 37)) + F.gelu(random(4, 37), approximate="tanh"),
        lambda: torch.cos(random(4, 37)) + random(4, 37).sin(),
        lambda: F.softmax(random(4, 37), dim=1, dtype=torch.float32),
        lambda: torch.logsumexp(random(4, 37), dim=-1, keepdim=True),
        lambda: F.layer_norm(random(4, 37), (37,), random(37, seed=1), random(37, seed=2)),
    ],
)
def test_a_form_computes_what_torch_computes(function: Callable[[], Tensor]) -> None:
    expected = function()

    with batch_invariant():
        got = function()

    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 8, 12, 13, 64])
def test_a_row_of_a_linear_layer_does_not_depend_on_how_many_there_are(num_rows: int) -> None:
    """In eager already; that compiled loops keep it is shown by tests/integration/test_batch_invariance.py."""
    x, weight = random(num_rows, 48), random(10, 48, seed=1)

    rows = linear(x, weight)

    for row in range(num_rows):
        torch.testing.assert_close(rows[row], linear(x[row : row + 1], weight)[0], rtol=1e-6, atol=1e-6)


def test_activations_are_float32_and_what_is_stored_has_the_models_dtype() -> None:
    spec = spec_of(reference("llama", num_hidden_layers=1), dtype="bfloat16", batch_invariant=True)

    embedding, layer, head = trace(DecodeEntry(4, 1, 16), spec.model, spec.limits).pieces

    for piece in (embedding, layer, head):
        graph, specs = from_text(piece.text)
        inputs = [
            torch.zeros([2 if n == "N" else n for n in sizes], dtype=getattr(torch, dtype))
            for dtype, sizes, _ in specs
        ]
        outputs = graph(*inputs)
        expected = torch.bfloat16 if piece is head else torch.float32
        assert {output.dtype for output in outputs if output.is_floating_point()} == {expected}


def test_zeros_do_not_change_a_sum_of_lanes() -> None:
    x = random(3, 20)

    assert torch.equal(row_sum(F.pad(x, (0, 44))), row_sum(x))


def test_integers_are_summed_as_they_come() -> None:
    with batch_invariant():
        total = torch.arange(12).view(3, 4).sum(-1)

    assert total.dtype == torch.int64
    assert total.tolist() == [6, 22, 38]


def graph_of(function: Callable[..., Tensor], *inputs: Tensor) -> fx.Graph:
    class Module(nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            with batch_invariant():
                return function(*tensors)

    return torch.export.export(Module(), inputs, strict=False).graph


@pytest.mark.parametrize(
    ("function", "inputs", "name"),
    [
        (lambda x: F.conv1d(x, x), (random(2, 2, 4),), "conv1d"),
        (lambda x: F.scaled_dot_product_attention(x, x, x), (random(1, 1, 4, 4),), "scaled_dot_product"),
        (lambda x: x.mean(0), (random(4, 4),), "mean"),
        (torch.linalg.vector_norm, (random(4, 4),), "norm"),
    ],
)
def test_what_has_no_form_is_refused_by_name(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], name: str
) -> None:
    graph = graph_of(function, *inputs)

    with pytest.raises(SpecError, match=rf"model\.batch_invariant.*some model.*{name}"):
        require_invariant(graph, "some model")


ENTRIES = (PromptEntry(2, 16, 4), DecodeEntry(4, 1, 16), SamplerEntry(2, 0.7, 0.9, 50, True))
PRODUCTS = ("linear", "matmul", "mm", "bmm", "scaled_dot_product_attention", "softmax", "mean")


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_traced_step_leaves_no_sum_to_a_library(entry: PromptEntry | DecodeEntry | SamplerEntry) -> None:
    model = reference("llama", num_hidden_layers=1)

    def products(*, is_invariant: bool) -> set[str]:
        spec = spec_of(model, dtype="bfloat16", batch_invariant=is_invariant)
        pieces = trace(entry, spec.model, spec.limits).pieces
        nodes = [node for piece in pieces for node in from_text(piece.text)[0].graph.nodes]
        names = {
            str(node.target).split(".")[1]
            for node in nodes
            if node.op == "call_function" and "." in str(node.target)
        }
        return names & set(PRODUCTS)

    assert products(is_invariant=True) == set()
    if not isinstance(entry, SamplerEntry):  # One operator, in either mode.
        assert products(is_invariant=False)
