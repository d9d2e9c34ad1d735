"""Sampling tokens, in units: our template ``sample_tokens.h``. Offline only."""

from __future__ import annotations

from typing import Any

import torch

from aotgaudi.backends.inductor.template import called
from aotgaudi.graphs.sample_tokens import SAMPLE_TOKENS

_CALL = r"""
#pragma omp parallel if ({{rows}} > 1)
  {
    aotgaudi::Row<{{dtype}}, {{size}}> row;
#pragma omp for schedule(dynamic)
    for (int64_t r = 0; r < {{rows}}; ++r) {
      aotgaudi::Filter filter;
{%- for name in filters %}
      filter.{{name}} = {{name}}[r];
{%- endfor %}
      output[r] = row.sample(logits + r * {{size}}, temperature[r], noise[r], filter);
    }
  }
"""


def _lower(logits: Any, temperature: Any, noise: Any, top_k: Any, top_p: Any, min_p: Any) -> Any:
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    rows, size = map(int, logits.get_size())
    return called(
        "sample_tokens",
        _CALL,
        {"logits": logits, "temperature": temperature, "noise": noise, **filters},
        [rows],
        torch.int64,
        rows=rows,
        size=size,
        filters=[name for name, value in filters.items() if value is not None],
    )


LOWERINGS = {SAMPLE_TOKENS: _lower}
"""How inductor compiles the operator."""
