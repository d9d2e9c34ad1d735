"""Collecting: down to the size, longest unused first, never what a root keeps, never under a build."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from aotgaudi.digest import Digest
from aotgaudi.errors import CorruptError, StoreError
from aotgaudi.files import lock_directory
from aotgaudi.store.cas import remove
from aotgaudi.store.collect import (
    Usage,
    collect,
    collect_unless_used,
    measure_store,
    plan_collection,
    read_contents,
)
from aotgaudi.store.records import digests_in
from aotgaudi.store.scratch import locked_directory, sweep_temporary_files
from aotgaudi.store.store import Root, Store
from tests.unit.failing import raising

EVERYTHING = 1 << 60


def key(number: int) -> str:
    return f"{number:064x}"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


def add(store: Store, number: int, *blobs: bytes, used: float) -> list[Digest]:
    """Records result `number`, which names `blobs` and was last used at `used`."""
    digests = [store.objects.put_bytes(blob) for blob in blobs]
    store.actions.put(key(number), {"files": {str(n): str(d) for n, d in enumerate(digests)}})
    store.actions.records.touch(key(number), used)
    return digests


def numbers(store: Store) -> list[int]:
    return [int(text, 16) for text in store.actions]


def test_what_was_used_longest_ago_goes_first_until_it_fits(store: Store) -> None:
    for number, used in ((1, 300.0), (2, 100.0), (3, 200.0)):
        add(store, number, bytes([number]) * 1000, used=used)
    record_bytes = store.actions.records.path(key(1)).stat().st_size

    collect(store, 2 * (1000 + record_bytes))
    assert numbers(store) == [1, 3]

    collect(store, 1000 + record_bytes)
    assert numbers(store) == [1]
    assert list(store.objects.digests()) == [Digest.of(b"\x01" * 1000)]


def test_a_use_that_is_noted_saves_a_record(store: Store) -> None:
    add(store, 1, b"a" * 1000, used=100.0)
    add(store, 2, b"b" * 1000, used=200.0)

    store.actions.note_use([key(1)])
    collect(store, 1500)

    assert numbers(store) == [1]


def test_an_object_that_another_record_names_stays(store: Store) -> None:
    add(store, 1, b"shared", b"own", used=100.0)
    add(store, 2, b"shared", used=200.0)
    size = collect(store, EVERYTHING, dry_run=True).bytes_before

    collect(store, size - 1)

    assert numbers(store) == [2]
    assert list(store.objects.digests()) == [Digest.of(b"shared")]


def test_a_root_keeps_its_records_with_their_objects_and_its_objects(store: Store) -> None:
    (kept,) = add(store, 1, b"kept with its record", used=1.0)
    (alone,) = add(store, 2, b"kept alone", used=1.0)
    add(store, 3, b"gone", used=1000.0)
    store.roots.put(Root(name="prod", keys=frozenset({key(1)}), objects=frozenset({alone})))

    outcome = collect(store, 0)

    assert numbers(store) == [1]
    assert set(store.objects.digests()) == {kept, alone}
    assert outcome.bytes_after == outcome.kept_bytes > 0

    store.roots.remove("prod")
    collect(store, 0)
    assert numbers(store) == []
    assert list(store.objects.digests()) == []


def test_orphans_go_whatever_the_size(store: Store) -> None:
    orphan = store.objects.put_bytes(b"its writer died before it could record it")
    add(store, 1, b"named", used=1.0)

    outcome = collect(store, EVERYTHING)

    assert outcome.orphans == (orphan,)
    assert list(store.objects.digests()) == [Digest.of(b"named")]


def test_a_dry_run_removes_nothing_and_says_the_same(store: Store) -> None:
    for number in range(4):
        add(store, number, bytes([number]) * 500, used=float(number))

    with store.in_use():
        told = collect(store, 1000, dry_run=True)
    assert numbers(store) == [0, 1, 2, 3]
    assert collect(store, 1000) == told


def test_a_root_that_cannot_be_read_stops_it_before_anything_goes(store: Store) -> None:
    add(store, 1, b"one", used=1.0)
    store.roots.put(Root(name="prod", keys=frozenset({key(1)})))
    (store.root / "roots" / "prod.json").write_text("{}")

    with pytest.raises(CorruptError, match="nothing is collected"):
        collect(store, 0)
    assert numbers(store) == [1]


def test_it_is_refused_while_somebody_builds(store: Store) -> None:
    add(store, 1, b"one", used=1.0)
    paths = [scratch(store, name, 10, 0.0) for name in ("logs/unit.log", "toolcache/toolchains/x")]

    with store.in_use():
        with pytest.raises(StoreError, match="is in use"):
            collect(Store.open(store.root), 0)
        assert collect_unless_used(store, 0) is None
    assert numbers(store) == [1]
    assert all(path.exists() for path in paths)
    collect(store, 0)


def test_it_is_refused_where_there_are_no_locks(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aotgaudi.store.store.fcntl.flock", raising(37))
    with pytest.raises(StoreError, match="no locks"):
        collect(store, 0)


def test_the_order_of_going_never_leaves_a_record_without_its_objects(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector that dies in the middle, at each of its steps."""
    for number in range(3):
        add(store, number, bytes([number]) * 100, used=float(number))
    real = Path.unlink

    def checked(path: Path, missing_ok: bool = False) -> None:
        real(path, missing_ok=missing_ok)
        for name in store.actions:
            value = store.actions.get(name)
            assert all(store.objects.has(digest) for digest in digests_in(value))

    monkeypatch.setattr(Path, "unlink", checked)
    collect(store, 0)
    assert numbers(store) == []


