"""Verifying: every damage is found before anything is loaded, and is told in terms of entries."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.format import INDEX_NAME, load_index
from aotgaudi.bundle.pack import pack_bundle
from aotgaudi.bundle.receipt import Receipt, SealedUnit
from aotgaudi.bundle.verify import CorruptObject, MissingEntry, Report, hold_bundle, verify_bundle
from aotgaudi.digest import Digest
from aotgaudi.entries import Entry, MhcEntry
from aotgaudi.errors import CorruptError, ManifestError, NotWarmError, StoreError
from aotgaudi.graphs.program import CacheSpec, Call, Program, TensorSpec
from aotgaudi.manifest.manifest import Manifest, dumps, read_manifest
from tests.specs import spec_of

if TYPE_CHECKING:
    from tests.unit.bundle.conftest import Sealed

TINY = Path(__file__).parents[3] / "manifests" / "tiny-llama.cpu.manifest.json"
SPEC = spec_of()
OBJECTS = ("shared.so", "layer.so", "constants", "model", "swap")
PROMPT, DECODE, DEFRAG = "(prompt, 1, 128, 0)", "(decode, 4, 1, 16)", "(defrag, 8)"
USERS = {
    "shared.so": (PROMPT, DECODE, DEFRAG),
    "layer.so": (PROMPT, DECODE),
    "constants": (PROMPT, DECODE),
    "model": (PROMPT, DECODE),
    "swap": (DEFRAG,),
}


def reseal(sealed: Sealed, **changes: object) -> None:
    """Edits the index as one would who wants the bundle to look sealed."""
    path = sealed.path / INDEX_NAME
    index = load_index(path.read_bytes()).model_copy(update=changes)
    path.write_bytes(index.dumps())


def test_a_whole_bundle(sealed: Sealed) -> None:
    bundle, report = sealed.open(), sealed.report()

    assert bundle.manifest_bytes == sealed.manifest_bytes
    assert bundle.index_bytes == (sealed.path / INDEX_NAME).read_bytes()
    assert bundle.receipt.programs == sealed.receipt.programs
    assert (report.num_entries, report.num_objects) == (3, 5)
    assert (report.missing, report.corrupt, report.extra) == ((), (), ())
    assert report.is_intact
    report.raise_if_bad(sealed.path)


def test_programs_and_objects_are_reached_by_digest(sealed: Sealed) -> None:
    bundle = sealed.open()
    digest = sealed.digests["layer.so"]

    assert bundle.program(sealed.entries[0].id).unit_keys() == (sealed.shared, sealed.layer)
    assert bundle.object_path(digest) == bundle.object_path(str(digest)) == sealed.object("layer.so")
    assert bundle.read_object(str(digest)) == b"layer.so" * 9
    with pytest.raises(NotWarmError, match=f"entry {'0' * 32} has no program"):
        bundle.program("0" * 32)


def test_an_opened_bundle_has_its_manifest_and_verifies_itself(sealed: Sealed, tmp_path: Path) -> None:
    manifest = read_manifest(TINY)
    data = TINY.read_bytes()
    receipt = sealed.receipt.model_copy(update={"manifest_id": manifest.id})
    pack_bundle(data, manifest.id, receipt, sealed.objects, tmp_path / "real")

    bundle = open_bundle(tmp_path / "real")

    assert bundle.manifest == manifest
    assert bundle.manifest is bundle.manifest
    report = verify_bundle(bundle)
    assert (report.num_entries, report.corrupt, report.extra) == (len(manifest.entries), (), ())
    assert len(report.missing) == len(manifest.entries) - 1  # DefragEntry(8) is in both.


def test_a_receipt_that_answers_another_manifest_than_the_one_beside_it_is_corrupt(
    sealed: Sealed, tmp_path: Path
) -> None:
    pack_bundle(TINY.read_bytes(), sealed.manifest_id, sealed.receipt, sealed.objects, tmp_path / "mixed")

    with pytest.raises(CorruptError, match=f"the receipt answers {sealed.manifest_id}"):
        verify_bundle(open_bundle(tmp_path / "mixed"))


@pytest.mark.parametrize("name", OBJECTS)
def test_any_flipped_bit_is_found(sealed: Sealed, name: str) -> None:
    path = sealed.object(name)
    data = path.read_bytes()
    digest = sealed.digests[name]
    positions = random.Random(name).sample(range(len(data) * 8), min(100, len(data) * 8))

    for position in positions:
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        path.write_bytes(flipped)
        (bad,) = sealed.report().corrupt
        assert bad.entries == USERS[name]
        assert bad.reason.endswith(f"should be {digest.sha256[:12]}...")

    path.write_bytes(data)
    assert sealed.report().is_intact


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("size", [0, 1, "half", "-1", "+1"])
def test_any_other_size_is_found(sealed: Sealed, name: str, size: object) -> None:
    path = sealed.object(name)
    data = path.read_bytes()
    bad = {0: b"", 1: data[:1], "half": data[: len(data) // 2], "-1": data[:-1], "+1": data + b"\0"}[size]
    path.write_bytes(bad)

    report = sealed.report()

    relative = str(path.relative_to(sealed.path))
    reason = f"has {len(bad)} bytes, should have {len(data)}"
    assert report.corrupt == (CorruptObject(relative, reason, USERS[name]),)
    assert report.missing == ()


def _symlink(path: Path) -> None:
    target = path.parents[3] / "elsewhere"
    path.rename(target)
    path.symlink_to(target)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("replace", [_symlink, _fifo, _directory])
def test_only_regular_files_are_read(sealed: Sealed, name: str, replace: object) -> None:
    """A link to the very bytes is refused as well; a FIFO does not block."""
    replace(sealed.object(name))  # type: ignore[operator]

    (bad,) = sealed.report().corrupt

    assert bad.reason.startswith("not a regular file")
    assert bad.entries == USERS[name]


def names(num_inputs: int, num_outputs: int) -> bytes:
    """What a unit's object has of its inputs and outputs, in the midst of its code."""
    given, made = (
        "".join(f"{form % n}\0" for n in range(num))
        for form, num in (("arg%d_1", num_inputs), ("output%d", num_outputs))
    )
    return b"\x7fELF.arg9_1, arg10_1\0\0" + given.encode() + made.encode() + b"code"


