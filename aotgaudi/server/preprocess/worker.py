"""The processes that preprocess requests: workers under the kernel's limits, and the fork server that starts them.

The fork server starts before the server is ready. It loads tokenizer, chat template and grammar library once, forks a
worker for each entry of `WORKERS`, and a new one whenever a worker ends. The server itself has threads and may start no
process once it is ready. The fork server has one thread, and imports neither torch nor HTTP nor asyncio. Unless seccomp is
"off", the kernel lets the fork server fork but run no other program, and a worker do neither.

A worker prepares one request at a time. If a chat template, a tokenizer or a grammar hangs or takes too much memory, only
that worker dies:

==================  =============================================================================================
processor time      a timer of the process (``ITIMER_PROF``), whose signal ends it, even inside C code that holds the
                    interpreter's lock. Time that other processes take does not count
memory              ``RLIMIT_AS``: the size at the start plus a fixed amount. At the limit, Python raises MemoryError
                    and the tokenizer aborts
processes           seccomp: a worker can start none
priority            the worker of large bodies and grammars has a lower priority than the engine and the other workers
==================  =============================================================================================

The processes' messages::

    server -> fork server   the model directory, as soon as it is known, and the file of a chat template; a `ServedModel`
                            and the workers' limits (all pickled); then names of workers to kill
    fork server -> server   {"worker": name, "cause": why the worker before it ended}, with the new worker's socket
                            {"error": [class, arguments]} if the model directory cannot be used
                            {"warning": a sentence for the log}, before the workers
    server -> worker        kind, NUL, the body as the client sent it
    worker -> server        `GRAMMAR`, the name of a parameter: its grammar is checked now
                            `ANSWER` or `LAST`, an answer (`aotgaudi.server.preprocess.prepare`); after the last one the
                            worker ends, and another takes its place

Messages from and to a worker are those of `multiprocessing.connection.Connection`. A worker handles hostile text and runs
the model's template, so the server unpickles nothing that a worker sends.

The fork server and its workers end when the server closes its end of the socket, which also happens if the server is killed.
They ignore the signals that a terminal or a supervisor sends to the whole process group, since the server handles these.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import pickle
import resource
import selectors
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

from aotgaudi.bundle.model_directory import ModelDirectory
from aotgaudi.child import die_with_parent
from aotgaudi.errors import AotGaudiError, RequestError, SpecError, TargetError
from aotgaudi.runtime.seccomp import forbid_processes, leave_others_alone
from aotgaudi.server.preprocess.prepare import (
    Answer,
    Kind,
    Preparer,
    TokenizeKind,
    answer_to_bytes,
    get_ready,
)

if TYPE_CHECKING:  # The API server imports this module too, and needs neither tokenizer nor templates.
    from aotgaudi.llm.chat import ChatTemplate
    from aotgaudi.llm.grammar_compiler import GrammarCompiler
    from aotgaudi.llm.tokenizer import Tokenizer

Cause = Literal["none", "done", "time", "memory", "killed"]
"""Why a worker ended: "none" if there was none before, "done" if it had grown, the limit that it hit, or another reason."""

MAX_PACKET_BYTES = 1 << 20
"""The largest packet between server and fork server."""

ANSWER, LAST, GRAMMAR = b"=", b"!", b"?"
"""The first byte of a worker's message."""

_LOAD_SECONDS = 60
"""Processor time to load tokenizer and template. A template is only compiled then, but one of 32 MiB may take long."""
_SECONDS_PER_BYTE = 1e-6
_KEPT_BYTES = 16 << 20
"""A worker that has grown by more than this ends, so that its memory is freed."""


@dataclass(frozen=True, kw_only=True)
class WorkerLimits:
    """The resources that one worker may use.

    Attributes:
        seconds: Processor time for a request with an empty body.
        memory_bytes: Memory in addition to its size at the start, for a model of length 0.
        memory_bytes_per_token: Further memory for each token of the model's length. A tokenizer takes some 200 bytes a
            character, and a token has four or five characters.
        niceness: As for nice(2).
        wall_seconds: A worker that takes longer to answer must be stopped or starved, and is killed.
    """

    seconds: float
    memory_bytes: int
    memory_bytes_per_token: int = 0
    niceness: int = 0
    wall_seconds: float = 60.0

    def for_model(self, max_len: int) -> WorkerLimits:
        """Returns the limits for a model whose length is `max_len` tokens."""
        num_bytes = self.memory_bytes + max_len * self.memory_bytes_per_token
        return replace(self, memory_bytes=num_bytes, memory_bytes_per_token=0)

    def seconds_for(self, num_bytes: int) -> float:
        """Returns the processor time for a request with a body of `num_bytes`: `seconds`, and a second for each MB."""
        return self.seconds + num_bytes * _SECONDS_PER_BYTE

    def too_large(self, grammar: str | None = None) -> RequestError:
        """Returns the refusal of a request that needs too much memory. `grammar` names the parameter if its grammar did."""
        limit = f"This request needs more than {self.memory_bytes >> 20} MiB of memory to prepare"
        return _refusal(limit, "grows", grammar)

    def too_slow(self, num_bytes: int, grammar: str | None = None) -> RequestError:
        """Returns the refusal of a request that needs too much time. `grammar` is as for `too_large`."""
        limit = (
            f"This request took more than {self.seconds_for(num_bytes):.3g} s of processor time to prepare"
        )
        return _refusal(limit, "runs", grammar)


