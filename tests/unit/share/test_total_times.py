"""A remote that answers a byte now and then, wherever it could, is given up within a total time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aotgaudi.digest import Digest
from aotgaudi.errors import MissingObjectError, RemoteError
from aotgaudi.share.file_remotes import ObjectStoreRemote
from aotgaudi.share.http_session import Limits, within
from aotgaudi.share.registry import RegistryRemote
from aotgaudi.share.remote import TransientError
from aotgaudi.share.transfer import Retry
from tests.unit.share.conftest import remote_of
from tests.unit.share.fake_registry import FakeRegistry, Handler, on, status, trickle

SHORT = Limits(answer_seconds=0.3, least_bytes_per_second=1e6)
DATA = b"x" * 200_000
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
LONG = OK + b"Content-Length: 200000\r\n\r\n"
TRICKLES = {
    "status line": trickle(b"", b"H"),
    "headers": trickle(OK, b"X-A: b\r\n"),
    "one header": trickle(OK + b"X-A: ", b"b"),
    "continue": trickle(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "of a length": trickle(LONG, b"x"),
    "fast, then slow": trickle(LONG + DATA[:150_000], b"x"),
    "chunks": trickle(CHUNKED, b"1\r\nx\r\n"),
    "chunk size": trickle(CHUNKED + b"1", b"0"),
    "chunk extension": trickle(CHUNKED + b"1;", b"x" * 500),
    "to the end": trickle(OK + b"Connection: close\r\n\r\n", b"x"),
    "trailers": trickle(CHUNKED + b"1\r\nx\r\n0\r\n", b"X-A: b\r\n"),
}
everywhere = pytest.mark.parametrize("act", TRICKLES.values(), ids=TRICKLES)


@pytest.fixture
def remote(registry: FakeRegistry) -> RegistryRemote:
    return remote_of(registry, limits=SHORT)


@contextlib.contextmanager
def given_up_soon() -> Iterator[None]:
    began = time.monotonic()
    with pytest.raises(TransientError, match=r"has not answered in") as caught:
        yield
    assert time.monotonic() - began < 5
    assert "\n" not in str(caught.value)


def read(remote: RegistryRemote | ObjectStoreRemote, offset: int = 0) -> tuple[int, bytes]:
    with remote.read(Digest.of(DATA), offset) as download:
        return download.offset, b"".join(download.chunks)


@everywhere
def test_a_manifest_is_given_up(
    registry: FakeRegistry, remote: RegistryRemote, act: Callable[[Handler], None]
) -> None:
    registry.faults.append(on("GET", "/manifests/", act))

    with given_up_soon():
        remote.resolve("v1")


@everywhere
def test_a_blob_is_given_up(
    registry: FakeRegistry, remote: RegistryRemote, act: Callable[[Handler], None]
) -> None:
    registry.faults.append(on("GET", "/blobs/", act))

    with given_up_soon():
        read(remote)


@pytest.mark.parametrize("name", ["headers", "chunk size"])
def test_a_token_is_given_up(registry: FakeRegistry, remote: RegistryRemote, name: str) -> None:
    challenge = f'Bearer realm="http://{registry.host}/token",service="x"'
    registry.faults.append(on("GET", "^/token", TRICKLES[name]))
    registry.faults.append(on("HEAD", "", status(401, Www_Authenticate=challenge)))

    with given_up_soon():
        remote.has(Digest.of(b""))


def test_a_blob_that_is_whole_is_not_waited_for(registry: FakeRegistry, remote: RegistryRemote) -> None:
    registry.faults.append(on("GET", "/blobs/", trickle(CHUNKED + b"%x\r\n%b\r\n" % (len(DATA), DATA), b"0")))

    assert read(remote) == (0, DATA)


def test_redirects_share_one_time(registry: FakeRegistry, remote: RegistryRemote) -> None:
    def lead_on(handler: Handler) -> None:
        time.sleep(0.2)
        handler.answer(307, Location=handler.path)

    registry.faults.append(on("GET", "", lead_on))

    with given_up_soon():
        remote.resolve("v1")
    assert len(registry.log) <= 2


def test_the_body_of_a_redirect_is_not_read(registry: FakeRegistry, remote: RegistryRemote) -> None:
    head = b"HTTP/1.1 307 There\r\nLocation: /v2/team/bundle/manifests/there\r\n"
    registry.faults.append(on("GET", "/v1$", trickle(head + b"Connection: close\r\n\r\n", b"x" * 100_000)))

    assert remote.resolve("v1") is None


def test_the_words_of_a_refusal_are_not_waited_for(registry: FakeRegistry, remote: RegistryRemote) -> None:
    head = b"HTTP/1.1 400 No\r\nTransfer-Encoding: chunked\r\n\r\n"
    registry.faults.append(on("GET", "", trickle(head, b"1\r\nx\r\n")))

    with pytest.raises(RemoteError, match="GET was answered with 400 No"):
        remote.resolve("v1")


def test_an_upload_that_nobody_takes_is_given_up(registry: FakeRegistry, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(bytes(16 << 20))
    slow = remote_of(registry, limits=Limits(answer_seconds=0.3, least_bytes_per_second=1 << 30))
    registry.is_deaf = True

    with given_up_soon():
        slow.put(Digest.of(bytes(16 << 20)), tmp_path / "blob")


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


def http(registry: FakeRegistry) -> ObjectStoreRemote:
    pytest.importorskip("aiohttp")
    return ObjectStoreRemote(f"http://{registry.host}/bucket", limits=SHORT)


def serve(handler: Handler) -> None:
    begin, _, end = (handler.headers.get("Range") or "bytes=0-")[6:].partition("-")
    start, stop = int(begin), int(end) + 1 if end else len(DATA)
    if start >= len(DATA):
        handler.answer(416)
    else:
        handler.answer(206, DATA[start:stop])


def test_an_object_of_a_store_comes_from_any_byte_on(registry: FakeRegistry) -> None:
    registry.faults.append(on("GET", "/objects/", serve))

    assert read(http(registry)) == (0, DATA)
    assert read(http(registry), 150_000) == (150_000, DATA[150_000:])
    assert read(http(registry), 300_000) == (0, b"")


def test_a_store_without_ranges_gives_all_of_it(registry: FakeRegistry) -> None:
    registry.faults.append(on("GET", "/objects/", status(200, DATA)))

    assert read(http(registry), 150_000) == (0, DATA)


def test_what_a_store_lacks_is_missing(registry: FakeRegistry) -> None:
    registry.faults.append(on("GET", "", status(404)))

    with pytest.raises(MissingObjectError, match="has no object"):
        read(http(registry))


@pytest.mark.parametrize("name", ["headers", "of a length", "chunk size"])
def test_an_object_store_is_given_up(registry: FakeRegistry, name: str) -> None:
    registry.faults.append(on("GET", "/objects/", TRICKLES[name]))

    with given_up_soon():
        read(http(registry))
    registry.faults.append(lambda handler: TRICKLES["headers"](handler) is None)
    with given_up_soon():
        http(registry).resolve("v1")
