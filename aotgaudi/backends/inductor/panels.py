"""Linear layers over weights in panels, in units: a template of ours, ``panels.h``. Offline only."""

from __future__ import annotations

from importlib import resources
from math import prod
from typing import Any, Optional

import torch
import torch._inductor.lowering  # Before cpp_template, with which it is in a circle.
from torch import Tensor
from torch._inductor import ir
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.utils import parallel_num_threads

from aotgaudi.backends.inductor.paged_decode import unfused

_CALL = r"""
{{template.header().getvalue()}}
{{code}}
extern "C"
{{kernel.def_kernel(inputs=inputs, outputs={"output": output})}}
{
  aotgaudi::Panels<{{num_rows}}, {{num_out}}, {{num_in}}>::run(x, weight, {{bias}}, output);
}
"""


@torch.library.custom_op("aotgaudi::linear_in_panels", mutates_args=())
def linear_in_panels(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
    """What a product over `PANELS` computes, of weights [out, in] as they are stored: to be compiled, not to be run."""
    return torch.nn.functional.linear(x, weight, bias)


@linear_in_panels.register_fake
def _(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
    del bias
    return x.new_empty(*x.shape[:-1], weight.shape[0])


IN_PANELS = torch.ops.aotgaudi.linear_in_panels.default


class _Panels(CppTemplate):  # type: ignore[misc,unused-ignore]
    def __init__(self, inputs: dict[str, Any]) -> None:
        x, weight = inputs["x"], inputs["weight"]
        num_out = int(weight.get_size()[0])
        layout = ir.FixedLayout(x.get_device(), x.get_dtype(), [*x.get_size()[:-1], num_out])
        super().__init__("aotgaudi_panels", list(inputs.values()), layout, parallel_num_threads())
        self._inputs = inputs

    def render(self, **kwargs: Any) -> str:
        """Returns the C++ of one call."""
        node, inputs = kwargs.get("template_buffer_node"), self._inputs
        *rows, num_in = map(int, inputs["x"].get_size())
        source: str = self._template_from_string(_CALL).render(
            template=self,
            kernel=kwargs["kernel"],
            code=resources.files(__package__).joinpath("panels.h").read_text(encoding="utf-8"),
            inputs=inputs,
            output=self.output_node if node is None else node,
            num_rows=prod(rows),
            num_out=int(inputs["weight"].get_size()[0]),
            num_in=num_in,
            bias="bias" if "bias" in inputs else "nullptr",
        )
        return source


def _lower(x: Any, weight: Any, bias: Any) -> Any:
    given = {"x": x, "weight": weight, "bias": bias}
    realize = ir.ExternKernel
    inputs = {
        name: realize.require_contiguous(realize.realize_input(value))
        for name, value in given.items()
        if value is not None
    }
    return unfused(_Panels(inputs).generate().output_node())


LOWERINGS = {IN_PANELS: _lower}
"""What inductor makes of the operator."""
