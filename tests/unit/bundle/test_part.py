"""A bundle that holds a part: what is sealed of it, proved again, and served by each policy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.backends.base import Target
from aotgaudi.bundle.bundle import Bundle, open_bundle
from aotgaudi.bundle.pack import pack_bundle
from aotgaudi.bundle.part import Outside, proved_part, sealed_part, served_manifest
from aotgaudi.bundle.receipt import ClosedUnder, Receipt, SealedPart, SealedUnit, loads
from aotgaudi.bundle.verify import verify_bundle
from aotgaudi.digest import canonical_json
from aotgaudi.entries import DecodeEntry, Entry, PromptEntry
from aotgaudi.errors import CorruptError, ManifestError, NotWarmError
from aotgaudi.graphs.program import Call, Program
from aotgaudi.manifest.importance import Importance
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.manifest import dumps as dump_manifest
from aotgaudi.store.cas import ObjectStore
from tests.command import Command
from tests.specs import FOUR, outputs_for, spec_of

UNIT = "a" * 64
MANIFEST = Manifest.of(spec_of())
LEAST = Importance(MANIFEST).tier("least")
"""One sequence of 32 tokens."""
COVERING = Importance(MANIFEST).tier("covering")
ALONE = (*MANIFEST.of_kind("sampler"), DecodeEntry(1, 1, 8), PromptEntry(1, 32, 2), PromptEntry(1, 16, 8))
"""Long chunks after two blocks at most: 49 tokens with whole chunks, 128 with shorter ones."""


def seal(
    root: Path,
    built: Iterable[Entry],
    change: Callable[[SealedPart], SealedPart | None] = lambda part: part,
) -> Bundle:
    """A bundle of `MANIFEST` in which one program answers what is built; `change` is made to the part of its receipt."""
    objects, entries = ObjectStore(root / "store"), tuple(built)
    program = Program(
        inputs=(),
        weights=(),
        caches=(),
        calls=(Call(unit=UNIT, inputs=(), outputs=FOUR),),
        outputs=(),
    )

    def digest(entry: Entry) -> str:
        return str(objects.put_bytes(program.model_copy(update={"outputs": outputs_for(entry)}).dumps()))

    receipt = Receipt(
        manifest_id=MANIFEST.id,
        target=Target(backend="fake", machine="none"),
        programs={entry.id: digest(entry) for entry in entries},
        units={UNIT: SealedUnit(artifact={"unit.so": str(objects.put_bytes(b"code"))}, tolerance=0.0)},
        builder={},
        part=change(sealed_part(MANIFEST, entries)),
    )
    pack_bundle(dump_manifest(MANIFEST), MANIFEST.id, receipt, objects, root / "bundle")
    return open_bundle(root / "bundle")


def limits_of(manifest: Manifest) -> Mapping[str, int]:
    return ClosedUnder.of(manifest.spec.limits).model_dump()


WHOLE = {"max_model_len": 128, "max_num_batched_tokens": 32, "max_num_seqs": 2, "num_blocks": 24}


@pytest.mark.parametrize(
    ("outside", "changes"),
    [
        ("refuse", {"max_model_len": 49, "max_num_seqs": 1}),
        ("chunk", {"max_num_batched_tokens": 16, "max_num_seqs": 1}),
    ],
)
def test_each_policy_has_limits_of_its_own(tmp_path: Path, outside: Outside, changes: dict[str, int]) -> None:
    bundle = seal(tmp_path, ALONE)

    served = served_manifest(bundle, outside)

    assert limits_of(served) == {**WHOLE, **changes}
    assert verify_bundle(bundle).is_intact
    assert verify_bundle(bundle).num_entries == len(ALONE)


def test_pad_up_serves_everything_where_larger_entries_cover_it_else_nothing(tmp_path: Path) -> None:
    covering, alone = seal(tmp_path / "covering", COVERING), seal(tmp_path / "alone", ALONE)

    served = served_manifest(covering, "pad-up")

    assert limits_of(served) == WHOLE
    assert len(served.entries) < len(MANIFEST.entries)
    with pytest.raises(NotWarmError, match=r"closed under max_model_len 49, .*--tier covering"):
        served_manifest(alone, "pad-up")


@pytest.mark.parametrize("outside", ["refuse", "chunk", "pad-up"])
def test_a_whole_bundle_is_served_whole_by_every_policy(tmp_path: Path, outside: Outside) -> None:
    bundle = seal(tmp_path, MANIFEST.entries, lambda _: None)

    assert served_manifest(bundle, outside) is bundle.manifest
    assert proved_part(bundle, "whole") is None


def test_what_can_serve_nothing_is_no_part() -> None:
    with pytest.raises(NotWarmError, match=r"the 11 entries that are built, of 57, can serve nothing"):
        sealed_part(MANIFEST, MANIFEST.of_kind("prompt"))


def raised(name: str, value: int) -> Callable[[SealedPart], SealedPart]:
    def change(part: SealedPart) -> SealedPart:
        return part.model_copy(update={"limits": part.limits.model_copy(update={name: value})})

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (raised("max_model_len", 50), "is not closed under max_model_len 50"),
        (raised("max_num_seqs", 2), "is not closed under"),
        (raised("max_num_batched_tokens", 33), "larger limits than its manifest"),
        (raised("num_blocks", 25), "larger limits than its manifest"),
        (raised("num_blocks", 3), "larger limits than its manifest"),
        (lambda part: part.model_copy(update={"settings": (0, 8)}), "larger limits than its manifest"),
    ],
    ids=["length", "sequences", "tokens", "blocks", "too few blocks", "settings"],
)
def test_what_the_receipt_says_is_proved_and_not_believed(
    tmp_path: Path, change: Callable[[SealedPart], SealedPart], said: str
) -> None:
    bundle = seal(tmp_path, ALONE, change)

    with pytest.raises(CorruptError, match=said):
        served_manifest(bundle, "refuse")


def test_lower_limits_than_could_be_are_served_as_they_were_sealed(tmp_path: Path) -> None:
    bundle = seal(tmp_path, ALONE, raised("max_model_len", 40))

    assert limits_of(served_manifest(bundle, "refuse"))["max_model_len"] == 40


def test_an_entry_that_the_part_lacks_makes_it_open(tmp_path: Path) -> None:
    """Somebody who knows the format takes an entry out of the receipt."""
    bundle = seal(tmp_path, ALONE)
    programs = {name: text for name, text in bundle.receipt.programs.items() if name != ALONE[-1].id}
    changed = Bundle(
        bundle.path,
        bundle.index,
        bundle.index_bytes,
        bundle.manifest_bytes,
        bundle.receipt.model_copy(update={"programs": programs}),
    )

    with pytest.raises(CorruptError, match="no entry for"):
        proved_part(changed, "whole")


def test_the_wire_form(tmp_path: Path) -> None:
    receipt = seal(tmp_path, ALONE).receipt

    document = json.loads(receipt.dumps())

    assert loads(receipt.dumps()) == receipt
    assert document["schema"] == "aotgaudi.receipt/1"
    assert document["part"] == {
        "limits": {"max_model_len": 49, "max_num_batched_tokens": 32, "max_num_seqs": 1, "num_blocks": 24},
        "chunked": {"max_model_len": 128, "max_num_batched_tokens": 16, "max_num_seqs": 1, "num_blocks": 24},
        "settings": [0, 1, 2, 3, 4, 5, 6, 7],
    }


LIMITS = {"max_model_len": 2, "max_num_batched_tokens": 1, "max_num_seqs": 1, "num_blocks": 1}


@pytest.mark.parametrize(
    ("part", "where"),
    [
        ({"limits": LIMITS, "chunked": LIMITS, "settings": []}, "part.settings"),
        ({"limits": LIMITS, "chunked": LIMITS, "settings": [1, 0]}, "part.settings"),
        ({"limits": LIMITS, "chunked": LIMITS, "settings": [-1]}, "part.settings.0"),
        ({"limits": {**LIMITS, "max_model_len": 1}, "chunked": LIMITS, "settings": [0]}, "max_model_len"),
        ({"limits": {**LIMITS, "block_size": 1}, "chunked": LIMITS, "settings": [0]}, "block_size"),
        ({"limits": LIMITS, "settings": [0]}, "part.chunked"),
    ],
)
def test_a_malformed_part_is_refused(tmp_path: Path, part: dict[str, Any], where: str) -> None:
    document = json.loads(seal(tmp_path, ALONE).receipt.dumps())

    with pytest.raises(ManifestError, match=where):
        loads(canonical_json({**document, "part": part}))


def test_verify_prints_the_limits_that_it_has_proved(tmp_path: Path) -> None:
    seal(tmp_path, ALONE)

    plain, as_json = (
        Command("verify")(tmp_path / "bundle", "--no-target", *options) for options in ([], ["--json"])
    )

    assert plain.exit_code == as_json.exit_code == 0, plain.output
    assert f"entries   {len(ALONE)}, all answered" in plain.stdout
    (line,) = (line for line in plain.stdout.splitlines() if line.startswith("part"))
    assert line == (
        "part      39 of 57 entries, closed under max_model_len 49, max_num_batched_tokens 32, max_num_seqs 1,"
        " num_blocks 24; with --outside chunk under max_model_len 128, max_num_batched_tokens 16, max_num_seqs 1,"
        " num_blocks 24 (proved)"
    )
    assert json.loads(as_json.stdout)["part"]["limits"]["max_model_len"] == 49


def test_verify_exits_with_4_where_the_limits_are_not_proved(tmp_path: Path) -> None:
    seal(tmp_path, ALONE, raised("max_model_len", 50))

    result = Command("verify")(tmp_path / "bundle", "--no-target")

    assert result.exit_code == 4
