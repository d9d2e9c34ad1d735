"""HTTP client of a wrapped server: asks for its health and sends the warm-up requests, with limits on time and bytes."""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import selectors
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from pydantic import JsonValue

from aotgaudi.bundle.launch import WarmUpRequest
from aotgaudi.errors import AotGaudiError, SpecError
from aotgaudi.wrap.events import printable

_HEALTH_PATH = "/health"
HEALTH_SECONDS = 2.0
ANSWER_SECONDS = 600.0
"""In a build, the first request may compile for minutes."""
_MAX_ANSWER_BYTES = 16 << 20
_PROBLEM_CHARS = 300
_NUM_TRIES, _NUM_LENGTHS, _NUM_TOGETHER = 12, 3, 2
"""For requests that must run at the same time: the tries, each cheap because it ended too soon; the lengths that they have,
each twice the one before; and the events that each answer needs after all have begun."""
_TOO_LONG = 400
"""How a server answers a request that was made longer than it takes; a batch's first try was taken."""
_STATUS = re.compile(rb"HTTP/1\.\d (\d{3})\b")
_UNFIT_FOR_ID, _MAX_NAME_CHARS = re.compile(r"[^A-Za-z0-9._-]"), 64
"""A launch is read from a bundle, where a request's name may be anything, even text that no header can hold."""


class WrappedServerError(AotGaudiError):
    """A wrapped server ended, hung, or broke off an answer.

    `exit_code` is the server's if it ended, else 1. `request_id` names the unanswered request, if any.
    """

    def __init__(self, message: str, exit_code: int = 1, request_id: str | None = None) -> None:
        self.exit_code, self.request_id = exit_code, request_id
        super().__init__(message)


@dataclass(frozen=True)
class Address:
    """Where a server listens, and what its clients must know.

    Attributes:
        host: The host, as a client on this machine reaches it.
        port: The port.
        uds: The unix socket that it listens on instead of a port, as we see it.
        served_name: The model's name in requests.
        authorization: The value of the ``Authorization`` header; empty for none. Never shown.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    served_name: str = ""
    authorization: str = field(default="", repr=False)


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
    try:
        if address.uds is None:
            socket.create_connection((address.host, address.port), HEALTH_SECONDS).close()
        else:
            _UnixConnection(address.uds, HEALTH_SECONDS).connect()
    except OSError:
        return
    where = f"--port {address.port}" if address.uds is None else f"--uds {address.uds}"
    raise SpecError(where, "is in use: another server answers there", "end that one, or take another")


def is_healthy(address: Address) -> bool:
    """Whether the server answers its health question with 200 now."""
    try:
        return _request(address, "GET", _HEALTH_PATH, None, HEALTH_SECONDS)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def ask(address: Address, request: WarmUpRequest) -> Answer:
    """Sends all copies of a request at once, and returns how they were answered.

    Several streamed answers must all run at the same time. If one ends too soon for that, all are sent again, for more
    tokens if the server takes them. If the last try fails too, the answer has a `problem`.

    Raises:
        WrappedServerError: An answer is missing or incomplete, or its status is 5xx.
    """
    is_batch = len(request.bodies) > 1 and all(body.get("stream") is True for body in request.bodies)
    ran_together = True
    if is_batch:
        answers, ran_together = _batch(address, request)
    else:
        answers = _send_copies(address, request)
    worst = max(status for status, _ in answers)
    if worst >= 500:
        first = next(copy for copy, (status, _) in enumerate(answers) if status == worst)
        raise WrappedServerError(
            f"the server answered the request {request.name!r} with {worst}",
            request_id=_request_id(request, first),
        )
    if worst < 400 and not ran_together:
        return Answer(
            worst,
            "",
            f"one of its {len(answers)} answers ended before the last had begun, {_NUM_TRIES} times",
        )
    texts = {_text(data) for status, data in answers if status == 200}
    failed = next((data for status, data in answers if status >= 400), b"")
    return Answer(worst, "\n".join(sorted(texts)), printable(failed.decode(errors="replace"), _PROBLEM_CHARS))


def _batch(address: Address, request: WarmUpRequest) -> tuple[list[tuple[int, bytes]], bool]:
    """Returns the answers of the first try whose answers ran at the same time, else of the last; and whether they did."""
    bodies: Sequence[Mapping[str, JsonValue]] = request.bodies
    num_longer = _NUM_LENGTHS - 1
    answers, ran_together = _stream_together(address, request, bodies)
    for _ in range(_NUM_TRIES - 1):
        if ran_together or max(status for status, _ in answers) >= 400:
            break
        longer = [_longer(body) for body in bodies] if num_longer > 0 else bodies
        again, ran_together = _stream_together(address, request, longer)
        if longer is not bodies and any(status == _TOO_LONG for status, _ in again):
            num_longer = 0
        else:
            bodies, answers, num_longer = longer, again, num_longer - 1
    return answers, ran_together


def _longer(body: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    tokens = body.get("max_tokens")
    return {**body, "max_tokens": 2 * tokens} if isinstance(tokens, int) else dict(body)


def _send_copies(address: Address, request: WarmUpRequest) -> list[tuple[int, bytes]]:
    """Returns the status and the data of each copy's answer."""
    bodies = [*request.bodies]

    def send(copy: int) -> tuple[int, bytes]:
        body = json.dumps({"model": address.served_name, **bodies[copy]}).encode()
        request_id = _request_id(request, copy)
        try:
            return _request(address, "POST", request.path, body, ANSWER_SECONDS, request_id)
        except (OSError, http.client.HTTPException) as error:
            raise _unanswered(request, copy, error) from error

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(send, range(len(bodies))))


