"""Bytes that are not quite HTTP: each is refused or closed, and the next client notices nothing."""

from __future__ import annotations

import re

from tests.hostile.attackers import COMPLETIONS, HOST, head, say, status_of
from tests.hostile.conftest import Trial
from tests.hostile.proxy import need_nginx, nginx_before

QUESTION = b'{"prompt": "a", "max_tokens": 1}'
NEXT = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
BODY = b"%x\r\n%s\r\n0\r\n\r\n" % (len(QUESTION), QUESTION)
CHUNKED = b"Host: 127.0.0.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"


def get(path: str, *lines: str) -> bytes:
    return "\r\n".join((f"GET {path} HTTP/1.1", *lines, "", "")).encode()


REFUSED = {
    "no HTTP at all": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500,
    "no Host": get("/health"),
    "two Hosts": get("/health", "Host: 127.0.0.1", "Host: other"),
    "space before the colon": get("/health", "Host: 127.0.0.1", "X : a"),
    "NUL in a header": b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: \0\r\n\r\n",
    "a head of 1 MB": get("/health", "Host: 127.0.0.1", *(f"X-{n}: {'a' * 990}" for n in range(1000))),
    "a forged Host": get("/health", "Host: evil.example"),
    "two lengths": head(COMPLETIONS, 5, "Content-Length: 6") + b"12345",
    "a negative length": head(COMPLETIONS, -1),
    "a chunk of negative size": b"POST /v1/completions HTTP/1.1\r\n"
    + CHUNKED
    + b"\r\n-5\r\nabcde\r\n0\r\n\r\n",
    "an unknown coding": b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
}


def test_l9_no_odd_request_is_followed_none_is_redirected_elsewhere_and_many_may_wait_on_one_connection(
    trial: Trial,
) -> None:
    with trial() as it:
        port = int(it.server.base_url.rpartition(":")[2])
        for name, data in REFUSED.items():
            received = say(port, data + NEXT, 5)
            it.expect(b"HTTP/1.1 200" not in received, f"{name}: {received[:300]!r}")
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", HOST):
            received = say(port, get("/metrics/", f"Host: {host}", "Connection: close"), 5)
            found = re.findall(rb"\r\nlocation: *(.*)\r\n", received.lower())
            it.expect(found == ([b"/metrics"] if host == HOST else []), f"{host}: {received[:200]!r}")
            it.expect(status_of(received) >= (307 if host == HOST else 400), f"{host}: {received[:200]!r}")
        received = say(port, NEXT * 5000 + get("/health", "Host: 127.0.0.1", "Connection: close"), 30)
        it.notes.append(f"{received.count(b'HTTP/1.1 200')} of 5001 answered")


REFUSED_BY_THE_PROXY = {
    "10,000 headers": get("/health", "Host: 127.0.0.1", *(f"X-{n}: a" for n in range(10_000))),
    "a length beside chunks": b"POST /v1/completions HTTP/1.1\r\nContent-Length: 4\r\n"
    + CHUNKED
    + b"\r\n"
    + BODY,
    "chunks in HTTP/1.0": b"POST /v1/completions HTTP/1.0\r\n" + CHUNKED + b"\r\n" + BODY,
    "folded headers": get("/health", "Host: 127.0.0.1", "X: a", " b"),
    "HTTP/3.7": b"GET /health HTTP/3.7\r\nHost: 127.0.0.1\r\n\r\n",
}


def test_l9_what_the_server_would_take_does_not_pass_the_proxy(trial: Trial) -> None:
    need_nginx()
    with trial(proxy=nginx_before) as it:
        port = int(it.base_url.rpartition(":")[2])
        for name, data in REFUSED_BY_THE_PROXY.items():
            received = say(port, data + NEXT, 5)
            it.expect(b"HTTP/1.1 200" not in received, f"{name}: {received[:300]!r}")
