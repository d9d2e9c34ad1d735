"""Bound programs: programs with the tensors and units that they run on, and the table of them by entry.

A bound program is a flat list of calls over numbered slots. Weights, constants and caches stay in their slots; step
inputs and intermediate results enter theirs and are cleared after each run. A device may run the whole list at once
(`aotgaudi.backends.base.Runtime.join`). Else this module makes each call, which costs one list of references on top of the
unit. One thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Optional

from torch import Tensor

from aotgaudi.backends.base import Executable, Plan, RunPlan, Step
from aotgaudi.entries import Entry, SamplerEntry
from aotgaudi.errors import ManifestError
from aotgaudi.graphs.program import Program, TensorSpec
from aotgaudi.spec.sampler_signature import SamplerSignature

Join = Callable[[Plan], Optional[RunPlan]]
"""`aotgaudi.backends.base.Runtime.join`."""


def call_by_call(plan: Plan) -> None:
    """Leaves a plan to be run call by call."""
    del plan


class BoundProgram:
    """One entry, ready to run."""

    def __init__(
        self,
        program: Program,
        units: Mapping[str, Executable],
        tensors: Mapping[str, Tensor],
        join: Join = call_by_call,
    ) -> None:
        """`tensors` maps ``weight:``, ``const:`` and ``kv:`` bindings to tensors. Raises ManifestError."""
        self.inputs: tuple[TensorSpec, ...] = program.inputs
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
        self.run: Callable[[Sequence[Tensor]], list[Tensor]] = join(self._plan) or self._run
        """Runs the program on the step's tensors, in the order of `inputs`. Returns its outputs."""

    def _run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        slots, plan = self._slots, self._plan
        slots[: plan.num_inputs] = inputs
        for run, arguments, results in self._calls:
            for slot, value in zip(results, run([slots[i] for i in arguments]), strict=True):
                slots[slot] = value
        outputs = [slots[i] for i in plan.outputs]
        for slot in plan.transient:
            slots[slot] = None
        return outputs  # type: ignore[return-value]

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


class ExecutableTable:
    """Entry -> bound program, for the entries that are warm. `add` may grow it between steps.

    `caches` are the KV caches that the programs share, ``[2, num_blocks + 1, K, B, D]``, one a layer.
    """

    def __init__(self) -> None:
        self.caches: list[Tensor] = []
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

    def declare_sampler(self, entry: SamplerEntry) -> None:
        """Declares that `entry` serves its batch size and signature. If there are several, the first one is used."""
        self._samplers.setdefault((entry.batch_size, entry.signature), entry)
        self._serving.clear()

    def get(self, entry: Entry) -> BoundProgram | None:
        """Returns the program, or None if the entry is not warm."""
        return self._programs.get(entry)

    def sampler_sizes(self) -> tuple[int, ...]:
        """Returns the batch sizes that have a sampler, ascending, without 0."""
        return tuple(sorted({size for size, _ in self._samplers if size}))

    @property
    def num_samplers_used(self) -> int:
        """How many sampler entries steps have asked for. Any thread."""
        found = list(self._serving.values())  # A copy made in one step: other threads may add entries.
        return len(set(found))

    def sampler(self, batch_size: int, signature: SamplerSignature) -> SamplerEntry:
        """Returns the entry that serves a batch: one with its signature, else the cheapest with a larger one.

        Raises ManifestError if no entry does; admission refuses the requests that would lead there.
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
