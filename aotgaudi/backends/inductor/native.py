"""Runs units and programs through the C interface of compiled units (torch/csrc/inductor/aoti_runtime/interface.h).

Torch's class for loaded units (`AOTIModelContainerRunnerCpu`) holds the interpreter's lock while a unit runs. Other threads
would get the lock only between two units, and the engine would then wait for them. Here a program is one foreign call that
releases the lock while it lasts: a loop over its units (``program.h``, which every unit contains).
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch._C import _aoti

from aotgaudi.backends.base import Plan

_PREFIX = "AOTInductorModelContainer"
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = (
    ctypes.py_object,
    (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
)


class _Call(ctypes.Structure):
    """``AotgaudiCall`` in program.h."""

    _fields_ = (
        ("run", ctypes.c_void_p),
        ("container", ctypes.c_void_p),
        ("inputs", ctypes.c_void_p),
        ("outputs", ctypes.c_void_p),
        ("num_inputs", ctypes.c_int64),
        ("num_outputs", ctypes.c_int64),
    )


class NativeUnit:
    """A unit's library and its ``AOTInductorModelContainer``. Freed with the last reference."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises RuntimeError if the unit cannot be set up."""
        self.library = library
        container = ctypes.c_void_p()
        create = library[f"{_PREFIX}CreateWithDevice"]
        if create(ctypes.byref(container), ctypes.c_size_t(1), b"cpu", None) != 0:
            raise RuntimeError("a unit cannot be set up")
        self.container = container
        self.entry = ctypes.cast(library[f"{_PREFIX}Run"], ctypes.c_void_p)
        self.num_inputs, self.num_outputs = self._count("NumInputs"), self._count("NumOutputs")
        weakref.finalize(self, library[f"{_PREFIX}Delete"], container).atexit = False

    def _count(self, what: str) -> int:
        number = ctypes.c_size_t()
        self.library[f"{_PREFIX}Get{what}"](self.container, ctypes.byref(number))
        return number.value


def load_unit(path: Path) -> NativeUnit | None:
    """Loads a unit; None for one without ``aotgaudi_run``. Raises OSError or RuntimeError if it cannot be loaded."""
    library = ctypes.CDLL(str(path))
    return NativeUnit(library) if hasattr(library, "aotgaudi_run") else None


@dataclass(frozen=True, slots=True)
class Call:
    """One call: a unit, and the numbers of the slots of its inputs and outputs."""

    unit: NativeUnit
    inputs: Sequence[int]
    outputs: Sequence[int]


class NativeProgram:
    """Runs a plan with one foreign call. One thread at a time; other threads go on meanwhile."""

    def __init__(self, plan: Plan, calls: Sequence[Call]) -> None:
        """`calls` are those of the plan, at least one."""
        self._calls = calls  # Keeps alive what `table` points to.
        self._numbers = [(_numbers(call.inputs), _numbers(call.outputs)) for call in calls]
        table = (_Call * len(calls))()
        for row, call, (inputs, outputs) in zip(table, calls, self._numbers, strict=True):
            row.run, row.container = call.unit.entry, call.unit.container
            row.inputs, row.outputs = (ctypes.cast(numbers, ctypes.c_void_p) for numbers in (inputs, outputs))
            row.num_inputs, row.num_outputs = len(call.inputs), len(call.outputs)
        self._slots = (ctypes.c_void_p * max(len(plan.slots), 1))()
        for number, tensor in enumerate(plan.slots):
            if tensor is not None:
                self._slots[number] = _handle(tensor)
        self._results = (ctypes.c_void_p * max(len(plan.outputs), 1))()
        transient, outputs = _numbers(plan.transient), _numbers(plan.outputs)
        library = calls[0].unit.library
        self._run_all = library.aotgaudi_run
        self._arguments = (
            table,
            ctypes.c_int64(len(calls)),
            self._slots,
            transient,
            ctypes.c_int64(len(plan.transient)),
            outputs,
            ctypes.c_int64(len(plan.outputs)),
            self._results,
        )
        self._num_outputs = len(plan.outputs)
        weakref.finalize(self, _release, self._slots).atexit = False

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Runs the plan on its inputs. Raises RuntimeError if a unit fails; the reason is on standard error."""
        slots, results = self._slots, self._results
        for number, tensor in enumerate(inputs):
            slots[number] = _handle(tensor)
        if self._run_all(*self._arguments) != 0:
            raise RuntimeError("a unit has failed: see standard error")
        return _taken(results[: self._num_outputs])


def run_alone(unit: NativeUnit) -> Callable[[Sequence[Any]], list[Any]]:
    """Returns a function that runs one unit on tensors in its order and returns its outputs."""
    given, found = range(unit.num_inputs), range(unit.num_inputs, unit.num_inputs + unit.num_outputs)
    plan = Plan([None] * found.stop, unit.num_inputs, (), found, range(found.stop))
    return NativeProgram(plan, [Call(unit, given, found)]).run


def _numbers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int32]:
    return (ctypes.c_int32 * max(len(values), 1))(*values)


def _handle(tensor: Tensor) -> int:
    """Returns a new handle of a tensor. The caller must free it."""
    pointer: int = _get_pointer(_aoti.unsafe_alloc_void_ptr_from_tensor(tensor), None)
    return pointer


def _taken(handles: Iterable[int | None]) -> list[Tensor]:
    """Takes ownership of handles and returns their tensors, without None. Torch's function for one handle leaks it."""
    capsules = [_new_capsule(handle, None, None) for handle in handles if handle is not None]
    return _aoti.alloc_tensors_by_stealing_from_void_ptrs(capsules)


def _release(slots: ctypes.Array[ctypes.c_void_p]) -> None:
    _taken(slots)