@pytest.mark.parametrize(
    ("library", "change", "problem"),
    [
        (names(2, 1), {}, None),
        (b"from a compiler whose objects have no names", {}, None),
        (names(13, 1), {}, "has 13 inputs and 1 outputs, the program gives it 2 and 1"),
        (names(2, 2), {}, "has 2 inputs and 2 outputs, the program gives it 2 and 1"),
        (
            names(2, 1),
            {"layouts": {"1": "woven"}},
            "takes a weight in the layout 'woven', which is not known",
        ),
        (names(2, 1), {"layouts": {"0": "panels"}}, "takes its input 0 in a layout, which is no weight"),
        (names(2, 1), {"layouts": {"7": "panels"}}, "takes its input 7 in a layout, which is no weight"),
        (names(2, 1), {"name": "other.so"}, "has no file unit.so"),
    ],
)
def test_a_unit_that_no_server_could_load_or_call_is_found_without_loading_it(
    sealed: Sealed, library: bytes, change: dict[str, object], problem: str | None
) -> None:
    artifact = {str(change.pop("name", "unit.so")): str(sealed.objects.put_bytes(library))}
    unit = SealedUnit.model_validate({"artifact": artifact, "tolerance": 0.0, **change})
    call = Call(unit=sealed.shared, inputs=("step:a", "weight:w"), outputs=("1",))
    step, weight = (TensorSpec(name=name, shape=(1,), dtype="int64") for name in "aw")
    program = Program(inputs=(step,), weights=(weight,), caches=(), calls=(call,), outputs=("1",))
    digest = str(sealed.objects.put_bytes(program.dumps()))
    entry = MhcEntry(128, 1, "attn")
    manifest = Manifest(SPEC, (entry,))
    receipt = Receipt(
        manifest_id=manifest.id,
        target=sealed.receipt.target.model_copy(update={"backend": "cpu"}),
        programs={entry.id: digest},
        units={sealed.shared: unit},
        builder={},
    )
    pack_bundle(dumps(manifest), manifest.id, receipt, sealed.objects, sealed.path.with_name("of-a-cpu"))

    (found,) = verify_bundle(open_bundle(sealed.path.with_name("of-a-cpu"))).corrupt or (None,)

    assert (found is None) == (problem is None)
    assert found is None or f"cannot run: unit aaaaaaaaaaaa... of it {problem}" in found.reason


