"""What a manifest needs travels between stores: by the keys that a build looks up, and only as far as it is sound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aotgaudi.backends.fake.probe import probe
from aotgaudi.compile.plan import Plan, make_plan
from aotgaudi.compile.share import Share, pull_entries, push_plan
from aotgaudi.errors import CorruptError, RemoteError
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.share.file_remotes import DirectoryRemote
from aotgaudi.share.transfer import Conduct, Retry, Sources
from aotgaudi.store.cas import object_path
from aotgaudi.store.records import dump_record
from aotgaudi.store.store import Store
from tests.command import Command
from tests.workload import SPEC_TEXT, key_of, seed, tiny_spec

LABELS = (("layer a", "head b"), ("layer a", "sampler c"))
MANIFEST = Manifest.of(tiny_spec())


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def conduct(warnings: list[str]) -> Conduct:
    return Conduct(Retry(sleep=lambda _: None), 2, warn=warnings.append)


@pytest.fixture
def built(tmp_path: Path) -> Store:
    """A store in which all of the manifest is built."""
    store = Store.open(tmp_path / "built")
    seed(store, MANIFEST.spec, MANIFEST.entries, LABELS)
    (tmp_path / "tiny.toml").write_text(SPEC_TEXT)
    arguments = ["build", "cache", str(tmp_path / "tiny.toml"), "--store", str(store.root), "-j", "1"]
    assert Command()(*arguments).exit_code == 0
    return Store.open(tmp_path / "built")


@pytest.fixture
def remote(tmp_path: Path) -> DirectoryRemote:
    return DirectoryRemote(tmp_path / "remote")


@pytest.fixture
def empty(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "empty")


def plan_of(store: Store) -> Plan:
    return make_plan(MANIFEST.entries, MANIFEST.spec, probe(), store)


def pull(store: Store, conduct: Conduct, *remotes: DirectoryRemote) -> Share:
    return pull_entries(MANIFEST.entries, MANIFEST.spec, probe(), store, Sources(remotes, conduct))


def test_an_empty_store_has_all_of_it_afterwards(
    built: Store, empty: Store, remote: DirectoryRemote, conduct: Conduct
) -> None:
    pushed = push_plan(plan_of(built), built, remote, conduct)
    pulled = pull(empty, conduct, remote)

    assert plan_of(empty).is_complete
    assert {state.key.hex: state.row for state in plan_of(empty).programs} == {
        state.key.hex: state.row for state in plan_of(built).programs
    }
    assert plan_of(empty).units == plan_of(built).units
    assert pulled == Share(pushed.num_records, pushed.num_records, pushed.num_objects, pushed.size_bytes)


def test_a_second_time_nothing_moves(
    built: Store, empty: Store, remote: DirectoryRemote, conduct: Conduct
) -> None:
    first = push_plan(plan_of(built), built, remote, conduct)
    pull(empty, conduct, remote)

    assert push_plan(plan_of(built), built, remote, conduct) == Share(first.num_wanted, 0, 0, 0)
    assert pull(empty, conduct, remote) == Share(0, 0, 0, 0)


def test_only_what_is_lacking_is_pulled(
    built: Store, empty: Store, remote: DirectoryRemote, conduct: Conduct
) -> None:
    push_plan(plan_of(built), built, remote, conduct)
    pull(empty, conduct, remote)
    empty.actions.discard(key_of("head b"))
    empty.objects.discard(next(iter(plan_of(built).units[key_of("sampler c")].digests())))

    assert pull(empty, conduct, remote).num_records == 2
    assert plan_of(empty).is_complete


def test_a_part_of_it_is_shared_too(
    tmp_path: Path, empty: Store, remote: DirectoryRemote, conduct: Conduct
) -> None:
    traced = Store.open(tmp_path / "traced")
    seed(traced, MANIFEST.spec, MANIFEST.entries, LABELS)

    push_plan(plan_of(traced), traced, remote, conduct)
    pulled = pull(empty, conduct, remote)

    assert pulled.num_records == len(plan_of(traced).programs)
    assert pulled.num_wanted == pulled.num_records + 3
    assert set(plan_of(empty).missing_units) == set(plan_of(traced).missing_units)


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_what_a_remote_has_damaged_is_a_miss_with_a_warning(
    built: Store, empty: Store, remote: DirectoryRemote, conduct: Conduct, warnings: list[str], damage: str
) -> None:
    push_plan(plan_of(built), built, remote, conduct)
    (digest,) = set(plan_of(built).units[key_of("head b")].digests())
    path = object_path(remote.root, digest)
    data = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(data[:-1] if damage == "cut" else bytes([data[0] ^ 1]) + data[1:])

    pull(empty, conduct, remote)

    assert set(plan_of(empty).missing_units.values()) == {"head b"}
    assert bool(warnings) is (damage != "gone")
    assert push_plan(plan_of(built), built, remote, conduct, overwrite=True).num_objects > 0
    pull(empty, conduct, remote)
    assert plan_of(empty).is_complete


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b"[" * 9999])
def test_a_record_that_is_none_is_a_miss_and_the_next_remote_is_asked(
    built: Store,
    empty: Store,
    remote: DirectoryRemote,
    conduct: Conduct,
    warnings: list[str],
    data: bytes,
    tmp_path: Path,
) -> None:
    push_plan(plan_of(built), built, remote, conduct)
    bad = DirectoryRemote(tmp_path / "bad")
    for path in (remote.root / "records").rglob("*.json"):
        bad.put_record(path.stem, data, [])

    pull(empty, conduct, bad, remote)

    assert plan_of(empty).is_complete
    assert len(warnings) == len(list((remote.root / "records").rglob("*.json")))
    assert all("counts for nothing" in line and "\n" not in line for line in warnings)


def test_a_record_that_names_a_unit_by_no_key_is_a_miss_with_a_warning(
    built: Store, empty: Store, remote: DirectoryRemote, conduct: Conduct, warnings: list[str]
) -> None:
    push_plan(plan_of(built), built, remote, conduct)
    for state in plan_of(built).programs:
        assert state.row is not None
        value = state.row.model_dump(mode="json")
        value["units"] = {f"../../{key}": unit for key, unit in value["units"].items()}
        remote.put_record(state.key.hex, dump_record(state.key.hex, value), [])

    pull(empty, conduct, remote)

    assert len(warnings) == len(plan_of(empty).untraced) == len(plan_of(built).programs)
    assert all("counts for nothing" in line for line in warnings)


def test_a_record_of_another_key_is_no_answer(
    built: Store, empty: Store, remote: DirectoryRemote, conduct: Conduct
) -> None:
    push_plan(plan_of(built), built, remote, conduct)
    other = remote.get_record(key_of("layer a"))
    assert other is not None
    remote.put_record(key_of("head b"), other, [])

    pull(empty, conduct, remote)

    assert set(plan_of(empty).missing_units.values()) == {"head b"}


def test_a_record_of_a_remote_stays_while_its_objects_are_there(
    built: Store, remote: DirectoryRemote, conduct: Conduct
) -> None:
    push_plan(plan_of(built), built, remote, conduct)
    key = key_of("head b")
    first = remote.get_record(key)
    changed = plan_of(built).units[key].model_copy(update={"compile_seconds": 99.0})
    built.actions.put(key, changed.model_dump(mode="json"))

    assert push_plan(plan_of(built), built, remote, conduct).num_records == 0
    assert remote.get_record(key) == first

    remote.put_record(key, b"junk", [])
    assert push_plan(plan_of(built), built, remote, conduct).num_records == 1
    assert b"99" in (remote.get_record(key) or b"")


def test_a_damaged_store_is_not_pushed(built: Store, remote: DirectoryRemote, conduct: Conduct) -> None:
    (digest,) = set(plan_of(built).units[key_of("head b")].digests())
    path = object_path(built.root, digest)
    path.chmod(0o644)
    path.write_bytes(b"x" * digest.size_bytes)

    with pytest.raises(CorruptError):
        push_plan(plan_of(built), built, remote, conduct)
    assert not (remote.root / "records").exists()  # Objects first, then what names them.


def test_a_remote_that_cannot_be_used_is_an_error(empty: Store, conduct: Conduct, tmp_path: Path) -> None:
    class Down(DirectoryRemote):
        def get_record(self, key: str) -> bytes | None:
            raise RemoteError("down")

    with pytest.raises(RemoteError, match="down"):
        pull(empty, conduct, Down(tmp_path / "down"))


def test_an_empty_remote_is_none(empty: Store, remote: DirectoryRemote, conduct: Conduct) -> None:
    share = pull(empty, conduct, remote)

    assert (share.num_records, share.num_objects) == (0, 0)
    assert share.num_wanted == len(plan_of(empty).programs)


def test_what_the_command_line_says_of_it(built: Store, tmp_path: Path) -> None:
    def run(*arguments: object) -> dict[str, object]:
        result = Command("cache")(*arguments, "--json")
        assert result.exit_code == 0, result.output
        document: dict[str, object] = json.loads(result.stdout)
        return document

    spec, remote = tmp_path / "tiny.toml", tmp_path / "remote"
    pushed = run("push", remote, spec, "--store", built.root)
    pulled = run("pull", remote, spec, "--store", tmp_path / "new")

    assert pushed["num_missing"] == 0
    assert (
        pushed["num_records"]
        == pushed["num_records_uploaded"]
        == pulled["num_records"]
        == pulled["num_wanted"]
    )
