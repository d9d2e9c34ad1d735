"""The one cache of a process: made, as in the bridge, when the device is acquired."""

from __future__ import annotations

import functools

import torch

from habana_frameworks.bridge.launch import RecipeCache


@functools.cache
def recipe_cache() -> RecipeCache:
    """Returns the cache; acquires the device."""
    torch.ops.hpu_double.acquire()
    return RecipeCache()
