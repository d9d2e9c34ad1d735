"""The type of the device."""

import enum

from habana_frameworks.bridge.profile import DEVICE


class synDeviceType(enum.IntEnum):
    """As Synapse numbers them."""

    synDeviceGaudi2 = 4
    synDeviceGaudi3 = 5


def _get_device_type() -> int:
    """Returns the type of the machine's cards. Acquires none (Synapse's ``device.cpp:573``)."""
    return int(synDeviceType.synDeviceGaudi3 if DEVICE == "gaudi3" else synDeviceType.synDeviceGaudi2)
