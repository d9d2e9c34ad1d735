from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from aotgaudi.bundle.launch import LAUNCH_SCHEMA, Launch, Place, load_launch
from aotgaudi.digest import Digest
from aotgaudi.errors import ManifestError
from tests.environment import ROOT
from tests.launches import a_launch

GOLDEN = ROOT / "tests" / "golden" / "data" / "launch.json"
JSON = st.recursive(
    st.none() | st.booleans() | st.text(max_size=8) | st.integers(-(2**53) + 1, 2**53 - 1),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,20}", fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
SOMEWHERE = st.builds(
    Place, root=TEXTS, prefix=TEXTS, site_packages=TEXTS, variables=st.dictionaries(NAMES, TEXTS, max_size=2)
)


@given(flags=st.dictionaries(NAMES, JSON, max_size=4), variables=st.dictionaries(NAMES, TEXTS, max_size=3))
def test_any_flags_and_variables_survive_a_round_trip(
    flags: dict[str, Any], variables: dict[str, str]
) -> None:
    launch = a_launch(flags=flags, variables=variables)

    assert load_launch(launch.dumps()) == launch


@given(place=SOMEWHERE, name=TEXTS, words=st.lists(TEXTS, min_size=1, max_size=3))
def test_the_id_knows_no_place(place: Place, name: str, words: list[str]) -> None:
    launch = a_launch()

    moved = a_launch(place=place, words=tuple(words), model=launch.model.model_copy(update={"name": name}))

    assert moved.id == launch.id


@given(name=NAMES, value=JSON)
def test_any_flag_more_is_another_launch(name: str, value: Any) -> None:
    launch = a_launch(flags={})

    assert a_launch(flags={name: value}).id != launch.id


def test_the_text_true_is_not_a_switch_that_is_on() -> None:
    assert a_launch(flags={"x": "true"}).id != a_launch(flags={"x": True}).id


def test_components_name_what_they_are_of() -> None:
    components = dict(a_launch().components())

    assert components["schema"] == LAUNCH_SCHEMA
    assert components["flag.max-model-len"] == '"512"'
    assert components["variable.VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert components["model.config.json"] == str(Digest.of(b"{}"))
    assert components["software.vllm"].startswith("0.32.0 ")
    assert components["world.tensor_parallel"] == "1"
    assert components["exercise"].startswith("smoke ")


def test_conditions_are_the_places() -> None:
    conditions = dict(a_launch().conditions())

    assert conditions["place.root"] == "/run/aotgaudi"
    assert conditions["model.name"] == "/models/tiny"
    assert conditions["variable.VLLM_IMAGE_TAG"] == "v7"
    assert not conditions.keys() & dict(a_launch().components()).keys()


def test_a_launch_that_was_edited_is_refused() -> None:
    data = a_launch().dumps().replace(b"512", b" 512", 1) + b"\n"

    with pytest.raises(ManifestError, match="launch is not in canonical form"):
        load_launch(data)


def test_another_version_of_the_format_is_refused_by_its_name() -> None:
    data = a_launch().dumps().replace(b"aotgaudi.launch/1", b"aotgaudi.launch/2")

    with pytest.raises(ManifestError, match=r"launch has schema 'aotgaudi.launch/2'"):
        load_launch(data)


def test_no_words_are_no_launch() -> None:
    with pytest.raises(ValidationError, match="words"):
        a_launch(words=())


def test_an_unknown_member_is_refused() -> None:
    with pytest.raises(ValidationError, match="colour"):
        Launch(**{**a_launch().model_dump(by_alias=True), "colour": "red"})


def test_the_form_and_the_id_are_those_that_were_released() -> None:
    launch = load_launch(GOLDEN.read_bytes())

    assert launch.id == "346b97855823b303604e514e23cbf9dccb3cb7558bbcfa9ea2c9f61aa1c93703"
    assert launch == a_launch()
    assert a_launch().dumps() == GOLDEN.read_bytes()
