"""What can be made to go wrong: names in AOTGAUDI_DOUBLE_FAULTS, with commas between them. device.cpp reads some too."""

from __future__ import annotations

import os

FAULTS = {
    "fixed-l": "L hashes what it is meant to hash (a repair that may have been made)",
    "key-unstable": "a salt of the process is part of every key",
    "collision": "all keys are the same number",
    "zero-metadata": "a graph compiles to nothing and leaves an empty metadata file",
    "late-recipe": "outputs of matrix products carry a permutation, so what follows has another key",
    "no-flush": "there is no _flush_disk_cache",
    "slow-store": "recipes are stored seconds after they were compiled",
    "no-recipe-metric": "there is no metric recipe_cache",
    "const-tensor": "constants are stored beside recipes",
    "four-fields": "a fourth field of the cache's setting aborts, whatever the release",
    "fallback-op": "index_copy is not lowered",
    "eager-op-raises": "an operator outside a compiled cluster is an error",
    "wrong-numbers": "the first output of each cluster is 1 % too large",
    "no-inplace": "index_copy into an input copies the whole of it",
    "truncated-recipe": "a recipe is stored without its last byte",
    "read-only-fails": "looking a recipe up in a directory that cannot be written to raises",
    "no-int-narrowing": "integers keep 64 bits",
    "hang": "acquiring a card never ends",
    "busy-card": "another process holds every card",
    "no-event": "compiling is not counted",
    "late-environment": "variables are read when they are needed, not when the bridge is imported",
    "no-direct": "the backend works under torch.compile alone",
    "leaf-views": "a view may be the output of a cluster",
}

_ON = frozenset(filter(None, os.environ.get("AOTGAUDI_DOUBLE_FAULTS", "").split(",")))
if not FAULTS.keys() >= _ON:
    raise ValueError(f"AOTGAUDI_DOUBLE_FAULTS: unknown: {', '.join(sorted(_ON - FAULTS.keys()))}")


def has_fault(name: str) -> bool:
    """Returns whether the fault `name` is on. Raises KeyError for a name that is no fault."""
    assert FAULTS[name]
    return name in _ON
