"""HTTP client of a wrapped server: asks for its health and sends the warm-up requests, with limits on time and bytes."""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

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
_NUM_TRIES, _NUM_TOGETHER = 3, 2
"""For requests that must run at the same time: the tries, and the events that each needs after all have begun."""
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

    Several streamed answers must all run at the same time. If one ends too soon for that, all are sent again for twice as
    many tokens. If the last try fails too, the answer has a `problem`.

    Raises:
        WrappedServerError: An answer is missing or incomplete, or its status is 5xx.
    """
    bodies = [*request.bodies]
    is_batch = len(bodies) > 1 and all(body.get("stream") is True for body in bodies)
    num_tries, is_apart = 0, True
    answers: list[tuple[int, bytes]] = []
    while is_apart and num_tries < _NUM_TRIES:
        answers, is_apart = _send(address, request, bodies, is_batch)
        bodies = [_longer(body) for body in bodies]
        num_tries += 1
    worst = max(status for status, _ in answers)
    if is_apart:
        problem = f"one of its {len(bodies)} answers ended before the last had begun, {_NUM_TRIES} times"
        return Answer(worst, "", problem)
    if worst >= 500:
        first = next(copy for copy, (status, _) in enumerate(answers) if status == worst)
        raise WrappedServerError(
            f"the server answered the request {request.name!r} with {worst}",
            request_id=_request_id(request, first),
        )
    texts = {_text(data) for status, data in answers if status == 200}
    failed = next((data for status, data in answers if status >= 400), b"")
    return Answer(worst, "\n".join(sorted(texts)), printable(failed.decode(errors="replace"), _PROBLEM_CHARS))


class _Batch:
    """The progress of several streamed answers. Thread-safe."""

    def __init__(self, num: int) -> None:
        self._lock, self._events = Lock(), [0] * num
        self._when_all_began: list[int] | None = None

    @property
    def ran_together(self) -> bool:
        """Whether every answer had events after all had begun."""
        began = self._when_all_began
        return began is not None and all(
            now >= then + _NUM_TOGETHER for then, now in zip(began, self._events, strict=True)
        )

    def note(self, copy: int) -> None:
        """Counts one event of an answer."""
        with self._lock:
            self._events[copy] += 1
            if self._when_all_began is None and all(self._events):
                self._when_all_began = list(self._events)


def _longer(body: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    tokens = body.get("max_tokens")
    return {**body, "max_tokens": 2 * tokens} if isinstance(tokens, int) else dict(body)


def _send(
    address: Address, request: WarmUpRequest, bodies: Sequence[Mapping[str, JsonValue]], is_batch: bool
) -> tuple[list[tuple[int, bytes]], bool]:
    """Returns the status and the data of each answer, and whether a batch failed to run at the same time.

    The answers of a batch have no data.
    """
    batch = _Batch(len(bodies)) if is_batch else None

    def send(copy: int) -> tuple[int, bytes]:
        body = json.dumps({"model": address.served_name, **bodies[copy]}).encode()
        request_id = _request_id(request, copy)
        on_event = None if batch is None else partial(batch.note, copy)
        try:
            return _request(address, "POST", request.path, body, ANSWER_SECONDS, request_id, on_event)
        except (OSError, http.client.HTTPException) as error:
            what = "no answer" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
            raise WrappedServerError(
                f"the server did not answer the request {request.name!r}: {what}", request_id=request_id
            ) from error

    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(send, range(len(bodies))))
    is_served = all(status < 400 for status, _ in answers)
    return answers, batch is not None and is_served and not batch.ran_together


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


def _request(
    address: Address,
    method: str,
    path: str,
    body: bytes | None,
    timeout_seconds: float,
    request_id: str = "",
    on_event: Callable[[], None] | None = None,
) -> tuple[int, bytes]:
    """Returns an answer's status and data. Events that are passed to `on_event` are not in the data."""
    headers = {"Connection": "close"}
    if request_id:
        headers["X-Request-Id"] = request_id
    if body is not None:
        headers["Content-Type"] = "application/json"
    if address.authorization:
        headers["Authorization"] = address.authorization
    connection: http.client.HTTPConnection
    if address.uds is None:
        connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout_seconds)
    else:
        connection = _UnixConnection(address.uds, timeout_seconds)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        if on_event is None or response.status != 200:
            return response.status, response.read(_MAX_ANSWER_BYTES)
        while line := response.readline(_MAX_ANSWER_BYTES):
            if line.startswith(b"data: {"):
                on_event()
        return response.status, b""
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
