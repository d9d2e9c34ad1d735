"""References and locations: what reads as what, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.errors import RemoteError, SpecError
from aotgaudi.share.file_remotes import DirectoryRemote, ObjectStoreRemote
from aotgaudi.share.locations import open_remote, registry_host
from aotgaudi.share.registry import RegistryRemote
from aotgaudi.share.registry_client import Reference, parse_reference

HEX = "a" * 64


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("registry.example/team/model", Reference("registry.example", "team/model")),
        ("localhost/x:v1", Reference("localhost", "x", "v1")),
        ("localhost:5000/a/b/c:v1.2-rc_3", Reference("localhost:5000", "a/b/c", "v1.2-rc_3")),
        (f"registry.example/x@sha256:{HEX}", Reference("registry.example", "x", None, f"sha256:{HEX}")),
        (f"registry.example/x:v1@sha256:{HEX}", Reference("registry.example", "x", "v1", f"sha256:{HEX}")),
        ("[::1]:5000/x", Reference("[::1]:5000", "x")),
    ],
)
def test_a_reference_reads(text: str, expected: Reference) -> None:
    assert parse_reference(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "model",
        "team/model",
        "registry.example",
        "registry.example/",
        "registry.example/Team/model",
        "registry.example/team//model",
        "registry.example/team/model:",
        "registry.example/team/model:-x",
        f"registry.example/team/model:{'x' * 129}",
        "registry.example/team/model@sha256:abc",
        f"registry.example/team/model@sha512:{HEX}",
        "user:pass@registry.example/team/model",
        f"registry.example/{'a/' * 128}a",
        "registry.example/team/model\n",
    ],
)
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="is no reference"):
        parse_reference(text)


@given(st.text(max_size=60))
def test_any_text_is_a_reference_or_refused(text: str) -> None:
    try:
        reference = parse_reference(text)
    except SpecError:
        return
    assert text.startswith(reference.label)


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("localhost:5000", True),
        ("127.0.0.1", True),
        ("127.9.9.9:5000", True),
        ("[::1]:5000", True),
        ("a.localhost", True),
        ("10.0.0.1:5000", False),
        ("localhost.example", False),
        ("127.0.0.1.example:80", False),
    ],
)
def test_loopback_is_this_machine(host: str, is_loopback: bool) -> None:
    assert Reference(host, "x").is_loopback is is_loopback


def test_a_registry_has_a_host_and_nothing_else_has_one() -> None:
    assert registry_host("registry.example:5000/team/model:v1") == "registry.example:5000"
    assert registry_host("oci://localhost/x") == "localhost"
    for text in ("./a.b/c", "/a", "s3://bucket/x", "file:///a", "oci:a.b/c", "cache", "team/cache"):
        assert registry_host(text) is None


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        ("registry.example/team/model:v1", RegistryRemote, "v1"),
        ("oci://registry.example/team/model", RegistryRemote, None),
        ("./cache", DirectoryRemote, None),
        ("../cache", DirectoryRemote, None),
        ("/srv/cache", DirectoryRemote, None),
        ("~/cache", DirectoryRemote, None),
        (".", DirectoryRemote, None),
        ("file:///srv/a%20cache", DirectoryRemote, None),
        ("memory://cache", ObjectStoreRemote, None),
    ],
)
def test_a_location_is_a_remote(text: str, kind: type, name: str | None) -> None:
    found = open_remote(text)

    assert isinstance(found.remote, kind)
    assert found.name == name


def test_a_file_url_is_decoded() -> None:
    found = open_remote("file:///srv/a%20cache")

    assert found.remote.label == "/srv/a cache"


@pytest.mark.parametrize(
    "text", ["cache", "team/cache", "", "oci://team/cache", "Registry.example/Team/x", "file://host/x"]
)
def test_what_is_no_location_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        open_remote(text)


def test_a_word_is_taken_for_a_directory_s_name() -> None:
    with pytest.raises(SpecError, match=r"a directory is \./cache"):
        open_remote("cache")


@pytest.mark.parametrize("text", ["http://me:secret@cache.example/x", "file://me:secret@host/x"])
def test_a_password_in_a_location_is_not_repeated(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        open_remote(text)
    assert "secret" not in str(caught.value)


def test_a_protocol_that_nobody_speaks_is_refused() -> None:
    with pytest.raises(RemoteError, match="Protocol not known"):
        open_remote("nosuch://bucket/x")
