"""Locations of remotes: what reads as what, and what is refused."""

from __future__ import annotations

import pytest

from aotgaudi.errors import RemoteError, SpecError
from aotgaudi.share.file_remotes import DirectoryRemote, ObjectStoreRemote
from aotgaudi.share.locations import open_remote


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("./cache", DirectoryRemote),
        ("../cache", DirectoryRemote),
        ("/srv/cache", DirectoryRemote),
        ("~/cache", DirectoryRemote),
        (".", DirectoryRemote),
        ("file:///srv/a%20cache", DirectoryRemote),
        ("memory://cache", ObjectStoreRemote),
    ],
)
def test_a_location_is_a_remote(text: str, kind: type) -> None:
    assert isinstance(open_remote(text), kind)


def test_a_file_url_is_decoded() -> None:
    assert open_remote("file:///srv/a%20cache").label == "/srv/a cache"


@pytest.mark.parametrize("text", ["cache", "team/cache", "", "registry.example/team/x:v1", "file://host/x"])
def test_what_is_no_location_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        open_remote(text)


def test_a_word_is_taken_for_a_directory_s_name() -> None:
    with pytest.raises(SpecError, match=r"a URL such as s3://BUCKET/PREFIX, .*; a directory is \./cache"):
        open_remote("cache")


@pytest.mark.parametrize("text", ["http://me:secret@cache.example/x", "file://me:secret@host/x"])
def test_a_password_in_a_location_is_not_repeated(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        open_remote(text)
    assert "secret" not in str(caught.value)


def test_a_protocol_that_nobody_speaks_is_refused() -> None:
    with pytest.raises(RemoteError, match="Protocol not known"):
        open_remote("nosuch://bucket/x")
