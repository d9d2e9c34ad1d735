"""The choice of entries, in units: our template ``choose_entries.h``. Offline only."""

from __future__ import annotations

import math
from typing import Any

import torch

from aotgaudi.backends.inductor.template import called
from aotgaudi.graphs.choose_entries import CHOOSE_ENTRIES

_CALL = r"""
#pragma omp parallel if ({{rows}} > 1)
  {
    aotgaudi::Choice choice;
#pragma omp for schedule(dynamic)
    for (int64_t r = 0; r < {{rows}}; ++r)
      choice.choose(scores + r * {{size}}, seen + r * {{size}}, {{size}}, {{k}}, output + r * {{size}});
  }
"""


def _lower(scores: Any, seen: Any, k: int) -> Any:
    *others, size = map(int, scores.get_size())
    return called(
        "choose_entries",
        _CALL,
        {"scores": scores, "seen": seen},
        [*others, size],
        torch.bool,
        rows=math.prod(others),
        size=size,
        k=k,
    )


LOWERINGS = {CHOOSE_ENTRIES: _lower}
"""How inductor compiles the operator."""
