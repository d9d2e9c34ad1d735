"""How many connections the limit of open files allows, in processes of their own."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from aotgaudi.server.options import MAX_CONNECTIONS

pytestmark = pytest.mark.process

_PROGRAM = """
import resource, sys
from aotgaudi.server.options import allow_connections
soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    print(allow_connections(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
except Exception as error:
    print(error)
"""


def run(soft: int, hard: int) -> str:
    arguments = map(str, (soft, hard))
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


def test_the_soft_limit_is_raised_as_far_as_is_needed() -> None:
    connections, soft = map(int, run(256, 10_000).split())

    assert connections == MAX_CONNECTIONS
    assert connections < soft < connections + 100


def test_a_low_hard_limit_gives_fewer_connections_and_keeps_files_for_the_server() -> None:
    connections, soft = map(int, run(110, 110).split())

    assert soft == 110
    assert 40 < connections < 80


def test_a_limit_that_is_higher_already_stays() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    assert run(hard, hard) == f"{MAX_CONNECTIONS} {hard}"


def test_too_few_files_are_a_users_mistake() -> None:
    said = run(30, 30)

    assert said.startswith("connections: need ")
    assert "may open 30 " in said
    assert "ulimit -Hn" in said
