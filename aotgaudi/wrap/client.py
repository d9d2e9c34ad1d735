"""HTTP client of a wrapped server: asks for its health and sends the warm-up requests, with limits on time and bytes.

A server with TLS must show the very certificate in the file that its command names. Who signed it, for which host and until
when is a matter for other clients.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import re
import select
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic import JsonValue

from aotgaudi.bundle.launch import WarmUpRequest
from aotgaudi.errors import AotGaudiError, SpecError
from aotgaudi.files import read_regular
from aotgaudi.wrap.adapters.base import Address
from aotgaudi.wrap.events import printable

_HEALTH_PATH = "/health"
HEALTH_SECONDS = 2.0
ANSWER_SECONDS = 600.0
"""In a build, the first request may compile for minutes."""
_MAX_ANSWER_BYTES, _READ_BYTES, _MAX_PEM_BYTES = 16 << 20, 1 << 20, 1 << 20
_PROBLEM_CHARS = 300
_NUM_TOGETHER = 2
"""The events that each request of a batch needs after all have begun, for them to run at the same time."""
_WAIT_SECONDS = 0.1
_HEALTHY_SECONDS, _UNHEALTHY_SECONDS = 1.0, 0.1
"""The waits between two health questions: while the server is healthy, and while it is not."""
_UNFIT_FOR_ID, _MAX_NAME_CHARS = re.compile(r"[^A-Za-z0-9._-]"), 64
"""A launch is read from a bundle, where a request's name may be anything, even text that no header can hold."""
_NOT_YET = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_CERTIFICATE_FLAG = "--ssl-certfile"


class WrappedServerError(AotGaudiError):
    """A wrapped server ended, hung, or broke off an answer.

    `exit_code` is the server's if it ended, else 1. `request_id` names the unanswered request, if any.
    """

    def __init__(self, message: str, exit_code: int = 1, request_id: str | None = None) -> None:
        self.exit_code, self.request_id = exit_code, request_id
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Answer:
    """How a request was answered: an HTTP status, and the text of all choices, for all copies that were sent.

    `problem` is the server's message for an error status, or says why the copies did not run at the same time.
    """

    status: int
    text: str
    problem: str = ""

    def digest(self, *, is_greedy: bool) -> str:
        """Returns the digest that a build compares, 64 hex digits: of the status, and for a greedy request of the text."""
        return _digest(self.status, self.text if is_greedy else "")

    @property
    def status_digest(self) -> str:
        """The digest that is the same in all starts, 64 hex digits: of the status. The text depends on the weights, too."""
        return _digest(self.status)


def _digest(status: int, text: str = "") -> str:
    return hashlib.sha256(f"{status}\n{text}".encode()).hexdigest()


def require_free(address: Address) -> None:
    """Raises SpecError if another server listens there, since it would get our requests."""
    connection = _Connection(replace(address, certificate=None), HEALTH_SECONDS)
    try:
        connection.connect()
    except OSError:
        return
    finally:
        connection.close()
    where = f"--port {address.port}" if address.uds is None else f"--uds {address.uds}"
    raise SpecError(where, "is in use: another server answers there", "end that one, or take another")


class OtherServerError(OSError):
    """What answers has another certificate than the wrapped server."""


def pinned(address: Address) -> Address:
    """Returns `address` with the certificate that its server's file holds now. Raises SpecError if it holds none."""
    if address.certificate is None:
        return address
    return replace(address, pinned=_certificate(address.certificate))


def _certificate(path: str) -> bytes:
    """Returns the first certificate in a PEM file, which is the server's own, DER. Raises SpecError."""
    try:
        text = read_regular(Path(path), _MAX_PEM_BYTES).decode("ascii", "replace")
        begin = text.index(ssl.PEM_HEADER)
        end = text.index(ssl.PEM_FOOTER, begin)
        return ssl.PEM_cert_to_DER_cert(text[begin : end + len(ssl.PEM_FOOTER)])
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it holds no certificate"
        raise SpecError(_CERTIFICATE_FLAG, f"{path} cannot be read: {why}", "a PEM file") from error


