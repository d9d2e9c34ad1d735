"""Private helpers of the bridge."""

import torch

from habana_frameworks.bridge.bridge import recipe_cache
from habana_frameworks.bridge.faults import has_fault

if not has_fault("no-flush"):

    def _flush_disk_cache() -> None:
        """D-11: blocks until every recipe is on disk."""
        recipe_cache().disk.flush()


def _get_jit_cache_size() -> int:
    """Returns how many single operators were compiled (D-15)."""
    return int(torch.ops.hpu_double.eager_cache_size())
