"""Speaking HTTP with a registry. oras is the transport: it authenticates and sends; what comes back is ours to judge.

What oras leaves open is settled here: time limits on every request, which scheme of authentication is asked for, that
credentials are sent to no other place in the clear, and that no error message carries them.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

from aotgaudi.errors import RemoteError, StoreError, store_error
from aotgaudi.oci.reference import Reference
from aotgaudi.remotes.remote import TransientError

CONNECT_SECONDS = 10.0
READ_SECONDS = 60.0
_CHUNK_BYTES = 1 << 20
_MAX_ERROR_BYTES = 64 << 10
_POOL_SIZE = 16
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_REALM = re.compile(r'realm="(?P<realm>[^"]*)"', re.IGNORECASE)


@dataclass(frozen=True)
class Credentials:
    """A user name and a password for every registry that is spoken to, or files as ``docker login`` writes them."""

    user: str | None = None
    password: str | None = field(default=None, repr=False)
    config_files: tuple[Path, ...] = ()


class FileBody:
    """A file as the body of a request, read anew each time it is sent: a request may be sent again, authenticated.

    `failure` is what was wrong with the file, where sending failed for that.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path, self._size_bytes = path, size_bytes
        self.failure: StoreError | None = None

    def __len__(self) -> int:
        """Bytes."""
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


class RegistryClient:
    """Requests to one repository. Safe in threads. Nothing is sent before the first request."""

    def __init__(self, reference: Reference, credentials: Credentials, *, allow_http: bool = False) -> None:
        """Plain http is spoken with this machine, and elsewhere only where `allow_http`."""
        self.reference = reference
        self.is_plain = reference.is_loopback or allow_http
        self._credentials = credentials
        self._registry: Any = None

    @contextlib.contextmanager
    def request(
        self,
        method: str,
        path: str,
        expected: Collection[int],
        *,
        headers: Mapping[str, str] | None = None,
        data: bytes | FileBody | None = None,
    ) -> Iterator[Any]:
        """Yields the response, its body unread, whose status is one of `expected`.

        `path` is below ``/v2/REPOSITORY/``, or a URL that the registry gave. Raises TransientError and RemoteError.
        """
        url = urljoin(f"{self._origin}/v2/{self.reference.repository}/", path)
        self._refuse_clear_text(url)
        with self._translated():
            response = self._send(method, url, dict(headers or {}), data)
        try:
            if response.status_code not in expected:
                raise self._refusal(method, response)
            with self._translated():
                yield response
                response.raw.read(
                    _MAX_ERROR_BYTES, decode_content=False
                )  # What is read to its end can be used again.
        finally:
            response.close()

    @property
    def _origin(self) -> str:
        return f"{'http' if self.is_plain else 'https'}://{self.reference.host}"

    def _send(self, method: str, url: str, headers: dict[str, str], data: bytes | FileBody | None) -> Any:
        registry = self._connected()
        response = self._send_once(registry, method, url, headers, data)
        if response.status_code == 401 and getattr(registry.auth, "token", None) is not None:
            response.close()
            registry.auth.token = None  # It was for less than this request needs: oras asks for another one.
            response = self._send_once(registry, method, url, headers, data)
        return response

    def _send_once(
        self, registry: Any, method: str, url: str, headers: dict[str, str], data: bytes | FileBody | None
    ) -> Any:
        sent = {**headers, "Accept-Encoding": "identity", **_basic_header(registry)}
        try:
            return _unretried(registry)(registry, url, method, headers=sent, data=data, stream=True)
        except OSError:  # All of requests' own.
            raise
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise self._unauthorised() from error  # Oras has nothing to answer the challenge with.

    def _connected(self) -> Any:
        """The registry of oras, with the scheme of authentication that the registry asks for."""
        if self._registry is None:
            registry = self._make_registry("token")
            reply = registry.session.get(f"{self._origin}/v2/", stream=True)
            challenge = reply.headers.get("Www-Authenticate", "")
            reply.raw.read(_MAX_ERROR_BYTES, decode_content=False)
            reply.close()
            if reply.status_code == 401 and challenge.lower().startswith("basic"):
                registry = self._make_registry("basic")
                if not getattr(registry.auth, "_basic_auth", None):
                    raise self._unauthorised()
            self._registry = registry
        return self._registry

    def _make_registry(self, scheme: str) -> Any:
        from oras.container import Container
        from oras.provider import Registry

        logging.getLogger("oras.logger").setLevel(
            logging.CRITICAL + 1
        )  # What fails is raised, and said once.
        registry = Registry(self.reference.host, insecure=self.is_plain, auth_backend=scheme)
        _settle_session(registry.session, self._refuse_clear_realm)
        registry.session.trust_env = (
            not self.reference.is_loopback
        )  # There is no proxy on the way to ourselves.
        given = self._credentials
        if given.user is not None and given.password is not None:
            registry.auth.set_basic_auth(given.user, given.password)
        elif not getattr(registry.auth, "_basic_auth", None):
            files = [str(path) for path in given.config_files if path.is_file()]
            registry.auth.load_configs(Container(self.reference.label), files)
        return registry

    def _refuse_clear_text(self, url: str) -> None:
        if urlsplit(url).scheme != "https" and not self.is_plain:
            raise RemoteError(f"{self.reference.label}: leads to plain http (allow it with --insecure)")

    def _refuse_clear_realm(self, response: Any, *_: Any, **__: Any) -> None:
        """Credentials go where the registry says, but not in the clear."""
        realm = _REALM.search(response.headers.get("Www-Authenticate", ""))
        if response.status_code == 401 and realm and realm["realm"].lower().startswith("http:"):
            self._refuse_clear_text(realm["realm"])

    def _refusal(self, method: str, response: Any) -> RemoteError:
        status = response.status_code
        if status in (401, 403):
            return self._unauthorised()
        text = f"{self.reference.label}: {method} was answered with {status} {_reason(response)}".rstrip()
        if status not in _TRANSIENT_STATUS:
            return RemoteError(text)
        after = response.headers.get("Retry-After", "")
        return TransientError(text, float(after) if after.isdecimal() and len(after) < 6 else None)

    def _unauthorised(self) -> RemoteError:
        return RemoteError(
            f"{self.reference.label}: not authorised"
            f" (docker login {self.reference.host}, or set ORAS_USER and ORAS_PASS)"
        )

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """What requests, urllib3 and oras raise, as ours."""
        from requests import exceptions
        from urllib3.exceptions import HTTPError

        label = self.reference.label
        try:
            yield
        except exceptions.SSLError as error:
            raise RemoteError(f"{label}: no trusted connection: {_inner(error)}") from error
        except (exceptions.Timeout, exceptions.ConnectionError, exceptions.ChunkedEncodingError) as error:
            raise TransientError(f"{label}: {_inner(error)}") from error
        except (exceptions.RequestException, HTTPError) as error:
            raise TransientError(f"{label}: {type(error).__name__}: {_inner(error)}") from error
        except (
            ValueError
        ) as error:  # oras, where it has nothing to authenticate with; also requests' bad JSON.
            raise self._unauthorised() from error


