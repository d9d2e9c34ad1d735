"""A registry that answers a byte now and then, in every place where it could."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aotgaudi.digest import Digest
from aotgaudi.errors import RemoteError
from aotgaudi.share.pace import Limits, Pace, SlowError
from aotgaudi.share.registry_remote import RegistryRemote
from aotgaudi.share.remote import TransientError
from aotgaudi.share.retry import Retry
from tests.unit.share.conftest import remote_of
from tests.unit.share.fake_registry import FakeRegistry, Handler, on, status, trickle

SHORT = Limits(answer_seconds=0.3, document_seconds=0.3, window_seconds=0.2, least_bytes_per_second=4096)
DATA = b"x" * 200_000
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
LONG = OK + b"Content-Length: 200000\r\n\r\n"


@pytest.fixture
def remote(registry: FakeRegistry) -> RegistryRemote:
    return remote_of(registry, limits=SHORT)


@contextlib.contextmanager
def given_up_soon() -> Iterator[None]:
    began = time.monotonic()
    with pytest.raises(TransientError, match=r"has not answered in|sent \d+ bytes in") as caught:
        yield
    assert time.monotonic() - began < 3
    assert "\n" not in str(caught.value)


def read(remote: RegistryRemote) -> bytes:
    with remote.read(Digest.of(DATA)) as download:
        return b"".join(download.chunks)


HEADS = {
    "status line": trickle(b"", b"H"),
    "headers": trickle(OK, b"X-A: b\r\n"),
    "one header": trickle(OK + b"X-A: ", b"b"),
    "continue": trickle(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
}
BODIES = {
    "of a length": trickle(LONG, b"x"),
    "chunks": trickle(CHUNKED, b"1\r\nx\r\n"),
    "chunk size": trickle(CHUNKED + b"1", b"0"),
    "chunk extension": trickle(CHUNKED + b"1;", b"x" * 500),
    "wrapped": trickle(CHUNKED, b"1;" + b"y" * 30_000 + b"\r\nx\r\n"),
    "to the end": trickle(OK + b"Connection: close\r\n\r\n", b"x"),
    "trailers": trickle(CHUNKED + b"1\r\nx\r\n0\r\n", b"X-A: b\r\n"),
}


@pytest.mark.parametrize("act", [*HEADS.values(), *BODIES.values()], ids=[*HEADS, *BODIES])
def test_a_manifest_that_trickles_is_given_up(
    registry: FakeRegistry, remote: RegistryRemote, act: Callable[[Handler], None]
) -> None:
    registry.faults.append(on("GET", "/manifests/", act))

    with given_up_soon():
        remote.resolve("v1")


@pytest.mark.parametrize("act", [*HEADS.values(), *BODIES.values()], ids=[*HEADS, *BODIES])
def test_a_blob_that_trickles_is_given_up(
    registry: FakeRegistry, remote: RegistryRemote, act: Callable[[Handler], None]
) -> None:
    registry.faults.append(on("GET", "/blobs/", act))

    with given_up_soon():
        read(remote)


def test_a_blob_that_begins_fast_and_then_trickles_is_given_up(
    registry: FakeRegistry, remote: RegistryRemote
) -> None:
    registry.faults.append(on("GET", "/blobs/", trickle(LONG + DATA[:150_000], b"x")))

    with given_up_soon():
        read(remote)


@pytest.mark.alone
def test_a_blob_that_is_whole_is_not_waited_for(registry: FakeRegistry, remote: RegistryRemote) -> None:
    whole = b"%x\r\n%b\r\n" % (len(DATA), DATA)
    registry.faults.append(on("GET", "/blobs/", trickle(CHUNKED + whole, b"0")))
    began = time.monotonic()

    assert read(remote) == DATA
    assert time.monotonic() - began < 0.2


@pytest.mark.parametrize("act", [*HEADS.values(), *BODIES.values()], ids=[*HEADS, *BODIES])
def test_a_token_that_trickles_is_given_up(
    registry: FakeRegistry, remote: RegistryRemote, act: Callable[[Handler], None]
) -> None:
    challenge = f'Bearer realm="http://{registry.host}/token",service="x"'
    registry.faults.append(on("GET", "^/token", act))
    registry.faults.append(on("HEAD", "", status(401, Www_Authenticate=challenge)))

    with given_up_soon():
        remote.has(Digest.of(b""))


def test_redirects_share_one_time(registry: FakeRegistry, remote: RegistryRemote) -> None:
    def lead_on(handler: Handler) -> None:
        time.sleep(0.2)
        handler.answer(307, Location=handler.path)

    registry.faults.append(on("GET", "", lead_on))

    with given_up_soon():
        remote.resolve("v1")
    assert len(registry.log) <= 2


def test_a_redirect_s_body_is_not_read(registry: FakeRegistry, remote: RegistryRemote) -> None:
    head = b"HTTP/1.1 307 There\r\nLocation: /v2/team/bundle/manifests/there\r\n"
    registry.faults.append(on("GET", "/v1$", trickle(head + b"Connection: close\r\n\r\n", b"x" * 100_000)))

    assert remote.resolve("v1") is None


def test_the_words_of_a_refusal_are_not_waited_for(registry: FakeRegistry, remote: RegistryRemote) -> None:
    head = b"HTTP/1.1 400 No\r\n"
    registry.faults.append(
        on("GET", "", trickle(head + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"))
    )

    with pytest.raises(RemoteError, match="GET was answered with 400 No"):
        remote.resolve("v1")


def test_an_upload_that_nobody_takes_is_given_up(
    registry: FakeRegistry, remote: RegistryRemote, tmp_path: Path
) -> None:
    (tmp_path / "blob").write_bytes(bytes(64 << 20))
    slow = remote_of(registry, limits=Limits(connect_seconds=0.3, answer_seconds=0.3, window_seconds=0.2))
    registry.is_deaf = True

    began = time.monotonic()
    with pytest.raises(TransientError):
        slow.put(Digest.of(bytes(64 << 20)), tmp_path / "blob")
    assert time.monotonic() - began < 12


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


def test_content_must_keep_up_in_every_window() -> None:
    now = [0.0]
    pace = Pace(30.0, clock=lambda: now[0])
    pace.keep_up(Limits(window_seconds=10.0, least_bytes_per_second=100.0))

    pace.count(1_000_000)
    now[0] = 10.0
    pace.count(1)
    assert pace.seconds_left() == 10.0
    now[0] = 20.0
    with pytest.raises(SlowError, match="sent 1 bytes in 10 s"):
        pace.count(1)
