"""Which checks run on which lines of the contract, what keeps one from running, and where nothing can be examined.

Faults themselves: tests/hpu/test_faults.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from aotgaudi.doctor.hpu import recipes
from aotgaudi.doctor.hpu.lab import HpuCheck, Lab, LineFinding, Outcome, judged
from aotgaudi.doctor.hpu.report import CHECKS, LINES, acquire, examine, selected
from aotgaudi.errors import SpecError, UnexaminedError
from tests.environment import ROOT


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


def test_lines_whose_probe_came_to_no_end_are_unclear_and_others_keep_their_verdict(lab: Lab) -> None:
    def look(_: Lab) -> Iterator[LineFinding]:
        yield judged("K-35", True, "every recipe was there")
        Outcome({}, "it ended with SIGABRT").required()

    found = HpuCheck("H-08", "recipes", ("K-31", "K-35"), look).findings(lab, {})

    assert found == (
        LineFinding("K-31", "unclear", "it ended with SIGABRT"),
        LineFinding("K-35", "confirmed", "every recipe was there"),
    )


def test_a_report_is_told_after_each_check_so_that_it_can_be_kept(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aotgaudi.doctor.hpu.report.require_bridge", lambda: None)
    lab.kept("identity", lambda: Outcome({"name": "GAUDI2", "capability": "1.24", "is_double": True}))
    other = HpuCheck("H-05", "graphs", ("K-29",), lambda _: [judged("K-29", True, "other keys")])
    told: list[tuple[str, ...]] = []

    report = examine(lab, (CHECK, other), lambda _, __, so_far: told.append(so_far.of("confirmed")))

    assert told == [("K-31",), ("K-29", "K-31")]
    assert report.of("confirmed") == told[-1]


def test_each_check_has_an_id_and_each_line_of_the_contract_one_check() -> None:
    assert len({check.id for check in CHECKS}) == len(CHECKS)
    assert Counter(line for check in CHECKS for line in check.lines) == Counter(dict.fromkeys(LINES, 1))


def test_what_a_check_needs_is_examined_before_it() -> None:
    seen: set[str] = set()
    for check in CHECKS:
        assert seen >= set(check.needs or ()), check.id
        seen.update(check.lines)


def test_the_documented_table_has_the_same_lines() -> None:
    text = (ROOT / "docs" / "reference" / "hpu-contract.md").read_text(encoding="utf-8")
    checks = {line: check.id for check in CHECKS for line in check.lines}

    assert re.findall(r"^\| K-\d\d \|.*", text, re.MULTILINE) == [
        f"| {line} | {row.statement}{' **(needed)**' * row.is_needed} | {row.mark} | {row.source} | {checks[line]} |"
        for line, row in LINES.items()
    ]


def test_all_checks_run_unless_some_are_named() -> None:
    assert selected(()) == CHECKS
    assert {check.id for check in selected(("H-05", "H-08"))} == {"H-05", "H-08"}


def test_a_check_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(SpecError, match=r"there is no check H-99 \(one of H-01, H-02"):
        selected(("H-01", "H-99"))


def test_without_the_bridge_nothing_is_examined(lab: Lab) -> None:
    with pytest.raises(UnexaminedError, match=r"habana-torch-plugin is not installed here, for .*python"):
        acquire(lab)


@pytest.mark.parametrize(
    ("problem", "remedy"),
    [
        ("RuntimeError: Device acquire failed.", "--card N takes another"),
        ("RuntimeError: Device acquire failed. No devices found.", "--runtime=habana"),
        ("AssertionError: torch 2.13.0 is not 2.11", "import torch"),
        ("it took more than 120 s", "import torch"),
    ],
)
def test_a_card_that_cannot_be_acquired_is_told_with_what_to_do(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, problem: str, remedy: str
) -> None:
    monkeypatch.setattr("aotgaudi.doctor.hpu.report.require_bridge", lambda: None)
    lab.kept("identity", lambda: Outcome({}, problem))

    with pytest.raises(UnexaminedError) as refused:
        acquire(lab)

    assert problem in str(refused.value)
    assert remedy in str(refused.value)


@pytest.mark.parametrize(
    ("user", "is_double", "verdict"),
    [(0, False, "skipped"), (0, True, "confirmed"), (1000, False, "confirmed")],
)
def test_a_directory_that_root_cannot_write_to_is_none(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, user: int, is_double: bool, verdict: str
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: user)
    lab.kept("identity", lambda: Outcome({"is_double": is_double}))

    assert recipes._if_bound(judged("K-36", True, "found"), lab).verdict == verdict
    assert recipes._if_bound(judged("K-36", False, "not found"), lab).verdict == "refuted"


@pytest.mark.parametrize("kernels", ["", "/nowhere/libtpc_kernels.so"])
def test_without_a_kernel_library_the_hash_of_the_libraries_is_not_examined(
    tmp_path: Path, kernels: str
) -> None:
    (check,) = (check for check in CHECKS if check.lines == ("K-38",))

    (found,) = check.findings(Lab(tmp_path, environment={"GC_KERNEL_PATH": kernels}), {})

    assert found.verdict == "skipped"


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [(["1"], ["2"], "confirmed"), (["1", "2"], ["1", "3"], "confirmed"), (["1"], ["1"], "refuted")],
)
def test_a_cluster_that_two_graphs_share_is_no_collision(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, first: list[str], second: list[str], verdict: str
) -> None:
    runs = [
        {"graph": number, "keys": keys, "error": 0.0, "problem": ""}
        for number, keys in ((1, first), (2, second), (1, first), (0, ["9"]))
    ]
    outcomes = {"recipes.keys": {"runs": runs, "constants": []}, "recipes.options": {}}
    monkeypatch.setattr(Lab, "run", lambda _, probe, *__, **___: Outcome(outcomes[probe]))
    (check,) = (check for check in CHECKS if check.id == "H-05")

    found = {one.line: one.verdict for one in check.findings(lab, {})}

    assert found["K-29"] == verdict
    assert found["K-05"] == ("skipped" if verdict == "refuted" else "confirmed")
