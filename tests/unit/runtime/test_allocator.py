"""When freed memory goes back to the system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from aotgaudi.runtime.memory import FreedMemory

MIB = 1 << 20


class Machine:
    """So many bytes are freed, of which a trim gives all back, and steps fault `step_bytes` in again."""

    def __init__(self, step_bytes: int) -> None:
        self.freed_bytes = self.step_bytes = step_bytes
        self.num_trims = 0

    def trim(self) -> None:
        self.num_trims += 1
        self.freed_bytes = self.step_bytes

    def memory(self) -> FreedMemory:
        return FreedMemory(lambda: self.freed_bytes, self.trim)


def test_what_steps_use_again_and_again_is_kept() -> None:
    machine = Machine(200 * MIB)
    memory = machine.memory()

    assert [memory.give_back() for _ in range(100)] == [False] * 100


def test_what_a_burst_leaves_goes_back_each_time() -> None:
    machine = Machine(200 * MIB)
    memory = machine.memory()

    for num_bursts in range(1, 4):
        for _ in range(5):
            memory.give_back()
        machine.freed_bytes += 40 * MIB
        assert memory.give_back()
        assert machine.num_trims == num_bursts


def test_what_was_taken_for_usual_by_mistake_is_looked_at_again() -> None:
    machine = Machine(0)
    machine.freed_bytes = 500 * MIB
    memory = machine.memory()

    for _ in range(120):
        memory.give_back()

    assert machine.freed_bytes == 0


_PROGRAM = """
from aotgaudi.runtime.memory import _anonymous_bytes, freed_memory, keep_freed_memory
keep_freed_memory()
memory = freed_memory()
for _ in range(3):
    memory.give_back()
before = _anonymous_bytes()
bodies = [bytearray(b"x" * (4 << 20)) for _ in range(20)]
kept = bytearray(b"x" * 100_000)  # Above the others in the heap.
held = memory.give_back()
del bodies
after = _anonymous_bytes()
print(held, memory.give_back(), after - before >> 20, _anonymous_bytes() - before >> 20)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_a_real_process_gives_back_what_bodies_took() -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], cwd=root, capture_output=True, text=True, check=True, timeout=60
    )

    held, given, before, after = done.stdout.split()
    assert (held, given) == ("False", "True")
    assert int(before) >= 60
    assert int(after) <= 16
