from __future__ import annotations

import pytest
from pydantic import ValidationError

from aotgaudi.errors import SpecError
from aotgaudi.spec.target import DEVICE_PROFILES, TargetSpec


@pytest.mark.parametrize(
    ("name", "num_sms"),
    [("a100", 108), ("h100", 132), ("h100-pcie", 114), ("h200", 132), ("h20", 78), ("b200", 148)],
)
def test_a_profile_has_its_devices_multiprocessors(name: str, num_sms: int) -> None:
    assert TargetSpec(backend="cuda", profile=name).resolved_num_sms == num_sms


def test_every_profile_is_a_name_that_can_be_typed_and_says_where_its_numbers_are_from() -> None:
    for name, profile in DEVICE_PROFILES.items():
        assert name == name.lower().strip()
        assert profile.source
        assert TargetSpec(profile=name, num_sms=profile.num_sms).resolved_num_sms == profile.num_sms


def test_num_sms_stands_above_the_profiles() -> None:
    assert TargetSpec(backend="cuda", profile="h200", num_sms=60).resolved_num_sms == 60


def test_without_either_nothing_is_guessed() -> None:
    assert TargetSpec(backend="cuda").resolved_num_sms is None


def test_an_unknown_profile_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SpecError, match=r"target\.profile: is 'h2000'.*a100.*h200.*target\.num_sms"):
        TargetSpec(backend="cuda", profile="h2000")


@pytest.mark.parametrize("num_sms", [0, -1, 4097, 1.5, True])
def test_a_number_that_no_device_has_is_refused(num_sms: object) -> None:
    with pytest.raises(ValidationError):
        TargetSpec(backend="cuda", num_sms=num_sms)
