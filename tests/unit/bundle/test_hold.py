"""From verifying to loading no name is looked up twice."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from aotgaudi.bundle.verify import VerifiedBundle, hold_bundle
from aotgaudi.errors import NotWarmError, StoreError, UntrustedError
from aotgaudi.store.cas import Fault

if TYPE_CHECKING:
    from tests.unit.bundle.conftest import Sealed


@pytest.fixture
def verified(sealed: Sealed) -> Iterator[VerifiedBundle]:
    held = hold_bundle(sealed.open())
    yield held
    held.objects.close()


def num_open() -> int:
    gc.collect()  # What other tests have left open goes now, not in between.
    return len(os.listdir("/proc/self/fd"))


def test_the_report_is_that_of_verifying(sealed: Sealed, verified: VerifiedBundle) -> None:
    assert verified.report == sealed.report()
    assert verified.report.is_intact


def test_programs_were_parsed_and_the_other_objects_are_sealed(
    sealed: Sealed, verified: VerifiedBundle
) -> None:
    assert verified.program(sealed.entries[0].id).unit_keys() == (sealed.shared, sealed.layer)
    assert len(verified.programs) == 2
    assert len(verified.objects) == 3
    assert verified.read(sealed.digests["constants"]) == b"constants" * 9
    assert verified.path(sealed.digests["layer.so"]).read_bytes() == b"layer.so" * 9
    with pytest.raises(NotWarmError, match=f"entry {'0' * 32} has no program"):
        verified.program("0" * 32)


def test_what_is_loaded_is_what_was_verified_whatever_happens_to_the_names(
    sealed: Sealed, verified: VerifiedBundle
) -> None:
    """The whole bundle is overwritten, and replaced by another one, between verifying and loading."""
    for path in (path for path in sealed.path.rglob("*") if path.is_file()):
        path.chmod(0o644)
        os.truncate(path, 0)
    evil = sealed.path.with_name("evil")
    shutil.copytree(sealed.path, evil)
    for path in (path for path in evil.rglob("*") if path.is_file()):
        path.chmod(0o644)
        path.write_bytes(b"evil")
    sealed.path.rename(sealed.path.with_name("old"))
    evil.rename(sealed.path)

    assert verified.program(sealed.entries[2].id).unit_keys() == (sealed.shared,)
    for name in ("shared.so", "layer.so", "constants"):
        assert verified.read(sealed.digests[name]) == name.encode() * 9
        assert verified.path(sealed.digests[name]).read_bytes() == name.encode() * 9


def test_no_object_is_opened_twice(sealed: Sealed, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, opened, os_open = sealed.open(), [], os.open

    def counting(path: str, *arguments: int) -> int:
        opened.append(str(path))
        return os_open(path, *arguments)

    monkeypatch.setattr(os, "open", counting)
    held = hold_bundle(bundle)
    held.program(sealed.entries[0].id)
    held.read(sealed.digests["constants"])
    monkeypatch.undo()
    held.objects.close()

    assert sorted(opened) == sorted(str(bundle.object_path(digest)) for digest in sealed.digests.values())


def test_verifying_alone_keeps_nothing_open(sealed: Sealed) -> None:
    before = num_open()

    assert sealed.report().is_intact

    assert num_open() == before


def test_what_is_unsound_cannot_be_loaded(sealed: Sealed) -> None:
    sealed.object("layer.so").write_bytes(b"evil")

    held = hold_bundle(sealed.open())

    assert [bad.entries for bad in held.report.corrupt] == [("(prompt, 1, 128, 0)", "(decode, 4, 1, 16)")]
    with pytest.raises(KeyError):
        held.path(sealed.digests["layer.so"])
    held.objects.close()


@pytest.mark.parametrize("error", [StoreError("no"), UntrustedError("no")])
def test_a_refusal_half_way_closes_what_was_open(
    sealed: Sealed, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    before = num_open()

    def refuse(*_: object) -> tuple[()] | Fault:
        raise error

    monkeypatch.setattr("aotgaudi.bundle.verify._extra", refuse)
    with pytest.raises(type(error)):
        hold_bundle(sealed.open())

    assert num_open() == before


def test_without_hashing_only_programs_sizes_and_presence_are_compared(sealed: Sealed) -> None:
    unit = sealed.object("layer.so")
    data = bytearray(unit.read_bytes())
    data[0] ^= 1
    unit.write_bytes(data)

    held = hold_bundle(sealed.open(), hashes=False)

    assert held.report.is_intact
    assert held.read(sealed.digests["layer.so"]) == data
    assert held.path(sealed.digests["layer.so"]).read_bytes() == data
    held.objects.close()
    unit.write_bytes(b"evil")
    assert hold_bundle(sealed.open(), hashes=False).report.corrupt
    unit.unlink()
    assert hold_bundle(sealed.open(), hashes=False).report.missing
