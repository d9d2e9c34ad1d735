"""One phase, prompt or decode, of a golden row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aotgaudi.bucketing.strategy import BucketingInputs, Strategy
from tests.golden.rows import Row, check_table, inputs_of

PHASES = ("prompt", "decode")


def with_phases(rows: Iterable[Row]) -> list[tuple[Row, str]]:
    """Returns each row with each phase."""
    return [(row, phase) for row in rows for phase in PHASES]


def phases_with(rows: Iterable[Row], field: str) -> list[tuple[Row, str]]:
    """Returns each row with each phase of which it has ``<phase>_<field>``."""
    return [(row, phase) for row, phase in with_phases(rows) if f"{phase}_{field}" in row]


def inputs_of_phase(row: Row, phase: str) -> BucketingInputs:
    """Returns a row's inputs without the bounds of its other phase, which our spec may refuse."""
    other = "DECODE" if phase == "prompt" else "PROMPT"
    environment = {name: value for name, value in row["env"].items() if not name.startswith(f"VLLM_{other}_")}
    return inputs_of({**row, "env": environment})


def check_phase(row: Row, phase: str, strategy: Strategy) -> None:
    """Asserts that a strategy gives the golden table of a phase, or fails where the public code did."""

    def make() -> Any:
        inputs = inputs_of_phase(row, phase)
        return strategy.prompt_table(inputs) if phase == "prompt" else strategy.decode_table(inputs)

    check_table(make, row.get(f"{phase}_buckets"), row.get(f"{phase}_error", row.get("error")))
