"""Parses locations of remotes, and opens the remotes.

::

    HOST/REPOSITORY[:TAG][@sha256:...]    a repository of an OCI registry   (also oci://...)
    ./DIR  ../DIR  /DIR  ~/DIR            a directory                       (also file:///DIR)
    s3://BUCKET/PREFIX                    an object store, of any kind that fsspec supports
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from aotgaudi.errors import SpecError
from aotgaudi.share.credentials import NO_CREDENTIALS, Credentials
from aotgaudi.share.file_remotes import DirectoryRemote, ObjectStoreRemote
from aotgaudi.share.registry import RegistryRemote
from aotgaudi.share.registry_client import RegistryClient, is_host, parse_reference
from aotgaudi.share.remote import Remote, without_password

_SCHEME = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://")
_EXPECTED = "HOST/REPOSITORY[:TAG], a URL such as s3://BUCKET/PREFIX, or a directory: ./DIR or /DIR"


@dataclass(frozen=True)
class NamedRemote:
    """A remote, and the bundle's name if the location has one (a registry's tag)."""

    remote: Remote
    name: str | None = None


def open_remote(
    text: str, credentials: Credentials = NO_CREDENTIALS, *, allow_http: bool = False
) -> NamedRemote:
    """Returns the remote at `text`, without sending anything. Raises SpecError if `text` is not a location, and RemoteError.

    `credentials` and `allow_http` (plain http to other machines) apply to registries.
    """
    if _is_path(text):
        return NamedRemote(DirectoryRemote(Path(text).expanduser()))
    if is_layout(text):
        raise SpecError(
            _shown(text),
            "is an image layout, to pull from (-o DIR, and from it alone), not a remote",
            _EXPECTED,
        )
    found = _SCHEME.match(text)
    if found is None or found["scheme"] == "oci":
        return _registry(text.removeprefix("oci://"), credentials, allow_http=allow_http)
    return NamedRemote(_by_url(text, found["scheme"], allow_http=allow_http))


def registry_host(text: str) -> str | None:
    """Returns ``HOST[:PORT]`` if `text` names a repository of a registry; else None."""
    found = _SCHEME.match(text)
    if _is_path(text) or is_layout(text) or (found is not None and found["scheme"] != "oci"):
        return None
    host = text.removeprefix("oci://").partition("/")[0]
    return host if is_host(host) else None


def is_layout(text: str) -> bool:
    """Returns whether `text` names an image layout (``oci:DIR[:TAG]``), which is not a remote. See oci.py."""
    return text.startswith("oci:") and not text.startswith("oci://")


def _is_path(text: str) -> bool:
    return text.startswith(("/", "./", "../", "~/")) or text in (".", "..")


def _registry(text: str, credentials: Credentials, *, allow_http: bool) -> NamedRemote:
    if not is_host(text.partition("/")[0]) or "/" not in text:
        hint = f"a directory is ./{text}" if re.fullmatch(r"[\w./-]+", text) else _EXPECTED
        raise SpecError(
            _shown(text), "is not a remote", f"{_EXPECTED}; {hint}" if hint != _EXPECTED else hint
        )
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
    """Returns a location as messages show it."""
    return without_password(text)[:200]
