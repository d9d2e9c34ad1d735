"""HTTP sessions without hidden passwords, redirects or retries, and with a total time limit for all that they do."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Union

from aotgaudi.errors import RemoteError, StoreError, store_error
from aotgaudi.share.remote import TransientError

if TYPE_CHECKING:
    from requests import Session

_POOL_SIZE = 16
_CHUNK_BYTES = 64 << 10
_PORTS = (("https", 443), ("http", 80))

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a remote may take: `connect_seconds` for each address, `answer_seconds` for an answer without a body.

    A transfer of n bytes may take `answer_seconds` + n / `least_bytes_per_second` in all.
    """

    connect_seconds: float = 10.0
    answer_seconds: float = 30.0
    least_bytes_per_second: float = 32 << 10

    def seconds_for(self, num_bytes: int) -> float:
        """Returns how long an answer or a request of `num_bytes` may take."""
        return self.answer_seconds + num_bytes / self.least_bytes_per_second


DEFAULT_LIMITS = Limits()


def within(seconds: float, action: Callable[[], T]) -> T:
    """Runs `action`, and returns its result within `seconds`. Raises what it raises, and TimeoutError.

    The time limits of HTTP libraries apply to single reads, so a server that sends a byte now and then could make us wait
    for ever. After a timeout, the thread that runs `action` is abandoned. It is a daemon and holds only a connection.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(max(seconds, 0.0))
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"has not answered in {seconds:.0f} s")
    return results[0]


class FileBody:
    """A file as the body of a request. It is read again for each sending, because a challenge makes us send a request twice.

    `failure` is the file's error, if that made the sending fail.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path, self._size_bytes = path, size_bytes
        self.failure: StoreError | None = None

    def __len__(self) -> int:
        """Returns the size in bytes."""
        return self._size_bytes

    def __iter__(self) -> Iterator[bytes]:
        """Yields exactly `len` bytes. Raises StoreError."""
        rest = self._size_bytes
        try:
            with self._path.open("rb", buffering=0) as file:
                while rest and (chunk := file.read(min(rest, _CHUNK_BYTES))):
                    rest -= len(chunk)
                    yield chunk
        except OSError as error:
            self.failure = store_error("read", self._path, error)
            raise self.failure from error
        if rest:
            self.failure = StoreError(f"{self._path} has fewer than {self._size_bytes} bytes")
            raise self.failure


Body = Union[bytes, FileBody]


def open_session(*, is_local: bool) -> Session:
    """Returns a session that uses no proxies (with `is_local`) and no passwords of ``~/.netrc``."""
    import requests
    from requests.adapters import HTTPAdapter

    class UnledSession(requests.Session):  # type: ignore[misc]
        def get_redirect_target(self, _: Any) -> None:
            """Returns None, since requests would read the whole body of a redirect, even of one that it does not follow."""

    session = UnledSession()
    adapter = HTTPAdapter(pool_connections=_POOL_SIZE, pool_maxsize=_POOL_SIZE)
    session.mount("https://", adapter)
    session.mount("http://", adapter)
    session.trust_env = not is_local  # There is no proxy within this machine.
    session.auth = lambda request: request  # Keeps passwords of ~/.netrc from replacing ours.
    return session


def origin_of(url: str) -> tuple[str, str]:
    """Returns scheme and ``HOST[:PORT]`` of a URL, in lower case, without the port that the scheme implies.

    urllib3 does both the parsing and the connecting, so both mean the same host. A URL with a user or a backslash, which
    other parsers read differently, is refused. Raises RemoteError.
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
    """Returns ``HOST[:PORT]`` of a URL. See `origin_of`."""
    return origin_of(url)[1]


@contextlib.contextmanager
def translated(label: str) -> Iterator[None]:
    """Turns errors of requests and urllib3 into TransientError or RemoteError, with one line that begins with `label`."""
    from requests import exceptions
    from urllib3.exceptions import HTTPError

    try:
        yield
    except exceptions.SSLError as error:
        raise RemoteError(f"{label}: no trusted connection: {_inner(error)}") from error
    except TimeoutError as error:
        raise TransientError(f"{label}: {error}") from error
    except (exceptions.Timeout, exceptions.ConnectionError, exceptions.ChunkedEncodingError) as error:
        raise TransientError(f"{label}: {_inner(error)}") from error
    except (exceptions.RequestException, HTTPError) as error:
        raise TransientError(f"{label}: {type(error).__name__}: {_inner(error)}") from error
    except OSError as error:
        if error.errno is not None:
            raise
        # What requests says of $REQUESTS_CA_BUNDLE and $CURL_CA_BUNDLE that do not exist.
        raise RemoteError(f"{label}: {error}") from error


def _inner(error: BaseException) -> str:
    """Returns the innermost reason, because the outer ones repeat the URL with all that it contains."""
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
    text = re.sub(r"^\w+\(host=[^)]*\): ", "", text)
    return re.sub(r"https?://\S+", "...", text)[:200]
