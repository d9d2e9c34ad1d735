"""Compares a compiled graph with the same graph in eager, on example inputs. Offline only.

Both compute the same sums and round at different places, so their results differ in the last bits. Where a graph
*chooses* (the experts of a token, the likeliest token, where a sum passes a limit), the last bits may decide: if two
experts' scores tie in the dtype, either choice is right, and the two results have nothing in common.

So results are compared row by row. A row that differs from eager is right only if eager gives the same when the choices
that the dtype leaves undecided go another way. A choice is undecided if the scores on its two sides differ by less than
rounding may change them. Nothing is left out: a graph that is wrong in one row, or in one expert, agrees with no way of
choosing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from aotgaudi.backends.base import Executable
from aotgaudi.backends.inductor.example_inputs import has_open_tokens, sample_inputs
from aotgaudi.errors import CompileError
from aotgaudi.graphs.canonical import InputSpec
from aotgaudi.graphs.choose_entries import CHOOSE_ENTRIES, entries_by_rank
from aotgaudi.graphs.quantized_linear import quantization_called
from aotgaudi.graphs.sample_tokens import SAMPLE_TOKENS

TOLERANCES = {torch.float32: 2e-4, torch.float64: 1e-6, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""Largest error allowed in a row, relative to the row's largest value (at least 1)."""

_NUM_SAMPLES = 3
"""Samples of inputs for a graph that chooses, since only what is chosen is checked, and for one with open tokens."""

_WINDOW = 2
"""How many ranks on each side of the last chosen one may change sides."""

_SHIFTS = (0.0, 1e-7, -1e-7, 1e-6, -1e-6, 1e-5, -1e-5)
"""Relative changes to one side of a comparison, which stand for sums of float32 in another order."""

_TOP_K, _ARGMAX = torch.ops.aten.topk.default, torch.ops.aten.argmax.default
_COMPARISONS = frozenset(
    overload
    for operator in (torch.ops.aten.ge, torch.ops.aten.gt, torch.ops.aten.le, torch.ops.aten.lt)
    for overload in (operator.Tensor, operator.Scalar)
)


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to decide undecided choices; with zeros, as eager decides.

    `swap` numbers the ways in which ranks next to the last one of a top-k change sides (`_sides`). `shift` is the relative
    change of one side of every comparison.
    """

    swap: int = 0
    shift: float = 0.0


def check(
    graph: fx.GraphModule, specs: list[InputSpec], executable: Executable, label: str
) -> tuple[float, float]:
    """Returns the largest absolute error over outputs and written inputs, and the largest that was allowed.

    Raises CompileError, naming `label`, unless every row of every sample agrees.
    """
    ways, extra = _ways(graph), _extra_tolerance(graph)
    error = allowed = 0.0
    for sample in range(_NUM_SAMPLES if len(ways) > 1 or has_open_tokens(specs) else 1):
        inputs = sample_inputs(
            graph, specs, sample + 1
        )  # Not what was compiled with: another number of KV blocks, or of tokens.
        compiled_inputs = [value.clone() for value in inputs]
        rows = _Rows([*executable.run(compiled_inputs), *compiled_inputs], extra)
        for way in ways:
            rows.compare(_eager(graph, inputs, way))
            if rows.all_agree:
                break
        else:
            raise CompileError(f"{label}: the compiled graph differs from eager by {rows.difference()}")
        error, allowed = max(error, rows.error), max(allowed, rows.allowed)
    return error, allowed


class _Rows:
    """The rows of one run of the compiled graph, and which of them agree with eager so far.

    A row has one index in all dimensions but the last. Tensors with the same number of rows agree in a row together or not
    at all.
    """

    def __init__(self, actual: Sequence[Tensor], extra_tolerance: float) -> None:
        self._actual, self._extra_tolerance = actual, extra_tolerance
        self._agree: dict[int, Tensor] = {}
        self._first: tuple[float, float] | None = None
        self.error = self.allowed = 0.0

    @property
    def all_agree(self) -> bool:
        return all(bool(agree.all()) for agree in self._agree.values())

    def difference(self) -> str:
        """Returns by how much the worst row differs from eager, and how many rows agree with no way of choosing, as text."""
        error, allowed = self._first or (0.0, 0.0)
        lacking = [(int((~agree).sum()), agree.numel()) for agree in self._agree.values() if not agree.all()]
        counts = ", ".join(f"{wrong} of {number}" for wrong, number in lacking)
        return f"{error:.3g}, allowed {allowed:.3g}, in {counts} rows"

    def compare(self, expected: Sequence[Tensor]) -> None:
        """Compares with the results of eager for one way of choosing."""
        now: dict[int, Tensor] = {}
        errors: list[tuple[Tensor, Tensor]] = []
        for got, want in zip(self._actual, expected, strict=True):
            error, allowed = _row_errors(got, want, self._extra_tolerance)
            number = error.numel()
            now[number] = now.get(number, torch.ones(number, dtype=torch.bool)) & (error <= allowed)
            errors.append((error, allowed))
        if self._first is None:
            self._first = max((_worst_row(*rows) for rows in errors), key=lambda row: row[0] - row[1])
        for number, agree in now.items():
            agreed = self._agree.get(number, torch.zeros_like(agree))
            self._agree[number] = agreed | agree
        for error, allowed in errors:
            agree = now[error.numel()]
            self.error = max(self.error, _worst(error[agree]))
            self.allowed = max(self.allowed, _worst(allowed[agree]))


def _row_errors(got: Tensor, want: Tensor, extra_tolerance: float) -> tuple[Tensor, Tensor]:
    """Returns each row's error and the allowed error. The error is infinite if shapes, dtypes or NaNs differ."""
    rows = want.reshape(-1, want.shape[-1] if want.dim() > 1 else 1)
    if got.shape != want.shape or got.dtype != want.dtype:
        return torch.full((len(rows),), torch.inf), torch.zeros(len(rows))
    if not want.numel() or torch.equal(got, want):
        return torch.zeros(len(rows)), torch.zeros(len(rows))
    # float32 holds every number of 16 bits, and is half as much to move as float64.
    wide = torch.float32 if want.dtype.itemsize == 2 else torch.float64
    rows = rows.to(wide)
    error = (got.reshape(rows.shape).to(wide) - rows).abs().amax(-1).nan_to_num(nan=torch.inf)
    tolerance = TOLERANCES.get(want.dtype, 0.0)
    if want.is_floating_point():
        tolerance += extra_tolerance
    return error, tolerance * rows.abs().amax(-1).clamp_min(1.0)


