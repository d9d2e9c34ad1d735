"""A start explains itself in the log and in /metrics."""

from __future__ import annotations

import itertools
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aotgaudi.phases import Phase
from tests.e2e.harness import Server

pytestmark = pytest.mark.slow

PHASES = {
    *("process", "engine_process", "engine_import", "import", "bind", "intake"),
    *("open", "manifest", "verify", "weights", "kv_caches", "import_torch"),
    *("tokenizer", "coverage", "layouts", "units", "bind_programs", "rehearsal", "engine"),
    *("guard", "listen"),
}  # fmt: skip


def phases_of(server: Server) -> dict[str, Phase]:
    edges: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        if family.name.startswith("aotgaudi_start_phase_"):
            edges[family.name] = {sample.labels["phase"]: sample.value for sample in family.samples}
    begin, end = (edges[f"aotgaudi_start_phase_{edge}_seconds"] for edge in ("begin", "end"))
    assert begin.keys() == end.keys()
    return {name: Phase(name, begin[name], end[name]) for name in begin}


def test_every_phase_is_in_the_metrics_and_lies_within_the_start(server: Server) -> None:
    phases = phases_of(server)
    ready = server.metric("aotgaudi_time_to_ready_seconds")

    assert phases.keys() == PHASES
    assert all(0 <= phase.begin <= phase.end <= ready for phase in phases.values())


def test_what_waits_for_another_phase_begins_after_it(server: Server) -> None:
    phases = phases_of(server)
    order = (
        "process",
        "engine_import",
        "open",
        "manifest",
        "coverage",
        "import_torch",
        "tokenizer",
        "layouts",
    )
    order = (*order, "units", "bind_programs", "rehearsal", "engine", "guard", "listen")

    for earlier, later in itertools.pairwise(order):
        assert phases[earlier].end <= phases[later].begin, (earlier, later)
    for name in ("weights", "kv_caches", "layouts"):
        assert phases["verify"].end <= phases[name].begin, name


def test_the_phases_explain_the_start(server: Server) -> None:
    """No more than a quarter of it is in no phase at all."""
    phases = phases_of(server).values()
    ready = server.metric("aotgaudi_time_to_ready_seconds")

    unexplained = covered_to = 0.0
    for phase in sorted(phases, key=lambda phase: phase.begin):
        unexplained += max(0.0, phase.begin - covered_to)
        covered_to = max(covered_to, phase.end)
    assert unexplained + ready - covered_to <= ready / 4


def test_the_log_has_them_on_one_line(server: Server) -> None:
    (line,) = [line for line in server.log.splitlines() if " start: " in line]

    assert set(re.findall(r"(\w+) \d+\.\d\d-\d+\.\d\d", line)) == PHASES