@pytest.mark.parametrize("name", OBJECTS)
def test_a_removed_object_makes_its_entries_missing(sealed: Sealed, name: str) -> None:
    path = sealed.object(name)
    path.unlink()

    report = sealed.report()

    reason = f"{path.relative_to(sealed.path)}: no such file"
    assert report.missing == tuple(MissingEntry(label, reason) for label in USERS[name])
    assert report.corrupt == ()
    with pytest.raises(NotWarmError):
        report.raise_if_bad(sealed.path)


def test_an_entry_without_a_program_is_missing(sealed: Sealed) -> None:
    programs = dict(sealed.receipt.programs)
    del programs[sealed.entries[1].id]
    sealed.pack(receipt=sealed.receipt.model_copy(update={"programs": programs}))

    report = sealed.report()

    assert report.missing == (MissingEntry(DECODE, "no program in the receipt"),)


def test_a_program_whose_unit_is_not_in_the_receipt_is_missing(sealed: Sealed) -> None:
    units = {sealed.shared: sealed.receipt.units[sealed.shared]}
    receipt = sealed.receipt.model_copy(update={"units": units}).dumps()
    (sealed.path / "receipt.json").write_bytes(receipt)
    reseal(sealed, receipt=str(Digest.of(receipt)))

    rows = sealed.report().missing

    assert [row.entry for row in rows] == [PROMPT, DECODE]
    assert all(f"unit {sealed.layer[:12]}" in row.reason for row in rows)


def test_intact_bytes_that_are_no_program_are_corrupt(sealed: Sealed) -> None:
    digest = sealed.digests["layer.so"]
    programs = {**sealed.receipt.programs, sealed.entries[2].id: digest}
    receipt = sealed.receipt.model_copy(update={"programs": programs}).dumps()
    (sealed.path / "receipt.json").write_bytes(receipt)
    reseal(sealed, receipt=str(Digest.of(receipt)))

    (bad,) = sealed.report().corrupt

    assert f"program {digest}" in bad.reason
    assert DEFRAG in bad.entries


def test_an_object_that_no_entry_needs_must_be_there_too(sealed: Sealed) -> None:
    spare = Digest.of(b"spare")
    objects = tuple(sorted((*sealed.open().index.objects, spare), key=str))
    reseal(sealed, objects=objects)

    (row,) = sealed.report().missing

    assert row.entry == "-"
    assert spare.sha256 in row.reason


STRAYS: dict[str, Callable[[Path], object]] = {
    "objects/sha256/stray": Path.touch,
    "objects/linked": lambda path: path.symlink_to(path.with_name("sha256"), target_is_directory=True),
    "objects/fifo": os.mkfifo,
    "tokenizers.py": Path.touch,
    "signature.dsse.json": Path.touch,
    "notes/deep/README": Path.touch,
}


@pytest.mark.parametrize("name", STRAYS)
def test_what_the_index_does_not_list_is_refused_wherever_it_is(sealed: Sealed, name: str) -> None:
    """A file that the index does not cover is covered by no signature: a server must not be started beside it."""
    (sealed.path / name).parent.mkdir(parents=True, exist_ok=True)
    STRAYS[name](sealed.path / name)
    (sealed.path / "aotgaudi.signature.json").write_bytes(b"{}")

    report = sealed.report()

    assert report.extra == hold_bundle(sealed.open()).report.extra == (name,)
    with pytest.raises(CorruptError, match="not in the index"):
        report.raise_if_bad(sealed.path)


