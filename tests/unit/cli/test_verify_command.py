"""``aotgaudi verify`` and the machine that it runs on; what it says of bundles is in tests/transcripts/verify.txt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aotgaudi.backends.base import NOT_INSTALLED, version_of
from aotgaudi.bundle.format import INDEX_NAME
from aotgaudi.gaudi.live_graphs import LiveGraphs
from aotgaudi.machine import Memory
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.store.cas import ObjectStore
from tests.command import Command
from tests.sealing import damage, seal, target_of
from tests.specs import ONE_SEQUENCE, SMALL_CONFIG, spec_of
from tests.unit.bundle.conftest import CAPTURED, SealedCapture, capture_receipt

run = Command("verify")


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return Manifest.of(spec_of(limits=ONE_SEQUENCE))


ANOTHER = {
    "another torch": ({"toolchain": {"torch": "1.0"}}, "compiled for torch 1.0"),
    "a CPU feature": ({"isa": ("no_such_feature",)}, "no_such_feature, which this one lacks"),
    "another machine": ({"machine": "sparc"}, "compiled for machine sparc"),
    "another device": ({"backend": "hpu"}, "compiled for the backend 'hpu'"),
    "no device": ({"backend": "fake"}, "compiled for the backend 'fake'"),
}


@pytest.mark.process
@pytest.mark.parametrize(("changes", "words"), ANOTHER.values(), ids=ANOTHER)
def test_what_this_machine_cannot_serve_exits_with_5_as_serve_does(
    manifest: Manifest, tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    bundle = seal(manifest, tmp_path, target=target_of(**changes))

    result = run(bundle)
    document = run.document(bundle, code=5)
    served = Command("serve")("--bundle", bundle, "--model", tmp_path, "--port", "0")

    assert (result.exit_code, served.exit_code) == (5, 5), served.output
    assert words in result.stderr
    assert result.stderr == served.stderr
    assert document["intact"] is True
    assert document["machine"]["satisfies_target"] is False
    assert words in document["machine"]["reason"]


def test_what_traffic_may_compile_on_a_captured_server_is_said(tmp_path: Path) -> None:
    objects = ObjectStore(tmp_path / "store")
    rows = (
        LiveGraphs(kind="preemption", state="bounded", text="none"),
        LiveGraphs(kind="penalties", state="open", text="a graph for each length"),
    )
    receipt = capture_receipt(objects, CAPTURED, live_graphs=rows, not_exercised=("images",))
    SealedCapture(tmp_path / "bundle", objects, receipt).pack()

    lines = run(tmp_path / "bundle", "--no-target").stdout.splitlines()
    document = run.document(tmp_path / "bundle", "--no-target")

    assert [line for line in lines if line.startswith(("live", "not asked"))] == [
        "not asked images",
        "live      not closed: penalties: a graph for each length",
    ]
    assert document["live_graphs"] == [row.model_dump() for row in rows]


def test_a_server_that_does_not_fit_into_the_memory_exits_with_5_and_what_would_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = seal(Manifest.of(spec_of(config=SMALL_CONFIG, limits=ONE_SEQUENCE)), tmp_path)
    assert run(bundle).exit_code == 0
    monkeypatch.setattr("aotgaudi.bundle.verify.available_memory", lambda: Memory(1 << 30, 4096))

    result = run(bundle)

    assert (result.exit_code, result.stderr.count("\n")) == (5, 1)
    assert "4.00 KiB of 1.00 GiB are free" in result.stderr
    assert run.document(bundle, code=5)["machine"]["satisfies_target"] is False
    assert run(bundle, "--no-target").exit_code == run(bundle, "--no-memory").exit_code == 0


def test_a_truncated_index_names_its_file(manifest: Manifest, tmp_path: Path) -> None:
    path = seal(manifest, tmp_path) / INDEX_NAME
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:100])

    result = run(path.parent)

    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"error: {path}: bundle index" in result.stderr


def test_a_description_is_what_verify_prints(manifest: Manifest, tmp_path: Path) -> None:
    printed = run("--print-target")
    (tmp_path / "server.json").write_text(printed.stdout)

    assert printed.exit_code == 0
    assert json.loads(printed.stdout)["toolchain"] == {"torch": version_of("torch")}
    assert run(seal(manifest, tmp_path), "--target", tmp_path / "server.json").exit_code == 0


def test_without_torch_the_rest_is_verified_and_it_is_said(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = seal(manifest, tmp_path)
    monkeypatch.setattr("aotgaudi.backends.online.version_of", lambda package: NOT_INSTALLED)

    result, document = run(bundle), run.document(bundle)

    assert result.exit_code == 0, result.output
    assert "machine   not checked: torch is not installed, so this machine cannot serve" in result.stdout
    assert document["machine"]["satisfies_target"] is None
    damage(bundle)
    assert run(bundle).exit_code == 4
    assert "torch is not installed" in run("--print-target").stderr
