"""The contract's lines: each is examined once, and docs/reference/hpu-contract.md has the same table."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from aotgaudi.doctor.hpu.contract import LINES
from aotgaudi.doctor.hpu.report import CHECKS
from tests.environment import ROOT

TEXT = (ROOT / "docs" / "reference" / "hpu-contract.md").read_text(encoding="utf-8")


def test_each_line_is_examined_by_one_check() -> None:
    assert Counter(line for check in CHECKS for line in check.lines) == Counter(dict.fromkeys(LINES, 1))


def test_what_a_check_needs_is_examined_before_it() -> None:
    seen: set[str] = set()
    for check in CHECKS:
        assert seen >= set(check.needs), check.id
        seen.update(check.lines)


@pytest.mark.parametrize("line", LINES)
def test_the_documented_table_has_the_line_its_mark_and_its_check(line: str) -> None:
    (check,) = (check.id for check in CHECKS if line in check.lines)
    needed = " **(needed)**" if LINES[line].is_needed else ""

    row = f"| {line} | {LINES[line].statement}{needed} | {LINES[line].mark} |"

    (found,) = (text for text in TEXT.splitlines() if text.startswith(row))
    assert found.endswith(f"| {check} |")


def test_no_other_line_is_documented() -> None:
    assert set(re.findall(r"^\| (K-\d\d) \|", TEXT, re.MULTILINE)) == set(LINES)
