"""How modules become graphs: `torch.export`, as all of ours are exported. Offline only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn


def export(module: nn.Module, args: tuple[Any, ...], dynamic: Any = None) -> torch.export.ExportedProgram:
    """Exports `module` without gradients; `dynamic` says which sizes stay open, as torch takes it. Raises as torch does."""
    with torch.no_grad(), _without_stack_traces():
        return torch.export.export(module, args, dynamic_shapes=dynamic, strict=False)


@contextlib.contextmanager
def _without_stack_traces() -> Iterator[None]:
    """Until the end, torch does not note with each node which lines made it: a seventh of tracing, which nobody reads.

    A torch that has no such choice does not look at the name.
    """
    config: Any = fx.config
    before = getattr(config, "do_not_emit_stack_traces", False)
    config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before
