"""Reads the golden rows, and says what each row stands for. Shared by all golden tests.

The rows lie in ``tests/golden/data`` (its READMEs say how they were made). ``AOTGAUDI_GOLDENS`` names another
folder of the same shape, to check other rows; a file that such a folder lacks has no rows, and its tests are skipped.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from aotgaudi.bucketing.strategy import BucketingInputs, Strategy
from aotgaudi.errors import SpecError
from aotgaudi.from_vllm.buckets import BucketingEnvironment

Row = dict[str, Any]

OURS = Path(__file__).parent / "data"
GOLDENS = Path(os.environ.get("AOTGAUDI_GOLDENS", OURS))

STRATEGIES = {"exponential_2d": "exponential", "linear_2d": "linear"}


@functools.cache
def read_rows(relative_name: str) -> list[Row]:
    """Returns the rows of a ``.jsonl`` or ``.jsonl.gz`` file of the goldens; none if another folder than ours lacks it."""
    path = GOLDENS / relative_name
    if not path.exists() and GOLDENS != OURS:
        return []
    read = gzip.open if path.suffix == ".gz" else open
    with read(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def each_of(cases: Iterable[Row | tuple[Row, str]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test for each row, or each row and phase: one pytest item a version, which names the row that fails.

    Twelve thousand items would spend more time in pytest than in tables.
    """
    groups: defaultdict[str, list[tuple[Any, ...]]] = defaultdict(list)
    for case in cases:
        arguments = case if isinstance(case, tuple) else (case,)
        groups[arguments[0]["version"]].append(arguments)

    def decorated(test: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.parametrize("version", groups)
        def run(version: str) -> None:
            for row, *rest in groups[version]:
                try:
                    test(row, *rest)
                except (Exception, pytest.fail.Exception) as error:
                    raise AssertionError(f"row {row['id']} of {version}, {rest}") from error

        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        return run

    return decorated


def inputs_of(row: Row) -> BucketingInputs:
    """Returns what a row's table is a function of. Raises where our spec refuses a number of it."""
    numbers = dict(row["inputs"])
    environment = environment_of(row)
    assert environment.contiguous_pa == row.get("use_contiguous_pa", environment.contiguous_pa)
    assert environment.strategy == STRATEGIES.get(row["strategy"], row["strategy"])
    return BucketingInputs(
        num_blocks=numbers.pop("num_hpu_blocks"),
        **numbers,
        contiguous_pa=environment.contiguous_pa,
        prefix_caching=environment.prefix_caching,
        merged_prefill=environment.merged_prefill,
        prompt=environment.prompt,
        decode=environment.decode,
        sliding=environment.sliding,
        file_text=row.get("file_text"),
    )


def environment_of(row: Row) -> BucketingEnvironment:
    """Returns what a row's variables say; the two-dimensional rows name their strategy outside of them."""
    strategy = row["strategy"]
    switch = (
        {"VLLM_EXPONENTIAL_BUCKETING": str(strategy == "exponential_2d")} if strategy.endswith("_2d") else {}
    )
    return BucketingEnvironment.parse(
        {**row["env"], **switch}, row["version"], enable_prefix_caching=row.get("prefix_caching", True)
    )


def check_table(
    make: Callable[[], Sequence[Sequence[int]]], golden: Row | None, error: str | None = None
) -> None:
    """Asserts that `make` gives the golden table; or an error of ours where upstream raised `error`."""
    if error is not None:
        with pytest.raises((SpecError, ValidationError)):
            make()
        return
    assert golden is not None
    table = [list(bucket) for bucket in make()]
    assert len(table) == golden["n"]
    if "list" in golden:
        assert table == golden["list"]
    else:
        assert (table[:5], table[-5:]) == (golden["head"], golden["tail"])
    if "sha256" in golden:
        text = json.dumps(table, separators=(",", ":"))
        assert hashlib.sha256(text.encode()).hexdigest() == golden["sha256"]


# One phase of a row, prompt or decode

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