def _unanswered(request: WarmUpRequest, copy: int, error: Exception) -> WrappedServerError:
    what = "no answer" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
    return WrappedServerError(
        f"the server did not answer the request {request.name!r}: {what}",
        request_id=_request_id(request, copy),
    )


class _Stream:
    """A streamed answer as far as it has been read."""

    def __init__(self, connection: http.client.HTTPConnection, copy: int) -> None:
        self.connection, self.copy, self.is_open = connection, copy, True
        self._head, self._line, self.num_events, self._is_done = bytearray(), b"", 0, False

    @property
    def status(self) -> int:
        found = _STATUS.match(self._head)
        return int(found[1]) if found else 0

    @property
    def data(self) -> bytes:
        """The body of an answer that is no stream of events."""
        return bytes(self._head.partition(b"\r\n\r\n")[2])

    def read(self) -> None:
        """Takes what has come. Raises http.client.HTTPException if that was no answer."""
        try:
            come = self.connection.sock.recv(_MAX_ANSWER_BYTES)
        except BlockingIOError:
            return
        self.is_open = bool(come)
        if len(self._head) < _MAX_ANSWER_BYTES and not self.num_events:
            self._head += come
        *lines, rest = (self._line + come).split(b"\n")
        self._line = bytes(rest)
        self.num_events += sum(line.startswith(b"data: {") for line in lines)
        self._is_done |= any(line.startswith(b"data: [DONE]") for line in lines)
        if not self.is_open and not (self._is_done if self.num_events else self.status):
            raise http.client.RemoteDisconnected("the answer broke off")


def _stream_together(
    address: Address, request: WarmUpRequest, bodies: Sequence[Mapping[str, JsonValue]]
) -> tuple[list[tuple[int, bytes]], bool]:
    """Returns the status and the data of each streamed answer, and whether all ran at the same time.

    They did if each had events that came after all had begun. One thread reads them all, because only so it is known which
    came later: when the last has begun, all that has come of the others by then is read and does not count.
    """
    streams, came = [_Stream(_connection(address, ANSWER_SECONDS), copy) for copy in range(len(bodies))], None
    stream = streams[0]
    try:
        with selectors.DefaultSelector() as selector:
            for stream in streams:
                stream.connection.connect()
            for stream in streams:
                body = json.dumps({"model": address.served_name, **bodies[stream.copy]}).encode()
                headers = _headers(address, body, _request_id(request, stream.copy))
                stream.connection.request("POST", request.path, body, headers)
                stream.connection.sock.setblocking(False)
                selector.register(stream.connection.sock, selectors.EVENT_READ, stream)
            while selector.get_map():
                all_began = all(stream.num_events for stream in streams)
                ready = [
                    key.data for key, _ in selector.select(0 if all_began and not came else ANSWER_SECONDS)
                ]
                if not ready and (came or not all_began):
                    raise TimeoutError
                for stream in ready:
                    stream.read()
                    if not stream.is_open:
                        selector.unregister(stream.connection.sock)
                if all_began and not came:
                    came = [stream.num_events for stream in streams]
    except (OSError, http.client.HTTPException) as error:
        raise _unanswered(request, stream.copy, error) from error
    finally:
        for stream in streams:
            stream.connection.close()
    answers = [(stream.status, b"" if stream.num_events else stream.data) for stream in streams]
    ran_together = came is not None and all(
        stream.num_events >= then + _NUM_TOGETHER for stream, then in zip(streams, came, strict=True)
    )
    return answers, ran_together


def _request_id(request: WarmUpRequest, copy: int) -> str:
    """Returns the ``X-Request-Id`` of one copy. The server's log may name the copy by it."""
    return f"aotgaudi-{_UNFIT_FOR_ID.sub('-', request.name)[:_MAX_NAME_CHARS]}-{copy}"


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _connection(address: Address, timeout_seconds: float) -> http.client.HTTPConnection:
    if address.uds is None:
        return http.client.HTTPConnection(address.host, address.port, timeout=timeout_seconds)
    return _UnixConnection(address.uds, timeout_seconds)


def _headers(address: Address, body: bytes | None, request_id: str) -> dict[str, str]:
    headers = {"Connection": "close"}
    if request_id:
        headers["X-Request-Id"] = request_id
    if body is not None:
        headers["Content-Type"] = "application/json"
    if address.authorization:
        headers["Authorization"] = address.authorization
    return headers


def _request(
    address: Address,
    method: str,
    path: str,
    body: bytes | None,
    timeout_seconds: float,
    request_id: str = "",
) -> tuple[int, bytes]:
    """Returns an answer's status and data."""
    connection = _connection(address, timeout_seconds)
    try:
        connection.request(method, path, body, _headers(address, body, request_id))
        response = connection.getresponse()
        return response.status, response.read(_MAX_ANSWER_BYTES)
    finally:
        connection.close()


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