def _require_own(address: Address, shown: bytes | None) -> None:
    """Raises OtherServerError for a certificate that the server's file held neither at its start nor holds now."""
    if shown and shown == address.pinned:
        return
    try:  # A server may read its file again (--enable-ssl-refresh).
        now = _certificate(address.certificate or "")
    except SpecError:
        now = b""
    if not shown or shown != now:
        where = address.uds or f"{address.host}:{address.port}"
        raise OtherServerError(
            f"another server answers at {where}: its certificate is not in {_CERTIFICATE_FLAG} {address.certificate}"
        )


class HealthProbe:
    """Asks a server for its health again and again, and never waits for the answer. For one thread only.

    `is_good` is the last answer. `problem` says who answered instead of the server; empty while nobody did.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._connection: _Connection | None = None
        self._is_asked, self._data = False, b""
        self._next_at = self._deadline = 0.0
        self.is_good, self.problem = False, ""

    def poll(self) -> bool:
        """Asks if it is time to, or takes the answer if there is one. Returns `is_good`."""
        now = time.monotonic()
        if self._connection is None and now >= self._next_at:
            self._connect(now)
        if self._connection is not None:
            answer = self._answer(self._connection)
            if answer is not None or now >= self._deadline:
                self._end(now, is_good=bool(answer))
        return self.is_good

    def close(self) -> None:
        """Takes no more answers."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _connect(self, now: float) -> None:
        self._connection, self._deadline = _Connection(self._address, HEALTH_SECONDS), now + HEALTH_SECONDS
        self._is_asked, self._data, self.problem = False, b"", ""
        try:
            self._connection.connect()
            self._connection.sock.setblocking(False)
        except OSError:
            self._end(now, is_good=False)

    def _answer(self, connection: _Connection) -> bool | None:
        """Returns whether the answer is 200; None if its first line is still to come."""
        try:
            if not self._is_asked:
                connection.greet()
                connection.request("GET", _HEALTH_PATH, headers=_headers(self._address))
                self._is_asked = True
            come = connection.sock.recv(_READ_BYTES)
        except _NOT_YET:
            return None
        except (OSError, http.client.HTTPException) as error:
            self.problem = str(error) if isinstance(error, OtherServerError) else ""
            return False
        self._data += come
        line, end, _ = self._data.partition(b"\n")
        if not end and come:
            return None
        return line.split()[1:2] == [b"200"]

    def _end(self, now: float, *, is_good: bool) -> None:
        self.close()
        self.is_good = is_good
        self._next_at = now + (_HEALTHY_SECONDS if is_good else _UNHEALTHY_SECONDS)


def ask(address: Address, request: WarmUpRequest, on_wait: Callable[[], object] = lambda: None) -> Answer:
    """Sends all copies of a request at once, to each data-parallel rank in turn, and returns how they were answered.

    Several streamed answers must all run at the same time; if they did not, the answer has a `problem`. `on_wait` is called
    whenever data have come, and ten times a second if none do.

    Raises:
        WrappedServerError: An answer is missing or incomplete, or its status is 5xx.
    """
    if address.ranks == 1:
        return _ask(address, request, None, on_wait)
    told = []
    for rank in range(address.ranks):
        try:
            told.append(_ask(address, request, rank, on_wait))
        except WrappedServerError as error:
            text = f"{error} (data-parallel rank {rank})"
            raise WrappedServerError(text, error.exit_code, error.request_id) from error
    return Answer(
        status=max(one.status for one in told),
        text="\n".join(sorted({one.text for one in told})),
        problem=next((one.problem for one in told if one.problem), ""),
    )