def _refusal(limit: str, does: str, grammar: str | None) -> RequestError:
    template = f"the model's chat template {does} without end, or the body has too much in it"
    cause = "its grammar is too complex" if grammar else template
    return RequestError(f"{limit}: {cause}", param=grammar)


WORKERS: Mapping[str, WorkerLimits] = {
    "completion": WorkerLimits(seconds=2.0, memory_bytes=32 << 20),
    "chat": WorkerLimits(seconds=2.0, memory_bytes=32 << 20),
    "slow": WorkerLimits(seconds=2.0, memory_bytes=64 << 20, memory_bytes_per_token=1024, niceness=10),
}
"""The workers, by name: no chat template delays a completion, and no large body and no grammar a small request without one.

Together they may use 136 MiB for a model of 8,192 tokens.
"""


# A worker


def run_worker(connection: Connection, preparer: Preparer, limits: WorkerLimits) -> NoReturn:
    """Answers questions over `connection` until it closes or this worker has grown too much, and then ends this process."""
    _confine(limits)
    size_at_start = _peak_bytes()
    grammars: list[str] = []

    def note(param: str) -> None:
        grammars.append(param)
        connection.send_bytes(GRAMMAR + param.encode())

    preparer = replace(preparer, on_grammar=note)
    with suppress(EOFError, OSError):  # The server is gone.
        mark = ANSWER
        while mark is ANSWER:
            kind, _, raw = connection.recv_bytes().partition(b"\0")
            grammars.clear()
            signal.setitimer(signal.ITIMER_PROF, limits.seconds_for(len(raw)))
            answered = answer_to_bytes(_answer(preparer, kind.decode(), raw, limits, grammars))
            signal.setitimer(signal.ITIMER_PROF, 0)
            mark = LAST if _peak_bytes() - size_at_start > _KEPT_BYTES else ANSWER
            connection.send_bytes(mark + answered)
    os._exit(0)


def _confine(limits: WorkerLimits) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.nice(limits.niceness)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = num_pages * resource.getpagesize() + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _answer(preparer: Preparer, kind: str, raw: bytes, limits: WorkerLimits, grammars: list[str]) -> Answer:
    try:
        return preparer.prepare(cast("Kind | TokenizeKind", kind), raw)
    except RequestError as error:
        return error
    except MemoryError:
        return limits.too_large(*grammars)
    except Exception as error:
        place = extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {place.filename}:{place.lineno}"
    except BaseException:  # Rust code that runs out of memory may panic instead of aborting.
        os.abort()


# The fork server


class ForkServer:
    """Forks the workers, and replaces each that ends."""

    def __init__(
        self,
        control: socket.socket,
        preparer: Preparer,
        workers: Mapping[str, WorkerLimits],
        *,
        is_guarded: bool,
    ) -> None:
        """With `is_guarded`, the kernel keeps workers from starting processes."""
        self._control, self._preparer, self._workers = control, preparer, workers
        self._is_guarded, self._pid = is_guarded, os.getpid()
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._pids: dict[int, int] = {}
        self._lives: dict[str, int] = {}

    def run(self) -> None:
        """Forks workers until the server is gone, and then ends the workers and returns."""
        try:
            for name in self._workers:
                self._fork(name, "none")
            while True:
                for key, _ in self._selector.select():
                    if key.fileobj is not self._control:
                        self._fork(key.data, self._reap(key.fd))
                    elif not self._obey():
                        return
        finally:
            for pid in self._pids.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _obey(self) -> bool:
        """Executes the server's next message. Returns False if the server is gone."""
        packet = self._control.recv(MAX_PACKET_BYTES)
        if packet:
            os.kill(self._pids[self._lives[packet.decode()]], signal.SIGKILL)
        return bool(packet)

    def _fork(self, name: str, cause: Cause) -> None:
        ours, theirs = socket.socketpair()
        life, held_by_worker = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._be_worker(name, theirs, held_by_worker)
        os.close(held_by_worker)
        theirs.close()
        self._pids[life], self._lives[name] = pid, life
        self._selector.register(life, selectors.EVENT_READ, name)
        with ours:
            packet = json.dumps({"worker": name, "cause": cause}).encode()
            socket.send_fds(self._control, [packet], [ours.fileno()])

    def _be_worker(self, name: str, connection: socket.socket, life: int) -> None:
        """Turns this process into a worker. Keeps only its connection and its end of the pipe that shows that it lives."""
        try:
            for fd in map(int, os.listdir("/proc/self/fd")):
                if fd > 2 and fd not in (connection.fileno(), life):
                    with suppress(OSError):
                        os.close(fd)
            die_with_parent(self._pid, signal.SIGKILL)  # A worker that hangs would not notice.
            leave_others_alone()  # Not even the fork server, which is inside the same domain until now.
            if self._is_guarded:
                forbid_processes()
            run_worker(Connection(connection.detach()), self._preparer, self._workers[name])
        finally:
            os._exit(1)

    def _reap(self, life: int) -> Cause:
        """Returns why the worker whose pipe is `life` ended.

        Raises:
            AotGaudiError: the worker could not begin.
        """
        self._selector.unregister(life)
        os.close(life)
        _, status = os.waitpid(self._pids.pop(life), 0)
        if os.WIFSIGNALED(status):
            return _CAUSES.get(os.WTERMSIG(status), "killed")
        if os.WEXITSTATUS(status) != 0:
            raise AotGaudiError("a preprocessor worker could not begin")
        return "done"


