"""Bound programs, which are programs with their tensors and units, and the table of them by entry.

A bound program is a flat list of calls over numbered slots. Weights, constants and caches stay in their slots. Step inputs
and intermediate results are put into theirs and cleared after each run. A device may run the whole list at once
(`aotgaudi.backends.base.Runtime.join`). Otherwise this module makes each call, which costs one list of references on top of
the unit. One thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Optional

import torch
from torch import Tensor

from aotgaudi.backends.base import Executable, HostPlacement, Placement, Plan, RunPlan, Step
from aotgaudi.entries import DecodeEntry, Entry, PromptEntry, SamplerEntry
from aotgaudi.errors import ManifestError
from aotgaudi.graphs.program import Program, TensorSpec
from aotgaudi.spec.sampler_signature import SamplerSignature

Join = Callable[[Plan], Optional[RunPlan]]
"""`aotgaudi.backends.base.Runtime.join`."""


BoundCall = tuple[Callable[[Sequence[Optional[Tensor]]], Sequence[Tensor]], tuple[int, ...], tuple[int, ...]]


class BoundProgram:
    """The program of an entry, ready to run."""

    def __init__(
        self,
        program: Program,
        units: Mapping[str, Executable],
        tensors: Mapping[str, Tensor],
        join: Join = lambda plan: None,
        put: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        """`tensors` maps ``weight:``, ``const:`` and ``kv:`` bindings to tensors. Raises ManifestError.

        `put` is `aotgaudi.backends.base.Placement.put`, for the step's tensors. A joined plan does not use it. By default,
        the plan runs call by call, and tensors stay where they are.
        """
        self.inputs: tuple[TensorSpec, ...] = program.inputs
        self._put = put
        self._slots: list[Optional[Tensor]] = []
        numbers: dict[str, int] = {}
        for spec in program.inputs:
            self._number(numbers, f"step:{spec.name}")
        steps: list[Step] = []
        for call in program.calls:
            arguments = tuple(self._resolve(numbers, binding, tensors) for binding in call.inputs)
            results = tuple(self._number(numbers, f"tmp:{name}") for name in call.outputs)
            steps.append(Step(units[call.unit], arguments, results))
        self._plan = Plan(
            slots=self._slots,
            num_inputs=len(program.inputs),
            steps=steps,
            outputs=tuple(self._resolve(numbers, f"tmp:{name}", {}) for name in program.outputs),
            transient=tuple(n for name, n in numbers.items() if name.startswith(("tmp:", "step:"))),
        )
        self._calls = [(step.unit.run, step.inputs, step.outputs) for step in steps]
        self._hidden = _hidden_slot(program, numbers)
        self.run: Callable[[Sequence[Tensor]], list[Tensor]] = join(self._plan) or self._run
        """Runs the program on the step's tensors, in the order of `inputs`, and returns its outputs."""

    def run_on_zeros(self) -> None:
        """Runs the program on zeros, for the side effects of a first run."""
        self.run([torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in self.inputs])

    @property
    def has_head(self) -> bool:
        """Whether the head (the last call) can run alone: it takes one result of the others and makes all outputs."""
        return self._hidden is not None

    def run_trunk(self, inputs: Sequence[Tensor]) -> Tensor:
        """Runs all calls except the head, and returns the hidden states of all tokens, which it takes. Needs `has_head`."""
        assert self._hidden is not None
        return self._run_calls(self._calls[:-1], dict(enumerate(inputs)), (self._hidden,))[0]

    def run_head(self, hidden: Tensor, inputs: Sequence[Tensor] = ()) -> Tensor:
        """Runs the head alone, with the step's tensors if it takes any, and returns its first output. Needs `has_head`."""
        assert self._hidden is not None
        values = {**dict(enumerate(inputs)), self._hidden: hidden}
        return self._run_calls(self._calls[-1:], values, self._plan.outputs)[0]

    def _run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        return self._run_calls(self._calls, dict(enumerate(inputs)), self._plan.outputs)

    def _run_calls(
        self, calls: Sequence[BoundCall], values: Mapping[int, Tensor], results: Sequence[int]
    ) -> list[Tensor]:
        slots = self._slots
        for slot, value in values.items():
            slots[slot] = self._put(value)
        for run, arguments, outputs in calls:
            for slot, value in zip(outputs, run([slots[i] for i in arguments]), strict=True):
                slots[slot] = value
        found = [slots[i] for i in results]
        for slot in self._plan.transient:
            slots[slot] = None
        return found  # type: ignore[return-value]

    def _number(self, numbers: dict[str, int], name: str) -> int:
        if name not in numbers:
            numbers[name] = len(self._slots)
            self._slots.append(None)
        return numbers[name]

    def _resolve(self, numbers: dict[str, int], binding: str, tensors: Mapping[str, Tensor]) -> int:
        if binding not in numbers:
            if binding not in tensors:
                raise ManifestError(f"a program binds {binding!r}, which it is not given")
            self._slots[self._number(numbers, binding)] = tensors[binding]
        return numbers[binding]


