"""What a session gives its guest, and what becomes of one that cannot be started."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from aotgaudi.digest import Digest
from aotgaudi.errors import StoreError
from aotgaudi.wrap.client import Address
from aotgaudi.wrap.file_watch import FileRules
from aotgaudi.wrap.sandbox import open_sandbox
from aotgaudi.wrap.session import Plan, Session


def a_plan(root: Path, script: str, **environment: str) -> Plan:
    return Plan(
        words=("/bin/sh", "-c", script),
        environment={"PATH": os.defpath, **environment},
        address=Address(port=1),
        rules=FileRules(root),
    )


def told(plan: Plan, root: Path) -> dict[str, str]:
    """The environment that a guest has which writes it down."""
    with open_sandbox(root) as place, Session(plan, place, phase="c") as session:
        deadline = time.monotonic() + 20
        while session.child.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        lines = (place.here / "environ").read_text().splitlines()
    return dict(line.partition("=")[::2] for line in lines)


def test_what_another_run_was_told_is_not_told_to_this_ones_witnesses(root: Path) -> None:
    plan = a_plan(
        root,
        f"env > {root}/environ",
        AOTGAUDI_WITNESS_ROLE="Worker",
        AOTGAUDI_WITNESS_ALLOWED="/elsewhere",
        AOTGAUDI_WITNESS="/elsewhere",
        AOTGAUDI_WITNESS_INTERVAL="0.1",
    )

    found = told(plan, root)

    assert {"AOTGAUDI_WITNESS_ROLE", "AOTGAUDI_WITNESS_ALLOWED"} & found.keys() == set()
    assert found["AOTGAUDI_WITNESS"] == f"{root}/events"
    assert found["AOTGAUDI_WITNESS_INTERVAL"] == "0.1"


def test_the_sealed_paths_are_told_whole(root: Path) -> None:
    sealed = {"cache/a.so": Digest.of(b"x"), "tmp/b/c.py": Digest.of(b"y")}
    plan = replace(a_plan(root, f"cat $AOTGAUDI_WITNESS_ALLOWED > {root}/x; env > {root}/environ"))
    plan = replace(plan, rules=FileRules(root, sealed=sealed))

    allowed = told(plan, root)["AOTGAUDI_WITNESS_ALLOWED"]

    assert allowed == f"{root}/allowed"
    assert (root / "x").read_text() == f"{root}/cache/a.so\n{root}/tmp/b/c.py\n"


def test_a_guest_that_cannot_be_started_is_one_sentence(root: Path) -> None:
    plan = replace(a_plan(root, "true"), words=("/bin/true", "x" * 200_000))

    with (
        open_sandbox(root) as place,
        pytest.raises(StoreError, match=r"cannot start the guest in .*: Argument list too long"),
    ):
        Session(plan, place, phase="c")
