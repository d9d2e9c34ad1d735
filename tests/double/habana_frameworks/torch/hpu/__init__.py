"""``torch.hpu``."""

from __future__ import annotations

import torch

from habana_frameworks.bridge.faults import has_fault
from habana_frameworks.bridge.profile import CARDS, DEVICE, PROFILE
from habana_frameworks.torch.hpu import graphs, metrics, random
from habana_frameworks.torch.hpu.memory import mem_get_info, memory_stats
from habana_frameworks.torch.hpu.random import (
    default_generators,
    get_rng_state,
    initial_seed,
    manual_seed,
    manual_seed_all,
    set_rng_state,
)
from habana_frameworks.torch.hpu.streams import (
    Event,
    Stream,
    current_stream,
    default_stream,
    set_stream,
    stream,
)
from habana_frameworks.torch.utils.internal import is_lazy

__all__ = [
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "default_generators",
    "default_stream",
    "device_count",
    "get_rng_state",
    "initial_seed",
    "is_available",
    "manual_seed",
    "manual_seed_all",
    "mem_get_info",
    "memory_stats",
    "metrics",
    "random",
    "set_rng_state",
    "set_stream",
    "stream",
    "synchronize",
]


def __getattr__(name: str) -> object:
    """HPU graphs, where the mode has them (D-23)."""
    if name == "wrap_in_hpu_graph" and (is_lazy() or has_fault("graphs-in-compile-mode")):
        return graphs.wrap_in_hpu_graph
    raise AttributeError(name)


def is_available() -> bool:
    """Returns whether the machine has a card. Acquires none."""
    return CARDS > 0


def device_count() -> int:
    """Returns how many cards there are."""
    return CARDS


def current_device() -> int:
    """Returns 0: a process has one card."""
    return 0


def set_device(device: object) -> None:
    """Does nothing: a process has one card."""


def synchronize(device: object = None) -> None:
    """Waits for the device, which is never behind."""
    del device


def get_device_name(device: object = None) -> str:
    """Acquires the device and returns its name."""
    del device
    torch.ops.hpu_double.acquire()
    return DEVICE.upper()


def get_device_capability(device: object = None) -> str:
    """Returns Synapse's version, as in the names of recipes."""
    del device
    return PROFILE.synapse


def get_device_properties(device: object = None) -> str:
    """Returns the device's properties as text."""
    del device
    return f"(sramBaseAddress=0x0, sramSize=50331648, deviceType={DEVICE}, tpcEnabledMask=0xffffff)"


def is_initialized() -> bool:
    """Returns whether this process has a card."""
    return int(torch.ops.hpu_double.module()) >= 0


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    pass
