"""HTTP with a registry: decides where requests may go, and authenticates in the two ways that registries use.

A registry that requires authentication answers 401 with a challenge: ``Basic``, or ``Bearer`` with the URL (the realm) of a
token service and the scope that the request needs (distribution-spec, and docs.docker.com: token authentication). The
client answers the challenge once and keeps the answer for later requests.

A password goes only to the registry that it was configured for. It does not follow a redirect or an upload to another
host, and it goes to a realm on another host only if the user allowed that host. Plain http is used only with a registry on
this machine, or if the user allowed it. No error message contains a password.

A reference is ``HOST[:PORT]/REPOSITORY[:TAG][@sha256:...]``. The grammar is that of distribution/reference, except that the
host is required, because there is no default registry.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlencode, urljoin

from aotgaudi.errors import RemoteError, SpecError
from aotgaudi.share.credentials import Credentials
from aotgaudi.share.http_session import (
    DEFAULT_LIMITS,
    Body,
    Limits,
    host_of,
    open_session,
    origin_of,
    translated,
    within,
)
from aotgaudi.share.remote import TransientError

if TYPE_CHECKING:
    from requests import Response, Session

_CHUNK_BYTES = 1 << 20
_MAX_ERROR_BYTES = 64 << 10
_MAX_TOKEN_BYTES = 1 << 20
_MAX_ANSWERS = 3
"""How many challenges one request may get. A token that another thread fetched may not cover what this request needs."""
_MAX_REDIRECTS = 5
_REST_SECONDS = 2.0
"""Time limit for the text of a refusal and the end of an answer, which are not worth a longer wait."""
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_KEEPS_METHOD = frozenset({307, 308})
_PARAMETER = re.compile(r'([A-Za-z]+)="([^"]*)"')
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    rf"(?P<host>{_HOST})/(?P<repository>{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_MAX_REPOSITORY = 255


@dataclass(frozen=True, slots=True)
class Reference:
    """A repository in a registry, and optionally a tag and the digest of a manifest."""

    host: str
    repository: str
    tag: str | None = None
    digest: str | None = None

    @property
    def label(self) -> str:
        """``HOST/REPOSITORY``."""
        return f"{self.host}/{self.repository}"

    @property
    def is_loopback(self) -> bool:
        """Whether the registry is on this machine."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Returns whether ``HOST[:PORT]`` is this machine."""
    name = host.rpartition(":")[0] if re.search(r":[0-9]+$", host) else host
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def is_host(text: str) -> bool:
    """Returns whether `text`, the part before the first slash, is a host: it has a dot or a port, or is localhost."""
    return text == "localhost" or "." in text or ":" in text


def parse_reference(text: str) -> Reference:
    """Parses a reference. Raises SpecError."""
    found = _REFERENCE.fullmatch(text)
    if found is None or not is_host(found["host"]) or len(found["repository"]) > _MAX_REPOSITORY:
        raise SpecError(
            f"{text:.200}", "is no reference", "HOST/REPOSITORY[:TAG][@sha256:DIGEST], in lower case"
        )
    return Reference(found["host"], found["repository"], found["tag"], found["digest"])


