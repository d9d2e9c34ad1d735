"""Reading from file systems of fsspec within bounds of time and memory, whatever the server sends.

fsspec reads an answer whole before it gives it to us, however long that is and takes. S3 and HTTP, where an answer is
somebody else's, are read as streams instead, by the libraries below fsspec (aiobotocore, aiohttp) on its own event loop;
other file systems part by part, with a time for each where they are asynchronous.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from aotgaudi.share.pace import Limits, Pace

_CHUNK_BYTES = 1 << 20
_PART_BYTES = 8 << 20
"""How much is asked for at once where there is no stream: one request, and what one thread holds in memory."""
_PART_WINDOWS = 4

_Read = Callable[[int], Awaitable[bytes]]


@dataclass(frozen=True)
class Stream:
    """A file's bytes from `offset` on, which is what was asked for or 0; `close` says that no more are wanted."""

    offset: int
    chunks: Iterator[bytes]
    close: Callable[[], None]


def timed(files: Any, seconds: float) -> dict[str, float]:
    """Returns the argument that gives a method of `files` a time limit; none where the file system has none."""
    return {"timeout": seconds} if files.async_impl is True else {}


def open_stream(files: Any, path: str, offset: int, num_bytes: int, limits: Limits) -> Stream:
    """Opens the file at `path`, of which `num_bytes` are wanted in all. Raises what fsspec does, and TimeoutError.

    Reading raises SlowError where content does not keep up with the least rate of `limits`.
    """
    protocols = {files.protocol} if isinstance(files.protocol, str) else set(files.protocol)
    opener = _open_http if "http" in protocols else _open_s3 if "s3" in protocols else None
    if opener is None:
        return Stream(offset, _parts(files, path, offset, num_bytes, limits), lambda: None)
    from fsspec.asyn import sync

    start, read, close = sync(files.loop, opener, files, path, offset, timeout=limits.answer_seconds)
    return Stream(
        start,
        _chunks(files.loop, read, num_bytes - start, limits),
        lambda: files.loop.call_soon_threadsafe(close),
    )


async def _open_s3(files: Any, path: str, offset: int) -> tuple[int, _Read, Callable[[], None]]:
    bucket, key, _ = files.split_path(path)
    wanted = {"Range": f"bytes={offset}-"} if offset else {}
    answer = await files._call_s3("get_object", Bucket=bucket, Key=key, **wanted)
    is_partial = answer["ResponseMetadata"]["HTTPStatusCode"] == 206
    return offset if is_partial else 0, answer["Body"].read, answer["Body"].close


async def _open_http(files: Any, path: str, offset: int) -> tuple[int, _Read, Callable[[], None]]:
    from aiohttp import ClientTimeout

    headers = {**files.kwargs.get("headers", {}), "Accept-Encoding": "identity"}
    headers |= {"Range": f"bytes={offset}-"} if offset else {}
    session = await files.set_session()
    options = {**files.kwargs, "headers": headers, "timeout": ClientTimeout(total=None)}
    response = await session.get(files.encode_url(path), **options)
    try:
        files._raise_not_found_for_status(response, path)
    except BaseException:
        response.close()
        raise
    return offset if response.status == 206 else 0, response.content.read, response.close


def _chunks(loop: Any, read: _Read, num_bytes: int, limits: Limits) -> Iterator[bytes]:
    from fsspec.asyn import sync
    from fsspec.exceptions import FSTimeoutError

    pace = Pace(limits.window_seconds)
    pace.keep_up(limits)
    while num_bytes > 0:
        try:
            chunk = bytes(sync(loop, read, min(num_bytes, _CHUNK_BYTES), timeout=pace.seconds_left()))
        except FSTimeoutError:
            continue  # The window is over: it may have brought enough.
        if not chunk:
            return
        pace.count(len(chunk))
        num_bytes -= len(chunk)
        yield chunk


def _parts(files: Any, path: str, offset: int, num_bytes: int, limits: Limits) -> Iterator[bytes]:
    time_limit = timed(files, _PART_WINDOWS * limits.window_seconds)
    while offset < num_bytes:
        stop = min(offset + _PART_BYTES, num_bytes)
        part = bytes(files.cat_file(path, start=offset, end=stop, **time_limit))
        if not part:
            return
        yield part
        offset += len(part)
