"""The contract's lines: each is examined once, and docs/reference/hpu-contract.md has the same table."""

from __future__ import annotations

import re
from collections import Counter

from aotgaudi.doctor.hpu.report import CHECKS, LINES
from tests.environment import ROOT

TEXT = (ROOT / "docs" / "reference" / "hpu-contract.md").read_text(encoding="utf-8")


def test_each_line_is_examined_by_one_check() -> None:
    assert Counter(line for check in CHECKS for line in check.lines) == Counter(dict.fromkeys(LINES, 1))


def test_what_a_check_needs_is_examined_before_it() -> None:
    seen: set[str] = set()
    for check in CHECKS:
        assert seen >= set(check.needs or ()), check.id
        seen.update(check.lines)


def test_the_documented_table_has_the_same_lines() -> None:
    checks = {line: check.id for check in CHECKS for line in check.lines}

    assert re.findall(r"^\| K-\d\d \|.*", TEXT, re.MULTILINE) == [
        f"| {line} | {row.statement}{' **(needed)**' * row.is_needed} | {row.mark} | {row.source} | {checks[line]} |"
        for line, row in LINES.items()
    ]
