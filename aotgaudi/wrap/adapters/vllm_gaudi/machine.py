"""The machine as what vllm-gaudi's graphs are compiled for: its cards, and the libraries that compile for them.

The bridge's own check of libraries is the same whatever they hold (K-38), so what decides is hashed here. Synapse's
version is in the names of the recipes, and in the graph compiler's digest.
"""

from __future__ import annotations

from pathlib import Path

from aotgaudi.backends.base import Target
from aotgaudi.gaudi.identity import SYSTEM_LIBRARIES, DigestMemory, Installation, LibraryDigests
from aotgaudi.gaudi.inventory import find_cards


def find_machine(site_packages: str, root: Path = Path("/")) -> Target:
    """Returns what this machine is to a server whose packages lie in `site_packages`. Acquires no card.

    Raises:
        TargetError: there is no card, cards of several types, or no software for them.
        StoreError: a library cannot be read.
    """
    machine = find_cards(root).device_type()
    installation = Installation(Path(site_packages) / "habana_frameworks", root / SYSTEM_LIBRARIES, ())
    libraries = LibraryDigests.of(installation.components(), DigestMemory(None))
    return Target(backend="hpu", machine=machine, toolchain=dict(libraries.components))