def _ask(address: Address, request: WarmUpRequest, rank: int | None, on_wait: Callable[[], object]) -> Answer:
    """Sends all copies of a request at once to a data-parallel rank (None: to a server without). Raises like `ask`."""
    bodies = request.bodies
    answers, ran_together = _exchanged(address, request, bodies, rank, on_wait)
    worst = max(status for status, _ in answers)
    if worst >= 500:
        first = next(copy for copy, (status, _) in enumerate(answers) if status == worst)
        raise WrappedServerError(
            f"the server answered the request {request.name!r} with {worst}",
            request_id=_request_id(request, first),
        )
    is_batch = len(bodies) > 1 and all(body.get("stream") is True for body in bodies)
    if is_batch and worst < 400 and not ran_together:
        return Answer(worst, "", f"one of its {len(answers)} answers ended before the last had begun")
    texts = {_text(data) for status, data in answers if status == 200}
    failed = next((data for status, data in answers if status >= 400), b"")
    return Answer(worst, "\n".join(sorted(texts)), printable(failed.decode(errors="replace"), _PROBLEM_CHARS))


class _Pending:
    """A request that was sent, and its answer as far as it has been read."""

    def __init__(self, connection: _Connection, request_id: str) -> None:
        self.connection, self.request_id = connection, request_id
        self.num_events, self._data, self._line = 0, bytearray(), b""

    def read(self) -> bool:
        """Takes what has come. Returns False at the end. Raises http.client.HTTPException for too much."""
        try:
            come = self.connection.sock.recv(_READ_BYTES)
        except _NOT_YET:  # Part of a record of TLS, or one without data.
            return True
        self._data += come
        if len(self._data) > _MAX_ANSWER_BYTES:
            raise http.client.HTTPException(f"its answer has more than {_MAX_ANSWER_BYTES >> 20} MiB")
        *lines, self._line = (self._line + come).split(b"\n")
        self.num_events += sum(line.startswith(b"data: {") for line in lines)
        return bool(come)

    def connect(self, on_wait: Callable[[], object]) -> None:
        """Connects, and shakes hands if that is needed."""
        self.connection.connect()
        self.connection.sock.setblocking(False)
        deadline, waiting = time.monotonic() + ANSWER_SECONDS, select.poll()
        waiting.register(self.connection.sock, select.POLLIN)
        while True:
            try:
                self.connection.greet()
                break
            except _NOT_YET:
                waiting.poll(_WAIT_SECONDS * 1000)
                on_wait()
            if time.monotonic() > deadline:
                raise TimeoutError
        self.connection.sock.settimeout(ANSWER_SECONDS)

    def send(self, path: str, data: bytes, headers: Mapping[str, str]) -> None:
        """Sends the request. From then on nothing waits for the server."""
        self.connection.request("POST", path, data, headers)
        self.connection.sock.setblocking(False)

    def answer(self) -> tuple[int, bytes]:
        """Returns the status and the body. Raises http.client.HTTPException if the answer is incomplete."""
        if not self._data:
            raise http.client.RemoteDisconnected("the server closed the connection")
        replay: Any = SimpleNamespace(makefile=lambda _: io.BytesIO(self._data))
        response = http.client.HTTPResponse(replay, method="POST")
        response.begin()
        body = response.read()
        if self.num_events and b"data: [DONE]" not in body:
            raise http.client.RemoteDisconnected("the answer broke off")
        return response.status, body


def _exchanged(
    address: Address,
    request: WarmUpRequest,
    bodies: Sequence[Mapping[str, JsonValue]],
    rank: int | None,
    on_wait: Callable[[], object],
) -> tuple[list[tuple[int, bytes]], bool]:
    """Sends all bodies at once. Returns the status and the data of each answer, and whether all were streamed together.

    They were if each had events that came after all had begun.
    """
    sent = [
        _Pending(_Connection(address, ANSWER_SECONDS), _request_id(request, copy))
        for copy in range(len(bodies))
    ]
    try:
        for one in sent:
            with _named(request, one):
                one.connect(on_wait)
        for one, body in zip(sent, bodies, strict=True):
            data = json.dumps({"model": address.served_name, **body}).encode()
            with _named(request, one):
                one.send(request.path, data, _headers(address, data, one.request_id, rank))
        came = _read_all(request, sent, on_wait)
        answers = []
        for one in sent:
            with _named(request, one):
                answers.append(one.answer())
    finally:
        for one in sent:
            one.connection.close()
    return answers, bool(came) and all(
        one.num_events >= then + _NUM_TOGETHER for one, then in zip(sent, came, strict=True)
    )


