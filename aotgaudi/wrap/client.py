"""HTTP client of a wrapped server: asks for its health and sends the warm-up requests, with limits on time and bytes.

A server with TLS must show the very certificate in the file that its command names. Who signed it, for which host and until
when is a matter for other clients.
"""

from __future__ import annotations

import http.client
import io
import json
import re
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from pydantic import JsonValue

from aotgaudi.bundle.launch import WarmUpRequest
from aotgaudi.digest import sha256_bytes
from aotgaudi.errors import AotGaudiError, SpecError, shown
from aotgaudi.files import read_regular
from aotgaudi.wrap.adapters.base import Address
from aotgaudi.wrap.events import printable
from aotgaudi.wrap.verdict import AnswerDigests

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
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


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

    def digests(self, *, is_greedy: bool) -> AnswerDigests:
        """Returns what a build compares, the text only for a greedy request, and what is the same in all starts."""
        texts = (self.text if is_greedy else "", "")
        return AnswerDigests(*(sha256_bytes(f"{self.status}\n{text}".encode()) for text in texts))


def require_free(address: Address) -> None:
    """Raises SpecError if another server listens there, since it would get our requests."""
    try:
        with closing(_Connection(replace(address, certificate=None), HEALTH_SECONDS)) as connection:
            connection.connect()
    except OSError:
        return
    except (UnicodeError, http.client.InvalidURL) as error:
        raise SpecError(
            "--host", f"is {shown(address.host)}", "an address, or a name that has one"
        ) from error
    where = f"--port {address.port}" if address.uds is None else f"--uds {address.uds}"
    raise SpecError(where, "is in use: another server answers there", "end that one, or take another")


class OtherServerError(OSError):
    """What answers has another certificate than the wrapped server."""


def pinned(address: Address) -> Address:
    """Returns `address` with its server's certificate, the first in the file, as it is now. Raises SpecError for none."""
    if address.certificate is None:
        return address
    try:
        text = read_regular(Path(address.certificate), _MAX_PEM_BYTES).decode("ascii", "replace")
        begin = text.index(ssl.PEM_HEADER)
        end = text.index(ssl.PEM_FOOTER, begin) + len(ssl.PEM_FOOTER)
        return replace(address, pinned=ssl.PEM_cert_to_DER_cert(text[begin:end]))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it holds no certificate"
        problem = f"{address.certificate} cannot be read: {why}"
        raise SpecError(_CERTIFICATE_FLAG, problem, "a PEM file") from error


