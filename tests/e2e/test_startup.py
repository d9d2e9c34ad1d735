"""A start explains itself: in the log, in /metrics, and beside the floor."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from aotgaudi.bench.startup import phases_in
from tests.e2e.harness import Server, Workplace

pytestmark = pytest.mark.slow

PHASES = {
    *("process", "engine_process", "engine_import", "import", "bind", "intake"),
    *("open", "manifest", "verify", "weights", "kv_caches", "import_torch"),
    *("tokenizer", "coverage", "warm_checks", "layouts", "units", "bind_programs", "rehearsal", "engine"),
    *("guard", "listen"),
}  # fmt: skip


def test_every_phase_is_in_the_metrics_and_lies_within_the_start(server: Server) -> None:
    phases = {phase.name: phase for phase in phases_in(server.client.get("/metrics").text)}
    ready = server.metric("aotgaudi_time_to_ready_seconds")

    assert phases.keys() == PHASES
    assert all(0 <= phase.begin <= phase.end <= ready for phase in phases.values())


def test_what_waits_for_another_phase_begins_after_it(server: Server) -> None:
    phases = {phase.name: phase for phase in phases_in(server.client.get("/metrics").text)}
    order = (
        "process",
        "engine_import",
        "open",
        "manifest",
        "coverage",
        "import_torch",
        "tokenizer",
        "warm_checks",
        "layouts",
    )
    order = (*order, "units", "bind_programs", "rehearsal", "engine", "guard", "listen")

    for earlier, later in itertools.pairwise(order):
        assert phases[earlier].end <= phases[later].begin, (earlier, later)
    for name in ("weights", "kv_caches", "warm_checks"):
        assert phases["verify"].end <= phases[name].begin, name


def test_the_phases_explain_the_start(server: Server) -> None:
    """No more than a quarter of it is in no phase at all."""
    phases = phases_in(server.client.get("/metrics").text)
    ready = server.metric("aotgaudi_time_to_ready_seconds")

    unexplained = covered_to = 0.0
    for phase in sorted(phases, key=lambda phase: phase.begin):
        unexplained += max(0.0, phase.begin - covered_to)
        covered_to = max(covered_to, phase.end)
    assert unexplained + ready - covered_to <= ready / 4


def test_the_log_has_them_on_one_line(server: Server) -> None:
    (line,) = [line for line in server.log.splitlines() if " start: " in line]

    assert set(re.findall(r"(\w+) \d+\.\d\d-\d+\.\d\d", line)) == PHASES


def test_starts_are_measured_beside_the_floor(workplace: Workplace) -> None:
    where = ("--bundle", workplace.bundle, "--model", workplace.model, "--runs", "1")

    done = workplace.run("bench", "startup", *where, "--json", "--", "--seccomp", "off")

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {row["phase"] for row in found["phases"]} == PHASES
    assert found["runs"] == found["ready"]["n"] == found["floor"]["n"] == 1
    assert found["ready_to_floor"] == found["ready"]["median"] / found["floor"]["median"]


def test_a_start_that_is_refused_ends_the_measurement_with_its_exit_code(
    workplace: Workplace, tmp_path: Path
) -> None:
    where = ("--bundle", workplace.bundle, "--model", workplace.model, "--runs", "1")
    assert workplace.run("key", "generate", tmp_path / "release").returncode == 0

    done = workplace.run("bench", "startup", *where, "--", "--trusted-key", tmp_path / "release.pub")

    assert done.returncode == 4
    assert "error: the server ended with 4: " in done.stderr
    assert "Traceback" not in done.stderr