def test_a_damaged_record_is_counted_and_left_to_fsck(store: Store) -> None:
    add(store, 1, b"one", used=1.0)
    path = store.actions.records.path(key(1))
    path.chmod(0o644)
    path.write_bytes(b"{}")

    assert collect(store, EVERYTHING).bad_records == (key(1),)
    assert path.exists()


def test_files_of_unit_locks_go_and_the_store_lock_stays(store: Store) -> None:
    with store.locks.try_unit(key(1)):
        pass

    collect(store, EVERYTHING)

    assert [path.name for path in (store.root / "locks").iterdir()] == ["store"]


def test_the_plan_counts_each_byte_once(store: Store) -> None:
    add(store, 1, b"a" * 100, b"a" * 100, b"b" * 50, used=1.0)
    add(store, 2, b"a" * 100, used=2.0)
    contents = read_contents(store)

    plan = plan_collection(contents, 0)

    assert plan.bytes_after == 0
    assert sorted(map(str, plan.objects)) == sorted(map(str, contents.objects))


def test_references_are_found_wherever_they_are() -> None:
    one, two, three = (f"sha256:{c * 64}:{n}" for n, c in enumerate("abc"))

    found = list(digests_in({"a": [one, {"b": [two]}], three: "sha256:no", "n": [1, None, 2.5, True]}))

    assert sorted(map(str, found)) == [one, two, three]


def test_a_sweep_takes_what_has_no_writer_and_leaves_what_has(store: Store) -> None:
    tmp = store.root / "tmp"
    (tmp / "put-1-dead").write_bytes(b"dead")
    (tmp / "check-old").mkdir()
    (tmp / "check-old" / "half").write_bytes(b"half")
    (tmp / "check-young").mkdir()
    os.utime(tmp / "check-old", (0, 0))
    from aotgaudi.files import temporary_file

    with temporary_file(tmp) as live:
        assert sweep_temporary_files(store.root) == 2
        assert live.path.exists()

    assert [path.name for path in tmp.iterdir()] == ["check-young"]


