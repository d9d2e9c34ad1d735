"""``pipeline.build``, which the command line, the Python API and the example share, on the fake backend."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.signing import generate_key
from aotgaudi.compile.pipeline import Workers, build
from aotgaudi.compile.run import Progress, Watch
from aotgaudi.digest import Digest
from aotgaudi.errors import BuildInterruptedError, CompileError, ManifestError, SpecError, StoreError
from aotgaudi.manifest.manifest import Manifest, write_manifest
from aotgaudi.store.store import Store
from tests.workload import SPEC_TEXT, seed, tiny_spec

pytestmark = pytest.mark.process

MANIFEST = Manifest.of(tiny_spec())
LABELS = (("layer a", "head b"), ("layer a", "sampler c"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Has a spec, a manifest, and a store in which their programs are traced."""
    (tmp_path / "tiny.toml").write_text(SPEC_TEXT, encoding="utf-8")
    write_manifest(tmp_path / "tiny.manifest.json", MANIFEST)
    traced(tmp_path / "store")
    return tmp_path


def traced(root: Path) -> Store:
    store = Store.open(root)
    seed(store, MANIFEST.spec, MANIFEST.entries, LABELS)
    return store


@pytest.mark.parametrize(
    "spec_of",
    [
        lambda folder: folder / "tiny.toml",
        lambda folder: str(folder / "tiny.toml"),
        lambda folder: folder / "tiny.manifest.json",
        lambda folder: tiny_spec(),
        lambda folder: MANIFEST,
    ],
    ids=["path", "text", "manifest file", "spec", "manifest"],
)
def test_a_spec_in_any_form_becomes_the_same_bundle(folder: Path, spec_of: Callable[[Path], Any]) -> None:
    result = build(spec_of(folder), folder / "out", store=folder / "store", jobs=1)

    assert result.manifest.id == MANIFEST.id
    assert len(result.outcome.compiled) == 3
    assert result.bundle == folder / "out"
    assert result.index == open_bundle(folder / "out").index
    assert set(open_bundle(folder / "out").receipt.programs) == {entry.id for entry in MANIFEST.entries}


def test_a_second_build_does_nothing_and_leaves_the_bundle_as_it_is(folder: Path) -> None:
    build(MANIFEST, folder / "out", store=folder / "store", jobs=1)
    times = {path: path.stat().st_mtime_ns for path in (folder / "out").iterdir()}

    result = build(MANIFEST, folder / "out", store=folder / "store", jobs=1, on_progress=pytest.fail)

    assert result.outcome.compiled == ()
    assert {path: path.stat().st_mtime_ns for path in (folder / "out").iterdir()} == times


def test_without_a_place_for_it_no_bundle_is_sealed_and_an_open_store_will_do(folder: Path) -> None:
    seen: list[Progress] = []
    result = build(MANIFEST, store=traced(folder / "other"), jobs=Workers(1), on_progress=seen.append)

    assert (result.bundle, result.index) == (None, None)
    assert len(result.outcome.compiled) == 3
    assert (seen[0].num_done, seen[-1].num_done, seen[-1].num_total) == (0, 3, 3)


def test_the_store_is_by_default_the_one_that_the_environment_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AOTGAUDI_STORE", str(folder / "store"))

    assert len(build(MANIFEST, jobs=1).outcome.compiled) == 3


def test_a_key_signs_the_bundle(folder: Path) -> None:
    generate_key(folder / "key.pem")

    build(MANIFEST, folder / "out", store=folder / "store", jobs=1, sign_key=folder / "key.pem")

    assert (folder / "out" / "aotgaudi.signature.json").is_file()


def test_a_model_is_bound_in_the_receipt_alone(folder: Path) -> None:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MANIFEST.spec.model.config), encoding="utf-8")
    (model / "model.safetensors").write_bytes(b"weights")
    unbound = build(MANIFEST, folder / "unbound", store=folder / "store", jobs=1)

    bound = build(MANIFEST, folder / "out", store=folder / "store", jobs=1, model=model)

    assert bound.outcome.compiled == ()
    assert bound.index is not None
    assert unbound.index is not None
    assert bound.index.objects == unbound.index.objects
    receipt = open_bundle(folder / "out").receipt
    assert receipt.model == {
        name: Digest.of((model / name).read_bytes()) for name in ("config.json", "model.safetensors")
    }
    assert receipt.model_copy(update={"model": None}) == open_bundle(folder / "unbound").receipt


def test_a_watch_is_entered_while_jobs_run_and_may_stop_them(folder: Path) -> None:
    class Stopping(Watch):
        entered: int = 0

        def __enter__(self) -> Watch:
            self.entered += 1
            return self

    watch = Stopping(should_stop=lambda: True)

    with pytest.raises(BuildInterruptedError, match="resumable"):
        build(MANIFEST, folder / "out", store=folder / "store", jobs=1, on_progress=watch)

    assert watch.entered == 1
    assert not (folder / "out").exists()


def test_units_that_fail_are_named_with_their_logs_and_nothing_is_sealed(folder: Path) -> None:
    store = Store.open(folder / "failing")
    seed(store, MANIFEST.spec, MANIFEST.entries, [("layer !fail", "head b")])

    with pytest.raises(CompileError, match=r"1 of 2 jobs failed; .*\n  layer !fail: told to fail\n    log: "):
        build(MANIFEST, folder / "out", store=store, jobs=1)

    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("spec", "out", "error", "message"),
    [
        ("absent.toml", "out", SpecError, "absent.toml: cannot be read"),
        ("absent.json", "out", ManifestError, "there is no such file"),
        (".", "out", SpecError, "is a directory"),
        ("tiny.toml", "store", StoreError, "neither a bundle nor empty"),
    ],
)
def test_a_mistake_is_said_before_any_work(
    folder: Path, spec: str, out: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build(folder / spec, folder / out, store=folder / "new")

    assert not (folder / "new").exists()
