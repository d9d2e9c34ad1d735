"""Where a remote is, as people write it.

::

    HOST/REPOSITORY[:TAG][@sha256:...]    a repository of an OCI registry   (also oci://...)
    ./DIR  ../DIR  /DIR  ~/DIR            a directory                       (also file:///DIR)
    s3://BUCKET/PREFIX                    an object store: what fsspec speaks
    oci:DIR[:TAG]                         an OCI image layout, to pull from (as skopeo writes it)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from aotgaudi.errors import SpecError
from aotgaudi.oci.client import Credentials, RegistryClient
from aotgaudi.oci.reference import is_host, parse_reference
from aotgaudi.oci.registry_remote import RegistryRemote
from aotgaudi.remotes.directory_remote import DirectoryRemote
from aotgaudi.remotes.object_store_remote import ObjectStoreRemote
from aotgaudi.remotes.remote import Remote

_SCHEME = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://")
_USER_INFO = re.compile(r"://[^/@\s]*@")
_EXPECTED = "HOST/REPOSITORY[:TAG], a URL such as s3://BUCKET/PREFIX, or a directory: ./DIR or /DIR"


@dataclass(frozen=True)
class LayoutPlace:
    """An image layout to pull from."""

    root: Path
    tag: str | None


@dataclass(frozen=True)
class NamedRemote:
    """A remote, and the bundle's name where the location has one (a registry's tag)."""

    remote: Remote
    name: str | None = None


def parse_layout(text: str) -> LayoutPlace:
    """Parses ``DIR[:TAG]``. A directory that is there may have colons in its name."""
    root, separator, tag = text.rpartition(":")
    if not separator or "/" in tag or Path(text).is_dir():
        return LayoutPlace(Path(text), None)
    return LayoutPlace(Path(root), tag)


def open_location(
    text: str, credentials: Credentials, *, allow_http: bool = False
) -> NamedRemote | LayoutPlace:
    """Returns what `text` means; sends nothing. Raises SpecError where it means nothing, RemoteError."""
    if text.startswith("oci:") and not text.startswith("oci://"):
        return parse_layout(text.removeprefix("oci:"))
    if text.startswith(("/", "./", "../", "~/")) or text in (".", ".."):
        return NamedRemote(DirectoryRemote(Path(text).expanduser()))
    found = _SCHEME.match(text)
    if found is None or found["scheme"] == "oci":
        return _registry(text.removeprefix("oci://"), credentials, allow_http=allow_http)
    return NamedRemote(_by_url(text, found["scheme"], allow_http=allow_http))


def _registry(text: str, credentials: Credentials, *, allow_http: bool) -> NamedRemote:
    if not is_host(text.partition("/")[0]) or "/" not in text:
        hint = f"a directory is ./{text}" if re.fullmatch(r"[\w./-]+", text) else _EXPECTED
        raise SpecError(_shown(text), "is no remote", f"{_EXPECTED}; {hint}" if hint != _EXPECTED else hint)
    reference = parse_reference(text)
    client = RegistryClient(reference, credentials, allow_http=allow_http)
    return NamedRemote(RegistryRemote(client), reference.tag)


def _by_url(text: str, scheme: str, *, allow_http: bool) -> Remote:
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise SpecError(_shown(text), "names another machine, or no directory", "file:///DIR")
        return DirectoryRemote(Path(unquote(parts.path)))
    if scheme == "http" and not allow_http:
        raise SpecError(_shown(text), "is plain http", "https, or --insecure")
    return ObjectStoreRemote(text)


def _shown(text: str) -> str:
    """How a location is repeated to people: without a password."""
    return _USER_INFO.sub("://", text)[:200]
