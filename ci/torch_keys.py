"""Says how the keys of two stores differ, in which two versions of torch built the same: ``torch_keys.py STORE STORE``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

COMPONENT = "target.toolchain.torch"


def units(store: Path) -> Iterator[Mapping[str, str]]:
    """Yields the components of the key of each unit of a store."""
    for path in sorted(store.glob("records/*/*.json")):
        components = json.loads(path.read_text())["value"].get("components", {})
        if components.get("schema", "").startswith("aotgaudi.unit-key/"):
            yield components


def main() -> None:
    """Compares the two."""
    one, other = ({row["graph"]: row for row in units(Path(name))} for name in sys.argv[1:])
    versions = [next(iter(rows.values()))[COMPONENT] for rows in (one, other)]
    same = one.keys() & other.keys()
    differing = {name for graph in same for name in one[graph] if one[graph][name] != other[graph][name]}
    print(f"torch {versions[0]}: {len(one)} units; torch {versions[1]}: {len(other)} units")
    only = len(one) - len(same), len(other) - len(same)
    print(f"the same graph in both: {len(same)}; only in the first: {only[0]}; only in the second: {only[1]}")
    print(f"components of the keys of the same graphs that differ: {', '.join(sorted(differing)) or 'none'}")


if __name__ == "__main__":
    main()
