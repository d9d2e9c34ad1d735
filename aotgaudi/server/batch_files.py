"""The two files of a batch (requests and answers), in the format of OpenAI's batch API: one JSON object a line.

::

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"id": "batch_req_0f3c", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {...}},
     "error": null}

Like OpenAI, we check the whole file of requests before the first request runs. One malformed line or duplicate id refuses
the file. An invalid body is answered with status 400 and does not affect other requests.

Each answer is appended as a whole line when it is ready. So if the process is killed, at most the last line of the file is
torn. The next process drops that line and goes on.

For each id, both classes keep only a hash of 16 bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from aotgaudi.errors import SpecError, store_error

_MAX_LINE_BYTES = 8 * 1024 * 1024
"""The longest line of requests: twice the largest body."""
_MAX_ID_CHARS = 512
_MAX_SHOWN = 5
_FORM = '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}'

Ids = set[bytes]
"""Hashes of ids."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of a file of requests."""

    custom_id: str
    url: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """The server's status and body for one request. `request_id` is the server's id for that request."""

    custom_id: str
    status: int
    request_id: str
    body: Mapping[str, Any]


def id_hash(custom_id: str) -> bytes:
    """Returns the hash that is kept of an id."""
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class RequestFile:
    """A file of requests, checked to its end when it is opened. It must not change afterwards."""

    def __init__(self, path: Path, urls: Collection[str]) -> None:
        """Checks the file. Requests may go to `urls` only.

        Raises:
            SpecError: the file cannot be read, has no request, or has malformed lines. Names the first of these lines.
        """
        self.path, self._urls = path, urls
        self.ids: Ids = set()
        problems: list[str] = []
        num_problems = 0
        for number, line in self._lines():
            problem = self._problem(line)
            if problem:
                num_problems += 1
                if len(problems) < _MAX_SHOWN:
                    problems.append(f"line {number} {problem}")
        if problems:
            more = f", and {num_problems - len(problems)} more" if num_problems > len(problems) else ""
            raise SpecError(
                str(path), f"is not a batch: {'; '.join(problems)}{more}", f"lines such as {_FORM}"
            )
        if not self.ids:
            raise SpecError(str(path), "has no request", f"lines such as {_FORM}")

    def __len__(self) -> int:
        return len(self.ids)

    def requests(self, but: Ids) -> Iterator[BatchRequest]:
        """Reads the requests again, one by one, and skips those whose ids are in `but`.

        Raises:
            SpecError: the file was changed.
        """
        num_left = len(self.ids)
        for number, line in self._lines():
            num_left -= 1
            request = _request_of(line)
            known = b"" if request is None else id_hash(request.custom_id)
            if request is None or known not in self.ids:
                raise SpecError(str(self.path), f"was changed while it was read, at line {number}")
            if known not in but:
                yield request
        if num_left:
            raise SpecError(str(self.path), f"was changed while it was read: {num_left} lines are gone")

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        try:
            with self.path.open("rb") as file:
                number = 0
                while line := file.readline(_MAX_LINE_BYTES + 1):
                    number += 1
                    if len(line) > _MAX_LINE_BYTES:
                        raise SpecError(
                            str(self.path), f"line {number} is longer than {_MAX_LINE_BYTES} bytes"
                        )
                    if line.strip():
                        yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        except OSError as error:
            raise SpecError(
                str(self.path), f"cannot be read: {error.strerror}", "a file of requests"
            ) from error

    def _problem(self, line: bytes) -> str:
        """Returns what is wrong with a line (empty if it is fine), and remembers the hash of its id."""
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            return f"is not JSON: {error}"
        if not isinstance(found, dict):
            return "is not a JSON object"
        custom_id = found.get("custom_id")
        is_id = isinstance(custom_id, str) and 0 < len(custom_id) <= _MAX_ID_CHARS
        known = id_hash(str(custom_id)) if is_id else b""
        checks = (
            (is_id, f"has no custom_id: a text of 1 to {_MAX_ID_CHARS} characters"),
            (found.get("method") == "POST", "has another method than POST"),
            (found.get("url") in tuple(self._urls), f"has no url of these: {', '.join(self._urls)}"),
            (isinstance(found.get("body"), dict), "has no body: a JSON object"),
            (known not in self.ids, f"has the custom_id of an earlier line: {str(custom_id)[:64]!r}"),
        )
        self.ids |= {known} if is_id else set()
        return next((problem for is_good, problem in checks if not is_good), "")


def _request_of(line: bytes) -> BatchRequest | None:
    try:
        found = json.loads(line)
        return BatchRequest(found["custom_id"], found["url"], found["body"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


@dataclass(slots=True)
class AnswerFile:
    """A file of answers, locked so that only this process appends to it. A context manager, which closes it.

    Attributes:
        done: Hashes of the ids that have an answer.
        num_errors: How many answers have another status than 200.
        fingerprints: The `system_fingerprint` values of the answers that the file had when it was opened.
    """

    path: Path
    done: Ids = field(default_factory=set)
    num_errors: int = 0
    fingerprints: set[str] = field(default_factory=set)
    _file: BinaryIO | None = None
    _end: int = 0

    @classmethod
    def open(cls, path: Path, requests: RequestFile) -> AnswerFile:
        """Opens or creates a file of answers to `requests`, and drops a torn last line.

        Raises:
            SpecError: the file is not one of answers, has answers to other requests, or another process writes to it.
            StoreError: the file cannot be written.
        """
        if path.exists() and path.samefile(requests.path):
            raise SpecError(str(path), "is the file of requests", "another file for the answers")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise store_error("write to", path, error) from error
        file = os.fdopen(descriptor, "r+b", buffering=0)
        found = cls(path, _file=file)
        try:
            found._read(requests.ids)
        except BaseException:
            file.close()
            raise
        return found

    def append(self, answer: BatchAnswer) -> None:
        """Writes an answer as one line, or nothing.

        Raises:
            StoreError: the line cannot be written, for example because the disk is full.
        """
        line = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": answer.custom_id,
            "response": {"status_code": answer.status, "request_id": answer.request_id, "body": answer.body},
            "error": None,
        }
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        assert self._file is not None
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._end)
            raise store_error("write to", self.path, error, needed_bytes=len(data)) from error
        self._end += len(data)
        self._note(answer.custom_id, answer.status)

    def close(self) -> None:
        """Flushes the file to disk and closes it. Idempotent."""
        if self._file is not None and not self._file.closed:
            with contextlib.suppress(OSError):  # A pipe, for example, cannot be synchronized.
                os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _note(self, custom_id: str, status: int) -> None:
        self.done.add(id_hash(custom_id))
        self.num_errors += status != 200

    def _read(self, known: Ids) -> None:
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SpecError(
                str(self.path), "is written to by another process", "wait, or another file"
            ) from error
        number = 0
        with open(self.path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                number += 1
                self._take(line, number, known)
                self._end += len(line)
        self._file.truncate(self._end)
        self._file.seek(self._end)

    def _take(self, line: bytes, number: int, known: Ids) -> None:
        try:
            found = json.loads(line)
            custom_id, response = found["custom_id"], found["response"]
            status, fingerprint = response["status_code"], response["body"].get("system_fingerprint")
            hashed = id_hash(custom_id)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise SpecError(
                str(self.path), f"line {number} is not an answer of a batch", "another file for the answers"
            ) from error
        if hashed not in known:
            raise SpecError(
                str(self.path),
                f"line {number} answers {custom_id[:64]!r}, which is not among the requests",
                "another file for the answers",
            )
        if fingerprint is not None:
            self.fingerprints.add(fingerprint)
        self._note(custom_id, status)
