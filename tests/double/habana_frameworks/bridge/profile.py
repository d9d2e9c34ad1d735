"""Which release the double is, and what differs between releases.

It is chosen where the double is installed: the version of the distribution is part of every key.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

_SETTABLE = frozenset(
    {
        "PT_HPU_GRAPH_DUMP_MODE",
        "PT_HPU_GRAPH_DUMP_FORMAT",
        "PT_COMPILATION_STATS_PATH",
        "PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES",
        "PT_ENABLE_INT64_SUPPORT",
        "PT_COMPILE_ONLY_MODE",
    }
)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One release.

    Attributes:
        name: As in its version.
        synapse: What ``get_device_capability`` and the names of recipes say (D-08).
        max_cache_fields: Of PT_HPU_RECIPE_CACHE_CONFIG (D-12).
        has_source_comments: Keys hold the comments of constants, and so a counter of the process (D-06).
        has_legacy_names: PT_RECIPE_CACHE_PATH and the like are read.
        queues_events: Metrics count when they are asked (D-14).
        settable: What ``bridge_config`` can set at run time (D-18).
        lazy_by_default: Where PT_HPU_LAZY_MODE is unset.
        sdpa_tail: Arguments of ``hpu::sdpa_recomp_fwd`` after the first eleven (D-21).
    """

    name: str
    synapse: str
    max_cache_fields: int
    has_source_comments: bool
    has_legacy_names: bool
    queues_events: bool
    settable: frozenset[str] = field(default=_SETTABLE)
    lazy_by_default: bool = False
    sdpa_tail: str = ""


PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            name="1.19",
            synapse="1.19.0.561.5a56187",
            max_cache_fields=3,
            has_source_comments=True,
            has_legacy_names=True,
            queues_events=False,
            lazy_by_default=True,
        ),
        Profile(
            name="1.24.1",
            synapse="1.24.1.482.6c1b7a2",
            max_cache_fields=4,
            has_source_comments=False,
            has_legacy_names=False,
            queues_events=True,
            settable=_SETTABLE | {"PT_HPU_DISALLOW_TORCH_COMPILE", "PT_HPU_ENABLE_CACHE_METRICS"},
            sdpa_tail=", int[]? window_size=None, Tensor? sinks=None",
        ),
    )
}

PROFILE = PROFILES[(Path(__file__).parents[1] / "profile.txt").read_text(encoding="ascii").strip()]
"""The one that is installed; `install.py` writes its name."""

DEVICE = os.environ.get("AOTGAUDI_DOUBLE_DEVICE", "gaudi2")
"""``gaudi2`` or ``gaudi3``."""
CARDS = int(os.environ.get("AOTGAUDI_DOUBLE_CARDS", "1"))
"""How many the machine has."""
COMPILE_SECONDS = float(os.environ.get("AOTGAUDI_DOUBLE_COMPILE_MS", "20")) / 1000
"""What compiling a graph takes."""
IS_FORK = os.environ.get("AOTGAUDI_DOUBLE_FORK") == "1"
"""Whether torch counts as Intel's fork, which the lazy mode needs (D-02)."""
