"""Decode attention in units: a template of ours, in which inductor has no part but to call it. Offline only.

What inductor makes of the operator's definition copies every block of every row in each step. The code in
``paged_decode.h`` reads the cache where it lies, and leaves out what nobody sees: its cost follows the tokens in use, not
the size of the bucket.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from torch._inductor import ir
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP
from torch._inductor.utils import parallel_num_threads
from torch._inductor.virtualized import V

from aotgaudi.graphs.paged_decode import PAGED_DECODE

_CALL = r"""
{{template.header().getvalue()}}
{{code}}
extern "C"
{{kernel.def_kernel(inputs=inputs, outputs={"output": output})}}
{
  using Decode = aotgaudi::PagedDecode<{{dtype}}, {{head_size}}, {{group}}, {{block_size}}>;
  const int64_t values = {{kernel.stride(cache, 0)}}, block = {{kernel.stride(cache, 1)}};
#pragma omp parallel for schedule(dynamic) if ({{rows * kv_heads}} > 1)
  for (int64_t task = 0; task < {{rows * kv_heads}}; ++task) {
    const int64_t row = task / {{kv_heads}}, head = task % {{kv_heads}};
    const int64_t at = task * {{group * head_size}};
    const {{dtype}}* keys = cache + head * {{block_size * head_size}};
    Decode::attend(query + at, keys, keys + values, block, block_list, block_rows, seen, {{num_blocks}}, row,
                   {{"sinks + head * %d" % group if has_sinks else "nullptr"}}, {{scaling}}f, {{softcap}}f, output + at);
  }
}
"""


class _PagedDecode(CppTemplate):  # type: ignore[misc,unused-ignore]
    def __init__(self, inputs: dict[str, Any], scaling: float, softcap: float) -> None:
        query = inputs["query"]
        layout = ir.FixedLayout(query.get_device(), query.get_dtype(), query.get_size())
        super().__init__("aotgaudi_paged_decode", list(inputs.values()), layout, parallel_num_threads())
        self._inputs, self._scaling, self._softcap = inputs, scaling, softcap

    def render(self, **kwargs: Any) -> str:
        """Returns the C++ of one call."""
        node, kernel = kwargs.get("template_buffer_node"), kwargs["kernel"]
        inputs = self._inputs
        rows, heads, head_size = map(int, inputs["query"].get_size())
        _, _, kv_heads, block_size, _ = inputs["cache"].get_size()
        source: str = self._template_from_string(_CALL).render(
            template=self,
            kernel=kernel,
            code=resources.files(__package__).joinpath("paged_decode.h").read_text(encoding="utf-8"),
            inputs=inputs,
            cache=inputs["cache"],
            output=self.output_node if node is None else node,
            dtype=DTYPE_TO_CPP[inputs["query"].get_dtype()],
            rows=rows,
            kv_heads=int(kv_heads),
            group=heads // int(kv_heads),
            head_size=head_size,
            block_size=int(block_size),
            num_blocks=int(inputs["block_list"].get_size()[0]),
            has_sinks="sinks" in inputs,
            scaling=repr(float(self._scaling)),
            softcap=repr(float(self._softcap)),
        )
        return source


def unfused(result: Any) -> Any:
    """Returns the output of a template, to which inductor may not add what comes after it: ours have no place for that."""
    V.graph.no_fuse_buffer_names.add(result.get_name())
    return result


def _lower(
    query: Any,
    cache: Any,
    block_list: Any,
    block_rows: Any,
    seen: Any,
    sinks: Any,
    scaling: float,
    softcap: float,
) -> Any:
    given = {
        "query": query,
        "cache": cache,
        "block_list": block_list,
        "block_rows": block_rows,
        "seen": seen,
        "sinks": sinks,
    }
    realize = ir.ExternKernel
    inputs = {
        name: realize.require_contiguous(realize.realize_input(value))
        for name, value in given.items()
        if value is not None
    }
    return unfused(_PagedDecode(inputs, scaling, softcap).generate().output_node())


LOWERINGS = {PAGED_DECODE: _lower}
"""What inductor makes of the operator."""