class RegistryClient:
    """Sends requests to one repository. Thread-safe. Nothing is sent before the first request."""

    def __init__(
        self,
        reference: Reference,
        credentials: Credentials,
        *,
        allow_http: bool = False,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        """Uses plain http on this machine, and with other machines only if `allow_http`."""
        self.reference = reference
        self.limits = limits
        self.is_plain = reference.is_loopback or allow_http
        self._allow_http = allow_http
        self._credentials = credentials
        self._lock = threading.RLock()  # Held while a token is requested.
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
        """Yields the response, whose status is one of `expected`, with its body unread.

        `path` is below ``/v2/REPOSITORY/``, or a URL from the registry. Raises TransientError and RemoteError.
        """
        url = urljoin(f"{self._origin}/v2/{self.reference.repository}/", path)
        with self._translated():
            response = self._send(method, url, dict(headers or {}), data)
        with _closing(response):
            if response.status_code not in expected:
                raise self._refusal(method, response)
            with self._translated():
                yield response
            _read_rest(response)

    def read_document(self, response: Response, max_bytes: int) -> bytes:
        """Returns a response's body, cut after `max_bytes` and one byte more."""
        return within(self.limits.answer_seconds, lambda: _read(response, max_bytes + 1))

    def chunks(self, response: Response, num_bytes: int) -> Iterator[bytes]:
        """Yields a response's body as it comes. Stops after `num_bytes` if the response does not state a length."""
        ends = time.monotonic() + self.limits.seconds_for(num_bytes)
        is_open = response.raw.length_remaining is None  # Its end may never come, so do not wait for it.
        while num_bytes > 0 or not is_open:
            chunk = within(
                ends - time.monotonic(), lambda: response.raw.read1(_CHUNK_BYTES, decode_content=False)
            )
            if not chunk:
                return
            num_bytes -= len(chunk)
            yield chunk

    @property
    def _origin(self) -> str:
        return f"{'http' if self.is_plain else 'https'}://{self.reference.host}"

    def _send(self, method: str, url: str, headers: dict[str, str], data: Body | None) -> Response:
        """Sends the request, and sends it again as long as the registry challenges it and we have another answer."""
        size = len(data) if data is not None else 0
        ends = time.monotonic() + self.limits.seconds_for(size)

        def send(authorization: str | None) -> Response:
            return self._follow(
                method, url, headers, lambda at: authorization if self._is_ours(at) else None, ends, data
            )

        sent = self._authorization
        for _ in range(_MAX_ANSWERS):
            response = send(sent)
            if response.status_code != 401 or not self._is_ours(str(response.url)):
                return response
            response.close()
            sent = self._answer(response.headers.get("Www-Authenticate", ""), sent)
        return send(sent)

    def _follow(
        self,
        method: str,
        url: str,
        headers: dict[str, str],
        authorize: Callable[[str], str | None],
        ends: float,
        data: Body | None = None,
    ) -> Response:
        """Sends a request and follows redirects, until `ends` at the latest. `authorize` returns the header for each URL.

        The bodies of redirects are not read.
        """
        for _ in range(_MAX_REDIRECTS + 1):
            self._refuse_clear_text(url)
            authorization = authorize(url)
            send = partial(
                self._opened().request,
                method,
                url,
                headers={**headers, "Accept-Encoding": "identity"}
                | ({"Authorization": authorization} if authorization else {}),
                data=data,
                stream=True,
                allow_redirects=False,
                timeout=(self.limits.connect_seconds, self.limits.answer_seconds),
            )
            response: Response = within(ends - time.monotonic(), send)
            if not response.is_redirect or not (
                method in ("GET", "HEAD") or response.status_code in _KEEPS_METHOD
            ):
                return response
            response.close()
            url = urljoin(str(response.url), response.headers["Location"])
        raise RemoteError(
            f"{self.reference.label}: leads from place to place, more than {_MAX_REDIRECTS} times"
        )

    def _opened(self) -> Session:
        with self._lock:
            if self._session is None:
                self._session = open_session(is_local=self.reference.is_loopback)
            return self._session

    def _answer(self, challenge: str, sent: str | None) -> str:
        """Returns the header that authorizes requests from now on. Raises RemoteError if that header was already sent."""
        with self._lock:
            if self._authorization is not None and self._authorization != sent:
                return self._authorization  # Another thread answered in the meantime.
            scheme, _, rest = challenge.partition(" ")
            if scheme.lower() == "basic":
                answer = self._credentials.basic(self.reference.host)
            else:
                answer = self._fetch_token(dict(_PARAMETER.findall(rest)))
            if answer is None or answer == sent:
                raise self._unauthorised()
            self._authorization = answer
            return answer

    def _fetch_token(self, parameters: Mapping[str, str]) -> str | None:
        """Requests a token from the realm, with the password if it may be sent there, else anonymously."""
        realm = parameters.get("realm", "")
        if not realm:
            return None
        asked = urlencode({name: parameters[name] for name in ("service", "scope") if name in parameters})
        url = urljoin(f"{self._origin}/", realm)
        url += ("&" if "?" in url else "?") + asked if asked else ""
        ends = time.monotonic() + self.limits.answer_seconds
        response = self._follow("GET", url, {}, self._password_at, ends)
        with _closing(response):
            if response.status_code in _TRANSIENT_STATUS:
                raise self._refusal("GET", response)
            if response.status_code != 200:
                return None
            return _token_in(self.read_document(response, _MAX_TOKEN_BYTES))

    def _password_at(self, url: str) -> str | None:
        """Returns the password for a token service: the registry's if the service may see it, else that of its host."""
        host = host_of(url)
        if self._credentials.may_see(host, self.reference.host):
            return self._credentials.basic(self.reference.host)
        own = self._credentials.basic(host)
        if own is None and self._credentials.basic(self.reference.host) is not None:
            self._foreign_realm = host
        return own

    def _is_ours(self, url: str) -> bool:
        """Returns whether `url` is on the registry itself, with the same scheme, name and port."""
        return origin_of(url) == origin_of(self._origin)

    def _refuse_clear_text(self, url: str) -> None:
        """Raises RemoteError unless `url` is encrypted, plain http was allowed, or the request stays on this machine."""
        scheme, host = origin_of(url)
        is_plain = self.is_plain and (self._allow_http or is_loopback(host))
        if scheme != "https" and not (scheme == "http" and is_plain):
            raise RemoteError(f"{self.reference.label}: leads to plain http (allow it with --insecure)")

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
        """Returns the registry's error message as one line of printable characters."""
        text = _read_rest(response).decode("utf-8", "replace")
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

    def _translated(self) -> contextlib.AbstractContextManager[None]:
        return translated(self.reference.label)


@contextlib.contextmanager
def _closing(response: Response) -> Iterator[None]:
    """Closes the response at the end, unless a read timed out, since closing would wait for the thread that reads."""
    try:
        yield
    except BaseException as error:
        if not (isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError)):
            response.close()
        raise
    response.close()


def _read(response: Response, max_bytes: int) -> bytes:
    data = b""
    while len(data) < max_bytes and (
        chunk := response.raw.read1(max_bytes - len(data), decode_content=False)
    ):
        data += chunk
    return data


def _read_rest(response: Response) -> bytes:
    """Returns a short body, if it comes soon. A connection can be reused once its answer is read to the end."""
    from urllib3.exceptions import HTTPError

    data = b""
    if response.raw.length_remaining is not None and response.raw.length_remaining <= _MAX_ERROR_BYTES:
        with contextlib.suppress(HTTPError, OSError):
            data = within(_REST_SECONDS, lambda: _read(response, _MAX_ERROR_BYTES))
    return data


def _token_in(data: bytes) -> str | None:
    try:
        document = json.loads(data)
        token = document.get("token") or document.get("access_token")
    except (ValueError, AttributeError, RecursionError):
        return None
    return f"Bearer {token}" if isinstance(token, str) and token.isascii() and token.isprintable() else None
