"""Who could have written to a store, and whether its file system is shared."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aotgaudi.errors import StoreError
from aotgaudi.store.location import NETWORK_FILE_SYSTEMS, file_system, refuse_unsafe
from aotgaudi.store.store import Store


@pytest.mark.parametrize("name", [".", "objects", "objects/sha256", "records", "roots"])
def test_a_directory_that_everybody_may_write_to_is_refused_with_what_mends_it(
    tmp_path: Path, name: str
) -> None:
    store = Store.open(tmp_path / "store")
    (store.root / name).mkdir(parents=True, exist_ok=True)
    (store.root / name).chmod(0o777)

    with pytest.raises(StoreError, match=r"everybody may write to .* \(chmod o-w") as caught:
        Store.open(store.root)
    assert str((store.root / name).resolve()) in str(caught.value)
    assert Store.open(store.root, trust_others=True).root == store.root

    (store.root / name).chmod(0o775)
    Store.open(store.root)


def test_a_layer_is_checked_too(tmp_path: Path) -> None:
    layer = Store.open(tmp_path / "layer")
    layer.root.chmod(0o777)

    with pytest.raises(StoreError, match="layer"):
        Store.open(tmp_path / "top", lower=[layer.root])
    Store.open(tmp_path / "top", lower=[layer.root], trust_others=True)


def test_a_parent_in_which_everybody_may_replace_the_store_is_refused(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "parent" / "store")
    store.root.parent.chmod(0o777)

    with pytest.raises(StoreError, match="everybody may replace it"):
        refuse_unsafe(store.root)

    store.root.parent.chmod(0o1777)
    refuse_unsafe(store.root)


def test_a_link_to_a_store_is_judged_by_what_it_leads_to(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "parent" / "store")
    (tmp_path / "link").symlink_to(store.root)
    Store.open(tmp_path / "link")

    store.root.parent.chmod(0o777)

    with pytest.raises(StoreError, match="everybody may replace it"):
        Store.open(tmp_path / "link")


def test_a_link_inside_a_store_is_refused(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    (tmp_path / "elsewhere").mkdir()
    (store.root / "records").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(StoreError, match="is not a directory"):
        Store.open(store.root)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_store_of_somebody_else_is_refused_and_of_root_is_not(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    refuse_unsafe(store.root)
    os.chown(store.root, 54321, -1)

    with pytest.raises(StoreError, match=r"belongs to uid 54321, .* \(chown it to uid 0"):
        Store.open(store.root)
    Store.open(store.root, trust_others=True)


MOUNTS = r"""
22 1 0:21 / / rw - ext4 /dev/root rw
23 22 0:22 / /net rw,relatime shared:1 - nfs4 server:/export rw
24 23 0:23 / /net/local rw - xfs /dev/sdb rw
25 22 0:24 / /with\040space rw - fuse.sshfs host: rw
26 22 0:25 / /network rw - ext4 /dev/sdc rw
a line that is none
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/net", True),
        ("/net/a/b", True),
        ("/net/local/a", False),
        ("/with space/a", True),
        ("/network/a", False),
        ("/home/a", False),
        ("/", False),
    ],
)
def test_the_innermost_mount_decides(tmp_path: Path, path: str, expected: bool) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS, encoding="utf-8")

    assert (file_system(Path(path), mounts) in NETWORK_FILE_SYSTEMS) is expected


def test_where_it_cannot_be_told_it_is_taken_for_local(tmp_path: Path) -> None:
    assert file_system(tmp_path, tmp_path / "nothing") == ""
