"""A bundle of captured caches goes every way that a bundle of programs goes, and is refused where programs are needed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.format import INDEX_NAME, load_index
from aotgaudi.bundle.pack import pack_bundle
from aotgaudi.bundle.signature import load_envelope, load_statement
from aotgaudi.bundle.signing import Signing, generate_key, load_signing_key
from aotgaudi.bundle.trust import ANY_BUNDLE, TrustPolicy
from aotgaudi.bundle.verify import verify_bundle
from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, ManifestError, SpecError, UntrustedError
from aotgaudi.llm.running import ModelOptions, Observers
from aotgaudi.llm.start import start
from tests.command import Command
from tests.launches import a_launch
from tests.unit.bundle.conftest import CAPTURED, LAUNCH, LAUNCH_ID, SealedCapture


def test_the_index_counts_files_and_each_object_once(captured: SealedCapture) -> None:
    bundle = captured.open()

    assert bundle.index.manifest_id == LAUNCH_ID
    assert bundle.manifest_bytes == LAUNCH
    assert bundle.launch.id == LAUNCH_ID
    assert (bundle.index.counts.programs, bundle.index.counts.units) == (0, len(CAPTURED))
    assert bundle.index.counts.objects == len(set(CAPTURED.values()))
    report = verify_bundle(bundle)
    assert report.is_intact
    assert (report.num_entries, report.kind) == (len(CAPTURED), "capture")


def test_another_launch_is_refused(captured: SealedCapture, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="answers manifest"):
        pack_bundle(LAUNCH, "d" * 64, captured.receipt, captured.objects, tmp_path / "other")


def test_a_launch_that_is_not_the_one_of_the_receipt_is_found(captured: SealedCapture) -> None:
    other = a_launch(guest="fake", repairs=("another",))
    pack_bundle(other.dumps(), LAUNCH_ID, captured.receipt, captured.objects, captured.path)

    with pytest.raises(CorruptError, match=f"holds launch {other.id}"):
        _ = captured.open().launch


@pytest.mark.parametrize("change", ["one more", "one less", "none"])
def test_an_index_lists_exactly_the_objects_of_the_files(change: str, captured: SealedCapture) -> None:
    path = captured.path / INDEX_NAME
    index = load_index(path.read_bytes())
    objects = {
        "one more": (*index.objects, Digest.of(b"more")),
        "one less": index.objects[1:],
        "none": (),
    }[change]
    path.write_bytes(index.model_copy(update={"objects": tuple(sorted(objects, key=str))}).dumps())

    with pytest.raises(CorruptError, match="lists other objects than the receipt has files"):
        captured.open()


def test_a_file_that_nobody_named_is_found(captured: SealedCapture) -> None:
    stray = captured.path / "objects" / "sha256" / "aa" / "stray.so"
    stray.parent.mkdir(exist_ok=True)
    stray.touch()

    assert verify_bundle(captured.open()).extra == ("objects/sha256/aa/stray.so",)


def test_what_is_signed_is_the_launch_and_the_files_and_an_edit_is_refused(
    captured: SealedCapture, tmp_path: Path
) -> None:
    generate_key(tmp_path / "key")
    key = load_signing_key(tmp_path / "key")
    policy = TrustPolicy(keys=frozenset({key.public}))
    with pytest.raises(UntrustedError, match="not signed"):
        open_bundle(captured.path, policy)

    captured.pack(signing=Signing((key,)))

    bundle = open_bundle(captured.path, policy)
    assert bundle.statement is not None
    predicate = load_statement(
        load_envelope((captured.path / "aotgaudi.signature.json").read_bytes()).payload
    ).predicate
    assert (predicate.manifest_id, predicate.counts.units) == (LAUNCH_ID, len(CAPTURED))
    receipt = captured.path / "receipt.json"
    receipt.write_bytes(receipt.read_bytes().replace(b"run.py", b"ran.py"))
    with pytest.raises(CorruptError, match=r"receipt\.json"):
        open_bundle(captured.path, policy)


def test_serving_programs_from_it_is_refused_before_anything_is_loaded(
    captured: SealedCapture, tmp_path: Path
) -> None:
    options = ModelOptions(
        bundle=captured.path,
        acceptance=ANY_BUNDLE,
        model_dir=tmp_path / "none",
        require_warm=True,
        num_threads=1,
    )

    with pytest.raises(SpecError, match="holds the caches of another server, no programs"):
        start(options, Observers())


def test_verify_tells_of_files_and_of_the_proof(captured: SealedCapture) -> None:
    told = Command("verify")(captured.path)

    assert told.exit_code == 0, told.output
    assert f"launch    {LAUNCH_ID}" in told.output
    assert f"files     {len(CAPTURED)}, {sum(map(len, CAPTURED.values()))} bytes" in told.output
    assert "proof     0 compile, 0 generate (witnesses: files, process)" in told.output
    document = Command("verify").document(captured.path)
    assert (document["intact"], document["kind"], document["model"]) == (True, "capture", None)


def test_verify_exits_with_4_for_a_file_that_is_gone(captured: SealedCapture) -> None:
    captured.object("cache/a/run.py").unlink()

    told = Command("verify")(captured.path)

    assert told.exit_code == 4
    assert "cache/a/run.py" in told.output


def test_verify_compares_no_model_with_it(captured: SealedCapture, tmp_path: Path) -> None:
    told = Command("verify")(captured.path, "--model", tmp_path)

    assert told.exit_code == 2
    assert "no programs" in told.output


def test_sign_vouches_for_it_and_not_for_a_damaged_one(captured: SealedCapture, tmp_path: Path) -> None:
    generate_key(tmp_path / "key")
    copy = tmp_path / "copy"
    shutil.copytree(captured.path, copy)
    arguments = ["--sign-key", str(tmp_path / "key")]

    assert Command("sign")(copy, *arguments).exit_code == 0
    captured.object("cache/a/run.py").write_bytes(b"other")
    assert Command("sign")(captured.path, *arguments).exit_code == 4
