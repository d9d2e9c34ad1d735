"""The type of the device."""

import enum

import torch

from habana_frameworks.bridge.profile import DEVICE


class synDeviceType(enum.IntEnum):
    """As Synapse numbers them."""

    synDeviceGaudi2 = 4
    synDeviceGaudi3 = 5


def _get_device_type() -> int:
    """Acquires the device and returns its type."""
    torch.ops.hpu_double.acquire()
    return int(synDeviceType.synDeviceGaudi3 if DEVICE == "gaudi3" else synDeviceType.synDeviceGaudi2)
