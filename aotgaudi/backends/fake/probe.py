"""The fake target: the same everywhere."""

from __future__ import annotations

import functools
from pathlib import Path

from aotgaudi.backends.base import Target
from aotgaudi.source_digest import sha256_source


def probe(flags: dict[str, str] | None = None) -> Target:
    """Returns the fake target; `flags` become part of it, and of every key."""
    toolchain = {"fake": "1", "torch": "none", "compile_code": compile_code_digest()}
    return Target(backend="fake", machine="any", toolchain=toolchain, flags=flags or {})


@functools.cache
def compile_code_digest() -> str:
    """Returns the sha256 of the source of the fake compiler."""
    return sha256_source([Path(__file__).with_name("compiler.py")])
