"""Graphs that reach the bridge without Dynamo: built, proved and served; refused where the bridge cannot take them."""

from __future__ import annotations

from pathlib import Path

import pytest

from aotgaudi.compile.keys import ProofRow, UnitRow
from tests.hpu.benches import (
    DEFAULTS,
    DIRECT,
    NUM_SOME,
    NUM_TOKENS,
    PROMPT,
    SAMPLINGS,
    Bench,
    ask_for_a_mix,
    events,
    greedy_text,
)
from tests.hpu.collecting import LAYER, OTHER, Place
from tests.hpu.conftest import InstalledDouble

pytestmark = [pytest.mark.hpu_double, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("profile", "spec", "margin"),
    [("1.24.1", DEFAULTS, 0.1), pytest.param("1.19", DIRECT, 0.0, marks=pytest.mark.nightly)],
    ids=["defaults", "1.19"],
)
def test_graphs_that_reach_the_bridge_without_dynamo_are_built_proved_and_served(
    double: InstalledDouble, tmp_path: Path, profile: str, spec: str, margin: float
) -> None:
    """The defaults: bfloat16, contiguous attention, with exchanges of blocks that really happen, and all samplers."""
    direct = Bench(tmp_path / "direct", double(profile), spec)
    direct.build()
    second, journal = tmp_path / "second", tmp_path / "journal"

    again = direct.run("build", "spec.toml", "-o", "b2.bundle", AOTGAUDI_DOUBLE_JOURNAL=str(second))
    verified = direct.run("verify", "b.bundle")
    settings = {
        "AOTGAUDI_DOUBLE_JOURNAL": str(journal),
        "AOTGAUDI_DOUBLE_FAULTS": "eager-op-raises",
    }
    with direct.server(**settings) as server:
        answer = server.complete(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)["choices"][0]["text"]
        ask_for_a_mix(server, NUM_SOME, SAMPLINGS if spec == DEFAULTS else SAMPLINGS[:1])
        compiled = server.metric("aotgaudi_compilations_total", cause="backend")
        swaps = server.metric("aotgaudi_defrag_swaps_total")

    assert (again.returncode, verified.returncode) == (0, 0), again.stderr + verified.stderr
    assert "cache: nothing to do" in again.stdout
    assert not second.exists()
    wanted = greedy_text(direct.folder / "model", margin)
    assert len(wanted) > 10
    assert answer.startswith(wanted)
    assert (compiled, swaps > 0) == (0, spec == DEFAULTS)
    assert not {"GRAPH_COMPILE", "CACHE_MISS", "CPU_FALLBACK"} & set(events(journal))
    assert "with the front end (direct)" in server.log


def test_a_bridge_that_needs_dynamo_is_refused_before_anything_is_traced(bench: Bench) -> None:
    (bench.folder / "direct.toml").write_text(DIRECT, encoding="utf-8")

    done = bench.run("build", "direct.toml", "-o", "direct.bundle", AOTGAUDI_DOUBLE_FAULTS="no-direct")

    assert done.returncode == 6, done.stderr
    assert "target.frontend: is 'direct', and this bridge's backend cannot be called without" in done.stderr
    assert '(target.frontend = "dynamo"; aotgaudi doctor --hpu, H-18)' in done.stderr


@pytest.mark.parametrize(("profile", "key_mode"), [("1.24.1", "stable"), ("1.19", "pinned")])
def test_a_unit_needs_no_dynamo(
    double: InstalledDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str, key_mode: str
) -> None:
    monkeypatch.setattr("torch.compile", None)
    first, second = (Place(double(profile), tmp_path / name, key_mode, "direct") for name in "ab")

    row, again = first.compiled(LAYER), second.compiled(OTHER, LAYER)
    assert isinstance(row, UnitRow), row
    assert isinstance(again, UnitRow), again
    proof = first.proved(row)

    assert row.artifact.keys() == again.artifact.keys()
    assert isinstance(proof, ProofRow), proof
    assert (proof.num_rounds, proof.recipes) == (1, {})
