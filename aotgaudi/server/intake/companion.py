"""The intake's companion: loads tokenizer and chat template once, and forks the lanes, again and again.

`aotgaudi.server.intake.intake` starts it, with the arguments FD and SECCOMP, before the server is ready; FD is its socket
to the server. The server itself may fork nothing by then, and has threads, which a fork would
leave behind; the companion has one thread, and imports neither torch nor what serves HTTP. Unless SECCOMP is "off", the
kernel lets it fork but run no other program, and lets a lane do neither.

::

    server -> companion   the model directory, as soon as it is known; what a request is checked against, and the lanes;
                          then the names of lanes that do not answer, to be killed; and, with two descriptors, that
                          it is to refuse, and count, what the kernel stops the server from doing
    companion -> server   {"lane": name, "cause": why the lane before it ended}, with the new lane's socket
                          {"error": [class, arguments]} where the model directory cannot be used

It ends, and its lanes with it, when the server's end of the socket closes: also when the server is killed. Signals that
a terminal or a supervisor sends to the whole group are the server's to obey.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import selectors
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from aotgaudi.bundle.model_directory import ModelDirectory
from aotgaudi.errors import AotGaudiError, SpecError, TargetError
from aotgaudi.llm.chat import ChatTemplate
from aotgaudi.llm.tokenizer import Tokenizer
from aotgaudi.runtime.seccomp import forbid_processes, refuse
from aotgaudi.server.intake.lane import LaneLimits, run_lane
from aotgaudi.server.intake.prepare import Preparer, get_ready
from aotgaudi.server.intake.wire import ANSWER_FOR_KERNEL, MAX_PACKET_BYTES, Cause

_LOAD_SECONDS = 60
"""Processor time. Compiling a template computes nothing that it says, but one of 32 MiB may be long."""


class Companion:
    """Forks the lanes, and forks each again when it ends."""

    def __init__(
        self, control: socket.socket, preparer: Preparer, lanes: Mapping[str, LaneLimits], *, is_guarded: bool
    ) -> None:
        """`is_guarded`: the kernel lets lanes start no process."""
        self._control, self._preparer, self._lanes = control, preparer, lanes
        self._is_guarded = is_guarded
        self._counters: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._pids: dict[int, int] = {}
        self._lives: dict[str, int] = {}

    def run(self) -> None:
        """Returns when the server is gone, and the lanes are, too."""
        try:
            for name in self._lanes:
                self._fork(name, "none")
            while True:
                for key, _ in self._selector.select():
                    if key.fd in self._counters:
                        self._refuse(key.fd)
                    elif key.fileobj is not self._control:
                        self._fork(key.data, self._reap(key.fd))
                    elif not self._obey():
                        return  # The server is gone.
        finally:
            for pid in self._pids.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _refuse(self, listener: int) -> None:
        if not refuse(listener, self._counters[listener]):
            self._selector.unregister(listener)
            os.close(self._counters.pop(listener))
            os.close(listener)

    def _obey(self) -> bool:
        """Does what the server says next. Returns whether it is there."""
        packet, descriptors, _, _ = socket.recv_fds(self._control, MAX_PACKET_BYTES, 2)
        if packet == ANSWER_FOR_KERNEL:
            listener, self._counters[listener] = descriptors
            self._selector.register(listener, selectors.EVENT_READ)
        elif packet:
            os.kill(self._pids[self._lives[packet.decode()]], signal.SIGKILL)
        return bool(packet)

    def _fork(self, name: str, cause: Cause) -> None:
        ours, theirs = socket.socketpair()
        life, held_by_lane = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._be_lane(name, theirs, held_by_lane)
        os.close(held_by_lane)
        theirs.close()
        self._pids[life], self._lives[name] = pid, life
        self._selector.register(life, selectors.EVENT_READ, name)
        with ours:
            packet = json.dumps({"lane": name, "cause": cause}).encode()
            socket.send_fds(self._control, [packet], [ours.fileno()])

    def _be_lane(self, name: str, connection: socket.socket, life: int) -> None:
        """Keeps its connection and its end of the pipe alone: each other's is open as long as its owner lives."""
        try:
            for fd in map(int, os.listdir("/proc/self/fd")):
                if fd > 2 and fd not in (connection.fileno(), life):
                    with suppress(OSError):
                        os.close(fd)
            if self._is_guarded:
                forbid_processes()
            run_lane(connection, self._preparer, self._lanes[name])
        finally:
            os._exit(1)

    def _reap(self, life: int) -> Cause:
        """Returns why the lane ended whose pipe is `life`.

        Raises:
            AotGaudiError: it could not even begin.
        """
        self._selector.unregister(life)
        os.close(life)
        _, status = os.waitpid(self._pids.pop(life), 0)
        if os.WIFSIGNALED(status):
            return _CAUSES.get(os.WTERMSIG(status), "killed")
        if os.WEXITSTATUS(status) != 0:
            raise AotGaudiError("a lane of the intake could not begin")
        return "done"


_CAUSES: Mapping[int, Cause] = {
    signal.SIGPROF: "time",
    signal.SIGABRT: "memory",  # How Rust and C++ end where an allocation fails;
    signal.SIGSEGV: "memory",  # and a stack that may not grow.
    signal.SIGBUS: "memory",
}


def _serve(control: socket.socket, seccomp: str) -> None:
    """Serves the server at the other end of `control` until it closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # Threads would not outlive a fork.
    try:
        tokenizer, chat_template = _load(_next(control))
    except AotGaudiError as error:
        arguments = (
            (error.where, error.problem, error.remedy) if isinstance(error, SpecError) else (str(error),)
        )
        _next(control)  # A socket that is closed with something unread loses what was said last.
        control.send(json.dumps({"error": [type(error).__name__, arguments]}).encode())
        return
    model, lanes = _next(control)
    gc.collect()
    gc.freeze()  # What is there stays; so no lane copies it merely by looking for garbage.
    preparer = Preparer(tokenizer, chat_template, model)
    Companion(control, preparer, lanes, is_guarded=seccomp != "off" and _can_only_fork()).run()


def _can_only_fork() -> bool:
    """Has the kernel refuse to run other programs, lanes included. Returns False where it cannot; the server tells."""
    try:
        forbid_processes(may_fork=True)
    except TargetError:
        return False
    return True


def _load(model: ModelDirectory) -> tuple[Tokenizer, ChatTemplate | None]:
    signal.setitimer(signal.ITIMER_PROF, _LOAD_SECONDS)
    try:
        tokenizer, chat_template = Tokenizer.load(model), ChatTemplate.load(model)
        get_ready(tokenizer)
        return tokenizer, chat_template
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _next(control: socket.socket) -> Any:
    """Returns what the server says next. It is the server, which this process trusts, that pickled it."""
    packet = control.recv(MAX_PACKET_BYTES)
    if not packet:
        sys.exit(0)  # The server ended before it was ready.
    return pickle.loads(packet)  # noqa: S301


def main() -> None:
    """Runs until the server is gone."""
    with socket.socket(fileno=int(sys.argv[1])) as control, suppress(ConnectionError):
        try:
            _serve(control, sys.argv[2])
        except AotGaudiError as failed:
            sys.exit(str(failed))
