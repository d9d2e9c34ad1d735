"""Speaking HTTP with a registry: requests with time limits, and the two ways in which registries authenticate.

A registry that wants to know who asks answers 401 with a challenge: ``Basic``, or ``Bearer`` with the URL (the realm)
where a token is given for the scope that the request needs (distribution-spec, and docs.docker.com: token
authentication). The challenge is answered once, and the answer is kept for the requests that follow.

A password is sent to the registry that it was configured for and to no other host: not where a redirect leads,
not to the location of an upload, and to a realm elsewhere only where the user allowed that host. Passwords and tokens
never travel in the clear, unless the registry is on this machine or plain http was allowed; no message carries one.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Union
from urllib.parse import urljoin, urlsplit

from aotgaudi.errors import RemoteError
from aotgaudi.remotes.credentials import Credentials
from aotgaudi.remotes.reference import Reference
from aotgaudi.remotes.remote import TransientError

if TYPE_CHECKING:
    from requests import Response, Session

CONNECT_SECONDS = 10.0
READ_SECONDS = 60.0
DOCUMENT_SECONDS = 60.0
"""How long a manifest, a token or an error message may take to arrive."""
_CHUNK_BYTES = 1 << 20
_MAX_ERROR_BYTES = 64 << 10
_MAX_TOKEN_BYTES = 1 << 20
_POOL_SIZE = 16
_MAX_ANSWERS = 3
"""How often one request may be asked who we are: another thread's token may be for less than this request needs."""
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_PARAMETER = re.compile(r'([A-Za-z]+)="([^"]*)"')
Body = Union[bytes, Iterable[bytes]]
"""What a request carries; an iterable is read anew each time that the request is sent, and has a length."""

_DEFAULT_PORTS = (("https", ":443"), ("http", ":80"))


