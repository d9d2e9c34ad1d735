"""Exports modules to graphs with `torch.export`, all in the same way. Offline only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn


def export(module: nn.Module, args: tuple[Any, ...], dynamic: Any = None) -> torch.export.ExportedProgram:
    """Exports `module` without gradients. `dynamic` describes the open sizes, as in torch. Raises torch's errors."""
    with torch.no_grad(), _without_stack_traces():
        return torch.export.export(module, args, dynamic_shapes=dynamic, strict=False)


@contextlib.contextmanager
def _without_stack_traces() -> Iterator[None]:
    """While active, torch does not record a stack trace for each node: a seventh of tracing time, for nothing.

    An older torch without this setting ignores it.
    """
    config: Any = fx.config
    before = getattr(config, "do_not_emit_stack_traces", False)
    config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before
