"""Each fault of the double refutes its line of the contract, and no other (docs/reliability.md has the same table).

Without one, doctor finds what sources say that the bridge is: every line that can be confirmed is confirmed.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aotgaudi.doctor.hpu.report import LINES, DoctorReport
from tests.environment import ROOT
from tests.hpu.conftest import InstalledDouble
from tests.hpu.doctors import Patient, examined

pytestmark = [pytest.mark.hpu_double, pytest.mark.slow, pytest.mark.timeout(1800)]

REFUTES = {
    "late-environment": "K-01",
    "graphs-in-compile-mode": "K-03",
    "not-registered": "K-04",
    "no-option": "K-05",
    "source-comments": "K-08",
    "late-recipe": "K-10",
    "no-recipe-metric": "K-12",
    "other-names": "K-13",
    "empty-metadata-fails": "K-15",
    "no-event": "K-16",
    "eager-op-raises": "K-17",
    "silent-fallback": "K-18",
    "fallback-op": "K-19",
    "no-int-narrowing": "K-20",
    "no-inplace": "K-21",
    "no-disallow": "K-22",
    "setting-restored": "K-23",
    "wrong-attention": "K-24",
    "shared-card": "K-25",
    "listed-once": "K-26",
    "four-fields": "K-27",
    "collision": "K-29",
    "key-unstable": "K-31",
    "truncated-recipe": "K-31",
    "const-tensor": "K-32",
    "leaf-views": "K-34",
    "no-flush": "K-35",
    "read-only-fails": "K-36",
    "wrong-numbers": "K-37",
    "fixed-l": "K-38",
    "wrong-long-sums": "K-39",
    "wrong-batches": "K-40",
    "figures-stand-still": "K-41",
    "zero-metadata": "K-42",
    "nan-rows": "K-43",
    "checked-indices": "K-44",
    "static-traces": "K-45",
}
ELSEWHERE = {"graphs-are-fresh": "K-33", "hang": "", "busy-card": "", "slow-store": "", "live-compile": ""}
"""Shown by other tests: K-33 needs Intel's torch; the others are about processes."""


@pytest.fixture(scope="module")
def reports(double: InstalledDouble, double_memory: Path) -> dict[str, DoctorReport | str]:
    newest = double("1.24.1")
    found = examined([Patient(newest, fault, memory=double_memory) for fault in REFUTES])
    return dict(zip(REFUTES, found, strict=True))


@pytest.mark.parametrize("fault", REFUTES)
def test_a_fault_refutes_its_line_and_no_other(reports: dict[str, DoctorReport | str], fault: str) -> None:
    report = reports[fault]

    assert isinstance(report, DoctorReport), report
    assert report.of("unclear") == ()
    assert report.of("refuted") == (REFUTES[fault],)
    assert f"| {REFUTES[fault]} |" in report.as_markdown()
    assert (REFUTES[fault] in report.lacks()) == LINES[REFUTES[fault]].is_needed


def test_where_keys_differ_between_processes_it_is_told_in_what(
    reports: dict[str, DoctorReport | str],
) -> None:
    report = reports["key-unstable"]

    assert isinstance(report, DoctorReport), report
    (seen,) = (line.observation for line in report.lines() if line.line == "K-31")
    assert re.search(r"; keys differ in: salt [0-9a-f]{16}; salt [0-9a-f]{16}$", seen)


def test_keys_that_do_not_repeat_when_pinned_are_refuted(double: InstalledDouble) -> None:
    (report,) = examined([Patient(double("1.19"), "pin-fails", only=("H-05", "H-06", "H-09"))])

    assert isinstance(report, DoctorReport), report
    assert report.of("refuted") == ("K-08", "K-09")


