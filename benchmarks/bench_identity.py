"""How long the identity of a Gaudi's software takes: 1 GB of libraries, read once, then remembered.

``python benchmarks/bench_identity.py [--gigabytes 1.0]``
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

from aotgaudi.gaudi.identity import DigestMemory, LibraryDigests

_SHARES = {
    "bridge": (0.2, 0.05),
    "bridge-python": (0.001,) * 20,
    "graph-compiler": (0.4,),
    "kernels": (0.2, 0.1, 0.03),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    num_bytes = int(parser.parse_args().gigabytes * 1e9)
    with tempfile.TemporaryDirectory() as folder:
        components = {}
        for name, shares in _SHARES.items():
            paths = [Path(folder, f"lib{name}{number}.so") for number in range(len(shares))]
            for path, share in zip(paths, shares, strict=True):
                path.write_bytes(os.urandom(1 << 20) * max(1, int(num_bytes * share) >> 20))
            components[name] = paths
        for label in ("cold", "warm"):
            began = time.perf_counter()
            LibraryDigests.of(components, DigestMemory(Path(folder, "memory")))
            print(f"{label}: {(time.perf_counter() - began) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
