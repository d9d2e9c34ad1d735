"""CPU quotas of control groups, from made-up files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aotgaudi.machine import available_cores

CORES = len(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


def machine(root: Path, membership: str, **files: str) -> Path:
    """A file system with this process's groups and the files of control groups, by path with ``__`` for ``/``."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "cgroup").write_text(membership)
    for name, text in files.items():
        path = root / "sys" / "fs" / "cgroup" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cpu_max", "cores"),
    [
        ("max 100000\n", 64),
        ("200000 100000\n", 2),
        ("250000 100000\n", 2),
        ("50000 100000\n", 1),
        ("12800000 100000\n", 64),
        ("nonsense\n", 64),
        ("", 64),
    ],
)
def test_a_quota_of_version_2_limits_the_cores(tmp_path: Path, cpu_max: str, cores: int) -> None:
    root = machine(tmp_path, "0::/pod/box\n", **{"pod__box__cpu.max": cpu_max})

    assert available_cores(root) == cores


def test_the_smallest_quota_of_the_groups_above_counts(tmp_path: Path) -> None:
    quotas = {"pod__cpu.max": "300000 100000", "pod__box__cpu.max": "800000 100000", "cpu.max": "max 100000"}

    assert available_cores(machine(tmp_path, "0::/pod/box\n", **quotas)) == 3


@pytest.mark.parametrize("mount", ["cpu,cpuacct", "cpu"])
@pytest.mark.parametrize(("quota", "cores"), [("150000", 1), ("400000", 4), ("-1", 64)])
def test_a_quota_of_version_1_limits_the_cores(tmp_path: Path, mount: str, quota: str, cores: int) -> None:
    files = {f"{mount}__box__cpu.cfs_quota_us": quota, f"{mount}__box__cpu.cfs_period_us": "100000"}
    membership = "5:memory:/box\n4:cpu,cpuacct:/box\n1:name=systemd:/box\n"

    assert available_cores(machine(tmp_path, membership, **files)) == cores


@pytest.mark.parametrize("group", ["/docker/0123/of/the/host", "/../../outside"])
def test_a_path_that_only_the_host_has_leads_to_the_groups_mount(tmp_path: Path, group: str) -> None:
    root = machine(tmp_path, f"0::{group}\n", **{"cpu.max": "200000 100000"})

    assert available_cores(root) == 2


def test_without_control_groups_the_affinity_counts(tmp_path: Path) -> None:
    assert available_cores(tmp_path) == 64


def test_this_machine_has_at_least_one() -> None:
    assert available_cores() >= 1
