"""Compiling again: the same bytes are said to be the same, others are found and named, and nothing is published."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.backends.fake import probe
from aotgaudi.bundle.pack import pack_bundle
from aotgaudi.compile.jobs import CompileJob
from aotgaudi.compile.pipeline import make_receipt
from aotgaudi.compile.plan import Plan, make_plan
from aotgaudi.compile.recheck import RecheckJob, first_difference, recheck
from aotgaudi.digest import Digest
from aotgaudi.entries import DefragEntry
from aotgaudi.errors import CompileError, CorruptError, NotWarmError
from aotgaudi.manifest.manifest import Manifest, dumps
from aotgaudi.store.cas import object_path
from aotgaudi.store.store import Store
from tests.workload import execute, key_of, seed, seeded_plan, text_of, tiny_spec

pytestmark = pytest.mark.process

FIVE = tuple(f"layer {number}" for number in range(5))


def built(store: Store, *labels: str) -> Plan:
    """A plan over one program that calls units of these labels, all compiled."""
    outcome = execute(store, seeded_plan(store, [labels]), 1)
    assert outcome.failures == ()
    return make_plan([DefragEntry(1)], tiny_spec(), probe(), store)


def files_of(store: Store) -> dict[str, bytes]:
    """What the store holds, but for its caches and logs."""
    return {
        str(path.relative_to(store.root)): path.read_bytes()
        for name in ("objects", "records", "tmp")
        for path in (store.root / name).rglob("*")
        if path.is_file()
    }


def test_equal_bytes_are_no_difference_and_nothing_is_published(store: Store) -> None:
    plan = built(store, *FIVE)
    before = files_of(store)

    found = recheck(plan, store, 5, 2)

    assert found.differences == ()
    assert sorted(found.labels) == sorted(FIVE)
    assert files_of(store) == before


def test_a_compiler_that_gives_other_bytes_is_found_out(store: Store) -> None:
    plan = built(store, "layer a", "head b !random")
    (stored,) = plan.units[key_of("head b !random")].artifact.values()

    found = recheck(plan, store, 2, 1)

    (difference,) = found.differences
    assert (difference.label, difference.file) == ("head b !random", "unit.bin")
    assert difference.unit == key_of("head b !random")
    assert difference.stored == str(stored)
    assert difference.rebuilt not in (None, str(stored))
    data = store.objects.read(stored)
    assert difference.offset >= len(data) - 16, "all but the last 16 bytes are the same"


@pytest.mark.parametrize("sample", [3, 10**9])
def test_a_sample_is_as_large_as_asked_and_the_same_every_time(store: Store, sample: int) -> None:
    plan = built(store, *FIVE)

    first, second = (recheck(plan, store, sample, 1).labels for _ in range(2))

    assert first == second
    assert len(set(first)) == min(sample, 5)


def test_a_store_without_the_units_has_nothing_to_compare(store: Store) -> None:
    with pytest.raises(NotWarmError, match="build cache"):
        recheck(seeded_plan(store, [FIVE]), store, 3, 1)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("layer !fail", "told to fail"),
        ("layer !die", "layer !die: the worker process was killed by signal 9"),
    ],
    ids=["fails", "dies"],
)
def test_a_unit_that_does_not_compile_any_more_is_an_error(store: Store, label: str, message: str) -> None:
    """It compiled once, under another name; the name is what makes the fake compiler fail."""
    plan = built(store, "layer x")
    key = key_of("layer x")
    row = plan.programs[0].row
    assert row is not None
    source = row.units[key].model_copy(update={"label": label})
    object.__setattr__(row, "units", {key: source})

    with pytest.raises(CompileError, match=message):
        recheck(plan, store, 1, 1)


def test_damage_to_the_stored_copy_is_no_difference_of_the_compiler(store: Store) -> None:
    plan = built(store, "head b !random")
    (text,) = plan.units[key_of("head b !random")].artifact.values()
    path = object_path(store.root, text)
    path.chmod(0o644)
    path.write_bytes(bytes(path.stat().st_size))

    with pytest.raises(CorruptError):
        recheck(plan, store, 1, 1)


def test_a_store_that_is_only_readable_can_be_checked(store: Store) -> None:
    built(store, "layer a")
    reader = Store.open(store.root, create=False, read_only=True)
    plan = make_plan([DefragEntry(1)], tiny_spec(), probe(), reader)

    assert recheck(plan, reader, 1, 1).differences == ()
    assert list((store.root / "tmp").iterdir()) == []


def test_a_file_that_is_new_or_gone_is_a_difference(store: Store, tmp_path: Path) -> None:
    plan = built(store, "layer a")
    key = key_of("layer a")
    (digest,) = plan.units[key].artifact.values()
    text = str(digest)
    source = str(Digest.of(text_of("layer a").encode()))
    job = CompileJob(key, source, "layer a", probe(), store.root, tmp_path / "log")

    gone = RecheckJob(job, {"unit.bin": digest, "other.bin": digest}, tmp_path).run()
    new = RecheckJob(job, {}, tmp_path).run()

    assert [(row.file, row.stored, row.rebuilt, row.offset) for row in gone] == [("other.bin", text, None, 0)]
    assert [(row.file, row.stored, row.rebuilt, row.offset) for row in new] == [("unit.bin", None, text, 0)]


@given(common=st.binary(max_size=40), left=st.binary(max_size=8), right=st.binary(max_size=8))
def test_the_first_difference_is_the_first(common: bytes, left: bytes, right: bytes) -> None:
    a, b = common + left, common + right
    at = first_difference(a, b)

    assert a[:at] == b[:at]
    assert a == b or a[at : at + 1] != b[at : at + 1]
    assert first_difference(a, a) == len(a)


def test_settings_of_the_users_torch_do_not_reach_a_worker() -> None:
    """They change what comes out, and no key knows of them."""
    theirs = {
        "TORCHINDUCTOR_CPP_MIN_CHUNK_SIZE": "7",
        "TORCHINDUCTOR_FREEZING": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "8",
        "TORCHINDUCTOR_CACHE_DIR": "theirs",
        "AOT_INDUCTOR_ENABLE_LTO": "1",
        "TORCHDYNAMO_AUTO_FUNCTIONALIZED_V2": "0",
        "TORCH_LOGS": "+inductor",
    }
    code = (
        "import json, os\nfrom aotgaudi.compile.workers import start_worker\n"
        "start_worker('/ours')\nprint(json.dumps(dict(os.environ)))"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **theirs}, capture_output=True, text=True, check=True
    )

    environment = json.loads(done.stdout)
    found = {name: environment[name] for name in theirs if name in environment}
    assert found == {
        "TORCHINDUCTOR_CACHE_DIR": "/ours",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCH_LOGS": "+inductor",
    }


def bundle_of(folder: Path, num_workers: int) -> dict[str, bytes]:
    """Builds a store in `folder`, seals it, and returns every file of the bundle."""
    manifest = Manifest.of(tiny_spec())
    store = Store.open(folder / "store")
    seed(store, manifest.spec, manifest.entries, [FIVE])
    for _ in range(2):  # To build, and to see what was built.
        plan = make_plan(manifest.entries, manifest.spec, probe(), store)
        assert execute(store, plan, num_workers, spec=manifest.spec).failures == ()
    out = folder / "bundle"
    pack_bundle(dumps(manifest), manifest.id, make_receipt(manifest, plan), store.objects, out)
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_stores_built_apart_give_one_bundle(tmp_path: Path) -> None:
    """Other times, places, numbers of workers and umasks: the same bytes in every file."""
    one = bundle_of(tmp_path / "one", 1)
    before = os.umask(0o077)
    try:
        other = bundle_of(tmp_path / "another" / "place", 3)
    finally:
        os.umask(before)

    assert one == other
    assert len(one) > len(FIVE)
