"""Every call that an action makes of the operating system, failed once each."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest

from aotgaudi.errors import AotGaudiError

CALLS = (
    "mkdir",
    "write",
    "fchmod",
    "chmod",
    "fsync",
    "rename",
    "unlink",
    "rmdir",
    "open",
    "lseek",
    "read",
    "pread",
)


def raising(code: int) -> Callable[..., NoReturn]:
    """A call of the operating system that always fails with this errno."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    return refuse


class FailingOnce:
    """``os.<call>``, whose call number `number` (from 0) fails."""

    def __init__(self, call: str, number: int, code: int) -> None:
        self._real, self._number, self._code = getattr(os, call), number, code
        self._count, self._lock = 0, threading.Lock()

    @property
    def has_failed(self) -> bool:
        return self._count > self._number

    def __call__(self, *arguments: object, **options: object) -> object:
        with self._lock:
            number, self._count = self._count, self._count + 1
        if number == self._number:
            raise OSError(self._code, os.strerror(self._code))
        return self._real(*arguments, **options)


def fail_each(
    monkeypatch: pytest.MonkeyPatch, call: str, code: int, action: Callable[[], object], most: int = 400
) -> Iterator[AotGaudiError | None]:
    """Runs `action` with the first `os.<call>` failing, then with the second, until there are no more.

    Yields the error, which is one line and one of ours, or None where the action did without that call.
    """
    for number in range(most):
        failing = FailingOnce(call, number, code)
        error = None
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                action()
            except AotGaudiError as found:
                error = found
        if not failing.has_failed:
            return
        assert error is None or "\n" not in str(error)
        yield error
    raise AssertionError(f"more than {most} calls of {call}")
