"""What an outcome means where a release differs in a way that is no fault. Faults themselves: tests/hpu/test_faults.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from aotgaudi.doctor.hpu.lab import Lab, Outcome
from aotgaudi.doctor.hpu.report import CHECKS


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [(["1"], ["2"], "confirmed"), (["1", "2"], ["1", "3"], "confirmed"), (["1"], ["1"], "refuted")],
)
def test_a_cluster_that_two_graphs_share_is_no_collision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: list[str], second: list[str], verdict: str
) -> None:
    runs = [
        {"graph": number, "keys": keys, "error": 0.0, "problem": ""}
        for number, keys in ((1, first), (2, second), (1, first), (0, ["9"]))
    ]
    outcomes = {"recipes.keys": {"runs": runs, "constants": []}, "recipes.options": {}}
    monkeypatch.setattr(Lab, "run", lambda _, probe, *__, **___: Outcome(outcomes[probe]))
    (check,) = (check for check in CHECKS if check.id == "H-05")

    found = {one.line: one.verdict for one in check.findings(Lab(tmp_path, environment={}), {})}

    assert found["K-29"] == verdict
    assert found["K-05"] == ("skipped" if verdict == "refuted" else "confirmed")
