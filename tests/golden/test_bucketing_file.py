"""Bucket files, malformed ones included: every row of ``file.jsonl.gz``."""

from __future__ import annotations

import pytest

from aotgaudi.bucketing.versions import find_strategy
from tests.golden.phases import PHASES, check_phase
from tests.golden.rows import Row, parameters, read_rows


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("row", parameters(read_rows("bucketing/file.jsonl.gz")))
def test_tables_equal_the_public_code(row: Row, phase: str) -> None:
    assert row["strategy"] == "file"

    check_phase(row, phase, find_strategy(row["version"], "file"))
