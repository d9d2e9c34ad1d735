"""Reads the small JSON files of a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aotgaudi.errors import SpecError


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in `path`; empty when there is no such file.

    Raises:
        SpecError: the file cannot be read, or does not hold a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise SpecError(str(path), f"cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise SpecError(str(path), f"holds {type(value).__name__}", "a JSON object is expected")
    return value