def _unretried(registry: Any) -> Any:
    """What oras sends a request with, less its own attempts: they wait for minutes, and know no clock but their own."""
    return inspect.unwrap(type(registry).do_request)


def _basic_header(registry: Any) -> dict[str, str]:
    """Oras waits to be asked for a password each time; so that no body is sent in vain, it is told at once."""
    from oras.auth.basic import BasicAuth

    return dict(registry.auth.get_auth_header()) if isinstance(registry.auth, BasicAuth) else {}


def _settle_session(session: Any, look: Any) -> None:
    from requests.adapters import HTTPAdapter

    class _Impatient(HTTPAdapter):  # type: ignore[misc]
        """Gives every request a time limit."""

        def send(self, request: Any, **options: Any) -> Any:
            options["timeout"] = options.get("timeout") or (CONNECT_SECONDS, READ_SECONDS)
            return super().send(request, **options)

    adapter = _Impatient(pool_connections=_POOL_SIZE, pool_maxsize=_POOL_SIZE)
    session.mount("https://", adapter)
    session.mount("http://", adapter)
    session.auth = lambda request: request  # No password of ~/.netrc takes the place of ours.
    session.hooks["response"].append(look)


def _reason(response: Any) -> str:
    """The registry's own words, as one line of printable characters."""
    text = response.raw.read(_MAX_ERROR_BYTES, decode_content=True).decode("utf-8", "replace")
    found = re.search(r'"message"\s*:\s*"([^"]{1,200})"', text)
    words = found[1] if found else str(response.reason or "")
    return "".join(char if char.isprintable() else " " for char in words)[:200]


def _inner(error: BaseException) -> str:
    """The innermost reason: the outer ones repeat the URL, with whatever is in it."""
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
