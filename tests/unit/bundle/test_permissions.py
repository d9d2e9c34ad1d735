"""Owner and mode: who else could have changed a bundle after it was verified, and how that is told."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.trust import OwnerRule, TrustPolicy
from aotgaudi.bundle.verify import hold_bundle, verify_bundle
from aotgaudi.errors import UntrustedError

if TYPE_CHECKING:
    from tests.unit.bundle.conftest import Sealed

MINE = TrustPolicy(owners=OwnerRule(os.geteuid()))
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def places(sealed: Sealed) -> dict[str, Path]:
    """A path of each kind in a bundle."""
    leaf = sealed.object("layer.so")
    leaf.chmod(0o444)
    return {
        "root": sealed.path,
        "index": sealed.path / "aotgaudi.bundle.json",
        "manifest": sealed.path / "manifest.json",
        "receipt": sealed.path / "receipt.json",
        "objects": sealed.path / "objects",
        "sha256": sealed.path / "objects" / "sha256",
        "leaf": leaf.parent,
        "program": sealed.object("swap"),
        "object": leaf,
    }


NAMES = ("root", "index", "manifest", "receipt", "objects", "sha256", "leaf", "program", "object")


def check(sealed: Sealed) -> None:
    report = verify_bundle(open_bundle(sealed.path, MINE))
    assert report.is_intact


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("bit", "who"), [(0o020, "its group"), (0o002, "everybody")])
def test_what_others_may_write_to_is_refused_with_the_remedy(
    sealed: Sealed, name: str, bit: int, who: str
) -> None:
    path = places(sealed)[name]
    check(sealed)
    mode = path.stat().st_mode & 0o777 | bit
    path.chmod(mode)

    with pytest.raises(UntrustedError) as caught:
        check(sealed)

    assert str(caught.value) == (
        f"{path} can be written to by {who} (mode {mode:04o})"
        f" (chmod -R go-w {path}, or allow it with --allow-unsafe-permissions)"
    )
    assert caught.value.exit_code == 4
    with pytest.raises(UntrustedError):
        hold_bundle(open_bundle(sealed.path, MINE))


@needs_root
@pytest.mark.parametrize("name", NAMES)
def test_what_belongs_to_somebody_else_is_refused(sealed: Sealed, name: str) -> None:
    path = places(sealed)[name]
    os.chown(path, 12345, -1)

    with pytest.raises(UntrustedError, match=f"{path} belongs to uid 12345, who can change it; .*chown -R 0"):
        check(sealed)


@pytest.mark.parametrize("name", ["root", "objects", "leaf"])
def test_a_sticky_directory_is_refused(sealed: Sealed, name: str) -> None:
    path = places(sealed)[name]
    path.chmod(0o1755)

    with pytest.raises(UntrustedError, match=f"{path} is sticky .mode 1755.*chmod -R -t"):
        check(sealed)


@needs_root
def test_roots_files_are_anybodys_to_run(sealed: Sealed) -> None:
    """As in a container that runs as an arbitrary uid."""
    policy = TrustPolicy(owners=OwnerRule(1000650000))

    assert verify_bundle(open_bundle(sealed.path, policy)).is_intact


def test_without_the_rule_anything_goes(sealed: Sealed) -> None:
    for path in (sealed.path, *sealed.path.rglob("*")):
        path.chmod(0o777)

    assert sealed.report().is_intact


def test_a_link_to_the_bundle_is_followed_and_its_target_checked(sealed: Sealed, tmp_path: Path) -> None:
    link = tmp_path / "current"
    link.symlink_to(sealed.path)
    assert verify_bundle(open_bundle(link, MINE)).is_intact

    sealed.path.chmod(0o777)
    with pytest.raises(UntrustedError, match=f"{link} can be written to by everybody"):
        open_bundle(link, MINE)


def test_what_is_missing_is_told_by_verifying(sealed: Sealed) -> None:
    leaf = sealed.object("layer.so")
    leaf.unlink()
    leaf.parent.rmdir()

    report = verify_bundle(open_bundle(sealed.path, MINE))

    assert [gone.entry for gone in report.missing] == ["(prompt, 1, 128, 0)", "(decode, 4, 1, 16)"]


def test_an_unsafe_signature_is_not_read(sealed: Sealed) -> None:
    from aotgaudi.bundle.bundle import read_signature

    path = sealed.path / "aotgaudi.signature.json"
    path.write_bytes(b"{}")
    path.chmod(0o646)

    with pytest.raises(UntrustedError, match="can be written to by everybody"):
        read_signature(sealed.path, MINE.examine)


def test_a_directory_in_which_everybody_may_replace_the_bundle_is_refused(
    sealed: Sealed, tmp_path: Path
) -> None:
    parent = tmp_path / "shared"
    parent.mkdir()
    bundle = sealed.path.rename(parent / "bundle")
    open_bundle(bundle, MINE)
    parent.chmod(0o777)

    with pytest.raises(
        UntrustedError, match=rf"everybody may replace {bundle}, .* \(chmod o-w .*, or \+t, or"
    ):
        open_bundle(bundle, MINE)

    assert open_bundle(bundle).path == bundle
    parent.chmod(0o1777)
    open_bundle(bundle, MINE)