def test_a_linked_objects_directory_is_refused(sealed: Sealed) -> None:
    objects = sealed.path / "objects"
    objects.rename(sealed.path / "real")
    objects.symlink_to(sealed.path / "real", target_is_directory=True)

    assert "objects" in sealed.report().extra


LOADED = {"inputs": ("step:slots", "weight:w", "kv:0"), "outputs": ("0.0",)}


def run_by(sealed: Sealed, entry: Entry, **changes: object) -> Report:
    """What verifying says of a bundle in which `entry` is run by a sound program with `changes`."""
    program = Program(
        inputs=(TensorSpec(name="slots", shape=(4,), dtype="int64"),),
        weights=(TensorSpec(name="w", shape=(2, 2), dtype="float32"),),
        caches=(CacheSpec(name="0", shape=(2, "num_blocks + 1", 2, 16, 8), dtype="float32"),),
        calls=(Call(unit=sealed.layer, **LOADED),),  # type: ignore[arg-type]
        outputs=("0.0",),
    ).model_copy(update=changes)
    digest = sealed.objects.put_bytes(program.dumps())
    programs = {**sealed.receipt.programs, entry.id: digest}
    units = {**sealed.receipt.units, "c" * 64: sealed.receipt.units[sealed.layer]}
    if "calls" not in changes:
        programs = {entry.id: digest}
    sealed.pack(receipt=sealed.receipt.model_copy(update={"programs": programs, "units": units}))
    report = sealed.report()
    assert [*hold_bundle(sealed.open()).report.corrupt] == [*report.corrupt]  # `serve` says the same.
    return report


def calls(*rows: tuple[tuple[str, ...], tuple[str, ...]]) -> tuple[Call, ...]:
    return tuple(Call(unit="c" * 64, inputs=inputs, outputs=outputs) for inputs, outputs in rows)


def test_a_program_whose_bindings_and_shapes_are_known_is_sound(sealed: Sealed) -> None:
    assert run_by(sealed, sealed.entries[1]).corrupt == ()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"calls": calls((("tmp:1.0",), ("0.0",)), (("tmp:0.0",), ("1.0",)))},
            "binds 'tmp:1.0', which is not there",
        ),
        ({"outputs": ("9.9",)}, "its output '9.9' is no output of a call"),
        ({"calls": calls((("kv:7",), ("0.0",)))}, "binds 'kv:7', which is not there"),
        ({"calls": calls((("weight:w+v",), ("0.0",)))}, r"binds 'weight:w\+v', which is not there"),
        ({"calls": calls((("const:c",), ("0.0",)))}, "binds 'const:c', which is not there"),
        ({"calls": calls(((), ("0.0",)), ((), ("0.0",)))}, "gives an output a name that is taken"),
        ({"calls": calls(((), ("0.0",)), (("tmp:0.0",), ("1.0",)))}, "another call gives it 0 and 1"),
        (
            {"inputs": (TensorSpec(name="slots", shape=(5,), dtype="int64"),)},
            r"int64 \[5\], .* gives int64 \[4\]",
        ),
        (
            {"inputs": (TensorSpec(name="slots", shape=(4,), dtype="bool"),)},
            r"bool \[4\], .* gives int64 \[4\]",
        ),
        (
            {"inputs": (TensorSpec(name="ctx", shape=(4,), dtype="int64"),), "calls": calls(((), ("0.0",)))},
            "'ctx', which",
        ),
        ({"weights": (TensorSpec(name="w", shape=(2,), dtype="evil"),)}, "has the dtype 'evil'"),
        (
            {"caches": (CacheSpec(name="0", shape=(2, 3, 2, 16, 8), dtype="float32"),)},
            r"shape \[2, 3, 2, 16, 8\]",
        ),
        (
            {"caches": (CacheSpec(name="0", shape=(1, "num_blocks + 1", 1, 8, 8), dtype="float32"),)},
            r"shape \[1, 'num_blocks \+ 1', 1, 8, 8\], should be .* 16 rows",
        ),
        (
            {"caches": (CacheSpec(name="keys", shape=(2, "num_blocks + 1", 2, 16, 8), dtype="float32"),)},
            "a cache 'keys', which is named neither for a layer",
        ),
        ({"outputs": ()}, "has 0 outputs"),
        (
            {"weights": tuple(TensorSpec(name="w", shape=(size,), dtype="float32") for size in (2, 3))},
            "it lists the weight 'w' twice",
        ),
    ],
)
def test_a_program_that_cannot_run_is_found_by_verify_and_by_serve(
    sealed: Sealed, changes: dict[str, object], reason: str
) -> None:
    (bad,) = run_by(sealed, sealed.entries[1], **changes).corrupt

    assert re.search(f"cannot run: .*{reason}", bad.reason)
    assert bad.entries == (DECODE,)


