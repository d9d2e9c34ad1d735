"""A Ray cluster to build on: one that there is, or one of our own on this machine.

One of our own belongs to a process in a session of its own (`main`): a signal to the builder's process group is the
builder's, which stops at a unit boundary, and not the end of the daemons that its units run under.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from aotgaudi.child import python_command
from aotgaudi.errors import CompileError, SpecError

_ANSWER_SECONDS = 10.0
_CLOSING_SECONDS = 15.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def connected(address: str, num_cpus: int | None = None) -> Iterator[Any]:
    """The module `ray`, connected to the cluster at `address` for as long as the context lasts.

    `address` is as Ray has it, or ``local`` for a cluster of our own with `num_cpus` CPUs (None: this machine's).

    Raises:
        SpecError: Ray is not installed.
        CompileError: the cluster cannot be started or reached.
    """
    if find_spec("ray") is None:
        raise SpecError("--ray", "Ray is not installed", "pip install 'aotgaudi[ray]'")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with contextlib.ExitStack() as ends:
        if address == "local":
            ends.enter_context(_our_token())
            address = ends.enter_context(_our_cluster(num_cpus))
        else:
            _require_answer(address)
        import ray  # It looks for a token once.

        with _kept_handlers():
            try:
                ray.init(address, log_to_driver=False, logging_level="error")
            except Exception as error:
                reason = first_line(error)
                raise CompileError(f"cannot use the Ray cluster at {address}: {reason}") from error
        ends.callback(ray.shutdown)
        yield ray


def first_line(error: Exception) -> str:
    """The first line of what `error` says, or its name; 300 characters at most."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def main() -> None:
    """A process that starts a cluster on this machine, tells its address on stdout, and ends it when stdin ends.

    ``argv[1]`` is how many CPUs it has, or ``null`` for all of them.
    """
    num_cpus = json.loads(sys.argv[1])
    try:
        import ray

        ray.init(
            "local",
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
        )
        said = {"address": ray.get_runtime_context().gcs_address}
    except Exception as error:
        said = {"error": first_line(error)}
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


@contextlib.contextmanager
def _our_token() -> Iterator[None]:
    """Only this process and its children may use what it starts here; unless the environment says who may."""
    ours = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    added = ours.keys() - os.environ.keys()
    os.environ.update({name: ours[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _our_cluster(num_cpus: int | None) -> Iterator[str]:
    """The address of a cluster on this machine, which ends with the context, or with this process however that ends."""
    process = subprocess.Popen(
        python_command("aotgaudi.compile.cluster", json.dumps(num_cpus)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline() or '{"error": "its process ended"}')
        if "error" in said:
            raise CompileError(f"cannot start a Ray cluster on this machine: {said['error']}")
        yield said["address"]
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a cluster of our own: at the end of its stdin, or by force. What it started ends with it."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(_CLOSING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def _require_answer(address: str) -> None:
    """Raises CompileError where nothing listens at ``HOST:PORT``: Ray itself would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not (host and port.isdecimal()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise CompileError(f"cannot use the Ray cluster at {address}: {error}") from error


@contextlib.contextmanager
def _kept_handlers() -> Iterator[None]:
    """Ray takes SIGTERM over, which is ours: it stops the build at a unit boundary."""
    saved = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in saved.items():
            signal.signal(number, handler)
