"""What the witness costs a guest: CPU time, with and without it, in processes of their own that alternate.

``python benchmarks/bench_witness.py [--rounds 7]``; needs neither torch nor a guest. CPU time is compared, not wall time, so
that a busy machine changes little.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import Spread, Table, environment, finish, make_parser, verdict

from aotgaudi.wrap.witness import SITE

IDLE_SECONDS = 4.0
CODE = f"""
import os, subprocess, sys, time, json
sys.path.insert(0, sys.argv[1]); folder = sys.argv[2]
began = time.process_time()
import aotgaudi_witness; aotgaudi_witness.register()
found = {{"register": time.process_time() - began}}
code = compile("x = 1", "<string>", "exec")
inside, outside = folder + "/root/file", folder + "/file"
open(inside, "w").close(); open(outside, "w").close()

def read(): os.close(os.open(outside, os.O_RDONLY))
def write_outside(): os.close(os.open(outside, os.O_WRONLY))
def write_inside(): os.close(os.open(inside, os.O_WRONLY))
def spawn(): os.waitpid(os.posix_spawn("/bin/true", ["true"], {{}}), 0)

for name, number, work in [
    ("event", 200_000, lambda: sys.audit("guest.event", 1)),
    ("exec", 100_000, lambda: exec(code, {{}})),
    ("read", 50_000, read), ("write_outside", 50_000, write_outside), ("write_inside", 50_000, write_inside),
    ("spawn", 100, spawn),
]:
    work()
    began = time.process_time()
    for _ in range(number):
        work()
    found[name] = (time.process_time() - began) / number
began = time.process_time()
time.sleep({IDLE_SECONDS})
found["idle"] = (time.process_time() - began) / {IDLE_SECONDS}
print(json.dumps(found))
"""
NAMES = {
    "event": "an audit event that the witness does not handle",
    "exec": "`exec` of a code object",
    "read": "a file opened for reading",
    "write_outside": "a file opened for writing, not below a root",
    "write_inside": "a file opened for writing below a root, again",
    "spawn": "a process started (its line is written)",
}
TARGET_IDLE = 0.001
"""Share of one core that a witness may use while nothing happens."""


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    machine = environment()
    samples: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for _ in range(args.rounds):
        for is_witnessed, found in samples.items():
            found.append(measure(is_witnessed=is_witnessed))
    spreads = {
        "witnessed" if key else "alone": {n: Spread(tuple(s[n] for s in found)) for n in found[0]}
        for key, found in samples.items()
    }
    measurements = {key: {n: spread.json() for n, spread in found.items()} for key, found in spreads.items()}
    finish("witness", args, machine, measurements, [_table(spreads, args.rounds)])


def measure(*, is_witnessed: bool) -> dict[str, float]:
    """Returns the CPU seconds of everything in one process."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "root").mkdir()
        (place / "events").mkdir()
        (place / "state").write_text("v")
        variables = {
            "AOTGAUDI_WITNESS": str(place / "events"),
            "AOTGAUDI_WITNESS_ROOTS": json.dumps([str(place / "root")]),
            "AOTGAUDI_WITNESS_STATE": str(place / "state"),
        }
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", CODE, str(SITE), folder],
            env={"PATH": os.environ["PATH"], **(variables if is_witnessed else {})},
            check=True,
            capture_output=True,
            text=True,
        )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _table(spreads: dict[str, dict[str, Spread]], rounds: int) -> Table:
    alone, witnessed = spreads["alone"], spreads["witnessed"]

    def row(name: str) -> tuple[str, ...]:
        more = witnessed[name].median - alone[name].median
        return NAMES[name], alone[name].text(2, 1e6), witnessed[name].text(2, 1e6), f"{more * 1e6:.2f}", ""

    idle = witnessed["idle"].median - alone["idle"].median
    begin = [f"{found['register'].median * 1e6:.0f}" for found in (alone, witnessed)]
    rows: list[tuple[str, ...]] = [row(name) for name in NAMES]
    rows.append(("`register`, once a process", *begin, "", ""))
    rows.append(
        (
            "a second of doing nothing",
            alone["idle"].text(0, 1e6),
            witnessed["idle"].text(0, 1e6),
            f"{idle * 1e6:.0f}",
            verdict(round(idle, 5), TARGET_IDLE),
        )
    )
    columns = ("what", "without (µs of CPU)", "with", "more", "target")
    note = f"Medians of {rounds} processes of each kind, alternating (least and most in brackets); state `v`, one root."
    return Table("The witness", columns, tuple(rows), note)


if __name__ == "__main__":
    main()
