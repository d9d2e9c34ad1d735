"""Which checks run, what keeps one from running, and what is said where nothing can be examined."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aotgaudi.doctor.hpu.examination import CHECKS, acquire, selected
from aotgaudi.doctor.hpu.findings import HpuCheck, LineFinding, judged
from aotgaudi.doctor.hpu.lab import Lab
from aotgaudi.errors import SpecError, UnexaminedError


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path, environment={})


def confirming(_: Lab) -> Iterator[LineFinding]:
    yield judged("K-31", True, "found", "not found")


CHECK = HpuCheck("H-08", "recipes in another process", ("K-31",), confirming, ("K-29", "K-37"))


def test_a_check_is_skipped_where_a_line_that_it_rests_on_was_refuted(lab: Lab) -> None:
    found = CHECK.findings(lab, {"K-29": "confirmed", "K-37": "refuted"})

    assert found == (LineFinding("K-31", "skipped", "K-37 was refuted"),)


@pytest.mark.parametrize("verdict", ["confirmed", "unclear", "skipped"])
def test_else_it_runs(lab: Lab, verdict: str) -> None:
    assert CHECK.findings(lab, {"K-29": verdict}) == (LineFinding("K-31", "confirmed", "found"),)  # type: ignore[dict-item]


def test_all_checks_run_unless_some_are_named() -> None:
    assert selected(()) == CHECKS
    assert {check.id for check in selected(("H-05", "H-08"))} == {"H-05", "H-08"}


def test_a_check_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(SpecError, match=r"there is no check H-26 \(one of H-01, H-02"):
        selected(("H-01", "H-26"))


def test_without_the_bridge_nothing_is_examined(lab: Lab) -> None:
    with pytest.raises(UnexaminedError, match="habana-torch-plugin is not installed here"):
        acquire(lab)
