"""What a server is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aotgaudi.bundle.bundle import Acceptance


@dataclass(frozen=True)
class ServeOptions:
    """What ``aotgaudi serve`` was told. `environment` is what a builder started on first use inherits."""

    bundle: Path
    acceptance: Acceptance
    model_dir: Path
    require_warm: bool
    host: str
    port: int
    served_model_names: tuple[str, ...]
    num_threads: int
    store_root: Path
    environment: Mapping[str, str]