def _hidden_slot(program: Program, numbers: Mapping[str, int]) -> int | None:
    """Returns the slot of the one result that the last call takes from the others; None if it is not a head."""
    if len(program.calls) < 2:
        return None
    head = program.calls[-1]
    taken = {binding for binding in head.inputs if binding.startswith("tmp:")}
    if len(taken) != 1 or not set(program.outputs) <= set(head.outputs):
        return None
    return numbers[taken.pop()]


class ExecutableTable:
    """Maps warm entries to bound programs.

    The programs share the KV caches. `placement` says where the caches and all results are.
    """

    def __init__(self) -> None:
        self.caches: list[Tensor] = []
        self.placement: Placement = HostPlacement()
        self._programs: dict[Entry, BoundProgram] = {}
        self._samplers: dict[tuple[int, SamplerSignature], SamplerEntry] = {}
        self._serving: dict[tuple[int, SamplerSignature], SamplerEntry] = {}

    def __len__(self) -> int:
        return len(self._programs)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._programs

    def add(self, entry: Entry, program: BoundProgram) -> None:
        """Makes an entry warm."""
        self._programs[entry] = program

    def declare_samplers(self, entries: Iterable[Entry]) -> None:
        """Declares which sampler serves each batch size and signature: the first of `entries`, if several do."""
        for entry in entries:
            if isinstance(entry, SamplerEntry):
                self._samplers.setdefault((entry.batch_size, entry.signature), entry)

    def get(self, entry: Entry) -> BoundProgram | None:
        """Returns the program, or None if the entry is not warm."""
        return self._programs.get(entry)

    def programs(self) -> Iterator[tuple[Entry, BoundProgram]]:
        """Yields each program once, with one entry that it serves."""
        yield from {id(program): (entry, program) for entry, program in self._programs.items()}.values()

    @property
    def has_heads(self) -> bool:
        """Whether the heads of all warm steps can run alone (`BoundProgram.has_head`)."""
        kinds = (PromptEntry, DecodeEntry)
        return all(program.has_head for entry, program in self._programs.items() if isinstance(entry, kinds))

    def heads(self) -> Mapping[int, DecodeEntry]:
        """Returns a warm decode entry for each batch size, ascending. Its head takes that many tokens of any step."""
        warm = sorted(entry for entry in self._programs if isinstance(entry, DecodeEntry))
        found: dict[int, DecodeEntry] = {}
        for entry in warm:
            found.setdefault(entry.batch_size, entry)
        return found

    def sampler_sizes(self) -> tuple[int, ...]:
        """Returns the batch sizes above 0 that have a sampler, ascending."""
        return tuple(sorted({size for size, _ in self._samplers if size}))

    def sampler(self, batch_size: int, signature: SamplerSignature) -> SamplerEntry:
        """Returns the entry that serves a batch: one with its signature, else the cheapest with a larger signature.

        Raises ManifestError if there is none. Admission refuses the requests for which this would happen.
        """
        key = (batch_size, signature)
        if key not in self._serving:
            self._serving[key] = self._cheapest(batch_size, signature)
        return self._serving[key]

    def _cheapest(self, batch_size: int, signature: SamplerSignature) -> SamplerEntry:
        able = [
            (s, entry)
            for (size, s), entry in self._samplers.items()
            if size == batch_size and s.serves(signature)
        ]
        if not able:
            raise ManifestError(
                f"no sampler entry serves {str(signature)!r} for batch size {batch_size};"
                " add a setting to sampler.settings"
            )
        return min(able)[1]
