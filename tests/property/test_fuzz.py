"""A sample of what benchmarks/fuzz.py does for hours: no parser lets go of anything but its own one-line error."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tests.property.fuzz_targets import Fuzz, targets

SAMPLE = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
def test_a_parser_survives(target: Fuzz) -> None:
    @SAMPLE
    @given(target.inputs)
    def survive(data: bytes) -> None:
        target.check(data)

    survive()
