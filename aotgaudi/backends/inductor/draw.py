"""The choice of tokens in units: a template of ours, in which inductor has no part but to call it. Offline only."""

from __future__ import annotations

from importlib import resources
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP
from torch._inductor.utils import parallel_num_threads

from aotgaudi.graphs.draw import DRAW

_CALL = r"""
{{template.header().getvalue()}}
{{code}}
extern "C"
{{kernel.def_kernel(inputs=inputs, outputs={"output": output})}}
{
#pragma omp parallel if ({{rows}} > 1)
  {
    aotgaudi::Row<{{dtype}}, {{size}}> row;
#pragma omp for schedule(dynamic)
    for (int64_t r = 0; r < {{rows}}; ++r) {
      aotgaudi::Filter filter;
{%- for name in filters %}
      filter.{{name}} = {{name}}[r];
{%- endfor %}
      output[r] = row.draw(logits + r * {{size}}, temperature[r], noise[r], filter);
    }
  }
}
"""


class _Draw(CppTemplate):  # type: ignore[misc,unused-ignore]
    def __init__(self, inputs: dict[str, Any]) -> None:
        logits = inputs["logits"]
        layout = ir.FixedLayout(logits.get_device(), torch.int64, logits.get_size()[:1])
        super().__init__("aotgaudi_draw", list(inputs.values()), layout, parallel_num_threads())
        self._inputs = inputs

    def render(self, **kwargs: Any) -> str:
        """Returns the C++ of one call."""
        node, kernel = kwargs.get("template_buffer_node"), kwargs["kernel"]
        rows, size = map(int, self._inputs["logits"].get_size())
        source: str = self._template_from_string(_CALL).render(
            template=self,
            kernel=kernel,
            code=resources.files(__package__).joinpath("draw.h").read_text(encoding="utf-8"),
            inputs=self._inputs,
            output=self.output_node if node is None else node,
            dtype=DTYPE_TO_CPP[self._inputs["logits"].get_dtype()],
            rows=rows,
            size=size,
            filters=[name for name in ("top_k", "top_p", "min_p") if name in self._inputs],
        )
        return source


def _lower(logits: Any, temperature: Any, noise: Any, top_k: Any, top_p: Any, min_p: Any) -> Any:
    given = {
        "logits": logits,
        "temperature": temperature,
        "noise": noise,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
    }
    realize = ir.ExternKernel
    inputs = {
        name: realize.require_contiguous(realize.realize_input(value))
        for name, value in given.items()
        if value is not None
    }
    return _Draw(inputs).generate().output_node()


LOWERINGS = {DRAW: _lower}
"""What inductor makes of the operator."""
