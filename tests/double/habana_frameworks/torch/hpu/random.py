"""D-30: the generator of the device. Source: ``hpu/random.py`` of the bridge."""

from __future__ import annotations

import torch

default_generators: list[torch.Generator] = [torch.ops.hpu_double.default_generator()]


def get_rng_state(device: object = "hpu") -> torch.Tensor:
    """Returns the generator's state."""
    del device
    return default_generators[0].get_state()


def set_rng_state(new_state: torch.Tensor, device: object = "hpu") -> None:
    """Sets it."""
    del device
    default_generators[0].set_state(new_state)


def manual_seed(seed: int) -> torch.Generator:
    """Seeds the generator and returns it."""
    return default_generators[0].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seeds the generators of all devices: a process has one."""
    manual_seed(seed)


def initial_seed() -> int:
    """Returns what it was last seeded with."""
    return int(default_generators[0].initial_seed())
