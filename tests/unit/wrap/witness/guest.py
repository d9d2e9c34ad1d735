"""Runs code in a process of its own as a guest's: nothing but the standard library, the witness on the path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotgaudi.wrap.witness import SITE

BEGIN = f"""
import sys; sys.path.insert(0, {str(SITE)!r})
import aotgaudi_witness; aotgaudi_witness.register()
def say(byte, kind="state"):
    "Says what the guest is at, and goes on once the witness has answered with an event of that kind."
    import glob, os, time
    with open(os.environ["AOTGAUDI_WITNESS_STATE"], "w") as file:
        file.write(byte)
    while True:
        names = glob.glob(os.environ["AOTGAUDI_WITNESS"] + "/*.jsonl")
        lines = [line for name in names for line in open(name).read().splitlines()]
        if any('"e":"' + kind + '"' in line and '"phase":"' + byte + '"' in line for line in lines):
            break
        time.sleep(0.01)
"""


@dataclass(frozen=True, kw_only=True)
class Guest:
    """A place for a guest: events, state and a root."""

    place: Path

    @property
    def root(self) -> Path:
        return self.place / "root"

    @property
    def state(self) -> Path:
        return self.place / "state"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "AOTGAUDI_WITNESS": str(self.place / "events"),
            "AOTGAUDI_WITNESS_ROOTS": json.dumps([str(self.root)]),
            "AOTGAUDI_WITNESS_STATE": str(self.state),
        }

    def run(
        self, code: str, *, python: str = sys.executable, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs code in a process that has registered, and fails where it fails."""
        done = self.attempt(code, python=python, **environ)
        assert done.returncode == 0, done.stderr
        return done

    def attempt(
        self, code: str, *, python: str = sys.executable, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, "-I", "-S", "-c", BEGIN + textwrap.dedent(code)],
            env={**self.environment, **environ},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def files(self) -> list[Path]:
        return sorted((self.place / "events").glob("*.jsonl"))

    def events(self, kind: str | None = None) -> list[Mapping[str, Any]]:
        """Returns the events of all processes, in order of time; each file must be whole."""
        found = []
        for file in self.files():
            lines = [json.loads(line) for line in file.read_bytes().splitlines()]
            assert [line["n"] for line in lines] == list(range(len(lines))), file
            assert lines[0]["e"] == "hello", file
            found.extend(lines)
        found.sort(key=lambda event: event["t"])
        return [event for event in found if kind in (None, event["e"])]


def make_guest(place: Path, state: str = "c") -> Guest:
    for folder in ("events", "root"):
        (place / folder).mkdir()
    (place / "state").write_text(state)
    return Guest(place=place)