def _read_all(request: WarmUpRequest, sent: Sequence[_Pending], on_wait: Callable[[], object]) -> list[int]:
    """Reads all answers. Returns the number of events that had come of each when all had begun; nothing if not all did.

    One thread reads them, because only so it is known which came later: when the last has begun, all that has come of the
    others by then is read first.
    """
    came: list[int] = []
    heard = time.monotonic()
    with selectors.DefaultSelector() as selector:
        for one in sent:
            selector.register(one.connection.sock, selectors.EVENT_READ, one)
        while reading := selector.get_map():
            have_begun = not came and all(one.num_events for one in sent)
            ready = [key.data for key, _ in selector.select(0 if have_begun else _WAIT_SECONDS)]
            for one in ready:
                with _named(request, one):
                    if not one.read():
                        selector.unregister(one.connection.sock)
            if have_begun:
                came = [one.num_events for one in sent]
            now = time.monotonic()
            heard = now if ready or have_begun else heard
            if came or not all(one.num_events for one in sent):  # Else what has come is read first.
                on_wait()
            if now - heard > ANSWER_SECONDS:
                with _named(request, next(iter(reading.values())).data):
                    raise TimeoutError
    return came


@contextmanager
def _named(request: WarmUpRequest, one: _Pending) -> Iterator[None]:
    """Raises WrappedServerError, which names the request, for an answer that is missing or incomplete."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        what = "no answer" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        raise WrappedServerError(
            f"the server did not answer the request {request.name!r}: {what}", request_id=one.request_id
        ) from error


def _request_id(request: WarmUpRequest, copy: int) -> str:
    """Returns the ``X-Request-Id`` of one copy. The server's log may name the copy by it."""
    return f"aotgaudi-{_UNFIT_FOR_ID.sub('-', request.name)[:_MAX_NAME_CHARS]}-{copy}"


class _Connection(http.client.HTTPConnection):
    """A connection to a server, by its port or its unix socket, and with TLS if it has a certificate."""

    def __init__(self, address: Address, timeout_seconds: float) -> None:
        host = address.host if address.uds is None else "localhost"
        super().__init__(host, address.port, timeout=timeout_seconds)
        self._address = address

    def connect(self) -> None:
        """Connects, without the handshake of TLS."""
        if self._address.uds is None:
            super().connect()
        else:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(self.timeout)
            self.sock.connect(self._address.uds)
        if self._address.certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # `greet` compares it.
            self.sock = context.wrap_socket(self.sock, do_handshake_on_connect=False)

    def greet(self) -> None:
        """Goes on with the handshake of TLS, and ends it. Raises one of `_NOT_YET`, or OtherServerError."""
        if isinstance(self.sock, ssl.SSLSocket):
            self.sock.do_handshake()
            _require_own(self._address, self.sock.getpeercert(binary_form=True))


def _headers(
    address: Address, body: bytes = b"", request_id: str = "", rank: int | None = None
) -> dict[str, str]:
    headers = {"Connection": "close"}
    if rank is not None:
        headers["X-data-parallel-rank"] = str(rank)
    if request_id:
        headers["X-Request-Id"] = request_id
    if body:
        headers["Content-Type"] = "application/json"
    if address.authorization:
        headers["Authorization"] = address.authorization
    return headers


def _text(data: bytes) -> str:
    """Returns the text of every choice in an answer of OpenAI's API; an empty text for any other answer."""
    try:
        choices = json.loads(data)["choices"]
        return "\n".join(_choice(choice) for choice in choices)
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""


def _choice(choice: dict[str, object]) -> str:
    message = choice.get("message")
    content = message.get("content") if isinstance(message, dict) else choice.get("text")
    return content if isinstance(content, str) else ""