_CAUSES: Mapping[int, Cause] = {
    signal.SIGPROF: "time",
    signal.SIGABRT: "memory",  # Rust and C++ end so if an allocation fails.
    signal.SIGSEGV: "memory",  # A stack that may not grow ends so.
    signal.SIGBUS: "memory",
}


def main() -> None:
    """Runs the fork server until the socket ``argv[1]``, which leads to the server, closes. ``argv[2]`` is a `Seccomp`."""
    leave_others_alone()
    with socket.socket(fileno=int(sys.argv[1])) as control, suppress(ConnectionError):
        try:
            _serve(control, sys.argv[2])
        except AotGaudiError as failed:
            sys.exit(str(failed))


def _serve(control: socket.socket, seccomp: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # Threads do not survive a fork.
    logging.disable()  # The engine's process loads the same files, and logs what is to be said about them.
    import aotgaudi.llm.chat
    import aotgaudi.llm.grammar_compiler
    import aotgaudi.llm.tokenizer  # noqa: F401 - while the server finds out which model it is

    try:
        tokenizer, chat_template, grammars = _load(*_next(control))
    except AotGaudiError as error:
        arguments = (
            (error.where, error.problem, error.remedy) if isinstance(error, SpecError) else (str(error),)
        )
        _next(control)  # Closing a socket with unread data would discard our error.
        control.send(json.dumps({"error": [type(error).__name__, arguments]}).encode())
        return
    model, workers = _next(control)
    parser = model.parsers.tool_call_parser
    if parser is not None and (chat_template is None or not chat_template.takes_tools):
        warning = (
            f"--tool-call-parser {parser}: the chat template does not mention tools, so the model is not shown those of a"
            " request (--chat-template FILE takes one that does)"
        )
        control.send(json.dumps({"warning": warning}).encode())
    gc.collect()
    gc.freeze()  # Otherwise collecting garbage would make workers copy these pages.
    preparer = Preparer(tokenizer, chat_template, grammars, model)
    ForkServer(control, preparer, workers, is_guarded=seccomp != "off" and _can_only_fork()).run()


def _can_only_fork() -> bool:
    """Makes the kernel refuse other programs here and in workers. Returns False if it cannot; the server logs that."""
    try:
        forbid_processes(may_fork=True)
    except TargetError:
        return False
    return True


def _load(
    model: ModelDirectory, template_file: Path | None
) -> tuple[Tokenizer, ChatTemplate | None, GrammarCompiler]:
    from aotgaudi.llm.chat import ChatTemplate
    from aotgaudi.llm.grammar_compiler import GrammarCompiler
    from aotgaudi.llm.tokenizer import Tokenizer

    signal.setitimer(signal.ITIMER_PROF, _LOAD_SECONDS)
    try:
        tokenizer, chat_template = Tokenizer.load(model), ChatTemplate.load(model, template_file)
        grammars = GrammarCompiler.load(model, tokenizer)
        get_ready(tokenizer)
        return tokenizer, chat_template, grammars
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _next(control: socket.socket) -> Any:
    """Returns the next value that the server has pickled. This process trusts the server."""
    packet = control.recv(MAX_PACKET_BYTES)
    if not packet:
        sys.exit(0)  # The server ended before it was ready.
    return pickle.loads(packet)  # noqa: S301
