"""What a build lacks comes from a remote, and results go there; whatever the remote does, the store gets no wrong bytes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotgaudi.backends.fake import probe
from aotgaudi.compile.keys import ProgramRow, UnitRow, record
from aotgaudi.compile.pipeline import fetch_missing, upload_all
from aotgaudi.compile.plan import Plan, make_plan
from aotgaudi.digest import Digest
from aotgaudi.errors import StoreError
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.share import remote as remote_module
from aotgaudi.share import remote_cache
from aotgaudi.share.remote import Remote
from aotgaudi.share.remote_cache import RememberedAnswers, RemoteCache, Traffic
from aotgaudi.store.records import dump_record
from aotgaudi.store.store import Store
from tests.remotes import Place, faulty_place, place
from tests.workload import SPEC_TEXT, key_of, seed, tiny_spec

__all__ = ["place"]

LABELS = (("layer a", "head b"), ("layer a", "sampler c"))
MANIFEST = Manifest.of(tiny_spec())
NUM_RECORDS = 7
"""Four programs and three units."""


@pytest.fixture
def built(tmp_path: Path) -> Store:
    """A store in which all of ``tiny.toml``, beside it, is built."""
    (tmp_path / "tiny.toml").write_text(SPEC_TEXT)
    return build_all(tmp_path / "built")


@pytest.fixture
def empty(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "empty")


def build_all(root: Path) -> Store:
    """A store in which all of the manifest is built."""
    store = Store.open(root)
    seed(store, MANIFEST.spec, MANIFEST.entries, LABELS)
    for label in ("layer a", "head b", "sampler c"):
        record(store, key_of(label), unit_row(store, label, f"code of {label}".encode() * 50))
    return store


def unit_row(store: Store, label: str, code: bytes) -> UnitRow:
    return UnitRow(
        artifact={"unit.so": store.objects.put_bytes(code)},
        label=label,
        compile_seconds=1.0,
        cpu_seconds=1.0,
        max_abs_error=0.0,
        tolerance=0.0,
    )


def plan_of(store: Store) -> Plan:
    return make_plan(MANIFEST.entries, MANIFEST.spec, probe(), store)


def push(
    store: Store, url: str, warnings: list[str] | None = None, memory: RememberedAnswers | None = None
) -> Traffic:
    told = [] if warnings is None else warnings
    with RemoteCache(Remote(url), store, memory, push=True, warn=told.append) as remote:
        upload_all(plan_of(store), remote)
        return remote.finish()


def pull(
    store: Store, url: str, warnings: list[str] | None = None, memory: RememberedAnswers | None = None
) -> Traffic:
    told = [] if warnings is None else warnings
    with RemoteCache(Remote(url), store, memory, warn=told.append) as remote:
        fetch_missing(plan_of(store), store, remote)
        return remote.finish()


def require_sound(store: Store, like: Store) -> None:
    """Every result of `store` is one of `like`, and every object intact."""
    rows, expected = plan_of(store).rows, plan_of(like).rows
    assert rows.items() <= expected.items()
    for digest in store.objects.digests():
        store.objects.verify(digest)


def unit_object(store: Store, label: str) -> str:
    (digest,) = plan_of(store).units[key_of(label)].digests()
    return f"objects/sha256/{digest.sha256[:2]}/{digest.sha256}"


def record_name(key: str) -> str:
    return f"records/{key[:2]}/{key}.json"


@pytest.mark.parametrize("kind", ["directory", "fsspec"])
def test_an_empty_store_has_all_of_it_afterwards(
    built: Store, empty: Store, place: Place, tmp_path: Path, kind: str
) -> None:
    url = str(tmp_path / "remote") if kind == "directory" else place.url
    pushed, pulled = push(built, url), pull(empty, url)

    assert plan_of(empty).is_complete
    assert plan_of(empty).rows == plan_of(built).rows
    assert pushed.num_uploaded == pulled.num_fetched == NUM_RECORDS
    assert pushed.uploaded_bytes == pulled.fetched_bytes > 0
    require_sound(empty, built)


def test_a_second_time_nothing_moves(built: Store, empty: Store, place: Place) -> None:
    push(built, place.url)
    pull(empty, place.url)
    num_files = len(place.files)

    assert (push(built, place.url).num_uploaded, push(empty, place.url).num_uploaded) == (0, 0)
    assert pull(empty, place.url).num_fetched == 0
    assert len(place.files) == num_files


def test_objects_are_there_before_the_records_that_name_them(built: Store, place: Place) -> None:
    push(built, place.url)
    written = [name for operation, name in place.answers if operation == "write"]

    for key, row in plan_of(built).rows.items():
        when = written.index(record_name(key))
        for digest in row.digests():
            assert written.index(f"objects/sha256/{digest.sha256[:2]}/{digest.sha256}") < when


def test_only_what_is_lacking_is_asked_for(built: Store, empty: Store, place: Place) -> None:
    push(built, place.url)
    pull(empty, place.url)
    empty.actions.discard(key_of("head b"))
    place.answers.clear()

    assert pull(empty, place.url).num_fetched == 1
    assert place.answers == [("read", record_name(key_of("head b")))]


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip, "its bytes are not what its digest says"),
        (lambda data: data[:-1], "has another size"),
        (lambda data: data + b"x", None),
        (lambda data: b"", "has another size"),
        (None, "has no object"),
    ],
    ids=["flipped", "cut", "longer", "empty", "gone"],
)
def test_an_object_with_other_bytes_is_a_miss_and_the_next_push_mends_it(
    built: Store, empty: Store, place: Place, damage: Callable[[bytes], bytes] | None, words: str | None
) -> None:
    push(built, place.url)
    name, warnings = unit_object(built, "head b"), list[str]()
    good = place.files.pop(name)
    if damage is not None:
        place.files[name] = damage(good)

    pull(empty, place.url, warnings)

    require_sound(empty, built)
    if words is None:  # Only as much as the object has is asked for.
        assert plan_of(empty).is_complete
        return
    assert list(plan_of(empty).missing_units.values()) == ["head b"]
    (line,) = warnings
    assert line.startswith(f"{place.url}: record {key_of('head b'):.12}... counts for nothing: ")
    assert words in line
    with RemoteCache(Remote(place.url), empty, push=True, warn=warnings.append) as remote:
        fetch_missing(plan_of(empty), empty, remote)
        record(empty, key_of("head b"), unit_row(empty, "head b", b"code of head b" * 50))  # It is compiled.
        upload_all(plan_of(empty), remote)
    assert place.files[name] == good


@pytest.mark.parametrize(
    "damage", ["flipped", "of another key", "of another kind", "no JSON", "large", "empty"]
)
def test_a_bad_record_is_a_miss_and_the_next_push_mends_it(
    built: Store, empty: Store, place: Place, damage: str
) -> None:
    push(built, place.url)
    key, warnings = key_of("head b"), list[str]()
    name = record_name(key)
    good = place.files[name]
    place.files[name] = {
        "flipped": flip(good),
        "of another key": place.files[record_name(key_of("layer a"))],
        "of another kind": dump_record(key, {"program": "sha256:x", "units": {}}),
        "no JSON": b"\x00\xff" * 100,
        "large": bytes(remote_module.LARGEST_RECORD_BYTES + 1),
        "empty": b"",
    }[damage]

    pull(empty, place.url, warnings)

    assert list(plan_of(empty).missing_units.values()) == ["head b"]
    assert len(warnings) == 1
    require_sound(empty, built)
    push(built, place.url)
    if damage != "of another kind":  # That is a sound record, until somebody asks for it.
        assert place.files[name] == good
    with RemoteCache(Remote(place.url), empty, push=True, warn=warnings.append) as remote:
        fetch_missing(plan_of(empty), empty, remote)
        row = plan_of(built).units[key]
        for digest in row.digests():
            empty.objects.put_bytes(built.objects.read(digest))
        record(empty, key, row)
        upload_all(plan_of(empty), remote)
    assert place.files[name] == good


def test_many_bad_objects_are_one_warning(built: Store, empty: Store, place: Place) -> None:
    push(built, place.url)
    for name in place.names("objects/"):
        place.files[name] = flip(place.files[name])
    warnings: list[str] = []

    pull(empty, place.url, warnings)

    assert not plan_of(empty).rows
    assert len(warnings) == 1


@settings(max_examples=20)
@given(st.data())
def test_whatever_a_remote_answers_what_the_store_then_has_is_right(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("remote")
    built, empty = build_all(folder / "built"), Store.open(folder / "empty")
    with faulty_place("any") as place:
        push(built, place.url)
        names = sorted(place.files)
        for _ in range(data.draw(st.integers(1, 8))):
            name = data.draw(st.sampled_from(names))
            kind = data.draw(st.sampled_from(["gone", "noise", "other", "flip", "cut"]))
            content = place.files.get(name, b"-")
            if kind == "gone":
                place.files.pop(name, None)
            elif kind == "noise":
                place.files[name] = data.draw(st.binary(max_size=200))
            elif kind == "other":
                place.files[name] = place.files.get(data.draw(st.sampled_from(names)), b"")
            else:
                at = data.draw(st.integers(0, max(0, len(content) - 1)))
                tail = bytes([content[at] ^ 1]) + content[at + 1 :] if content else b""
                place.files[name] = content[:at] + (tail if kind == "flip" else b"")
        warnings: list[str] = []
        pull(empty, place.url, warnings)

    require_sound(empty, built)
    assert len(warnings) <= 2


# A remote that is lost


def test_a_remote_that_is_not_there_is_one_warning(empty: Store, place: Place) -> None:
    def fail(*_: str) -> None:
        raise ConnectionRefusedError("refused")

    place.fault, warnings = fail, []

    pull(empty, place.url, warnings)

    assert warnings == [f"{place.url}: ConnectionRefusedError: refused; going on without it"]
    assert len(place.answers) <= 2 * remote_cache._MOST_FAILURES + 2


def test_a_remote_that_dies_midway_costs_the_rest_and_nothing_else(
    built: Store, empty: Store, place: Place
) -> None:
    push(built, place.url)
    place.answers.clear()

    def die(*_: str) -> None:
        if len(place.answers) > 4:
            raise ConnectionResetError("reset")

    place.fault, warnings = die, []

    pull(empty, place.url, warnings)

    require_sound(empty, built)
    assert not plan_of(empty).is_complete
    assert len(warnings) == 1


def test_single_failures_are_tried_again_and_lose_nothing(built: Store, empty: Store, place: Place) -> None:
    push(built, place.url)
    lock, count = threading.Lock(), [0]

    def sometimes(*_: str) -> None:
        with lock:
            count[0] += 1
            if count[0] % 3 == 0:
                raise ConnectionResetError("reset")

    place.fault, warnings = sometimes, []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(remote_cache, "_NUM_THREADS", 1)  # So that no second try is the third request, too.
        pull(empty, place.url, warnings)

    assert plan_of(empty).is_complete
    assert warnings == []


def test_a_remote_that_hangs_is_lost_after_one_answer_time(empty: Store, place: Place, built: Store) -> None:
    push(built, place.url)
    release, warnings = threading.Event(), list[str]()
    place.fault = lambda *_: release.wait(30) and None
    began = time.monotonic()
    with RemoteCache(Remote(place.url, seconds=0.3), empty, warn=warnings.append) as remote:
        fetch_missing(plan_of(empty), empty, remote)
    release.set()

    assert time.monotonic() - began < 10
    assert len(warnings) == 1
    assert "has not answered" in warnings[0]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), PermissionError(13, "Access Denied")]
)
def test_a_remote_that_takes_nothing_is_still_read(
    built: Store, empty: Store, place: Place, error: OSError
) -> None:
    push(built, place.url)

    def refuse(operation: str, name: str) -> None:
        if operation == "write":
            raise error

    place.fault = refuse
    del place.files[unit_object(built, "head b")]
    warnings: list[str] = []

    assert push(built, place.url, warnings).num_uploaded == 0
    assert pull(empty, place.url).num_fetched == NUM_RECORDS - 1
    assert len(warnings) == 1
    assert error.args[1] in warnings[0]


def test_a_store_that_is_full_is_not_the_remotes_fault(
    built: Store, empty: Store, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(built, place.url)

    def full(*_: object) -> None:
        raise StoreError("full")

    monkeypatch.setattr(empty.objects, "put_chunks", full)

    with pytest.raises(StoreError, match="full"):
        pull(empty, place.url)


def test_a_damaged_object_of_the_store_is_not_uploaded(built: Store, place: Place) -> None:
    (digest,) = plan_of(built).units[key_of("head b")].digests()
    path = built.objects.path(digest)
    path.chmod(0o644)
    path.write_bytes(b"x" * digest.size_bytes)
    warnings: list[str] = []

    push(built, place.url, warnings)

    assert record_name(key_of("head b")) not in place.files
    assert len(warnings) == 1
    assert "is not uploaded" in warnings[0]


def test_a_read_only_store_asks_for_nothing(built: Store, place: Place) -> None:
    store = Store.open(built.root, read_only=True)
    with RemoteCache(Remote(place.url), store) as remote:
        assert not remote.look_up("ab" * 32, ProgramRow.model_validate, record).result()
    assert place.answers == []


# Many at once


def test_keys_are_looked_up_side_by_side(empty: Store, place: Place) -> None:
    """The first opens the connection; the second is answered once there are sixteen more."""
    keys, are_many = [f"{number:064x}" for number in range(200)], threading.Event()

    def answer_together(*_: str) -> None:
        if len(place.answers) > 16:
            are_many.set()
        assert len(place.answers) == 1 or are_many.wait(30)

    place.fault, warnings = answer_together, list[str]()

    with RemoteCache(Remote(place.url), empty, warn=warnings.append) as remote:
        assert remote.look_up_all(keys, ProgramRow.model_validate, record) == 0

    assert (warnings, len(place.answers)) == ([], len(keys))


def test_what_was_answered_is_not_asked_again(built: Store, empty: Store, place: Place) -> None:
    traced = Store.open(empty.root.parent / "traced")
    seed(traced, MANIFEST.spec, MANIFEST.entries, LABELS)
    push(traced, place.url)
    memory = RememberedAnswers(empty.root / "answers")
    pull(empty, place.url, memory=memory)
    place.answers.clear()
    other = Store.open(empty.root.parent / "other")

    pull(other, place.url, memory=RememberedAnswers(empty.root / "answers"))

    assert [name for _, name in place.answers if name.startswith("records/")] == []
    assert len(plan_of(other).programs) == len(plan_of(traced).programs)
    assert not plan_of(other).untraced

    push(built, place.url, memory=RememberedAnswers(empty.root / "answers"))
    pull(other, place.url, memory=RememberedAnswers(empty.root / "answers"))
    assert plan_of(other).is_complete, "an upload is an answer, too"


def test_a_record_whose_objects_have_gone_is_asked_for_again(
    built: Store, empty: Store, place: Place
) -> None:
    memory = RememberedAnswers(empty.root / "answers")
    push(built, place.url, memory=memory)
    name = unit_object(built, "head b")
    content = place.files.pop(name)
    pull(empty, place.url, memory=RememberedAnswers(empty.root / "answers"))
    place.files[name] = content

    pull(empty, place.url, memory=RememberedAnswers(empty.root / "answers"))

    assert plan_of(empty).is_complete


def test_twenty_builders_share_one_remote(built: Store, place: Place, tmp_path: Path) -> None:
    place.seconds = 0.002
    stores = [Store.open(tmp_path / f"store {number % 10}") for number in range(20)]
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            if number % 2:
                push(built, place.url, memory=RememberedAnswers.of(built, place.url))
            pull(stores[number], place.url, memory=RememberedAnswers.of(stores[number], place.url))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []
    for store in stores:
        require_sound(store, built)
        pull(store, place.url)
        assert plan_of(store).is_complete
    for name in place.names("records/"):
        json.loads(place.files[name])
    for name in place.names("objects/"):
        assert Digest.of(place.files[name]).sha256 == name.rpartition("/")[2]