@pytest.mark.parametrize(
    ("fault", "seconds", "said"),
    [("busy-card", 60.0, "Device acquire failed"), ("hang", 2.0, "took more than 2 s")],
)
def test_without_a_card_nothing_is_examined(newest: Path, fault: str, seconds: float, said: str) -> None:
    (refused,) = examined([Patient(newest, fault, seconds=seconds)])

    assert isinstance(refused, str)
    assert refused.startswith("6: a card could not be acquired: ")
    assert said in refused


def test_every_fault_of_the_double_is_in_a_table() -> None:
    place = ROOT / "tests" / "double" / "habana_frameworks" / "bridge" / "faults.py"
    names = re.findall(r'^    "([a-z-]+)": "', place.read_text(encoding="utf-8"), re.MULTILINE)
    documented = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")

    assert sorted(names) == sorted({*REFUTES, *ELSEWHERE, "pin-fails"})
    for fault, line in {**REFUTES, **ELSEWHERE, "pin-fails": "K-09"}.items():
        reaction = f"{LINES[line].consequence} |" if line else ""
        assert re.search(rf"\| `{fault}` \| {line or '-'} \| {re.escape(reaction)}", documented), fault


def test_the_whole_is_refuted_where_it_is_examined_alone(newest: Path) -> None:
    (report,) = examined([Patient(newest, "wrong-numbers", only=("H-26",))])

    assert isinstance(report, DoctorReport), report
    assert report.of("refuted") == ("K-46",)


def test_every_line_of_the_contract_has_a_fault_that_refutes_it() -> None:
    """But for K-46, which is skipped where its cause is known; the test above examines it alone."""
    assert {*REFUTES.values(), *ELSEWHERE.values(), "K-09", "K-02", "K-46"} - {""} == set(LINES)


# Without a fault


@pytest.fixture(scope="module")
def releases(double: InstalledDouble, newest_report: DoctorReport) -> tuple[DoctorReport, DoctorReport]:
    (other,) = examined([Patient(double("1.19"))])
    assert isinstance(other, DoctorReport), other
    return newest_report, other


def test_every_line_of_the_contract_is_examined_once(releases: tuple[DoctorReport, DoctorReport]) -> None:
    for report in releases:
        assert sorted(line.line for line in report.lines()) == sorted(LINES)


def test_the_newest_release_confirms_every_line_that_can_be(
    releases: tuple[DoctorReport, DoctorReport],
) -> None:
    newest, _ = releases

    assert newest.of("refuted") == newest.of("unclear") == ()
    assert newest.of("skipped") == ("K-09", "K-33")  # Keys need no pinning; torch is not Intel's.
    assert newest.key_mode == "stable"
    assert newest.summary().startswith("this is a double: usable: torch_compile, keys stable;")


def test_the_old_release_is_not_usable_for_its_keys_which_can_be_pinned(
    releases: tuple[DoctorReport, DoctorReport],
) -> None:
    _, oldest = releases

    assert oldest.lacks() == oldest.of("refuted") == ("K-08",)
    assert oldest.of("unclear") == ()
    assert "K-09" in oldest.of("confirmed")
    assert oldest.key_mode == "pinned"


def test_the_report_says_double_on_each_line_and_in_its_version(newest_report: DoctorReport) -> None:
    report = newest_report
    rows = [row for row in report.as_markdown().splitlines() if row.startswith("| H-")]

    assert report.is_double
    assert report.versions["habana-torch-plugin"].endswith("+aotgaudi.double")
    assert all("| this is a double: " in row for row in rows)


def test_hpu_graphs_are_examined_where_torch_is_intels(double: InstalledDouble) -> None:
    patient = Patient(double("1.24.1"), settings={"AOTGAUDI_DOUBLE_FORK": "1"}, only=("H-22",))
    stale, fresh = examined([patient, Patient(**{**vars(patient), "fault": "graphs-are-fresh"})])

    assert isinstance(stale, DoctorReport)
    assert isinstance(fresh, DoctorReport)
    assert stale.of("confirmed") == ("K-33",)
    assert fresh.of("refuted") == ("K-33",)
