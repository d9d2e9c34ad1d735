"""D-09: from a cluster and its arguments to a recipe: in memory, on disk, or compiled now.

Source: ``hpu_recipe_cache.h`` and ``.cpp``, ``hpu_habana_launch_op_pt.cpp:4918-4966`` of the bridge.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from habana_frameworks.bridge import flags
from habana_frameworks.bridge.disk_cache import CacheConfig, DiskCache
from habana_frameworks.bridge.faults import has_fault
from habana_frameworks.bridge.journal import emit
from habana_frameworks.bridge.keys import graph_text, key_components, recipe_key
from habana_frameworks.bridge.profile import COMPILE_SECONDS
from habana_frameworks.bridge.recipe import Recipe

_NUMBERS = itertools.count()
_DEFAULT_LRU = 100_000


class RecipeCache:
    """Recipes in memory, the least recently used of which go first, in front of those on disk."""

    def __init__(self) -> None:
        self.disk = DiskCache(CacheConfig.read())
        self._most = int(flags.text("HABANA_PGM_LRU_MAX") or _DEFAULT_LRU)
        self._recipes: OrderedDict[tuple[str, str], Recipe] = OrderedDict()

    def recipe(self, module: fx.GraphModule, text: str, args: Sequence[Any], name: str) -> Recipe:
        """Returns the recipe of a cluster for these arguments."""
        key = recipe_key(text, args, len(_outputs(module)))
        # In memory everything is compared, on disk the key alone.
        whole = (key, f"{text}\0{_argument_spec(args)}")
        found = None if _forgets() else self._recipes.get(whole) or self._from_disk(key)
        if found is None:
            emit("CACHE_MISS", recipe_id=key)
            found = self._compiled(module, key, name)
            if flags.is_on("PT_RECIPE_CACHE_DUMP_DEBUG"):
                self.disk.dump(f"{key}_{name}", key_components(text, args, len(_outputs(module))))
        else:
            emit("CACHE_HIT", recipe_id=key)
        self._recipes[whole] = found
        self._recipes.move_to_end(whole)
        if len(self._recipes) > self._most:
            self._recipes.popitem(last=False)
        return found

    def _from_disk(self, key: str) -> Recipe | None:
        data = self.disk.find(key)
        try:
            return None if data is None else Recipe(data)
        except ValueError:
            return None  # A warning in the bridge, and a miss.

    def _compiled(self, module: fx.GraphModule, key: str, name: str) -> Recipe:
        began = time.perf_counter()
        time.sleep(COMPILE_SECONDS)
        data = Recipe.compile(module)
        microseconds = int((time.perf_counter() - began) * 1e6)
        if not has_fault("no-event"):
            emit("GRAPH_COMPILE", recipe=name, microseconds=microseconds)
        is_single = sum(node.op == "call_function" for node in module.graph.nodes) == 1
        is_empty = is_single and has_fault("zero-metadata")
        self.disk.store(key, b"" if is_empty else data, b"" if is_empty else b"holder " + key.encode())
        return Recipe(data)


@functools.cache
def recipe_cache() -> RecipeCache:
    """Returns the one cache of the process, which acquires the device."""
    torch.ops.hpu_double.acquire()
    return RecipeCache()


class HabanaGraphModule(torch.nn.Module):
    """A cluster. Called with tensors of the device, launches its recipe."""

    def __init__(self, module: fx.GraphModule, cache: RecipeCache) -> None:
        super().__init__()
        self._module, self._cache = module, cache
        self._name = f"fx_graph_{next(_NUMBERS):04d}"
        self._text = graph_text(module, self._name)
        self._is_tuple = not isinstance(_output_value(module), fx.Node)

    def forward(self, *args: Any) -> Any:
        """Returns what the cluster returns."""
        found = self._cache.recipe(self._module, self._text, args, self._name).launch(args)
        return tuple(found) if self._is_tuple else found[0]


def _forgets() -> bool:
    state = os.environ.get("AOTGAUDI_DOUBLE_STATE")
    return state is not None and has_fault("live-compile") and Path(state, "forget").exists()


def _output_value(module: fx.GraphModule) -> Any:
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    return output.args[0]


def _outputs(module: fx.GraphModule) -> Sequence[Any]:
    value = _output_value(module)
    return [value] if isinstance(value, fx.Node) else value


def _argument_spec(args: Sequence[Any]) -> str:
    return repr([(a.dtype, tuple(a.shape), a.stride()) if isinstance(a, torch.Tensor) else a for a in args])
