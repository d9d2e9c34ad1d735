"""What doctor finds on the double as sources say the bridge is: every line that can be confirmed is confirmed."""

from __future__ import annotations

import pytest

from aotgaudi.doctor.hpu.report import LINES, DoctorReport
from tests.hpu.conftest import InstalledDouble
from tests.hpu.doctors import Patient, examined

pytestmark = [pytest.mark.hpu_double, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def reports(double: InstalledDouble, newest_report: DoctorReport) -> tuple[DoctorReport, DoctorReport]:
    (other,) = examined([Patient(double("1.19"))])
    assert isinstance(other, DoctorReport), other
    return newest_report, other


def test_every_line_of_the_contract_is_examined_once(reports: tuple[DoctorReport, DoctorReport]) -> None:
    for report in reports:
        assert sorted(line.line for line in report.lines()) == sorted(LINES)


def test_the_newest_release_confirms_every_line_that_can_be(
    reports: tuple[DoctorReport, DoctorReport],
) -> None:
    newest, _ = reports

    assert newest.of("refuted") == newest.of("unclear") == ()
    assert newest.of("skipped") == ("K-09", "K-33")  # Keys need no pinning; torch is not Intel's.
    assert newest.key_mode == "stable"
    assert newest.summary().startswith("this is a double: usable: torch_compile, keys stable;")


def test_the_old_release_is_not_usable_for_its_keys_which_can_be_pinned(
    reports: tuple[DoctorReport, DoctorReport],
) -> None:
    _, oldest = reports

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
