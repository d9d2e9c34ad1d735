"""D-22: memory of the device."""

import torch

_TAGS = ("Limit", "InUse", "MaxInUse", "NumAllocs", "NumFrees")


def memory_stats(device: object = None) -> dict[str, int]:
    """Returns the figures by their names."""
    del device
    stats = dict(zip(_TAGS, torch.ops.hpu_double.memory(), strict=True))
    return {**stats, "ActiveAllocs": stats["NumAllocs"] - stats["NumFrees"]}


def mem_get_info(device: object = None) -> tuple[int, int]:
    """Returns free and total bytes."""
    stats = memory_stats(device)
    return stats["Limit"] - stats["InUse"], stats["Limit"]
