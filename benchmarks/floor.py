"""Does the least that any server of a bundle and a model must do before it can answer. bench_ready.py times this process.

It imports torch, Starlette and uvicorn, maps the weights without touching them, reads and hashes every file of the bundle,
loads the tokenizer, and prints one line. Nothing overlaps, so the time is the plain sum.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import starlette.applications  # noqa: F401 - imported for its time
import torch  # noqa: F401 - imported for its time
import uvicorn  # noqa: F401 - imported for its time
from safetensors import safe_open
from tokenizers import Tokenizer


def main() -> None:
    """Does this for the bundle and the model in ``sys.argv``. Keeps everything alive until the line is printed."""
    bundle, model = map(Path, sys.argv[1:])
    kept: list[object] = []
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            kept.extend(file.get_tensor(name) for name in file.keys())  # noqa: SIM118 - no mapping
    digests = {
        path: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(bundle.rglob("*"))
        if path.is_file()
    }
    kept.append(Tokenizer.from_file(str(model / "tokenizer.json")))
    sys.stdout.write(f"{len(kept)} {len(digests)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
