"""What a compiled unit says of itself, read from its bytes without loading it. Imports no torch.

Loading a shared object runs its constructors, so `aotgaudi verify` must not. But inductor's constructor of a model stores
the name of each input and output (torch/_inductor/codegen/cpp_wrapper_cpu.py, ``inputs_info_`` and ``outputs_info_``), and
these are text in the object: ``arg0_1``, ``arg1_1``, ..., ``output0``, ...
"""

from __future__ import annotations

ARTIFACT_FILE = "unit.so"
LAYOUTS = frozenset({"onednn", "panels"})
"""The layouts of weights that `runtime.py` prepares."""


def arity_of(library: bytes, /) -> tuple[int, int] | None:
    """Returns how many inputs and outputs a unit has; None if the object does not say."""
    num_inputs = _num_names(library, b"\0arg%d_1\0")
    return (num_inputs, _num_names(library, b"\0output%d\0")) if num_inputs else None


def _num_names(library: bytes, form: bytes) -> int:
    """Returns how many of the texts ``form % 0``, ``form % 1``, ... there are. They lie one after another."""
    at = 0
    number = 0
    while (at := _find(library, form % number, at)) >= 0:
        number += 1
    return number


def _find(library: bytes, name: bytes, start: int) -> int:
    found = library.find(name, start)
    return found if found >= 0 else library.find(name)
