"""Parses locations of remotes, and opens the remotes.

::

    ./DIR  ../DIR  /DIR  ~/DIR            a directory                       (also file:///DIR)
    s3://BUCKET/PREFIX                    an object store, of any kind that fsspec supports
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from aotgaudi.errors import SpecError
from aotgaudi.share.file_remotes import DirectoryRemote, ObjectStoreRemote
from aotgaudi.share.remote import Remote, without_password

_SCHEME = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://")
_EXPECTED = "a URL such as s3://BUCKET/PREFIX, or a directory: ./DIR or /DIR"


def open_remote(text: str, *, allow_http: bool = False) -> Remote:
    """Returns the remote at `text`, without sending anything. Raises SpecError if `text` is not a location, and RemoteError.

    With `allow_http`, a URL may be plain http.
    """
    if text.startswith(("/", "./", "../", "~/")) or text in (".", ".."):
        return DirectoryRemote(Path(text).expanduser())
    found = _SCHEME.match(text)
    if found is None:
        hint = f"; a directory is ./{text}" if re.fullmatch(r"[\w./-]+", text) else ""
        raise SpecError(_shown(text), "is not a remote", _EXPECTED + hint)
    return _by_url(text, found["scheme"], allow_http=allow_http)


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
