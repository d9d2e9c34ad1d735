"""``hpu_backend``."""

from __future__ import annotations

import inspect
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
    """Compiles a graph; under ``torch.compile``, or called directly without gradients (K-06)."""
    if flags.is_on("PT_HPU_DISALLOW_TORCH_COMPILE"):
        raise RuntimeError("Use of torch.compile is prohibited by PT_HPU_DISALLOW_TORCH_COMPILE.")
    if has_fault("no-direct") and not any("torch/_dynamo" in frame.filename for frame in inspect.stack()):
        raise RuntimeError("hpu_backend needs a graph of Dynamo's")
    with config.patched(options or {}):
        return compile_with_aot(module, inputs)


register_backend(hpu_backend, name="hpu_backend")
