"""Object stores that answer slowly, or with more than was asked for."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from aotgaudi.digest import Digest
from aotgaudi.errors import MissingObjectError, RemoteError
from aotgaudi.share.object_store_remote import ObjectStoreRemote
from aotgaudi.share.pace import Limits
from aotgaudi.share.receiving import receive
from aotgaudi.share.remote import TransientError
from aotgaudi.share.retry import Retry
from aotgaudi.share.transfer import Conduct, Sources
from tests.unit.share.fake_registry import FakeRegistry, Handler, on, status, trickle
from tests.unit.share.test_pace import BODIES, HEADS

pytest.importorskip("aiohttp")

SHORT = Limits(answer_seconds=0.6, document_seconds=0.6, window_seconds=0.4, least_bytes_per_second=4096)
DATA = b"x" * 200_000
DIGEST = Digest.of(DATA)
SLOW = {**{f"head: {name}": act for name, act in HEADS.items()}, **BODIES}


def http(registry: FakeRegistry) -> ObjectStoreRemote:
    return ObjectStoreRemote(f"http://{registry.host}/bucket", limits=SHORT)


def read(remote: ObjectStoreRemote, offset: int = 0) -> tuple[int, bytes]:
    with remote.read(DIGEST, offset) as download:
        return download.offset, b"".join(download.chunks)


def serve(handler: Handler) -> None:
    start = int((handler.headers.get("Range") or "bytes=0-")[6:].rstrip("-"))
    if start >= len(DATA):
        handler.answer(416)
    else:
        handler.answer(206 if start else 200, DATA[start:])


def test_an_object_comes_from_any_byte_on(registry: FakeRegistry) -> None:
    registry.faults.append(on("GET", "/objects/", serve))

    assert read(http(registry)) == (0, DATA)
    assert read(http(registry), 150_000) == (150_000, DATA[150_000:])
    assert read(http(registry), 300_000) == (0, b"")


def test_a_server_without_ranges_gives_all_of_it(registry: FakeRegistry) -> None:
    registry.faults.append(on("GET", "/objects/", status(200, DATA)))

    assert read(http(registry), 150_000) == (0, DATA)


def test_what_is_not_there_is_missing(registry: FakeRegistry) -> None:
    registry.faults.append(on("GET", "", status(404)))

    with pytest.raises(MissingObjectError, match="has no object"):
        read(http(registry))


@pytest.mark.parametrize("act", SLOW.values(), ids=SLOW)
def test_an_object_that_trickles_is_given_up(registry: FakeRegistry, act: Callable[[Handler], None]) -> None:
    registry.faults.append(on("GET", "/objects/", act))
    began = time.monotonic()

    with pytest.raises(RemoteError) as caught:
        read(http(registry))
    assert time.monotonic() - began < 5
    assert "\n" not in str(caught.value)


def test_a_name_that_trickles_is_given_up(registry: FakeRegistry) -> None:
    registry.faults.append(lambda handler: HEADS["headers"](handler) is None)

    with pytest.raises(TransientError):
        http(registry).resolve("v1")


def test_an_answer_without_end_takes_no_memory(registry: FakeRegistry) -> None:
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    registry.faults.append(on("GET", "/objects/", trickle(head, bytes(1 << 20), pause_seconds=0)))

    tracemalloc.start()
    offset, data = read(http(registry))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert (offset, data) == (0, bytes(len(DATA)))
    assert peak_bytes < 16 << 20


def test_s3_that_trickles_is_given_up(
    registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("s3fs")
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{registry.host}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    registry.faults.append(
        on("GET", "", trickle(b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n" + b"x" * 1000, b"x"))
    )
    limits = Limits(answer_seconds=20.0, window_seconds=0.4, least_bytes_per_second=100_000)
    sources = Sources(
        [ObjectStoreRemote("s3://bucket/prefix", limits=limits)],
        Conduct(Retry(num_attempts=2, sleep=lambda _: None)),
    )
    began = time.monotonic()

    with pytest.raises(TransientError, match=r"sent \d+ bytes in 0 s"):
        receive(DIGEST, tmp_path / "part", tmp_path / "whole", lambda file: sources.fill(DIGEST, file))
    assert time.monotonic() - began < 40
    assert (tmp_path / "part").stat().st_size >= 1000
