"""What an outcome means where a release differs in a way that is no fault. Faults themselves: tests/hpu/test_faults.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aotgaudi.doctor.hpu.lab import Lab, Outcome
from aotgaudi.doctor.hpu.report import CHECKS


class Told(Lab):
    """Every probe tells the same."""

    def __init__(self, directory: Path, values: dict[str, Any]) -> None:
        super().__init__(directory, environment={})
        self._values = values

    def run(self, *_: Any, **__: Any) -> Outcome:
        return Outcome(self._values)


def verdicts(tmp_path: Path, check_id: str, values: dict[str, Any]) -> dict[str, str]:
    (check,) = (check for check in CHECKS if check.id == check_id)
    return {found.line: found.verdict for found in check.findings(Told(tmp_path, values), {})}


@pytest.mark.parametrize(
    ("outside", "verdict"),
    [(0, {"K-18": "skipped", "K-34": "confirmed"}), (1, {"K-18": "refuted", "K-34": "skipped"})],
)
def test_an_operator_that_a_release_lowers_did_not_fall_back(
    tmp_path: Path, outside: int, verdict: dict[str, str]
) -> None:
    values = {"not_lowered": "", "num_outside": outside, "view": "refused", "copy_of_view": ""}

    assert verdicts(tmp_path, "H-12", values) == verdict


def test_what_a_release_does_not_tell_is_not_refuted(tmp_path: Path) -> None:
    values = {"is_told": False, "refused": "", "eager_compiled": 0, "compiled": 0}

    assert verdicts(tmp_path, "H-11", values) == {"K-17": "skipped"}


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [(2, 0, "confirmed"), (1, 0, "confirmed"), (0, 0, "refuted"), (1, 1, "refuted")],
)
def test_a_graph_may_become_several_clusters(tmp_path: Path, first: int, second: int, verdict: str) -> None:
    keys = [str(key) for key in range(first)]
    values = {
        "first": {"compiled": first, "misses": keys},
        "second": {"compiled": second, "hits": keys},
        "told_at_once": True,
        "knows_recipes": True,
    }

    assert verdicts(tmp_path, "H-09", values)["K-16"] == verdict


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [(["1"], ["2"], "confirmed"), (["1", "2"], ["1", "3"], "confirmed"), (["1"], ["1"], "refuted")],
)
def test_a_cluster_that_two_graphs_share_is_no_collision(
    tmp_path: Path, first: list[str], second: list[str], verdict: str
) -> None:
    runs = [
        {"graph": number, "keys": keys, "error": 0.0, "problem": ""}
        for number, keys in ((1, first), (2, second), (1, first), (0, ["9"]))
    ]

    found = verdicts(tmp_path, "H-05", {"runs": runs, "constants": [], "refused": {}})

    assert found["K-29"] == verdict
    assert found["K-05"] == ("skipped" if verdict == "refuted" else "confirmed")