@pytest.mark.parametrize("version", range(1, 6))
def test_programs_of_earlier_versions_are_read(sealed: Sealed, version: int) -> None:
    changes = {"schema_": f"aotgaudi.program/{version}"}

    assert run_by(sealed, sealed.entries[1], **changes).corrupt == ()


def test_a_layer_may_have_one_plane_and_several_caches(sealed: Sealed) -> None:
    shapes = {"0": (1, "num_blocks + 1", 1, 16, 576), "0.raw": (1, "num_blocks + 1", 1, 4, 8)}
    caches = tuple(CacheSpec(name=name, shape=shape, dtype="float32") for name, shape in shapes.items())  # type: ignore[arg-type]

    assert run_by(sealed, sealed.entries[1], caches=caches).corrupt == ()


def test_a_weight_that_two_units_read_may_be_listed_for_each(sealed: Sealed) -> None:
    tied = TensorSpec(name="w", shape=(2,), dtype="float32")

    assert run_by(sealed, sealed.entries[1], weights=(tied, tied)).corrupt == ()


def test_constants_that_are_bound_and_not_there_are_found(sealed: Sealed) -> None:
    changes = {"calls": calls((("const:inv_freq",), ("0.0",))), "constants": str(sealed.digests["constants"])}

    (bad,) = run_by(sealed, sealed.entries[1], **changes).corrupt

    assert "its constants lack 'inv_freq'" in bad.reason


