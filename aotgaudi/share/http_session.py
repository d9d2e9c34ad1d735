"""Sessions of requests as we want them: paced, without passwords and retries of their own; URLs as they read them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, Union

from aotgaudi.errors import RemoteError
from aotgaudi.share.pace import SlowError, pace_connections
from aotgaudi.share.remote import TransientError

if TYPE_CHECKING:
    from requests import Session

_POOL_SIZE = 16
_PORTS = (("https", 443), ("http", 80))


class SizedBody(Protocol):
    """What a request carries in pieces; read anew each time that the request is sent."""

    def __len__(self) -> int:
        """Bytes."""
        ...

    def __iter__(self) -> Iterator[bytes]:
        """Yields exactly `len` bytes."""
        ...


Body = Union[bytes, SizedBody]


def open_session(*, is_local: bool) -> Session:
    """Returns a session whose responses have a `Pace` (``raw.pace``); the read time limit is for a head as a whole.

    Neither proxies (with `is_local`) nor passwords of ``~/.netrc`` are used, and no redirect is followed.
    """
    import requests
    from requests.adapters import HTTPAdapter

    class PacedAdapter(HTTPAdapter):  # type: ignore[misc]
        def init_poolmanager(self, *args: Any, **options: Any) -> None:
            super().init_poolmanager(*args, **options)
            manager = self.poolmanager
            manager.pool_classes_by_scheme = pace_connections(manager.pool_classes_by_scheme)

        def proxy_manager_for(self, proxy: str, **options: Any) -> Any:
            is_new = proxy not in self.proxy_manager
            manager = super().proxy_manager_for(proxy, **options)
            if is_new:
                manager.pool_classes_by_scheme = pace_connections(manager.pool_classes_by_scheme)
            return manager

    class UnledSession(requests.Session):  # type: ignore[misc]
        def get_redirect_target(self, _: Any) -> None:
            """There is none: requests would read all of a redirect's body, followed or not."""

    session = UnledSession()
    adapter = PacedAdapter(pool_connections=_POOL_SIZE, pool_maxsize=_POOL_SIZE)
    session.mount("https://", adapter)
    session.mount("http://", adapter)
    session.trust_env = not is_local  # There is no proxy on the way to ourselves.
    session.auth = lambda request: request  # No password of ~/.netrc takes the place of ours.
    return session


def origin_of(url: str) -> tuple[str, str]:
    """Returns scheme and ``HOST[:PORT]`` of a URL, in lower case, without the port that the scheme implies.

    The URL is read by urllib3, which connects, so that both mean the same host; one with a user, or with a backslash, which
    others read differently, is refused. Raises RemoteError.
    """
    from urllib3.exceptions import LocationParseError
    from urllib3.util import parse_url

    try:
        parts = parse_url(url)
    except LocationParseError as error:
        raise RemoteError(f"is led to a URL that cannot be read: {url!r:.200}") from error
    if parts.auth is not None or "\\" in url or not parts.host:
        raise RemoteError(f"is led to a URL that is ambiguous: {url!r:.200}")
    scheme = (parts.scheme or "").lower()
    port = "" if parts.port is None or (scheme, parts.port) in _PORTS else f":{parts.port}"
    return scheme, f"{parts.host.lower()}{port}"


def host_of(url: str) -> str:
    """Returns ``HOST[:PORT]`` of a URL; see `origin_of`."""
    return origin_of(url)[1]


@contextlib.contextmanager
def translated(label: str) -> Iterator[None]:
    """What requests and urllib3 raise, as TransientError and RemoteError in one line that begins with `label`."""
    from requests import exceptions
    from urllib3.exceptions import HTTPError

    try:
        yield
    except exceptions.SSLError as error:
        raise RemoteError(f"{label}: no trusted connection: {_inner(error)}") from error
    except (exceptions.Timeout, exceptions.ConnectionError, exceptions.ChunkedEncodingError) as error:
        raise TransientError(f"{label}: {_inner(error)}") from error
    except SlowError as error:
        raise TransientError(f"{label}: {error}") from error
    except (exceptions.RequestException, HTTPError) as error:
        raise TransientError(
            f"{label}: {_slow(error) or type(error).__name__ + ': ' + _inner(error)}"
        ) from error


def _slow(error: BaseException) -> str | None:
    """What a server was given up for, where that is among the causes of `error`."""
    cause: BaseException | None = error
    for _ in range(10):
        if cause is None or isinstance(cause, SlowError):
            break
        cause = cause.__cause__ or cause.__context__
    return str(cause) if isinstance(cause, SlowError) else None


def _inner(error: BaseException) -> str:
    """The innermost reason: the outer ones repeat the URL, with whatever is in it."""
    slow = _slow(error)
    if slow is not None:
        return slow
    reason: Any = error
    for _ in range(5):
        inner = getattr(reason, "reason", None) or next(
            (arg for arg in getattr(reason, "args", ()) if isinstance(arg, BaseException)), None
        )
        if inner is None or isinstance(inner, str):
            break
        reason = inner
    text = str(getattr(reason, "strerror", None) or reason)
    text = re.sub(r"^(<[^>]*>|HTTPS?Connection(Pool)?\([^)]*\)): ", "", text)
    return re.sub(r"https?://\S+", "...", text)[:200]
