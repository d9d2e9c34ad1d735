"""D-12: the grammar of PT_HPU_RECIPE_CACHE_CONFIG, as the bridge reads it (recipe_cache_config.cpp)."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from habana_frameworks.bridge import flags
from habana_frameworks.bridge.faults import has_fault
from habana_frameworks.bridge.profile import PROFILE

_MIB = 1024 * 1024


@dataclass(frozen=True)
class CacheConfig:
    """Where recipes are kept; `path` is empty where they are not."""

    path: str = ""
    deletes: bool = False
    limit_bytes: int = 1024 * _MIB
    on_nfs: bool = False

    @classmethod
    def read(cls) -> CacheConfig:
        """Returns what the variables say. Ends the process where there are too many fields."""
        value = flags.text("PT_HPU_RECIPE_CACHE_CONFIG")
        if not value and PROFILE.has_legacy_names:
            names = ("PT_RECIPE_CACHE_PATH", "PT_CACHE_FOLDER_DELETE", "PT_CACHE_FOLDER_SIZE_MB")
            value = ",".join(flags.text(name) for name in names)
        fields = value.split(",") if value else []
        most = PROFILE.max_cache_fields
        if len(fields) == most == 4 and has_fault("four-fields"):
            most = 3
        if len(fields) > most:
            sys.stderr.write(f"PT_HPU_RECIPE_CACHE_CONFIG number of fields not in range <1:{most}>\n")
            sys.stderr.flush()
            os.abort()
        path, deletes, limit, nfs = (*fields, *[""] * (4 - len(fields)))
        on_nfs = nfs.lower() in ("1", "true", "t", "yes", "y", "on")
        return cls(
            _ranked(path),
            not on_nfs and deletes.lower() in ("1", "true", "t", "yes", "y", "on"),
            0 if on_nfs else int(limit or 1024) * _MIB,
            on_nfs,
        )

    def prepare(self) -> None:
        """Makes the directory, or empties it. Raises OSError where it cannot be made."""
        if not self.path:
            return
        directory = Path(self.path)
        directory.mkdir(parents=True, exist_ok=True)
        if self.deletes and flags.text("LOCAL_RANK", "0") == "0":
            for path in directory.iterdir():
                if path.is_file():
                    path.unlink()


def _ranked(path: str) -> str:
    rank = flags.text("RANK")
    return path + rank if path and rank and flags.is_on("PT_HPU_INFERENCE_MODE") else path
