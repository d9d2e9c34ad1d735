"""A bundle that holds a part: what the report says of each policy is what a server of it does, and what is cold is seen."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from aotgaudi.bundle.part import Outside, served_manifest
from aotgaudi.bundle.receipt import ClosedUnder, SealedPart
from aotgaudi.errors import NotWarmError
from aotgaudi.manifest.coverage import coverage_of
from aotgaudi.report.drawing import steps_figure
from aotgaudi.spec.scheduler import SchedulerSpec
from tests.unit.bundle.test_part import ALONE, COVERING, LEAST, MANIFEST, seal
from tests.unit.report.reports import report_on_bundle

KINDS = {"prompt", "decode"}


@pytest.mark.parametrize("built", [ALONE, COVERING, LEAST], ids=["alone", "covering", "least"])
def test_each_policy_is_reported_as_it_is_served(tmp_path: Path, built) -> None:
    bundle = seal(tmp_path, built)

    part = report_on_bundle(bundle).part

    assert part is not None
    assert part.is_closed
    assert part.num_cold == len(MANIFEST.entries) - len(built)
    assert [policy.policy for policy in part.policies] == list(get_args(Outside))
    whole = {phase.kind: phase.num_reachable for phase in coverage_of(MANIFEST, SchedulerSpec()).phases}
    for policy in part.policies:
        try:
            served = served_manifest(bundle, policy.policy)
        except NotWarmError:
            assert (policy.policy, policy.limits, policy.phases) == ("pad-up", None, ())
            continue
        assert policy.limits == ClosedUnder.of(served.spec.limits).model_dump()
        proved = {phase.kind: phase for phase in coverage_of(served, SchedulerSpec()).phases}
        assert {phase.kind for phase in policy.phases} == KINDS
        for phase in policy.phases:
            assert (phase.num_served, phase.num_reachable) == (
                proved[phase.kind].num_reachable,
                whole[phase.kind],
            )


def test_steps_whose_entries_are_not_built_are_counted_and_have_a_colour(tmp_path: Path) -> None:
    found = report_on_bundle(seal(tmp_path, LEAST))

    for index, plane in enumerate(found.planes):
        cold = [cell for cell in plane.cells if cell.num_cold]
        assert cold
        assert len(cold) < len(plane.cells)
        assert any(point.is_warm is False for point in plane.points)
        figure = steps_figure(plane, f"planes.{index}", "")
        assert "has an entry, none of which is built" in figure
        assert 'fill="var(--cold)"' in figure


def test_where_larger_entries_cover_everything_nothing_is_cold(tmp_path: Path) -> None:
    found = report_on_bundle(seal(tmp_path, COVERING))

    assert {cell.num_cold for plane in found.planes for cell in plane.cells} == {0}
    assert found.entries.num_warm < found.entries.num_entries


def test_a_whole_bundle_is_no_part(tmp_path: Path) -> None:
    assert report_on_bundle(seal(tmp_path, MANIFEST.entries, lambda _: None)).part is None


def test_a_part_that_is_not_closed_is_a_warning_and_the_rest_is_reported(tmp_path: Path) -> None:
    def claim(part: SealedPart) -> SealedPart:
        return part.model_copy(update={"limits": part.limits.model_copy(update={"max_model_len": 100})})

    found = report_on_bundle(seal(tmp_path, ALONE, claim))

    assert found.part is None
    assert any("is not closed under max_model_len 100" in text for text in found.warnings)
    assert found.entries.num_warm == len(ALONE)
