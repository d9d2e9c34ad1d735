"""What a server on a card refuses, without a card: memory that is too little, and what was compiled after the rehearsal."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aotgaudi.backends.base import Target
from aotgaudi.backends.hpu import card, process, runtime
from aotgaudi.backends.hpu.process import RESERVED_SHARE, prepare
from aotgaudi.backends.hpu.runtime import CardPlacement
from aotgaudi.digest import Digest
from aotgaudi.errors import TargetError
from aotgaudi.machine import Memory
from aotgaudi.manifest.memory import KvCache, MemoryNeed

MIB = 1 << 20


class FakeCard:
    def __init__(self, free: int, total: int) -> None:
        self._memory = Memory(total, free)

    def memory(self) -> Memory:
        return self._memory


def placement(free: int, total: int) -> CardPlacement:
    return CardPlacement(cast("Any", FakeCard(free, total)))


def need_of(weights: int, num_blocks: int) -> MemoryNeed:
    """What a server needs whose weights take so many MiB, and a block 10."""
    cache = KvCache(10 * MIB, fixed_bytes=10 * MIB)
    return MemoryNeed(cache=cache, num_blocks=num_blocks, weights_bytes=weights * MIB)


def test_what_does_not_fit_is_refused_with_the_figures_and_the_number_of_blocks_that_would() -> None:
    device = placement(900 * MIB, 1000 * MIB)

    with pytest.raises(TargetError) as caught:
        device.require(need_of(400, num_blocks=60))

    assert str(caught.value) == (
        "target: the card has too little memory: weights need 400.00 MiB, 60 KV blocks 610.00 MiB and recipes and workspaces"
        " 100.00 MiB, 1.08 GiB in all; 900.00 MiB of 1,000.00 MiB are free; limits.num_blocks may be 39 at most"
    )
    device.require(need_of(400, num_blocks=39))
    with pytest.raises(TargetError):
        device.require(need_of(400, num_blocks=40))


def test_a_rehearsal_that_leaves_too_little_is_refused() -> None:
    total = 1000 * MIB
    device = placement(total, total)
    device.require(need_of(100, num_blocks=50))
    device.card = cast("Any", FakeCard(int(total * RESERVED_SHARE / 4) - 1, total))

    with pytest.raises(
        TargetError, match=r"after every program has run, 2[45]\.00 MiB of .* may be 49 at most"
    ):
        device.require_headroom()


def test_a_process_that_has_imported_torch_is_refused_since_the_bridge_has_read_its_environment() -> None:
    with pytest.raises(TargetError, match="torch was imported before"):
        prepare()


@pytest.mark.parametrize(
    ("sealed", "named", "said"),
    [
        ("1.19", "1.24", r"^target\.toolchain\.synapse: compiled for 1\.19, this card has 1\.24$"),
        (
            "1.24",
            "1.19",
            r"^target\.toolchain\.synapse: recipes were compiled for 1\.19, this machine has 1\.24$",
        ),
    ],
)
def test_recipes_of_another_release_are_refused_by_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sealed: str, named: str, said: str
) -> None:
    target = Target(backend="hpu", machine="gaudi2", toolchain={"synapse": sealed})
    found: Any = SimpleNamespace(device_type="gaudi2", synapse="1.24")
    found.require = lambda target: card.Card.require(found, target)
    monkeypatch.setattr(runtime.card, "acquired", lambda: found)
    monkeypatch.setattr(runtime, "materialise", lambda *_: None)
    monkeypatch.setattr(runtime, "recipe_directory", lambda: tmp_path)
    files = [(f"7_a_syn{named}.{end}", Digest.of(b""), tmp_path) for end in ("recipe", "metadata")]
    with pytest.raises(TargetError, match=said):
        runtime.HpuRuntime(target).restore(files)


@pytest.mark.parametrize("call", ["stat", "mkdir"], ids=["sweeping", "making a directory"])
def test_two_processes_that_start_at_once_both_have_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The other one sweeps what we have found and not looked at yet, or what we have made and not locked yet."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    old = tmp_path / "aotgaudi-recipes-old"
    old.mkdir()
    real, others = getattr(os, call), list[Path]()

    def late(path: Any, *arguments: Any, **options: Any) -> Any:
        if not others and Path(path).name.startswith("aotgaudi-recipes-"):
            if call == "mkdir":
                real(path, *arguments, **options)
            others.append(tmp_path)  # Only this once.
            others.append(process._new_directory())
            if call == "mkdir":
                return None
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, call, late)

    ours = process._new_directory()

    assert set(tmp_path.iterdir()) == {ours, others[1]}
