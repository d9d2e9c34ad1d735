"""The report: what it says of verdicts, that it is the committed schema's, and that nothing private is in it."""

from __future__ import annotations

import getpass
import socket

import pytest

from aotgaudi.doctor.hpu.lab import Verdict
from aotgaudi.doctor.hpu.report import (
    LINES,
    CheckReport,
    DoctorReport,
    LineReport,
    report_schema,
    without_private,
)
from aotgaudi.document import load_document
from tests.environment import ROOT


def report(*lines: tuple[str, Verdict], is_double: bool = False) -> DoctorReport:
    found = tuple(LineReport.of(line, verdict, f"seen of {line}") for line, verdict in lines)
    return DoctorReport(
        is_double=is_double,
        device_type="gaudi2",
        versions={"torch": "2.11.0"},
        key_mode="stable",
        checks=(CheckReport(id="H-05", title="graphs", seconds=1.5, lines=found),),
    )


def test_it_is_read_as_it_is_written() -> None:
    written = report(("K-01", "confirmed"), ("K-29", "unclear"))

    assert load_document(written.dumps(), DoctorReport, "report") == written


def test_the_committed_schema_is_up_to_date() -> None:
    """Mend with ``python -m aotgaudi.doctor.hpu.report docs``."""
    assert (ROOT / "docs" / "doctor-hpu.schema.json").read_bytes() == report_schema()


def test_the_summary_counts_verdicts() -> None:
    verdicts: dict[str, Verdict] = {**dict.fromkeys(LINES, "confirmed"), "K-03": "refuted", "K-04": "skipped"}

    found = report(*verdicts.items())

    counts = f"{len(LINES) - 2} confirmed, 1 refuted, 1 skipped"
    assert found.summary() == f"usable: torch_compile, keys stable; {counts}"


def test_what_was_examined_in_part_is_not_called_usable() -> None:
    found = report(("K-01", "confirmed"), ("K-02", "confirmed"))

    assert found.summary().startswith(f"examined in part, 2 of {len(LINES)} lines: nothing that is needed")


@pytest.mark.parametrize(
    ("verdict", "is_lacking"), [("refuted", True), ("unclear", True), ("skipped", False)]
)
def test_a_needed_line_that_was_not_found_to_hold_makes_it_unusable(
    verdict: Verdict, is_lacking: bool
) -> None:
    found = report(("K-29", verdict), ("K-01", verdict))

    assert found.lacks() == (("K-29",) if is_lacking else ())
    assert found.summary().startswith("not usable for K-29; " if is_lacking else "examined in part")


def test_people_are_told_what_was_relied_on_and_asked_for_the_file() -> None:
    text = report(("K-29", "refuted")).as_markdown()

    assert "| H-05 | K-29 | different graphs have different keys | confirmed | NO | seen of K-29 |" in text
    assert "K-29 was refuted: not usable: one graph would be run with the recipe of another" in text
    assert "Please send this file" in text
    without = report(("K-01", "confirmed")).as_markdown()
    assert "What follows" not in without
    assert "Please send this file" in without


def test_what_is_unclear_is_told_with_how_to_ask_again() -> None:
    (row,) = report(("K-01", "confirmed"), ("K-29", "unclear")).shortcomings()

    assert "seen of K-29" in row
    assert row.endswith("`aotgaudi doctor --hpu --only H-05`")


def test_a_double_says_so_in_each_row_and_asks_for_nothing() -> None:
    text = report(("K-29", "refuted"), is_double=True).as_markdown()

    assert "| NO | this is a double: seen of K-29 |" in text
    assert "Please send" not in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no such file: /home/someone/.cache/x.so", "no such file: ..."),
        ("'/opt/habana/lib'", "'...'"),
        ("~/notes/x failed", "... failed"),
        ("2.0e-03 off; 3/4 of them", "2.0e-03 off; 3/4 of them"),
        ("a/b are named", "a/b are named"),
        ("card 0000:19:00.0 is held", "card ... is held"),
        ("AM50033569, 01P0-HL2080A0", "..., 01P0-HL2080A0"),
        ("uuid 01234567-89ab-cdef-0123-456789abcdef", "uuid ..."),
        ("mac 9c:b6:d0:aa:bb:cc, 10.0.3.17:8000", "mac ..., ...:8000"),
        (
            "V is 1.24.1.482.6c1b7a2, the capability 1.24.1.48",
            "V is 1.24.1.482.6c1b7a2, the capability 1.24.1.48",
        ),
    ],
)
def test_what_is_private_is_left_out(text: str, shown: str) -> None:
    assert without_private(text) == shown


def test_the_names_of_host_and_user_are_left_out() -> None:
    text = without_private(f"on {socket.gethostname()}: {getpass.getuser()} may not")

    assert text == "on ...: ... may not"
