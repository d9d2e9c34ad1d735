"""Cores and memory under the limits of control groups, from made-up files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aotgaudi.machine import Memory, available_cores, available_memory


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


MEMINFO = "MemTotal:        8000 kB\nMemFree:   10 kB\nMemAvailable:    6000 kB\n"


def machine_with_memory(root: Path, membership: str = "", **files: str) -> Path:
    """A file system with 8000 kB of memory, this process's groups, and files of control groups (``__`` for ``/``)."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(MEMINFO)
    (root / "proc" / "self" / "cgroup").write_text(membership)
    for name, text in files.items():
        path = root / "sys" / "fs" / "cgroup" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_control_groups_the_machine_decides(tmp_path: Path) -> None:
    assert available_memory(machine_with_memory(tmp_path)) == Memory(8_192_000, 6_144_000)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("4000000\n", Memory(4_000_000, 3_500_000)),
        ("1000000\n", Memory(1_000_000, 500_000)),
        ("500\n", Memory(500, 0)),
        ("max\n", Memory(8_192_000, 6_144_000)),
        ("", Memory(8_192_000, 6_144_000)),
    ],
)
def test_a_limit_of_version_2_counts_and_pages_of_files_are_free(
    tmp_path: Path, limit: str, expected: Memory
) -> None:
    files = {
        "box__memory.max": limit,
        "box__memory.current": "700000\n",
        "box__memory.stat": "anon 1\ninactive_file 200000\n",
    }

    assert available_memory(machine_with_memory(tmp_path, "0::/box\n", **files)) == expected


def test_the_least_of_the_groups_above_counts(tmp_path: Path) -> None:
    files = {"pod__memory.max": "3000000", "pod__box__memory.max": "5000000"}

    assert available_memory(machine_with_memory(tmp_path, "0::/pod/box\n", **files)).total_bytes == 3_000_000


def test_a_limit_of_version_1_counts_and_its_largest_number_means_none(tmp_path: Path) -> None:
    files = {
        "memory__box__memory.limit_in_bytes": "2000000",
        "memory__box__memory.usage_in_bytes": "1500000",
        "memory__memory.limit_in_bytes": "9223372036854771712",
    }

    assert available_memory(machine_with_memory(tmp_path, "4:memory:/box\n2:cpu:/box\n", **files)) == Memory(
        2_000_000, 500_000
    )


def test_where_nothing_can_be_read_nothing_is_free(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == Memory(0, 0)
