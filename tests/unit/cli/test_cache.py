"""``aotgaudi cache`` where stores are prepared or looked into; what it prints is in tests/transcripts/cache.txt."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result

from aotgaudi.compile.pipeline import make_receipt, plan_manifest
from aotgaudi.digest import Digest
from aotgaudi.manifest.manifest import Manifest, write_manifest
from aotgaudi.store.cas import object_path
from aotgaudi.store.location import default_store_root
from aotgaudi.store.store import Store
from tests.command import Command
from tests.workload import SPEC_TEXT, PoolInThisProcess, key_of, seed, text_of, tiny_spec

run = Command()

LABELS = (("layer a", "head b"), ("layer a", "sampler c"))


class Place:
    """A folder with a spec and its manifest, and a store in which all of it is built."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec, self.manifest_path = folder / "tiny.toml", folder / "tiny.manifest.json"
        self.spec.write_text(SPEC_TEXT, encoding="utf-8")
        self.manifest = Manifest.of(tiny_spec())
        write_manifest(self.manifest_path, self.manifest)
        self.root = folder / "store"
        store = Store.open(self.root)
        seed(store, self.manifest.spec, self.manifest.entries, LABELS)
        assert self.build().exit_code == 0

    def build(self, *more: object) -> Result:
        return run("build", "cache", self.manifest_path, "--store", self.root, "-j", 1, *more)

    def open(self) -> Store:
        return Store.open(self.root)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr("aotgaudi.compile.cards.LocalPool", PoolInThisProcess)
    return Place(tmp_path)


