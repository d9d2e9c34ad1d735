"""What serving asks of the kernel: of this machine's, and where it refuses."""

from __future__ import annotations

import errno
import os
import resource
import sys

import pytest

from aotgaudi.doctor.kernel import MANY_FILES, kernel_findings, of_filter, of_open_files, of_sealed_memory


def test_this_process_can_still_start_others_after_it_was_examined() -> None:
    findings = list(kernel_findings())

    assert [finding.subject for finding in findings] == ["seccomp", "sealed memory", "open files"]
    assert os.waitstatus_to_exitcode(os.system("true")) == 0


@pytest.mark.parametrize(
    ("code", "status", "seen"),
    [
        ("pass", "ok", "refuses to start processes"),
        ("import sys; sys.exit('first\\nTargetError: no filter is known')", "warning", "no filter is known"),
        ("import sys; sys.exit(1)", "warning", "without a word"),
    ],
)
def test_a_filter_that_cannot_be_set_is_a_warning_with_the_reason(code: str, status: str, seen: str) -> None:
    finding = of_filter([sys.executable, "-c", code])

    assert (finding.status, finding.prevents) == (status, ())
    assert seen in finding.observation


def test_memory_that_cannot_be_sealed_prevents_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_sealed_memory().status == "ok"

    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.memfd_create", refuse)
    finding = of_sealed_memory()
    assert (finding.status, finding.prevents) == ("error", ("serve",))
    assert "Operation not permitted" in finding.observation


@pytest.mark.parametrize(
    ("limit", "status"),
    [(resource.RLIM_INFINITY, "ok"), (MANY_FILES, "ok"), (MANY_FILES - 1, "warning")],
)
def test_few_open_files_are_a_warning(limit: int, status: str) -> None:
    assert of_open_files(limit).status == status
