"""Findings about machines: this one, and made-up ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from aotgaudi.backends.base import NOT_INSTALLED
from aotgaudi.backends.inductor.levels import ISA_LEVELS
from aotgaudi.doctor.machine import (
    ROOM_BYTES,
    WORKER_BYTES,
    Purpose,
    examine_machine,
    of_cpu,
    of_memory,
    of_packages,
    of_store,
    of_tools,
    of_torch,
    version_in,
)
from aotgaudi.errors import EXTRAS
from aotgaudi.machine import Memory
from aotgaudi.store.store import Store
from tests.environment import ROOT


@pytest.mark.process
def test_every_finding_that_is_not_ok_says_what_would_be_right_and_subjects_differ(tmp_path: Path) -> None:
    found = list(examine_machine(tmp_path / "store"))

    assert all(finding.remedy for finding in found if finding.status != "ok")
    assert all("\n" not in finding.observation for finding in found)
    assert len({finding.subject for finding in found}) == len(found)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("extra", ["build", "serve"])
def test_what_is_not_installed_is_named_and_what_cannot_be_done_without_it(
    monkeypatch: pytest.MonkeyPatch, extra: Purpose
) -> None:
    monkeypatch.setattr("aotgaudi.doctor.machine.missing_modules", lambda name: (name,) * (name == extra))

    finding = of_packages()

    assert (finding.status, finding.prevents) == ("warning", (extra,))
    assert f"[{extra}] lacks {extra}" in finding.observation
    assert finding.remedy == f"pip install 'aotgaudi[{extra}]'"


def test_without_any_package_both_extras_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aotgaudi.doctor.machine.version_of", lambda package: NOT_INSTALLED)

    finding = of_packages()

    assert finding.prevents == ("build", "serve")
    assert ", ".join(EXTRAS["build"]) in finding.observation
    assert finding.remedy == "pip install 'aotgaudi[build,serve]'"


@pytest.mark.parametrize(
    ("found", "statuses"),
    [
        ("2.13.0", ["ok"]),
        ("2.13.1+cpu", ["ok"]),
        ("2.130.0", ["error"]),
        ("2.12.1", ["error"]),
        ("3.0", ["error"]),
        (NOT_INSTALLED, []),
    ],
)
def test_torch_is_of_the_minor_version_that_is_tested(found: str, statuses: list[str]) -> None:
    findings = list(of_torch(found, "2.13.0"))

    assert [finding.status for finding in findings] == statuses
    assert all(finding.prevents == ("build", "serve") for finding in findings if finding.status == "error")


def test_beside_the_bridge_of_a_gaudi_torch_is_the_bridges_and_nothing_may_replace_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (torch,) = of_torch("2.11.0+git1", "2.13.0", "1.24.1.482")
    monkeypatch.setattr("aotgaudi.doctor.machine.version_of", lambda package: NOT_INSTALLED)
    packages = of_packages("1.24.1.482")

    assert (torch.status, torch.prevents) == ("warning", ("build", "serve"))
    assert "belongs to the Gaudi bridge 1.24.1.482" in torch.observation
    assert torch.remedy == "in another environment than the Gaudi bridge's: torch 2.13.0"
    assert packages.remedy.startswith("in another environment than the Gaudi bridge's: pip install ")


def test_the_version_that_is_tested_is_that_of_the_constraints(tmp_path: Path) -> None:
    path = tmp_path / "constraints.txt"
    path.write_text('# torch==1\ntorchvision==9\ntorch==2.13.0 ; python_version >= "3.11"\n')

    assert (version_in(path, "torch"), version_in(path, "numpy")) == ("2.13.0", "")
    assert version_in(ROOT / "aotgaudi" / "constraints.txt", "torch").startswith("2.")


@pytest.mark.parametrize(("is_needed", "status"), [(True, "error"), (False, "warning")])
def test_a_missing_compiler_is_an_error_where_the_rest_could_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_needed: bool, status: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    finding = of_tools(is_needed=is_needed)

    assert (finding.status, finding.prevents) == (status, ("build",))
    assert "g++ is missing" in finding.observation
    assert finding.remedy == "install g++ and binutils"


@pytest.mark.process
def test_a_compiler_that_does_not_run_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")

    finding = of_tools(is_needed=True)

    assert finding.status == "error"
    assert f"{compiler} does not say its version" in finding.observation


@pytest.mark.process
def test_the_compiler_that_a_build_would_call_is_named_with_its_path() -> None:
    finding = of_tools(is_needed=True)

    assert finding.status == "ok"
    assert "/g++: g++" in finding.observation


def test_the_best_instruction_set_is_what_a_build_would_choose() -> None:
    best = of_cpu(frozenset(ISA_LEVELS["avx512"].features))
    none = of_cpu(frozenset({"sse2"}))

    assert best.status == "ok"
    assert "builds for avx512, runs avx2 as well" in best.observation
    assert (none.status, none.prevents) == ("error", ("build", "serve"))
    assert "none of avx2" in none.observation


@pytest.mark.parametrize(
    ("workers", "status", "remedy"),
    [(2, "ok", ""), (1, "warning", "build with -j 1"), (0, "warning", "1.0 GB for each worker of a build")],
)
def test_memory_is_for_a_worker_a_core(workers: int, status: str, remedy: str) -> None:
    finding = of_memory(Memory(WORKER_BYTES * 8, WORKER_BYTES * workers), 2)

    assert (finding.status, finding.remedy, finding.prevents) == (status, remedy, ())


def test_a_store_is_checked_as_a_build_would_and_a_place_for_one_is_left_alone(tmp_path: Path) -> None:
    Store.open(tmp_path / "good")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")

    names = ("good", "empty", "other", "none/yet")
    good, empty, other, none = (of_store(tmp_path / name) for name in names)

    assert "error" not in (good.status, empty.status, none.status)
    assert "not made yet" in none.observation
    assert (other.status, other.prevents) == ("error", ("build",))
    assert "--store DIR" in other.remedy
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "good", "other"]
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_place_that_may_not_be_looked_at_is_an_error_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("aotgaudi.doctor.machine._is_filled", refuse)

    finding = of_store(tmp_path / "store")

    assert finding.status == "error"
    assert "Permission denied" in finding.observation


def test_a_store_below_a_file_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    finding = of_store(tmp_path / "file" / "store")

    assert (finding.status, finding.prevents) == ("error", ("build",))


@pytest.mark.parametrize(
    ("free", "kind", "status", "words"),
    [
        (ROOM_BYTES, "ext4", "ok", "ext4, 2.0 GB free"),
        (ROOM_BYTES - 1, "ext4", "warning", "free"),
        (100_000_000, "ext4", "error", "0.1 GB free"),
        (ROOM_BYTES, "nfs4", "ok", "on a network, where other machines may use it, too"),
        (ROOM_BYTES, "", "ok", "file system unknown"),
    ],
)
def test_a_place_needs_room_and_may_be_on_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, kind: str, status: str, words: str
) -> None:
    class Status:
        f_bavail, f_frsize = free, 1

    monkeypatch.setattr("aotgaudi.doctor.machine.os.statvfs", lambda _: Status)
    monkeypatch.setattr("aotgaudi.doctor.machine.file_system", lambda _: kind)

    finding = of_store(tmp_path / "store")

    assert finding.status == status
    assert words in finding.observation
