"""What a builder will do on a Gaudi: compile, wait until recipes are stored, collect them by key, and publish them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from aotgaudi.doctor.hpu.bridge import SHAPES, Bridge, graph, recipe_directory
from aotgaudi.gaudi.environment import process_environment
from aotgaudi.gaudi.recipes import RecipeSet, collect
from aotgaudi.store.store import Store

GRAPHS = (1, 2, 3)


def publish_recipes(root: Path, key: str) -> None:
    """Compiles `GRAPHS`, and publishes their recipes in the store at `root` as the record `key`."""
    bridge = Bridge()
    for number in GRAPHS:
        bridge.compiled(graph(number))(*bridge.placed(*bridge.random(SHAPES)))
    bridge.flush()
    store = Store.open(root)
    files = collect(recipe_directory(), bridge.counts().recipes).files
    recipes = RecipeSet.of("gaudi2", files, store.objects.put_file)
    store.actions.put(key, recipes.as_record())


def environment_of(folder: Path, directory: Path, **more: str) -> Mapping[str, str]:
    """Returns the environment of a process that compiles on the double into `directory`."""
    inherited = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    settings = {"PYTHONPATH": str(folder), "AOTGAUDI_DOUBLE_COMPILE_MS": "1", **more}
    return process_environment({**inherited, **settings}, directory)
