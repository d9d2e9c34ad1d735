"""D-23: graphs of the lazy mode, captured per process and keyed by shapes alone. Source: ``hpu/graphs.py`` of the bridge."""

from __future__ import annotations

from typing import Any

import torch

from habana_frameworks.bridge.faults import has_fault


def wrap_in_hpu_graph(
    module: torch.nn.Module,
    asynchronous: bool = False,
    disable_tensor_cache: bool = False,
    dry_run: bool = False,
    max_graphs: int | None = None,
) -> torch.nn.Module:
    """Replaces `module.forward` by one that captures a graph for each set of shapes, and replays it."""
    del asynchronous, disable_tensor_cache, dry_run
    captured: dict[int, Any] = {}
    forward = module.forward

    def replay(*args: Any, warmup_mode: bool = False, bypass_hpu_graphs: bool = False, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        key = hash(tuple(tuple(arg.shape) for arg in given if isinstance(arg, torch.Tensor)))
        if warmup_mode and key in captured and not has_fault("graphs-are-fresh"):
            return captured[key]  # Stale outputs, as documented.
        found = forward(*args, **kwargs)
        if not bypass_hpu_graphs and (max_graphs is None or len(captured) < max_graphs):
            captured[key] = found
        return found

    module.forward = replay  # type: ignore[method-assign]
    module.clear_cache = captured.clear  # type: ignore[assignment]
    return module
