"""Private helpers of the bridge. Source: ``utils/debug/__init__.py``."""

import torch

from habana_frameworks.bridge.faults import has_fault
from habana_frameworks.bridge.launch import recipe_cache


def __getattr__(name: str) -> object:
    """D-11: ``_flush_disk_cache``, where the bridge has it."""
    if name == "_flush_disk_cache" and not has_fault("no-flush"):
        return _flush
    raise AttributeError(name)


def _flush() -> None:
    """Blocks until every recipe is on disk. Does nothing in a process without a device (``HPUDevice.cpp:195``)."""
    if torch.hpu.is_initialized():
        recipe_cache().disk.flush()


def _get_jit_cache_size() -> int:
    """Returns how many single operators were compiled (D-15)."""
    return int(torch.ops.hpu_double.eager_cache_size())
