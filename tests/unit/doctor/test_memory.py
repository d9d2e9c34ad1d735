"""Limits of control groups, from made-up files."""

from __future__ import annotations

from pathlib import Path

import pytest

from aotgaudi.doctor.memory import Memory, available_memory

MEMINFO = "MemTotal:        8000 kB\nMemFree:   10 kB\nMemAvailable:    6000 kB\n"


def machine(root: Path, membership: str = "", **files: str) -> Path:
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
    assert available_memory(machine(tmp_path)) == Memory(8_192_000, 6_144_000)


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

    assert available_memory(machine(tmp_path, "0::/box\n", **files)) == expected


def test_the_least_of_the_groups_above_counts(tmp_path: Path) -> None:
    files = {"pod__memory.max": "3000000", "pod__box__memory.max": "5000000"}

    assert available_memory(machine(tmp_path, "0::/pod/box\n", **files)).total_bytes == 3_000_000


def test_a_limit_of_version_1_counts_and_its_largest_number_means_none(tmp_path: Path) -> None:
    files = {
        "memory__box__memory.limit_in_bytes": "2000000",
        "memory__box__memory.usage_in_bytes": "1500000",
        "memory__memory.limit_in_bytes": "9223372036854771712",
    }

    assert available_memory(machine(tmp_path, "4:memory:/box\n2:cpu:/box\n", **files)) == Memory(
        2_000_000, 500_000
    )


def test_where_nothing_can_be_read_nothing_is_free(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == Memory(0, 0)
