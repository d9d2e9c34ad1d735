"""Bucket files, malformed ones included: every row of ``file.jsonl.gz``."""

from __future__ import annotations

from aotgaudi.bucketing.versions import find_strategy
from tests.golden.phases import check_phase, with_phases
from tests.golden.rows import Row, each_of, read_rows


@each_of(with_phases(read_rows("bucketing/file.jsonl.gz")))
def test_tables_equal_the_public_code(row: Row, phase: str) -> None:
    assert row["strategy"] == "file"

    check_phase(row, phase, find_strategy(row["version"], "file"))