@pytest.mark.parametrize(
    ("offsets", "num_bytes", "is_sound"),
    [
        ([0, 4], 4, True),
        ([0, 4], 3, False),
        ([0, 4], 5, False),
        ([1, 4], 4, False),
        ("x", 4, False),
        (None, 4, False),
    ],
)
def test_constants_that_no_server_could_read_are_found(
    sealed: Sealed, offsets: object, num_bytes: int, is_sound: bool
) -> None:
    header = json.dumps({"inv_freq": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(num_bytes)
    changes = {"calls": calls((("const:inv_freq",), ("0.0",)))}

    report = run_by(sealed, sealed.entries[1], **changes, constants=str(sealed.objects.put_bytes(data)))

    assert (report.corrupt == ()) == is_sound


def test_programs_that_name_other_caches_are_found(sealed: Sealed) -> None:
    more = CacheSpec(name="1", shape=(2, "num_blocks + 1", 2, 16, 8), dtype="float32")
    run_by(sealed, sealed.entries[1])
    sealed = replace(sealed, receipt=sealed.open().require_programs())
    other = CacheSpec(name="0", shape=(2, "num_blocks + 1", 4, 16, 8), dtype="float32")

    report = run_by(
        sealed, sealed.entries[2], caches=(other, more), calls=calls(((), ())), inputs=(), outputs=()
    )

    assert any("names other caches than another program" in bad.reason for bad in report.corrupt)


def test_the_message_is_a_table_that_names_entries_and_the_mending_command(sealed: Sealed) -> None:
    sealed.object("shared.so").write_bytes(b"")
    sealed.object("constants").unlink()

    with pytest.raises(CorruptError) as caught:
        sealed.report().raise_if_bad(sealed.path)

    head, columns, corrupt, *missing, mend = str(caught.value).splitlines()
    assert head == f"bundle {sealed.path} cannot be served: 1 corrupt, 2 missing, 0 extra (3 entries)"
    assert columns.split() == ["entry", "state", "reason"]
    assert corrupt.startswith(f"{PROMPT} and 2 more  corrupt  objects/sha256/")
    assert corrupt.endswith("has 0 bytes, should have 81")
    assert [row.split("  ")[0] for row in missing] == [PROMPT, DECODE]
    assert mend.endswith(f"aotgaudi build SPEC -o {sealed.path}")


def test_a_long_table_is_cut(sealed: Sealed) -> None:
    for number in range(30):
        (sealed.path / "objects" / f"{number}").write_bytes(b"")

    with pytest.raises(CorruptError) as caught:
        sealed.report().raise_if_bad(sealed.path)

    assert len(str(caught.value).splitlines()) == 1 + 1 + 10 + 1 + 1
    assert "... and 20 more" in str(caught.value)


@pytest.mark.parametrize("name", ["manifest.json", "receipt.json"])
@pytest.mark.parametrize("damage", ["edit", "truncate", "remove", "link", "fifo"])
def test_opening_refuses_documents_that_are_not_those_named(sealed: Sealed, name: str, damage: str) -> None:
    path = sealed.path / name
    data = path.read_bytes()
    path.unlink()
    if damage == "edit":
        path.write_bytes(data.replace(b"a", b"b", 1))
    elif damage == "truncate":
        path.write_bytes(data[:-1])
    elif damage == "link":
        (sealed.path / "copy").write_bytes(data)
        path.symlink_to(sealed.path / "copy")
    elif damage == "fifo":
        os.mkfifo(path)

    with pytest.raises(CorruptError, match=f"{name}: "):
        sealed.open()


def test_opening_refuses_a_receipt_for_another_manifest(sealed: Sealed) -> None:
    reseal(sealed, manifest_id="other")

    with pytest.raises(CorruptError, match="the index is of other"):
        sealed.open()


def test_opening_bounds_what_it_reads(sealed: Sealed) -> None:
    reseal(sealed, manifest=f"sha256:{'0' * 64}:{1 << 40}")

    with pytest.raises(ManifestError, match="would have 1099511627776 bytes"):
        sealed.open()


@pytest.mark.parametrize("cut", [0, 1, 100])
def test_opening_refuses_a_malformed_index(sealed: Sealed, cut: int) -> None:
    path = sealed.path / INDEX_NAME
    path.write_bytes(path.read_bytes()[:cut])

    with pytest.raises(ManifestError, match="bundle index"):
        sealed.open()


def test_opening_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(StoreError, match="none: there is no such file or directory"):
        open_bundle(tmp_path / "none")
    for path in (tmp_path, tmp_path / "none", tmp_path / "file"):
        with pytest.raises(StoreError, match=f"no bundle at {path}"):
            open_bundle(path)


@pytest.mark.process
def test_the_bundle_package_imports_no_torch_numpy_or_sqlite() -> None:
    code = (
        "import sys, aotgaudi.bundle.pack, aotgaudi.bundle.verify;"
        "print([m for m in ('torch', 'numpy', 'sqlite3') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_an_index_that_claims_millions_of_objects_is_refused_unread(sealed: Sealed) -> None:
    os.truncate(sealed.path / "aotgaudi.bundle.json", 228_000_000)
    started = time.process_time()

    with pytest.raises(CorruptError, match=r"aotgaudi\.bundle\.json: has more than \d{7} bytes"):
        sealed.open()

    assert time.process_time() - started < 1


def test_an_index_with_more_objects_than_its_receipt_can_need_is_refused(sealed: Sealed) -> None:
    index = load_index((sealed.path / "aotgaudi.bundle.json").read_bytes())
    more = sorted(map(str, (*index.objects, *(Digest(f"{number:064x}", 5) for number in range(1000)))))
    (sealed.path / "aotgaudi.bundle.json").write_bytes(
        index.model_copy(update={"objects": tuple(map(Digest.parse, more))}).dumps()
    )

    with pytest.raises(CorruptError, match=r"the index lists 1005 objects, its receipt needs 8 at most"):
        sealed.open()
