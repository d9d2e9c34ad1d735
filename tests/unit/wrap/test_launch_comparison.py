from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.backends.base import Target
from aotgaudi.bundle.launch import Launch, ModelIdentity, Place, WarmUp
from aotgaudi.digest import Digest
from aotgaudi.wrap.adapters.vllm import VLLM
from aotgaudi.wrap.launch_comparison import Difference, compare
from tests.launches import a_launch

RULES = VLLM.variable_rules
PLACE = a_launch().place


def place(**changes: Any) -> Place:
    return PLACE.model_copy(update=changes)


def test_a_launch_is_the_sealed_one() -> None:
    found = compare(a_launch(), a_launch(), RULES)

    assert found.is_same
    assert found.exit_code == 0
    assert found.sentence() == "the launch is the sealed one"


@pytest.mark.parametrize(
    ("changes", "name", "code"),
    [
        ({"flags": {"max-model-len": "1024"}}, "flag.max-model-len", 3),
        ({"flags": {}}, "flag.max-model-len", 3),
        ({"variables": {}}, "variable.VLLM_CPU_KVCACHE_SPACE", 3),
        ({"model": ModelIdentity(name="x", files={"config.json": Digest.of(b"x")})}, "model.config.json", 3),
        ({"world": {"tensor_parallel": 2}}, "world.tensor_parallel", 3),
        ({"exercise": WarmUp(level="none")}, "exercise", 3),
        ({"repairs": ()}, "repairs", 3),
        ({"manifest_id": "m"}, "shapes", 3),
        ({"software": {**a_launch().software, "vllm": "0.33.0 cd"}}, "software.vllm", 5),
        ({"software": {**a_launch().software, "new-plugin": "1 cd"}}, "software.new-plugin", 5),
        ({"target": Target(backend="cpu", machine="x86_64", isa=("avx2",))}, "target.isa", 5),
        ({"target": Target(backend="cpu", machine="aarch64", isa=("avx2", "fma"))}, "target.machine", 5),
        ({"guest": "vllm-gaudi"}, "guest", 5),
    ],
    ids=str,
)
def test_each_component_that_differs_is_named_with_its_exit_code(
    changes: dict[str, Any], name: str, code: int
) -> None:
    here = a_launch(**changes)

    found = compare(a_launch(), here, RULES)

    assert here.id != a_launch().id
    assert name in [one.name for one in found.components]
    assert found.exit_code == code
    assert not found.is_same
    assert "\n" not in found.sentence()


@pytest.mark.parametrize(
    ("sealed", "here", "sentence"),
    [
        (
            {},
            {"flags": {"max-model-len": "1024"}},
            "flag.max-model-len is 1024, the capture was built for 512",
        ),
        (
            {"flags": {}},
            {"flags": {"enforce-eager": True}},
            "flag.enforce-eager is on, the capture was built for (default)",
        ),
        (
            {},
            {"target": Target(backend="cpu", machine="x86_64", isa=("avx2", "sse2"))},
            "target.isa is one with sse2, the capture was built for one with fma",
        ),
    ],
)
def test_the_sentence_says_what_was_sealed_and_what_is_here(
    sealed: dict[str, Any], here: dict[str, Any], sentence: str
) -> None:
    """A flag that is not given is the default, and of features only those are shown that the other side lacks."""
    assert compare(a_launch(**sealed), a_launch(**here), RULES).sentence() == sentence


def test_long_texts_that_begin_alike_are_shown_from_where_they_part() -> None:
    long = "-O3 " * 30

    assert Difference("variable.CXXFLAGS", f"{long}-mavx2", f"{long}-mfma").shown == ("...avx2", "...fma")
    assert Difference("variable.CXXFLAGS", long, f"{long}-g").shown[1].endswith("-g")
    assert Difference("x", "(a secret)", "(a secret)").shown == ("(a secret)", "(a secret)")


def test_of_several_differences_the_machines_comes_first() -> None:
    found = compare(a_launch(), a_launch(flags={}, software={}), RULES)

    assert found.sentence().startswith("software.")
    assert found.exit_code == 5


def test_a_cpu_with_more_features_will_do() -> None:
    here = a_launch(target=Target(backend="cpu", machine="x86_64", isa=("avx2", "avx512f", "fma")))

    assert compare(a_launch(), here, RULES).is_same
    assert not compare(here, a_launch(), RULES).is_same


@pytest.mark.parametrize(
    ("changes", "is_established"),
    [
        ({"root": "/elsewhere"}, True),
        ({"variables": {"VLLM_IMAGE_TAG": "v8"}}, True),
        ({"variables": {}}, True),
        ({"variables": {"VLLM_IMAGE_TAG": "v7", "VLLM_P2P_SIDE_CHANNEL_HOST": "10.0.0.7"}}, False),
        ({"prefix": "/usr", "site_packages": "/usr/lib/python3/dist-packages"}, False),
    ],
    ids=str,
)
def test_conditions_are_established_where_they_can_be(changes: dict[str, Any], is_established: bool) -> None:
    found = compare(a_launch(), a_launch(place=place(**changes)), RULES)

    assert found.components == ()
    assert bool(found.unmet) is not is_established
    assert bool(found.established) is is_established
    assert found.is_same is is_established


def test_another_site_packages_is_another_machine_and_a_pods_variable_is_not_warm() -> None:
    moved = compare(a_launch(), a_launch(place=place(site_packages="/x")), RULES)
    of_pod = compare(a_launch(), a_launch(place=place(variables={"VLLM_LOOPBACK_IP": "::1"})), RULES)

    assert moved.exit_code == 5
    assert of_pod.exit_code == 3
    assert "VLLM_LOOPBACK_IP" in of_pod.sentence()


@given(
    flags=st.dictionaries(st.sampled_from("abc"), st.sampled_from(["1", "2", True]), max_size=3),
    others=st.dictionaries(st.sampled_from("abc"), st.sampled_from(["1", "2", True]), max_size=3),
)
def test_two_launches_are_the_same_exactly_if_their_ids_are(
    flags: dict[str, Any], others: dict[str, Any]
) -> None:
    one, other = a_launch(flags=flags), a_launch(flags=others)

    assert compare(one, other, RULES).is_same == (one.id == other.id)


@pytest.mark.parametrize(
    ("sealed", "here", "is_established"),
    [
        ("/models/a", "/models/b", True),
        ("/models/a", "org/name", True),
        ("org/name", "/models/a", False),
        ("org/name", "org/other", False),
    ],
)
def test_a_model_is_seen_as_it_was_by_an_alias_not_by_another_name_on_the_hub(
    sealed: str, here: str, *, is_established: bool
) -> None:
    def named(name: str) -> Launch:
        return a_launch(model=a_launch().model.model_copy(update={"name": name}))

    found = compare(named(sealed), named(here), RULES)

    assert found.is_same is is_established
    assert found.exit_code == (0 if is_established else 3)
    assert [one.name for one in (*found.established, *found.unmet)] == ["model.name"]
