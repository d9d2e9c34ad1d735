"""What takes too long is given up within a total time."""

from __future__ import annotations

import time

import pytest

from aotgaudi.share.http_session import within
from aotgaudi.share.remote import TransientError
from aotgaudi.share.transfer import Retry


def test_a_slow_remote_is_not_tried_again_and_again() -> None:
    now, calls = [0.0], []

    def fail() -> None:
        calls.append(now[0])
        now[0] += 59.0
        raise TransientError("slow")

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with pytest.raises(TransientError, match="slow"):
        Retry(sleep=sleep, clock=lambda: now[0]).call(fail)
    assert len(calls) == 2


def test_what_ends_in_time_gives_its_result_or_its_error() -> None:
    def fail() -> None:
        raise KeyError("x")

    assert within(5.0, lambda: 7) == 7
    with pytest.raises(KeyError):
        within(5.0, fail)
    with pytest.raises(TimeoutError):
        within(0.01, lambda: time.sleep(0.5))
