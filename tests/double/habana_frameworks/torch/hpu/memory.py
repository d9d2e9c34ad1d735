"""D-22: memory of the device. Source: ``hpu/memory.py`` of the bridge."""

import torch

from habana_frameworks.bridge.faults import has_fault

_TAGS = ("Limit", "InUse", "MaxInUse", "NumAllocs", "NumFrees")


def memory_stats(device: object = None) -> dict[str, int]:
    """Returns the figures by their names."""
    del device
    stats = dict(zip(_TAGS, torch.ops.hpu_double.memory(), strict=True))
    return {**stats, "ActiveAllocs": stats["NumAllocs"] - stats["NumFrees"]}


def mem_get_info(device: object = None) -> tuple[int, int]:
    """Returns free and total bytes."""
    stats = memory_stats(device)
    in_use = 0 if has_fault("figures-stand-still") else stats["InUse"]
    return stats["Limit"] - in_use, stats["Limit"]