class HealthProbe:
    """Asks a server for its health again and again, and never waits for the answer. For one thread only.

    `is_good` is the last answer. `problem` says who answered instead of the server; empty while nobody did.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._connection: _Connection | None = None
        self._is_asked, self._line = False, b""
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
        self._is_asked, self._line, self.problem = False, b"", ""
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
                connection.ask("GET", _HEALTH_PATH)
                self._is_asked = True
            come = connection.sock.recv(_READ_BYTES)
        except _NOT_YET:
            return None
        except (OSError, http.client.HTTPException) as error:
            self.problem = str(error) if isinstance(error, OtherServerError) else ""
            return False
        self._line += come
        is_whole = not come or b"\n" in self._line
        return self._line.split()[1:2] == [b"200"] if is_whole else None

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
    ranks = range(address.ranks) if address.ranks > 1 else (None,)
    told = [_ask(address, request, rank, on_wait) for rank in ranks]
    return Answer(
        status=max(one.status for one in told),
        text="\n".join(sorted({one.text for one in told})),
        problem=next((one.problem for one in told if one.problem), ""),
    )


def _ask(address: Address, request: WarmUpRequest, rank: int | None, on_wait: Callable[[], object]) -> Answer:
    """Sends all copies of a request at once to a data-parallel rank (None: to a server without). Raises like `ask`."""
    bodies = request.bodies
    sent = [_Pending(address, request, copy, rank) for copy in range(len(bodies))]
    try:
        for one in sent:
            with one.named():
                one.connect(on_wait)
        for one, body in zip(sent, bodies, strict=True):
            with one.named():
                one.send(request.path, {"model": address.served_name, **body})
        ran_together = _read_all(sent, on_wait)
        answers = []
        for one in sent:
            with one.named():
                answers.append(one.answer())
    finally:
        for one in sent:
            one.connection.close()
    worst = max(status for status, _ in answers)
    if worst >= 500:
        first = next(one for one, (status, _) in zip(sent, answers, strict=True) if status == worst)
        raise WrappedServerError(
            f"the server answered {first.title} with {worst}", request_id=first.request_id
        )
    is_batch = len(bodies) > 1 and all(body.get("stream") is True for body in bodies)
    if is_batch and worst < 400 and not ran_together:
        return Answer(worst, "", f"one of its {len(answers)} answers ended before the last had begun")
    texts = {_text(data) for status, data in answers if status == 200}
    failed = next((data for status, data in answers if status >= 400), b"")
    return Answer(worst, "\n".join(sorted(texts)), printable(failed.decode(errors="replace"), _PROBLEM_CHARS))


class _Pending:
    """One copy of a request, and its answer as far as it has been read.

    Attributes:
        request_id: its ``X-Request-Id``. The server's log may name the copy by it.
        title: the request, in words.
    """

    def __init__(self, address: Address, request: WarmUpRequest, copy: int, rank: int | None) -> None:
        self.connection, self._rank = _Connection(address, ANSWER_SECONDS), rank
        self.request_id = f"aotgaudi-{_UNFIT_FOR_ID.sub('-', request.name)[:_MAX_NAME_CHARS]}-{copy}"
        of_rank = "" if rank is None else f" (data-parallel rank {rank})"
        self.title = f"the request {request.name!r}{of_rank}"
        self.num_events, self._data, self._line = 0, bytearray(), b""

    @contextmanager
    def named(self) -> Iterator[None]:
        """Raises WrappedServerError, which names the request, for an answer that is missing or incomplete."""
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            what = "no answer" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
            text = f"the server did not answer {self.title}: {what}"
            raise WrappedServerError(text, request_id=self.request_id) from error

    def connect(self, on_wait: Callable[[], object]) -> None:
        """Connects, and shakes hands if that is needed."""
        self.connection.connect()
        deadline = time.monotonic() + ANSWER_SECONDS
        self.connection.sock.settimeout(_WAIT_SECONDS)
        while True:
            try:
                self.connection.greet()
                break
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise
                on_wait()
        self.connection.sock.settimeout(ANSWER_SECONDS)

    def send(self, path: str, body: Mapping[str, JsonValue]) -> None:
        """Sends the request. From then on nothing waits for the server."""
        headers = {"Content-Type": "application/json", "X-Request-Id": self.request_id}
        if self._rank is not None:
            headers["X-data-parallel-rank"] = str(self._rank)
        self.connection.ask("POST", path, json.dumps(body).encode(), headers)
        self.connection.sock.setblocking(False)

    def read(self) -> bool:
        """Takes all that has come. Returns False at the end. Raises http.client.HTTPException for too much."""
        while True:  # With TLS, each call returns one record.
            try:
                come = self.connection.sock.recv(_READ_BYTES)
            except _NOT_YET:
                return True
            if not come:
                return False
            self._data += come
            if len(self._data) > _MAX_ANSWER_BYTES:
                raise http.client.HTTPException(f"its answer has more than {_MAX_ANSWER_BYTES >> 20} MiB")
            *lines, self._line = (self._line + come).split(b"\n")
            self.num_events += sum(line.startswith(b"data: {") for line in lines)

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


def _read_all(sent: Sequence[_Pending], on_wait: Callable[[], object]) -> bool:
    """Reads all answers. Returns whether they were streamed together: each had events that came after all had begun.

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
                with one.named():
                    if not one.read():
                        selector.unregister(one.connection.sock)
            if have_begun:
                came = [one.num_events for one in sent]
            now = time.monotonic()
            heard = now if ready or have_begun else heard
            if came or not all(one.num_events for one in sent):  # Else what has come is read first.
                on_wait()
            if now - heard > ANSWER_SECONDS:
                with next(iter(reading.values())).data.named():
                    raise TimeoutError
    return bool(came) and all(
        one.num_events >= then + _NUM_TOGETHER for one, then in zip(sent, came, strict=True)
    )


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
        """Goes on with the handshake of TLS, and ends it. Raises like a read that would wait, or OtherServerError."""
        if not isinstance(self.sock, ssl.SSLSocket):
            return
        self.sock.do_handshake()
        found, address = self.sock.getpeercert(binary_form=True), self._address
        with suppress(SpecError):  # A server may read its file again (--enable-ssl-refresh).
            if found in (address.pinned, pinned(address).pinned):
                return
        where = address.uds or f"{address.host}:{address.port}"
        raise OtherServerError(
            f"another server answers at {where}: its certificate is not in {_CERTIFICATE_FLAG} {address.certificate}"
        )

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = _NO_HEADERS
    ) -> None:
        """Sends a request, with the key that the server requires."""
        key = {"Authorization": self._address.authorization} if self._address.authorization else {}
        self.request(method, path, body, {"Connection": "close", **key, **headers})


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