def test_a_sweep_holds_the_lock_of_a_directory_until_it_is_gone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one that is being made could be locked by its maker, and then be removed."""
    dead, locks = store.root / "tmp" / "unit-dead", list[bool | None]()
    dead.mkdir()

    def removed(path: Path) -> bool:
        with lock_directory(path) as is_free:
            locks.append(is_free)
        return remove(path)

    monkeypatch.setattr("aotgaudi.store.scratch.remove", removed)

    assert sweep_temporary_files(store.root) == 1
    assert (locks, dead.exists()) == ([False], False)


def test_a_sweep_without_locks_goes_by_the_age_that_the_file_system_gives(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aotgaudi.store.scratch.fcntl.flock", raising(37))
    for name, used in (("put-1-old", 0), ("put-1-young", None)):
        path = store.root / "tmp" / name
        path.write_bytes(b"")
        os.utime(path, None if used is None else (used, used))

    sweep_temporary_files(store.root)

    assert [path.name for path in (store.root / "tmp").iterdir()] == ["put-1-young"]


def test_a_scratch_directory_is_private_and_gone_at_the_end(store: Store) -> None:
    with locked_directory(store.root) as path:
        (path / "file").write_bytes(b"x")
        assert path.parent == store.root / "tmp"
        assert path.stat().st_mode & 0o777 == 0o700

    assert list((store.root / "tmp").iterdir()) == []


def test_a_sweep_leaves_a_scratch_directory_that_is_used_and_takes_one_whose_user_is_dead(
    store: Store,
) -> None:
    with locked_directory(store.root) as used:
        dead = store.root / "tmp" / "unit-of-the-dead"
        dead.mkdir()
        (dead / "half").write_bytes(b"x")

        assert sweep_temporary_files(store.root) == 1

        assert used.is_dir()
        assert not dead.exists()


def test_a_scratch_directory_that_was_swept_meanwhile_is_no_error(store: Store) -> None:
    with locked_directory(store.root) as path:
        shutil.rmtree(path)


def test_a_build_first_clears_what_the_dead_left_but_not_beside_another_build(store: Store) -> None:
    dead = store.root / "tmp" / "put-1-dead"
    dead.write_bytes(b"")
    with store.locks.shared(), Store.open(store.root).in_use():
        assert dead.exists()

    with store.in_use():
        assert not dead.exists()


# Scratch


def scratch(store: Store, name: str, num_bytes: int, used: float) -> Path:
    """A log, tool cache or partial object, last used at `used`."""
    path = store.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.startswith("toolcache"):
        (path / "headers").mkdir(parents=True)
        (path / "headers" / "all.gch").write_bytes(bytes(num_bytes))
    else:
        path.write_bytes(bytes(num_bytes))
    os.utime(path, (used, used))
    return path


def test_the_limit_counts_logs_and_tool_caches(store: Store) -> None:
    (digest,) = add(store, 1, b"x" * 1000, used=5.0)
    scratch(store, "toolcache/toolchains/avx2-1", 2000, time.time())
    scratch(store, "logs/unit.log", 300, time.time())

    plan = collect(store, EVERYTHING)

    record_bytes = store.actions.records.path(key(1)).stat().st_size
    assert plan.bytes_after == digest.size_bytes + record_bytes + 2000 + 300
    assert plan.bytes_before == plan.bytes_after
    assert plan.evicted == plan.orphans == plan.scratch == ()
    assert numbers(store) == [1]


def test_what_was_used_longest_ago_goes_first_whatever_it_is(store: Store) -> None:
    now = time.time()
    logs = [scratch(store, f"logs/{age}.log", 1000, now - age) for age in (500, 100)]
    tools = [scratch(store, f"toolcache/toolchains/{age}", 1000, now - age) for age in (400, 10)]
    add(store, 1, b"x" * 1000, used=now - 200)
    everything = [*logs, *tools, store.actions.records.path(key(1))]

    lost = []
    for limit in (4900, 3900, 2900, 1900, 900):
        collect(store, limit)
        lost.append([path for path in everything if not path.exists()])
        everything = [path for path in everything if path.exists()]

    record = store.actions.records.path(key(1))
    assert lost == [[logs[0]], [tools[0]], [record], [logs[1]], [tools[1]]]


def test_what_the_caller_keeps_stays_as_under_a_root(store: Store) -> None:
    add(store, 1, b"of this build", used=1.0)
    add(store, 2, b"of another", used=2.0)

    outcome = collect_unless_used(store, 0, [Root(name="build", keys=frozenset({key(1)}))])

    assert numbers(store) == [1]
    assert outcome is not None
    assert outcome.bytes_after == outcome.kept_bytes > 0
    assert store.roots.names() == ()


def test_a_link_in_the_scratch_is_removed_and_not_followed(store: Store, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_bytes(b"precious")
    (store.root / "toolcache" / "toolchains").mkdir(parents=True)
    link = store.root / "toolcache" / "toolchains" / "link"
    link.symlink_to(tmp_path / "elsewhere")

    collect(store, 0)

    assert not link.is_symlink()
    assert (tmp_path / "elsewhere" / "file").read_bytes() == b"precious"


# Figures


def test_an_empty_store_has_no_uses(tmp_path: Path) -> None:
    usage = measure_store(Store.open(tmp_path))

    assert usage.kinds["objects"] == usage.kinds["records"] == Usage()
    assert (usage.oldest_use, usage.newest_use, usage.root_names) == (None, None, ())
    assert usage.index.endswith("not begun")
    assert measure_store(Store.open(tmp_path, read_only=True)).index == "none: records are read directly"


def test_everything_is_counted_once_by_kind(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    digests = [store.objects.put_bytes(b"x" * 10), store.objects.put_bytes(b"y" * 20)]
    for number, used in ((1, 5.0), (2, 9.0)):
        store.actions.put(f"{number:064x}", {"objects": list(map(str, digests))})
        store.actions.records.touch(f"{number:064x}", used)
    store.roots.put(Root(name="prod", keys=frozenset({key(9)})))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "unit.log").write_bytes(b"12345")
    (tmp_path / "tmp" / "put-1-dead").write_bytes(b"123")

    usage = measure_store(store)

    assert usage.kinds["objects"] == Usage(2, 30)
    assert usage.kinds["records"].num_files == 2
    assert usage.kinds["tmp"] == Usage(1, 3)
    assert usage.kinds["logs"] == Usage(1, 5)
    assert usage.kinds["scratch"] == Usage(1, len("aotgaudi.store/1\n"))
    assert usage.total == sum(usage.kinds.values(), Usage())
    assert usage.root_names == ("prod",)
    assert (usage.oldest_use, usage.newest_use) == (5.0, 9.0)
