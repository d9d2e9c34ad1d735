"""What a session runs, and what it gives the server."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from aotgaudi.digest import Digest
from aotgaudi.errors import StoreError
from aotgaudi.machine import within
from aotgaudi.wrap.adapters.base import Address
from aotgaudi.wrap.client import Answer
from aotgaudi.wrap.exercise import completion
from aotgaudi.wrap.file_watch import FileRules
from aotgaudi.wrap.launch import ServerCommand, describe, find_server
from aotgaudi.wrap.sandbox import Sandbox, open_sandbox
from aotgaudi.wrap.session import Plan, Session, link_model, plan_for
from tests.guests_here import Here
from tests.unit.wrap.test_client import FakeServer

pytestmark = pytest.mark.process


def a_plan(root: Path, script: str, **environment: str) -> Plan:
    return Plan(
        words=("/bin/sh", "-c", script),
        environment={"PATH": os.defpath, **environment},
        address=Address(port=1),
        rules=FileRules(root),
    )


def told(plan: Plan, root: Path) -> dict[str, str]:
    """The environment of a server that writes it down."""
    with open_sandbox(root) as sandbox, Session(plan, sandbox, phase="c") as session:
        deadline = time.monotonic() + 20
        while session.child.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        lines = (sandbox.root / "environ").read_text().splitlines()
    return dict(line.partition("=")[::2] for line in lines)


def test_what_another_run_was_told_is_not_told_to_this_ones_witnesses(root: Path) -> None:
    plan = a_plan(
        root,
        f"env > {root}/environ",
        AOTGAUDI_WITNESS_ALLOWED="/elsewhere",
        AOTGAUDI_WITNESS="/elsewhere",
        AOTGAUDI_WITNESS_INTERVAL="0.1",
    )

    found = told(plan, root)

    assert "AOTGAUDI_WITNESS_ALLOWED" not in found
    assert found["AOTGAUDI_WITNESS"] == f"{root}/events"
    assert found["AOTGAUDI_WITNESS_INTERVAL"] == "0.1"


def test_the_sealed_paths_are_told_whole(root: Path) -> None:
    sealed = {"cache/a.so": Digest.of(b"x"), "tmp/b/c.py": Digest.of(b"y")}
    plan = replace(a_plan(root, f"cat $AOTGAUDI_WITNESS_ALLOWED > {root}/x; env > {root}/environ"))
    plan = replace(plan, rules=FileRules(root, sealed=sealed))

    allowed = told(plan, root)["AOTGAUDI_WITNESS_ALLOWED"]

    assert allowed == f"{root}/allowed"
    assert (root / "x").read_text() == f"{root}/cache/a.so\n{root}/tmp/b/c.py\n"


def test_the_warm_up_is_sent_in_order_and_each_answer_has_a_digest(root: Path) -> None:
    requests = [completion("one", is_greedy=True), completion("two")]
    seen: list[int] = []
    with (
        FakeServer() as server,
        open_sandbox(root) as sandbox,
        Session(a_plan(root, "sleep 60"), sandbox, phase="c") as session,
    ):
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        session.plan = replace(session.plan, address=server.address)
        assert session.look().answers is None
        digests = session.warm_up(requests, on_answer=lambda: seen.append(len(server.asked)))
        assert session.look().answers == digests
        server.shutdown()

    assert server.request_ids == ["aotgaudi-one-0", "aotgaudi-two-0"]
    rome = Answer(200, "Rome")
    assert digests == tuple(rome.digests(is_greedy=one.is_greedy) for one in requests)
    assert seen == [1, 2]


def test_an_agent_that_failed_to_do_what_a_phase_asks_for_is_not_waited_for(root: Path) -> None:
    with (
        open_sandbox(root) as sandbox,
        Session(a_plan(root, "sleep 60"), sandbox, phase="f") as session,
    ):
        told = {"n": 0, "t": 1.0, "pid": session.child.pid, "e": "hello", "phase": "v"}
        events = sandbox.root / "events" / f"{session.child.pid}-1.jsonl"
        events.write_text(json.dumps(told) + "\n")
        assert not session.settle(0.2)
        fault = {**told, "n": 1, "e": "fault", "phase": "f", "hook": "state", "error": "it cannot be told"}
        events.write_text(f"{json.dumps(told)}\n{json.dumps(fault)}\n")

        assert not within(30.0, lambda: session.settle(600.0))


def test_a_server_that_cannot_be_started_is_one_sentence(root: Path) -> None:
    plan = replace(a_plan(root, "true"), words=("/bin/true", "x" * 200_000))

    with (
        open_sandbox(root) as sandbox,
        pytest.raises(StoreError, match=r"cannot start the server in .*: Argument list too long"),
    ):
        Session(plan, sandbox, phase="c")


@pytest.fixture
def found(tmp_path: Path) -> ServerCommand:
    here = Here(tmp_path / "here", {"VLLM_IMAGE_TAG": "v1", "VLLM_API_KEY": "topsecret"})
    here.install("vllm", "0.32.0+cpu")
    here.install("torch", "2.13.0+cpu")
    here.script()
    model = here.model()
    return find_server(["vllm", "serve", str(model), "--port", "8123"], here.environ)


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    (tmp_path / "place").mkdir()
    return Sandbox(tmp_path / "place")


def test_a_local_model_is_named_by_the_alias_and_served_by_its_name(
    found: ServerCommand, sandbox: Sandbox
) -> None:
    launch = describe(found, root=str(sandbox.root))
    plan = plan_for(found, launch, sandbox, "cold")
    link_model(found, launch, sandbox)

    assert f"{sandbox.root}/model" in plan.words
    assert str(found.model) not in plan.words[:-1]
    assert plan.address.served_name == str(found.model)
    assert os.readlink(sandbox.root / "model") == str(found.model)
    assert plan.address.port == 8123


@pytest.mark.parametrize("is_aliased", [True, False])
def test_a_model_of_the_hub_is_seen_by_the_alias_only_where_the_build_saw_it_so(
    found: ServerCommand, sandbox: Sandbox, is_aliased: bool
) -> None:
    words = ("vllm", "serve", "org/name")
    of_hub = replace(found, words=words, flags=found.adapter.read(words[2:], {}), is_local=False)
    sealed = describe(found if is_aliased else of_hub, root=str(sandbox.root))
    aliased = ("vllm", "serve", f"{sandbox.root}/model", "--served-model-name", "org/name")

    link_model(of_hub, sealed, sandbox)

    assert plan_for(of_hub, sealed, sandbox, "load").words == (aliased if is_aliased else words)
    assert (sandbox.root / "model").is_symlink() is is_aliased


def test_variables_that_the_server_hashes_are_as_in_the_launch(
    found: ServerCommand, sandbox: Sandbox
) -> None:
    sealed = describe(found, root=str(sandbox.root))
    elsewhere = replace(found, environ={**found.environ, "VLLM_IMAGE_TAG": "v2"})

    assert plan_for(elsewhere, sealed, sandbox, "load").environment["VLLM_IMAGE_TAG"] == "v1"
    bare = sealed.model_copy(update={"place": sealed.place.model_copy(update={"variables": {}})})
    assert "VLLM_IMAGE_TAG" not in plan_for(elsewhere, bare, sandbox, "load").environment


def test_the_rules_hold_what_is_sealed_and_what_may_appear(found: ServerCommand, sandbox: Sandbox) -> None:
    sealed = {"cache/vllm/model": Digest.of(b"x")}
    plan = plan_for(
        found,
        describe(found, root=str(sandbox.root)),
        sandbox,
        "load",
        sealed=sealed,
        left_out=("cache/mine/*",),
    )

    assert plan.rules.sealed == sealed
    assert plan.rules.root == sandbox.root
    assert plan.rules.is_left_out("cache/mine/x")
    assert plan.rules.is_left_out("cache/vllm/a.lock")
    assert not plan.rules.is_left_out("cache/vllm/other")


def test_a_home_that_holds_captured_files_is_the_servers(found: ServerCommand, sandbox: Sandbox) -> None:
    launch = describe(found, root=str(sandbox.root))

    assert plan_for(found, launch, sandbox, "load").environment["HOME"] == found.environ["HOME"]
    sealed = {"home/.x": Digest.of(b"x")}
    assert (
        plan_for(found, launch, sandbox, "load", sealed=sealed).environment["HOME"] == f"{sandbox.root}/home"
    )


def test_repairs_are_those_of_the_launch(found: ServerCommand, sandbox: Sandbox) -> None:
    assert plan_for(found, describe(found, root=str(sandbox.root)), sandbox, "load").repairs == (
        "vllm.finalize-loading",
    )
    bare = describe(found, root=str(sandbox.root), repairs=())
    assert plan_for(found, bare, sandbox, "load").repairs == ()
