"""What can be made to go wrong: names in AOTGAUDI_DOUBLE_FAULTS, with commas between them. device.cpp reads some too."""

from __future__ import annotations

import os

from habana_frameworks.bridge.journal import note

FAULTS = {
    "fixed-l": "L hashes what it is meant to hash (a repair that may have been made)",
    "key-unstable": "a salt of the process is part of every key",
    "source-comments": "keys hold the comments of constants, whatever the release",
    "pin-fails": "the counter of modules is not where it can be pinned",
    "other-names": "recipes have names of another form",
    "collision": "all keys are the same number",
    "zero-metadata": "a graph of one operator compiles to nothing and leaves an empty metadata file",
    "late-recipe": "outputs of matrix products carry a permutation, so what follows has another key",
    "no-flush": "there is no _flush_disk_cache",
    "slow-store": "storing a recipe takes a while between its two files",
    "no-recipe-metric": "there is no metric recipe_cache",
    "const-tensor": "constants are stored beside recipes",
    "four-fields": "a fourth field of the cache's setting aborts, whatever the release",
    "fallback-op": "index_copy is not lowered",
    "eager-op-raises": "an operator outside a compiled cluster is an error",
    "wrong-numbers": "the first output of each cluster is 10 % too large",
    "no-inplace": "index_copy into an input copies the whole of it",
    "truncated-recipe": "a recipe is stored without its last byte",
    "read-only-fails": "looking a recipe up in a directory that cannot be written to raises",
    "no-int-narrowing": "integers keep 64 bits",
    "hang": "acquiring a card never ends",
    "busy-card": "another process holds every card",
    "no-event": "compiling is not counted",
    "late-environment": "variables are read when they are needed, not when the bridge is imported",
    "leaf-views": "a view may be the output of a cluster",
    "shared-card": "several processes may have a card",
    "silent-fallback": "what is not lowered falls back without a word, although that is forbidden",
    "no-disallow": "PT_HPU_DISALLOW_TORCH_COMPILE is not heeded",
    "setting-restored": "a flag that is set for a while is set back after an exception",
    "graphs-in-compile-mode": "there are HPU graphs in every mode",
    "graphs-are-fresh": "an HPU graph that is run for warm-up computes",
    "not-registered": "importing torch._dynamo registers no backend",
    "no-option": "the backend does not know use_graph_freezing",
    "empty-metadata-fails": "an empty metadata makes the look-up raise",
    "listed-once": "recipes that come into the directory after the import are not found",
    "wrong-attention": "fused attention is 10 % too large",
    "wrong-long-sums": "cumulative sums of more than 4096 values are 10 % too large",
    "wrong-batches": "of more than 16 matrix products at once the last one is left out",
    "figures-stand-still": "the figure of free memory never changes",
    "nan-rows": "fused attention gives NaN in the rows beyond the lengths",
    "checked-indices": "a negative index is an error",
    "live-compile": "while the file `forget` lies in AOTGAUDI_DOUBLE_STATE, no recipe is found",
    "static-traces": "no shape is traced as dynamic",
}

_ON = frozenset(filter(None, os.environ.get("AOTGAUDI_DOUBLE_FAULTS", "").split(",")))
if not FAULTS.keys() >= _ON:
    raise ValueError(f"AOTGAUDI_DOUBLE_FAULTS: unknown: {', '.join(sorted(_ON - FAULTS.keys()))}")
_ASKED: set[str] = set()


def has_fault(name: str) -> bool:
    """Returns whether the fault `name` is on; the journal has which ones were asked for. Raises KeyError for no fault."""
    if FAULTS[name] and name not in _ASKED:
        _ASKED.add(name)
        note(asked=name)
    return name in _ON
