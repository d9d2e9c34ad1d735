"""What is run of a command in a place: the same in a build and in a run."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from aotgaudi.digest import Digest
from aotgaudi.wrap.launch import Found, describe, find_server
from aotgaudi.wrap.sandbox import Sandbox
from aotgaudi.wrap.session import link_model, plan_for
from tests.guests_here import Here


@pytest.fixture
def found(tmp_path: Path) -> Found:
    here = Here(tmp_path / "here", {"VLLM_IMAGE_TAG": "v1", "VLLM_API_KEY": "topsecret"})
    here.install("vllm", "0.32.0+cpu")
    here.install("torch", "2.13.0+cpu")
    here.script()
    model = here.model()
    return find_server(["vllm", "serve", str(model), "--port", "8123"], here.environ)


@pytest.fixture
def place(tmp_path: Path) -> Sandbox:
    (tmp_path / "place").mkdir()
    return Sandbox(Path("/run/x"), tmp_path / "place")


def test_a_local_model_is_named_by_the_alias_and_served_by_its_name(found: Found, place: Sandbox) -> None:
    launch = describe(found, root="/run/x")
    plan = plan_for(found, launch, place, "cold")
    link_model(found, launch, place)

    assert "/run/x/model" in plan.words
    assert str(found.model) not in plan.words[:-1]
    assert plan.address.served_name == str(found.model)
    assert os.readlink(place.here / "model") == str(found.model)
    assert plan.address.port == 8123


def test_a_model_of_the_hub_is_seen_by_the_alias_where_the_build_saw_it_so(
    found: Found, place: Sandbox
) -> None:
    sealed = describe(found, root="/run/x")
    words = ("vllm", "serve", "org/name")
    flags = found.adapter.read(words[2:], {})
    of_hub = replace(found, words=words, flags=flags, is_local=False)

    link_model(of_hub, sealed, place)
    plan = plan_for(of_hub, sealed, place, "load")

    assert plan.words == ("vllm", "serve", "/run/x/model", "--served-model-name", "org/name")
    assert (place.here / "model").is_symlink()


def test_a_model_of_the_hub_keeps_its_name_where_the_build_saw_that(found: Found, place: Sandbox) -> None:
    words = ("vllm", "serve", "org/name")
    of_hub = replace(found, words=words, flags=found.adapter.read(words[2:], {}), is_local=False)
    sealed = describe(of_hub, root="/run/x")

    link_model(of_hub, sealed, place)

    assert plan_for(of_hub, sealed, place, "load").words == words
    assert not (place.here / "model").is_symlink()


def test_variables_that_the_guest_hashes_are_as_in_the_launch(found: Found, place: Sandbox) -> None:
    sealed = describe(found, root="/run/x")
    elsewhere = Found(
        adapter=found.adapter,
        interpreter=found.interpreter,
        words=found.words,
        flags=found.flags,
        installed=found.installed,
        model=found.model,
        is_local=True,
        environ={**found.environ, "VLLM_IMAGE_TAG": "v2"},
    )

    assert plan_for(elsewhere, sealed, place, "load").environment["VLLM_IMAGE_TAG"] == "v1"
    bare = sealed.model_copy(update={"place": sealed.place.model_copy(update={"variables": {}})})
    assert "VLLM_IMAGE_TAG" not in plan_for(elsewhere, bare, place, "load").environment


def test_the_rules_hold_what_is_sealed_and_what_may_appear(found: Found, place: Sandbox) -> None:
    sealed = {"cache/vllm/model": Digest.of(b"x")}
    plan = plan_for(
        found, describe(found, root="/run/x"), place, "load", sealed=sealed, left_out=("cache/mine/*",)
    )

    assert plan.rules.sealed == sealed
    assert plan.rules.root == place.root
    assert plan.rules.is_left_out("cache/mine/x")
    assert plan.rules.is_left_out("cache/vllm/a.lock")
    assert not plan.rules.is_left_out("cache/vllm/other")


def test_a_home_that_holds_captured_files_is_the_servers(found: Found, place: Sandbox) -> None:
    launch = describe(found, root="/run/x")

    assert plan_for(found, launch, place, "load").environment["HOME"] == found.environ["HOME"]
    sealed = {"home/.x": Digest.of(b"x")}
    assert plan_for(found, launch, place, "load", sealed=sealed).environment["HOME"] == "/run/x/home"


def test_repairs_are_those_of_the_launch(found: Found, place: Sandbox) -> None:
    assert plan_for(found, describe(found, root="/run/x"), place, "load").repairs == (
        "vllm.finalize-loading",
    )
    bare = describe(found, root="/run/x", repairs=())
    assert plan_for(found, bare, place, "load").repairs == ()
