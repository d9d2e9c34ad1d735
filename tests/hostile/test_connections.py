"""Clients that come in thousands, stay for ever, vanish, or do not read.

Behind nginx with ``ci/templates/nginx.conf``, slow clients are closed, and others hardly notice (``--judge-times``). Without
it, they may stay; the server must live, stay bounded in memory, and give right answers to those whom it answers. How long
others wait is not promised.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import httpx
import psutil
import pytest

from tests.e2e.harness import Workplace, eventually
from tests.hostile import attackers
from tests.hostile.attackers import COMPLETIONS, head
from tests.hostile.conftest import Trial
from tests.hostile.proxy import need_nginx, nginx_before
from tests.hostile.server import Ordeal

LONG = {"prompt": [[5]] * 64, "max_tokens": 60, "ignore_eos": True}
SHORT = {"prompt": [5], "max_tokens": 1}
BRIEF_SECONDS = 3
"""How long the proxy waits for its clients here, instead of 20 s."""
ALMOST_4_MIB = 4 * 1024 * 1024 - 99

Start = Callable[..., AbstractContextManager[Ordeal]]


@dataclass
class _Edge:
    """Starts servers as clients reach them: with nginx in front, or without."""

    trial: Trial
    has_nginx: bool

    def __call__(self, *, is_timed: bool = True, is_brief: bool = True) -> AbstractContextManager[Ordeal]:
        """`is_brief`: a proxy closes clients that are slower than `BRIEF_SECONDS`.

        Without `is_timed`, a proxy does not help those who wait either: it counts requests, not their prompts.
        """
        if not self.has_nginx:
            return self.trial(is_timed=False)
        proxy = partial(nginx_before, timeout_seconds=BRIEF_SECONDS if is_brief else 20)
        return self.trial(proxy=proxy, is_timed=is_timed)


@pytest.fixture
def behind_nginx(trial: Trial) -> _Edge:
    need_nginx()
    return _Edge(trial, has_nginx=True)


@pytest.fixture(params=["nginx", "bare"])
def edge(request: pytest.FixtureRequest, trial: Trial) -> _Edge:
    if request.param == "nginx":
        need_nginx()
    return _Edge(trial, request.param == "nginx")


def test_h1_2500_connections_of_64_prompts_vanish_in_random_order(edge: _Edge) -> None:
    with edge(is_timed=False) as it:
        it.attack(attackers.vanish, 2500, LONG, 12.0)
        time.sleep(3)


def test_h1_9000_single_requests_at_once_are_answered_or_refused(edge: _Edge) -> None:
    with edge(is_brief=False) as it:  # The attacker itself takes seconds to send so much.
        it.attack(attackers.flood, 9000, SHORT, (200, 429, 503), seconds=240)


def test_h2_idle_connections_of_a_server_that_may_open_few_files(
    behind_nginx: _Edge, workplace: Workplace
) -> None:
    server = workplace.serve(prefix=("prlimit", "--nofile=110:110"))
    with behind_nginx.trial(server=server, proxy=nginx_before, is_timed=False) as it:
        process = psutil.Process(it.server.process.pid)
        with it.attacking(attackers.occupy, 210, 8.0):
            time.sleep(3)
            process.cpu_percent()
            time.sleep(5)
            percent = process.cpu_percent()
        it.notes.append(f"{percent:.0f} % of a core")
        it.expect(percent < 90, f"the server burned {percent:.0f} % of a core")


@pytest.mark.parametrize(
    ("num", "sent", "drip"),
    [
        (1000, b"", b""),
        (500, b"POST /v1/completions HTTP/1.1\r\nX: ", b"a"),
        (500, head(COMPLETIONS, 4000), b" "),
    ],
    ids=["idle", "half headers", "bodies byte by byte"],
)
def test_h2_others_are_served_beside_connections_that_never_finish(
    edge: _Edge, num: int, sent: bytes, drip: bytes
) -> None:
    with edge(is_timed=False) as it:
        with it.attacking(attackers.hold, num, sent, 60.0, drip):
            time.sleep(8)
            it.attacked.add(it.watch.cut())
        it.expect(len(it.attacked.first_token) > 20, f"{len(it.attacked.first_token)} answers in 8 s")


@pytest.mark.parametrize(
    ("num", "sent", "drip"),
    [
        (1000, b"", b""),
        (500, b"POST /v1/completions HTTP/1.1\r\nX: ", b"a"),
        (500, head(COMPLETIONS, 4000), b""),
        (300, head(COMPLETIONS, ALMOST_4_MIB + 99) + b" " * ALMOST_4_MIB, b""),
    ],
    ids=["idle", "half headers", "half bodies", "half bodies of 4 MiB"],
)
def test_h2_connections_that_never_finish_are_closed(
    behind_nginx: _Edge, num: int, sent: bytes, drip: bytes
) -> None:
    with behind_nginx() as it:
        it.attack(
            attackers.hold, num, sent, 40.0, drip, seconds=60
        )  # The attacker itself takes seconds to send so much.


def test_h3_300_unfinished_bodies_of_4_mib_take_a_bounded_memory(trial: Trial) -> None:
    with (
        trial(is_timed=False) as it,
        it.attacking(attackers.hold, 300, head(COMPLETIONS, ALMOST_4_MIB + 99) + b" " * ALMOST_4_MIB, 60.0),
    ):
        time.sleep(10)


def test_m10_40_clients_that_never_read_are_dropped_with_their_blocks(behind_nginx: _Edge) -> None:
    with behind_nginx(is_timed=False) as it:
        with it.attacking(attackers.never_read, 40, LONG, 60.0):
            time.sleep(15)
        it.expect(eventually(lambda: it.server.metric("aotgaudi_requests_waiting") == 0), "they still wait")


def test_the_template_streams_and_passes_on_what_the_server_says(workplace: Workplace) -> None:
    """The server runs for seconds, and has no room for as many prompts again as long as one of the first is open."""
    need_nginx()
    prompts = [[5]] * 64
    body = {"prompt": prompts, "max_tokens": 60, "ignore_eos": True, "stream": True}
    with workplace.serve("--max-requests", "64") as server, nginx_before(server.base_url) as url:
        engine = server.engine
        with httpx.Client(base_url=url, timeout=30) as client:
            with client.stream("POST", COMPLETIONS, json=body) as response:
                lines = response.iter_lines()
                assert next(lines).startswith("data: {")
                engine.suspend()  # The first event has passed, and there is no more for now.
                full = client.post(COMPLETIONS, json={"prompt": prompts, "max_tokens": 1})
                engine.resume()
                rest = list(lines)
            other_host = client.get("/health", headers={"Host": "evil.example"})
            too_long = client.post(COMPLETIONS, content=b" " * (5 << 20))

        assert rest[-2] == "data: [DONE]"
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        assert "the server is full" in full.json()["error"]["message"]
        assert other_host.status_code == 421
        assert too_long.status_code == 413
