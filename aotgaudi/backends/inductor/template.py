"""Our C++ in units, which inductor only calls. Offline only.

A template is a header in this folder and the body of one call, in which inputs have their names. The call may also use
``dtype`` (the first input's) and the other values given to `called`. Inductor fuses nothing into it (``epilogue_fusion`` in
compiler.py), because a template would have to write the fused code itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import torch
import torch._inductor.lowering  # Before cpp_template: the two import each other.
from torch._inductor import ir
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP
from torch._inductor.utils import parallel_num_threads

_FRAME = r"""
{{template.header().getvalue()}}
{{code}}
extern "C"
{{kernel.def_kernel(inputs=inputs, outputs={"output": output})}}
{
%s}
"""


class _Template(CppTemplate):  # type: ignore[misc,unused-ignore]
    def __init__(
        self,
        name: str,
        body: str,
        inputs: dict[str, Any],
        layout: ir.FixedLayout,
        values: Mapping[str, object],
    ) -> None:
        super().__init__(f"aotgaudi_{name}", list(inputs.values()), layout, parallel_num_threads())
        self._header, self._body, self._inputs, self._values = f"{name}.h", body, inputs, values

    def render(self, **kwargs: Any) -> str:
        """Returns the C++ of one call."""
        node, inputs = kwargs.get("template_buffer_node"), self._inputs
        given = {
            "code": resources.files(__package__).joinpath(self._header).read_text(encoding="utf-8"),
            "dtype": DTYPE_TO_CPP[next(iter(inputs.values())).get_dtype()],
            "inputs": inputs,
            "kernel": kwargs["kernel"],
            "output": self.output_node if node is None else node,
            "template": self,
        }
        text: str = self._template_from_string(_FRAME % self._body).render(
            {**inputs, **self._values, **given}
        )
        return text


def called(
    name: str,
    body: str,
    inputs: Mapping[str, Any],
    shape: Sequence[Any],
    dtype: torch.dtype,
    **values: object,
) -> Any:
    """Returns the output of one call of the template ``<name>.h``.

    Args:
        name: Of the header.
        body: The call, a Jinja template that writes to ``output``.
        inputs: Inductor's value of each input, by its name in the call; None for an absent one.
        shape: Of the output, which is contiguous.
        dtype: Of the output.
        **values: Other values that `body` uses.
    """
    realize = ir.ExternKernel
    found = {
        key: realize.require_contiguous(realize.realize_input(value))
        for key, value in inputs.items()
        if value is not None
    }
    layout = ir.FixedLayout(next(iter(found.values())).get_device_or_error(), dtype, list(shape))
    return _Template(name, body, found, layout, values).generate().output_node()