def test_a_second_build_does_nothing_and_reads_no_record(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "nothing to do" in place.build().stdout

    monkeypatch.setattr("aotgaudi.store.records.read_record", None)
    assert "nothing to do" in place.build().stdout


def test_gc_counts_and_collects_logs_and_tool_caches(place: Place) -> None:
    (place.root / "logs").mkdir(exist_ok=True)
    (place.root / "logs" / "unit.log").write_bytes(bytes(1000))
    headers = place.root / "toolcache" / "toolchains" / "avx2-1" / "headers"
    headers.mkdir(parents=True)
    (headers / "all.gch").write_bytes(bytes(5000))
    os.utime(headers.parent, (0, 0))
    run("cache", "root", "add", "prod", place.manifest_path, "--store", place.root)

    dry = run.document("cache", "gc", "--max-size", "1TB", "--dry-run", "--store", place.root)
    limit = dry["bytes_before"] - 1
    gone = run.document("cache", "gc", "--max-size", limit, "--store", place.root)

    assert dry["bytes_before"] - dry["kept_bytes"] >= 6000
    assert (gone["num_scratch"], gone["bytes_after"]) == (1, dry["bytes_before"] - 5000)
    assert (place.root / "logs" / "unit.log").exists()
    assert not headers.exists()
    assert "nothing to do" in place.build().stdout


def test_a_build_collects_when_it_is_done_and_keeps_what_it_needs(place: Place) -> None:
    store = place.open()
    store.actions.put("ef" * 32, {"of": "an older spec"})
    store.actions.records.touch("ef" * 32, 1.0)

    text = place.build("--store-limit", "0")
    again = json.loads(place.build("--store-limit", "0", "--json").stdout)

    assert text.exit_code == 0
    assert "gc: removed 1 records" in text.stdout
    assert store.actions.get("ef" * 32) is None
    assert again["gc"]["num_records"] == 0
    assert again["gc"]["bytes_after"] == again["gc"]["kept_bytes"] > 0
    assert "nothing to do" in place.build().stdout
    assert "gc" not in json.loads(place.build("--json").stdout)


def test_a_build_leaves_collecting_to_others_that_still_build(place: Place) -> None:
    with place.open().in_use():
        done = place.build("--store-limit", "0")

    assert done.exit_code == 0
    assert "gc: left to the others" in done.stdout


def test_a_kept_receipt_can_still_be_sealed_after_gc(place: Place) -> None:
    store = place.open()
    receipt = make_receipt(place.manifest, plan_manifest(place.manifest, store))
    path = place.folder / "receipt.json"
    path.write_bytes(receipt.dumps())
    assert run("cache", "root", "add", "prod", path, "--store", place.root).exit_code == 0

    run("cache", "gc", "--max-size", "0", "--store", place.root)

    digests = {
        *receipt.programs.values(),
        *(digest for unit in receipt.units.values() for digest in unit.artifact.values()),
    }
    for digest in digests:
        store.objects.verify(digest)
    assert not store.objects.has(Digest.of(text_of("layer a").encode())), "a receipt needs no texts"
    assert store.actions.get(key_of("layer a")) is not None


def test_gc_during_a_build_is_refused(place: Place) -> None:
    with place.open().in_use():
        result = run("cache", "gc", "--max-size", "1GiB", "--store", place.root)

    assert result.exit_code == 2
    assert "is in use" in result.stderr


def test_fsck_removes_what_is_bad_names_what_to_rebuild_and_a_build_mends(place: Place) -> None:
    artifact = plan_manifest(place.manifest, place.open()).units[key_of("layer a")].artifact["unit.bin"]
    for digest in (artifact, Digest.of(text_of("sampler c").encode())):
        path = object_path(place.root, digest)
        path.chmod(0o644)
        path.write_bytes(b"?" * digest.size_bytes)
    assert "nothing to do" in place.build().stdout, "sizes alone do not tell"

    dry = run("cache", "fsck", "--dry-run", "--json", "--store", place.root)
    assert dry.exit_code == 4
    assert not any(row["removed"] for row in json.loads(dry.stdout)["damage"])

    result = run("cache", "fsck", "--store", place.root)
    assert result.exit_code == 4
    assert "2 bad" in result.stderr
    assert "  layer a\n" in result.stderr
    assert "trace of sampler" in result.stderr or "trace of" in result.stderr

    assert run("cache", "fsck", "--store", place.root).exit_code == 0
    seed(place.open(), place.manifest.spec, place.manifest.entries, LABELS)  # As tracing would.
    assert json.loads(place.build("--json").stdout)["num_compiled"] == 1
    assert run.document("cache", "fsck", "--store", place.root)["rebuild"] == []


def test_a_root_of_what_is_not_there_is_refused(place: Place) -> None:
    receipt = make_receipt(place.manifest, plan_manifest(place.manifest, place.open()))
    path = place.folder / "receipt.json"
    path.write_bytes(receipt.dumps())
    run("cache", "gc", "--max-size", "0", "--store", place.root)

    said = run.refusal("cache", "root", "add", "prod", path, "--store", place.root)

    assert "is not in the store" in said


def deny_writing(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """As on a read-only file system, for root too."""
    real = os.access

    def access(path: str | Path, mode: int, **options: object) -> bool:
        return not (Path(path) == root and mode & os.W_OK) and real(path, mode)

    monkeypatch.setattr(os, "access", access)


def test_a_store_that_cannot_be_written_is_enough_while_nothing_is_missing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    deny_writing(monkeypatch, place.root)
    gc.collect()  # Closes the index that earlier builds opened in this process.
    before = sorted(path.stat().st_mtime_ns for path in place.root.rglob("*"))

    done = place.build()
    planned = run("build", "plan", place.manifest_path, "--store", place.root)
    collected = run("cache", "gc", "--max-size", "0", "--store", place.root)

    assert "nothing to do" in done.stdout
    assert "nothing to do" in planned.stdout
    assert collected.exit_code == 2
    assert "is read-only" in collected.stderr
    assert sorted(path.stat().st_mtime_ns for path in place.root.rglob("*")) == before


def test_a_build_into_a_store_that_cannot_be_written_fails_before_it_starts(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.open().actions.discard(key_of("layer a"))
    deny_writing(monkeypatch, place.root)

    result = place.build()

    assert result.exit_code == 2
    assert "nothing can be built into it (use another one, with this one below it" in result.stderr


_HOMELESS = """
import os
from aotgaudi.store.location import (default_store_root)
os.environ.pop("HOME", None)
if os.geteuid() == 0:
    os.setgid(54321)
    os.setuid(54321)
print(default_store_root())
"""


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without a name")
def test_a_uid_without_home_or_a_name_has_a_place_of_its_own() -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")
    }
    done = subprocess.run(
        [sys.executable, "-c", _HOMELESS], capture_output=True, text=True, check=False, env=environment
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("/aotgaudi-54321")


def test_the_default_place_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_store_root() == tmp_path / "aotgaudi"

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_store_root() == tmp_path / ".cache" / "aotgaudi"


def test_a_bundle_as_a_root_keeps_what_sealing_it_again_needs(place: Place) -> None:
    bundle = place.folder / "tiny.bundle"
    assert run("build", "bundle", place.manifest_path, "-o", bundle, "--store", place.root).exit_code == 0
    objects = {path.name for path in (bundle / "objects").rglob("*") if path.is_file()}

    assert run("cache", "root", "add", "prod", bundle, "--store", place.root).exit_code == 0
    run("cache", "gc", "--max-size", "0", "--store", place.root)

    assert {digest.sha256 for digest in place.open().objects.digests()} == objects


def test_damage_that_sealing_finds_is_mended_by_the_next_build(place: Place) -> None:
    artifact = plan_manifest(place.manifest, place.open()).units[key_of("layer a")].artifact["unit.bin"]
    path = object_path(place.root, artifact)
    path.chmod(0o644)
    path.write_bytes(b"?" * path.stat().st_size)
    seal = ("build", "bundle", place.manifest_path, "-o", place.folder / "tiny.bundle", "--store", place.root)

    failed = run(*seal)
    assert failed.exit_code == 4, failed.output
    assert "removed: build again" in failed.stderr

    assert json.loads(place.build("--json").stdout)["num_compiled"] == 1
    assert run(*seal).exit_code == 0