class RegistryClient:
    """Requests to one repository. Safe in threads. Nothing is sent before the first request."""

    def __init__(self, reference: Reference, credentials: Credentials, *, allow_http: bool = False) -> None:
        """Plain http is spoken with this machine; with others only where `allow_http`."""
        self.reference = reference
        self.is_plain = reference.is_loopback or allow_http
        self._credentials = credentials
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._authorization: str | None = None
        self._foreign_realm: str | None = None

    @contextlib.contextmanager
    def request(
        self,
        method: str,
        path: str,
        expected: Collection[int],
        *,
        headers: Mapping[str, str] | None = None,
        data: Body | None = None,
    ) -> Iterator[Response]:
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
                if response.raw.length_remaining is not None:  # What is read to its end can be used again.
                    response.raw.read(_MAX_ERROR_BYTES, decode_content=False)
        finally:
            response.close()

    def read_document(self, response: Response, max_bytes: int) -> bytes:
        """Returns a response's body, at most a byte more than `max_bytes` of it. Raises TransientError when it trickles."""
        data, started = b"", time.monotonic()
        while len(data) <= max_bytes and (
            chunk := response.raw.read1(max_bytes + 1 - len(data), decode_content=False)
        ):
            data += chunk
            if time.monotonic() - started > DOCUMENT_SECONDS:
                raise TransientError(
                    f"{self.reference.label}: sent {len(data)} bytes of a document in {DOCUMENT_SECONDS:.0f} s"
                )
        return data

    @property
    def _origin(self) -> str:
        return f"{'http' if self.is_plain else 'https'}://{self.reference.host}"

    def _send(self, method: str, url: str, headers: dict[str, str], data: Body | None) -> Response:
        """Sends the request; sends it again for as long as the registry challenges it and we have another answer."""
        sent = self._authorization if self._is_ours(url) else None
        for _ in range(_MAX_ANSWERS):
            response = self._send_once(method, url, headers, data, sent)
            if response.status_code != 401 or not self._is_ours(str(response.url)):
                return response
            response.close()
            sent = self._answer(response.headers.get("Www-Authenticate", ""), sent)
        return self._send_once(method, url, headers, data, sent)

    def _send_once(
        self,
        method: str,
        url: str,
        headers: dict[str, str],
        data: Body | None,
        authorization: str | None,
    ) -> Response:
        sent = {**headers, "Accept-Encoding": "identity"}
        if authorization is not None:
            sent["Authorization"] = authorization
        return self._opened().request(
            method,
            url,
            headers=sent,
            data=data,
            stream=True,
            timeout=(CONNECT_SECONDS, READ_SECONDS),
        )

    def _opened(self) -> Session:
        with self._lock:
            if self._session is None:
                self._session = _make_session(
                    self._refuse_clear_redirect, is_local=self.reference.is_loopback
                )
            return self._session

    def _answer(self, challenge: str, sent: str | None) -> str:
        """Returns the header that authorises requests from now on. Raises RemoteError if it is what was sent already."""
        session = self._opened()
        with self._lock:
            if self._authorization is not None and self._authorization != sent:
                return self._authorization  # Another thread has answered meanwhile.
            scheme, _, rest = challenge.partition(" ")
            if scheme.lower() == "basic":
                answer = self._credentials.basic(self.reference.host)
            else:
                answer = self._fetch_token(session, dict(_PARAMETER.findall(rest)))
            if answer is None or answer == sent:
                raise self._unauthorised()
            self._authorization = answer
            return answer

    def _fetch_token(self, session: Session, parameters: dict[str, str]) -> str | None:
        """Asks the realm for a token: with the password if it may be sent there, else anonymously."""
        realm = parameters.get("realm", "")
        if not realm:
            return None
        url = urljoin(f"{self._origin}/", realm)
        self._refuse_clear_text(url)
        password = self._password_at(_host(url))
        with contextlib.closing(
            session.get(
                url,
                params={name: parameters[name] for name in ("service", "scope") if name in parameters},
                headers={"Accept-Encoding": "identity"} | ({"Authorization": password} if password else {}),
                stream=True,
                timeout=(CONNECT_SECONDS, READ_SECONDS),
            )
        ) as response:
            if response.status_code in _TRANSIENT_STATUS:
                raise self._refusal("GET", response)
            if response.status_code != 200:
                return None
            return _token_in(self.read_document(response, _MAX_TOKEN_BYTES))

    def _password_at(self, host: str) -> str | None:
        """The password for a token service: the registry's own, where the service may see it; else that of its host."""
        if self._credentials.may_see(host, self.reference.host):
            return self._credentials.basic(self.reference.host)
        own = self._credentials.basic(host)
        if own is None and self._credentials.basic(self.reference.host) is not None:
            self._foreign_realm = host
        return own

    def _is_ours(self, url: str) -> bool:
        """Whether `url` is on the very registry: scheme, name and port."""
        return (
            f"{urlsplit(url).scheme}://{_host(url)}"
            == f"{urlsplit(self._origin).scheme}://{_host(self._origin)}"
        )

    def _refuse_clear_text(self, url: str) -> None:
        if urlsplit(url).scheme != "https" and not self.is_plain:
            raise RemoteError(f"{self.reference.label}: leads to plain http (allow it with --insecure)")

    def _refuse_clear_redirect(self, response: Response, *_: Any, **__: Any) -> None:
        if response.is_redirect:
            self._refuse_clear_text(urljoin(str(response.url), response.headers["Location"]))

    def _refusal(self, method: str, response: Response) -> RemoteError:
        status = response.status_code
        if status in (401, 403):
            return self._unauthorised()
        text = (
            f"{self.reference.label}: {method} was answered with {status} {self._reason(response)}".rstrip()
        )
        if status not in _TRANSIENT_STATUS:
            return RemoteError(text)
        after = response.headers.get("Retry-After", "")
        return TransientError(text, float(after) if after.isdecimal() and len(after) < 6 else None)

    def _reason(self, response: Response) -> str:
        """The registry's own words, as one line of printable characters."""
        text = self.read_document(response, _MAX_ERROR_BYTES).decode("utf-8", "replace")
        found = re.search(r'"message"\s*:\s*"([^"]{1,200})"', text)
        words = found[1] if found else str(response.reason or "")
        return "".join(char if char.isprintable() else " " for char in words)[:200]

    def _unauthorised(self) -> RemoteError:
        host = self.reference.host
        if self._foreign_realm is not None:
            remedy = (
                f"its tokens come from {self._foreign_realm}, and the password is for {host} alone:"
                f" allow it with --token-host {self._foreign_realm}"
            )
        else:
            remedy = f"docker login {host}, or set ORAS_USER and ORAS_PASS"
        return RemoteError(f"{self.reference.label}: not authorised ({remedy})")

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """What requests and urllib3 raise, as ours."""
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


def _make_session(look: Any, *, is_local: bool) -> Session:
    import requests
    from requests.adapters import HTTPAdapter

    session = requests.Session()
    adapter = HTTPAdapter(pool_connections=_POOL_SIZE, pool_maxsize=_POOL_SIZE)
    session.mount("https://", adapter)
    session.mount("http://", adapter)
    session.trust_env = not is_local  # There is no proxy on the way to ourselves.
    session.auth = lambda request: request  # No password of ~/.netrc takes the place of ours.
    session.hooks["response"].append(look)
    return session


def _host(url: str) -> str:
    """``HOST[:PORT]`` of a URL, in lower case, without the port that its scheme implies."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2].lower()
    for scheme, port in _DEFAULT_PORTS:
        if parts.scheme == scheme:
            host = host.removesuffix(port)
    return host


def _token_in(data: bytes) -> str | None:
    try:
        document = json.loads(data)
        token = document.get("token") or document.get("access_token")
    except (ValueError, AttributeError, RecursionError):
        return None
    return f"Bearer {token}" if isinstance(token, str) and token.isascii() and token.isprintable() else None


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
