"""``hpu_backend``: from a graph to a callable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo import register_backend
from torch._dynamo.backends.common import aot_autograd

from habana_frameworks.bridge import flags
from habana_frameworks.bridge.faults import has_fault
from habana_frameworks.bridge.launch import HabanaGraphModule, recipe_cache
from habana_frameworks.torch.dynamo.compile_backend import config, passes


def compile_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compiles what AOT autograd gives: clusters become recipes at their first launch."""
    del inputs
    passes.reinplace_index_copy(module)
    eager = passes.place(module)
    passes.check_eager_fallbacks(eager)
    passes.partition(module, eager, lambda cluster: HabanaGraphModule(cluster, recipe_cache()))
    forward = module.forward

    def boxed(args: list[Any]) -> Any:
        found = forward(*args)
        args.clear()
        return found

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


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
        backend = aot_autograd(
            fw_compiler=compile_graph,
            inference_compiler=compile_graph,
            keep_inference_input_mutations=config.keep_input_mutations,
        )
        return backend(module, inputs)  # type: ignore[no-any-return]


register_backend(hpu_backend, name="hpu_backend")
if has_fault("static-traces"):
    torch._dynamo.config.automatic_dynamic_shapes = False
