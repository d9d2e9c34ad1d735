from __future__ import annotations

import typing

import pytest

from aotgaudi.bucketing.versions import VERSIONS, find_strategy, find_unified
from aotgaudi.errors import SpecError
from aotgaudi.spec.bucketing import BucketingSpec


def test_the_registry_and_the_spec_name_the_same_strategies_and_versions() -> None:
    fields = BucketingSpec.model_fields
    assert list(typing.get_args(fields["version"].annotation)) == list(VERSIONS)
    known = {name for version in VERSIONS.values() for name in version.strategy_names}
    assert set(typing.get_args(fields["strategy"].annotation)) == known | {"tuned"}


def test_every_version_has_every_strategy_that_it_names() -> None:
    for name, version in VERSIONS.items():
        for strategy in version.strategy_names:
            found = find_unified(name) if strategy == "unified" else find_strategy(name, strategy)
            assert found is not None


@pytest.mark.parametrize(
    ("version", "strategy", "expected"),
    [
        ("vllm-gaudi@nowhere", "exponential", r"bucketing\.version.*vllm-gaudi@091bbad"),
        ("vllm-gaudi@091bbad", "nothing", r"bucketing\.strategy.*exponential"),
        ("vllm-gaudi@v0.17.1", "unified", r"bucketing\.strategy.*exponential"),
    ],
)
def test_an_unknown_strategy_or_version_is_an_error_that_names_the_known(
    version: str, strategy: str, expected: str
) -> None:
    with pytest.raises(SpecError, match=expected):
        find_strategy(version, strategy)


def test_a_version_without_unified_attention_is_an_error() -> None:
    with pytest.raises(SpecError, match=r"bucketing\.strategy: is 'unified'"):
        find_unified("vllm-gaudi@091bbad")
