"""Clients that come in crowds, stay for ever, vanish, do not read, or speak what is not HTTP."""

from __future__ import annotations

import time

import psutil
import pytest

from tests.e2e.harness import Workplace, eventually
from tests.hostile import attackers
from tests.hostile.attackers import COMPLETIONS, head
from tests.hostile.conftest import Trial

nightly = pytest.mark.nightly

LONG = {"prompt": [[5]] * 64, "max_tokens": 60, "ignore_eos": True}
SHORT = {"prompt": [5], "max_tokens": 1}
BRIEF = ("--client-timeout", "3")
"""Options by which a server waits for its clients for seconds, not minutes."""
ALMOST_4_MIB = 4 * 1024 * 1024 - 99


def test_h1_2500_connections_of_64_prompts_vanish_in_random_order(trial: Trial) -> None:
    with trial() as it:
        it.crowd_seconds = 0.3
        it.attack(attackers.vanish, 2500, LONG, 12.0)
        time.sleep(3)


def test_h1_9000_single_requests_at_once_are_answered_or_refused(trial: Trial) -> None:
    with trial() as it:
        it.crowd_seconds = 0.5
        it.attack(attackers.flood, 9000, SHORT, (200, 429, 503), seconds=240)


@pytest.mark.parametrize(
    "num_files", [110, pytest.param(120, marks=nightly), pytest.param(200, marks=nightly)]
)
def test_h2_idle_connections_beyond_the_limit_of_files(
    trial: Trial, workplace: Workplace, num_files: int
) -> None:
    server = workplace.serve(prefix=("prlimit", f"--nofile={num_files}:{num_files}"))
    with trial(server=server) as it:
        process = psutil.Process(it.server.process.pid)
        with it.attacking(attackers.occupy, num_files + 100, 8.0):
            time.sleep(3)
            process.cpu_percent()
            time.sleep(5)
            it.notes.append(f"{process.cpu_percent():.0f} % of a core")


@pytest.mark.parametrize(
    ("num", "sent", "drip"),
    [
        (1000, b"", b""),
        (500, b"POST /v1/completions HTTP/1.1\r\nX: ", b"a"),
        (500, head(COMPLETIONS, 4000), b" "),
    ],
    ids=["idle", "half headers", "half bodies"],
)
def test_h2_connections_that_never_finish_are_closed(
    trial: Trial, num: int, sent: bytes, drip: bytes
) -> None:
    with trial(*BRIEF) as it:
        it.attack(attackers.hold, num, sent, 20.0, drip, seconds=40)


def test_h3_300_unfinished_bodies_of_4_mib(trial: Trial) -> None:
    with trial(*BRIEF) as it:
        it.attack(attackers.hold, 300, head(COMPLETIONS, ALMOST_4_MIB + 99) + b" " * ALMOST_4_MIB, 20.0)


def test_m10_40_clients_that_never_read_are_dropped_with_their_blocks(trial: Trial) -> None:
    with trial(*BRIEF) as it:
        with it.attacking(attackers.never_read, 40, LONG, 60.0):
            time.sleep(15)
        it.expect(eventually(lambda: it.server.metric("aotgaudi_requests_waiting") == 0), "they still wait")
