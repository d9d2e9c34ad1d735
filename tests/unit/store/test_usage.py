"""Figures about a store."""

from __future__ import annotations

from pathlib import Path

from aotgaudi.store.roots import Root
from aotgaudi.store.store import Store
from aotgaudi.store.usage import Usage, measure_store

KEY = "ab" * 32


def test_an_empty_store_has_no_uses(tmp_path: Path) -> None:
    usage = measure_store(Store.open(tmp_path))

    assert usage.kinds["objects"] == usage.kinds["records"] == Usage()
    assert (usage.oldest_use, usage.newest_use, usage.root_names) == (None, None, ())
    assert usage.index.endswith("not begun")


def test_everything_is_counted_once_by_kind(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    digests = [store.objects.put_bytes(b"x" * 10), store.objects.put_bytes(b"y" * 20)]
    for number, used in ((1, 5.0), (2, 9.0)):
        store.actions.put(f"{number:064x}", {"objects": list(map(str, digests))})
        store.actions.records.touch(f"{number:064x}", used)
    store.roots.put(Root(name="prod", keys=frozenset({KEY})))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "unit.log").write_bytes(b"12345")
    (tmp_path / "tmp" / "put-1-dead").write_bytes(b"123")

    usage = measure_store(store)

    assert usage.kinds["objects"] == Usage(2, 30)
    assert usage.kinds["records"].num_files == 2
    assert usage.kinds["tmp"] == Usage(1, 3)
    assert usage.kinds["scratch"] == Usage(2, 5 + len("aotgaudi.store/1\n"))
    assert usage.total == sum(usage.kinds.values(), Usage())
    assert usage.root_names == ("prod",)
    assert (usage.oldest_use, usage.newest_use) == (5.0, 9.0)


def test_a_store_without_an_index_says_so(tmp_path: Path) -> None:
    Store.open(tmp_path)

    assert measure_store(Store.open(tmp_path, read_only=True)).index == "none: records are read directly"
