"""Reads the samples from the text of ``/metrics``."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from aotgaudi.errors import SpecError

PREFIXES = ("vllm:", "aotgaudi_", "vllm_")
"""Prefixes of the names of metrics, vLLM's and ours."""


class Sample(NamedTuple):
    """One line that is not a comment."""

    name: str
    labels: dict[str, str]
    value: float


def is_exposition(first_line: str) -> bool:
    """Returns whether this first line (a comment or a sample) begins a text of `/metrics`."""
    return first_line.startswith(("# HELP", "# TYPE", *PREFIXES)) or "{" in first_line.split(",", 1)[0]


def samples_of(path: Path, text: str, wanted: str) -> list[Sample]:
    """Returns every sample of `text`, which was read from `path`.

    Raises SpecError, with `wanted` as the remedy, if the text does not have that format.
    """
    from prometheus_client.parser import text_string_to_metric_families  # This import takes 70 ms.

    try:
        families = text_string_to_metric_families(text)
        return [Sample(one.name, one.labels, one.value) for family in families for one in family.samples]
    except (ValueError, KeyError) as error:
        raise SpecError(str(path), f"is not what /metrics answers: {error}", wanted) from error
