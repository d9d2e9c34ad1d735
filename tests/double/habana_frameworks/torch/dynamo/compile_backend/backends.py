"""``hpu_backend``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo import register_backend

from habana_frameworks.bridge import flags
from habana_frameworks.bridge.faults import has_fault
from habana_frameworks.torch.dynamo.compile_backend import config
from habana_frameworks.torch.dynamo.compile_backend.compilers import compile_with_aot


def hpu_backend(
    module: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    options: Mapping[str, object] | None = None,
    **_: object,
) -> Callable[..., Any]:
    """Compiles a graph under ``torch.compile``."""
    if flags.is_on("PT_HPU_DISALLOW_TORCH_COMPILE") and not has_fault("no-disallow"):
        raise RuntimeError("Use of torch.compile is prohibited by PT_HPU_DISALLOW_TORCH_COMPILE.")
    with config.patched(options or {}):
        return compile_with_aot(module, inputs)


register_backend(hpu_backend, name="hpu_backend")
if has_fault("static-traces"):
    torch._dynamo.config.automatic_dynamic_shapes = False
