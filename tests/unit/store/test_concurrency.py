"""Many processes on one store: no torn read, one answer a key, one compile a unit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.store.fsck import check_store
from aotgaudi.store.store import Store

pytestmark = pytest.mark.process

NUM_WRITERS, NUM_READERS, NUM_KEYS = 8, 4, 25

_WRITE = """
import random, sys
from pathlib import Path
from aotgaudi.store.store import Store
root, me, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
store = Store.open(root)
order = list(range(count))
random.Random(me).shuffle(order)
sys.stdin.readline()
with store.in_use():
    for number in order:
        digest = store.objects.put_bytes(b"%d of %d" % (number, me % 2) * 5000)  # Two writers agree, two differ.
        store.actions.put(f"{number:064x}", {"object": str(digest), "writer": me}, lambda value: True)
"""

_READ = """
import json, sys
from pathlib import Path
from aotgaudi.digest import Digest
from aotgaudi.store.store import Store
store, count = Store.open(Path(sys.argv[1])), int(sys.argv[2])
keys, seen, changed = [f"{number:064x}" for number in range(count)], {}, []
sys.stdin.readline()
while len(seen) < count:
    for key, value in store.actions.get_many(keys).items():
        store.objects.read(Digest.parse(value["object"]))
        if seen.setdefault(key, value) != value:
            changed.append(key)
print(json.dumps({"seen": seen, "changed": changed}))
"""

_BUILD = """
import sys
from pathlib import Path
from aotgaudi.store.store import Store
root, count = Path(sys.argv[1]), int(sys.argv[2])
store = Store.open(root)
sys.stdin.readline()
with store.in_use():
    for number in range(count):
        key = f"{number:064x}"
        with store.locks.try_unit(key) as is_mine:
            if is_mine and store.actions.get(key) is None:
                with (root / "journal").open("a") as journal:
                    journal.write(key + "\\n")
                store.actions.put(key, {"object": str(store.objects.put_bytes(key.encode()))})
"""


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def release(processes: list[subprocess.Popen[str]]) -> list[str]:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return outputs


def test_writers_that_disagree_leave_one_answer_and_readers_see_no_other(tmp_path: Path) -> None:
    Store.open(tmp_path)
    writers = [start(_WRITE, tmp_path, number, NUM_KEYS) for number in range(NUM_WRITERS)]
    readers = [start(_READ, tmp_path, NUM_KEYS) for _ in range(NUM_READERS)]

    outputs = release(writers + readers)[NUM_WRITERS:]

    store = Store.open(tmp_path)
    final = store.actions.get_many(f"{number:064x}" for number in range(NUM_KEYS))
    assert len(final) == NUM_KEYS
    for output in outputs:
        answer: dict[str, Any] = json.loads(output)
        assert answer == {"seen": final, "changed": []}
    assert check_store(store, 2).is_clean
    assert list((tmp_path / "tmp").iterdir()) == []


def test_of_many_builders_one_compiles_each_unit(tmp_path: Path) -> None:
    Store.open(tmp_path)

    release([start(_BUILD, tmp_path, NUM_KEYS) for _ in range(NUM_WRITERS)])

    journal = (tmp_path / "journal").read_text().split()
    assert sorted(journal) == [f"{number:064x}" for number in range(NUM_KEYS)]
    assert check_store(Store.open(tmp_path)).losses == ()