def _worst_row(error: Tensor, allowed: Tensor) -> tuple[float, float]:
    """Returns the error and the allowed error of the row that exceeds most."""
    if not error.numel():
        return 0.0, 0.0
    row = int((error - allowed).argmax())
    return error[row].item(), allowed[row].item()


def _worst(values: Tensor) -> float:
    return values.max().item() if values.numel() else 0.0


def _extra_tolerance(graph: fx.GraphModule) -> float:
    """Returns what quantized linear layers may add to the errors of a graph."""
    called = map(quantization_called, graph.graph.nodes)
    return max((quantization.tolerance for quantization in called if quantization), default=0.0)


def _ways(graph: fx.GraphModule) -> list[_Way]:
    """Returns the ways to decide what may be undecided in `graph`, eager's first."""
    targets = {node.target for node in graph.graph.nodes}
    swaps = (
        range(len(_sides(_WINDOW, 2 * _WINDOW))) if targets & {_TOP_K, _ARGMAX, CHOOSE_ENTRIES} else range(1)
    )
    shifts = _SHIFTS if targets & {SAMPLE_TOKENS, *_COMPARISONS} else _SHIFTS[:1]
    return [_Way(swap, shift) for swap, shift in itertools.product(swaps, shifts)]


def _sides(k: int, n: int) -> list[tuple[int, ...]]:
    """Returns the choices of `k` of `n` ranks that differ only near the last chosen rank; the first `k` ranks come first."""
    certain = max(0, k - _WINDOW)
    near = range(certain, min(n, k + _WINDOW))
    return [(*range(certain), *chosen) for chosen in itertools.combinations(near, k - certain)]


def _shifted(arguments: Sequence[Any], shift: float) -> tuple[Any, ...]:
    """Returns the arguments of a sampling operator with slightly shifted noise and filters."""
    logits, temperature, noise, top_k, *shares = arguments
    shifted = (None if share is None else share * (1 + shift) for share in shares)
    return logits, temperature, (noise * (1 + shift)).clamp_max(1 - 2**-53), top_k, *shifted


def _eager(graph: fx.GraphModule, inputs: Sequence[Tensor], way: _Way) -> list[Tensor]:
    """Runs `graph` in eager. Returns its outputs, then its inputs as they are afterwards."""
    own = [value.clone() for value in inputs]
    return [*_Eager(graph, way).run(*own), *own]


class _Eager(fx.Interpreter):
    """Runs a graph in eager, with undecided choices decided as `way` says."""

    def __init__(self, graph: fx.GraphModule, way: _Way) -> None:
        super().__init__(graph)
        self._way = way
        self._rounding = 0.0

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Takes an input. Scores are taken to be as coarse as the coarsest input."""
        value = super().placeholder(target, args, kwargs)
        self._rounding = max(self._rounding, TOLERANCES.get(value.dtype, 0.0))
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Calls an operator, whose choices may go another way."""
        if target in _COMPARISONS and self._way.shift:
            one, other = args
            args = (one, other + abs(other) * self._way.shift)
        if target is SAMPLE_TOKENS and self._way.shift:
            args = _shifted(args, self._way.shift)
        result = super().call_function(target, args, kwargs)
        if target is _TOP_K and args[2:] in ((), (-1,)):
            indices = self._otherwise(args[0], args[1], _ranked(args[0], args[1], result[1]))
            return args[0].gather(-1, indices), indices
        if target is _ARGMAX and args[1:] == (-1,):
            return self._otherwise(args[0], 1, _ranked(args[0], 1, result[..., None]))[..., 0]
        if target is CHOOSE_ENTRIES:
            scores, seen, k = args
            some = self._otherwise(torch.where(seen, scores, -torch.inf), k, entries_by_rank(scores, seen))
            return torch.zeros_like(seen).scatter(-1, some, value=True) & seen
        return result

    def _otherwise(self, scores: Tensor, k: int, order: Tensor) -> Tensor:
        """Returns the first `k` of each row's `order` (the largest first), or others where the choice is undecided."""
        sides, indices = _sides(k, scores.shape[-1]), order[..., :k]
        if not 0 < self._way.swap < len(sides):
            return indices
        chosen = sides[self._way.swap]
        left_out = min(set(range(k)) - set(chosen))
        scores = scores.float()
        ranked = scores.gather(-1, order)
        lost = ranked[..., left_out] - ranked[..., chosen[-1]]
        largest = scores.abs().nan_to_num(posinf=0.0).amax(-1)
        is_undecided = lost <= self._rounding * largest
        return torch.where(is_undecided[..., None], order[..., list(chosen)], indices)


def _ranked(scores: Tensor, k: int, indices: Tensor) -> Tensor:
    """Returns the order of each row's scores from the largest on, which begins with the `k` that were chosen."""
    others = scores.float().scatter(-1, indices, torch.inf).argsort(dim=-1, descending=True)[..., k:]
    return torch.cat([indices, others], dim=-1)
