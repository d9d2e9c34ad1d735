"""The processes that preprocess requests: workers under the kernel's limits, and the fork server that starts them.

The fork server starts before the server is ready. It loads tokenizer and chat template once and forks a worker for each
entry of `WORKERS`, and a new one whenever a worker ends. The server itself has threads and may start no process once it is
ready. The fork server has one thread, and imports neither torch nor HTTP nor asyncio. Unless seccomp is "off", the kernel
lets the fork server fork but run no other program, and a worker do neither.

A worker prepares one request at a time. If a chat template or a tokenizer hangs or takes too much memory, only that worker
dies:

==================  =============================================================================================
processor time      a timer of the process (``ITIMER_PROF``), whose signal ends it, even inside C code that holds the
                    interpreter's lock. Time that other processes take does not count
memory              ``RLIMIT_AS``: the size at the start plus a fixed amount. At the limit, Python raises MemoryError
                    and the tokenizer aborts
processes           seccomp: a worker can start none
priority            the worker of large bodies has a lower priority than the engine and the other workers
==================  =============================================================================================

The processes' messages::

    server -> fork server   the model directory, as soon as it is known, and the file of a chat template; a `ServedModel`
                            and the workers' limits (all pickled); then names of workers to kill
    fork server -> server   {"worker": name, "cause": why the worker before it ended}, with the new worker's socket
                            {"error": [class, arguments]} if the model directory cannot be used
                            {"warning": a sentence for the log}, before the workers
    server <-> worker       message  = length of head, length of tail (unsigned 32-bit, network order), head (JSON), tail
                            question   head: {"kind"}                      tail: the body as the client sent it
                            pass on    head: {"grammar": the name of a grammar's parameter}, to the worker of grammars
                            answer     head: {"strings", "text", "ignored"}  tail: the token ids of a text
                                       head: {"model", "lengths", ...}     tail: all prompts' token ids (native 32-bit)
                                       head: {"refusal": [message, param, HTTP status, whether it is a `BodyError`]}
                                       head: {"failure": what went wrong, without content of the request}
                                       and in each {"is_last"}: the worker ends now, and another takes its place

A worker handles hostile text and runs the model's template, so the server unpickles nothing that a worker sends.

The fork server and its workers end when the server closes its end of the socket, which also happens if the server is killed.
They ignore the signals that a terminal or a supervisor sends to the whole process group, since the server handles these.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import resource
import selectors
import signal
import socket
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

from aotgaudi.bundle.model_directory import ModelDirectory
from aotgaudi.child import die_with_parent
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.engine.structured_outputs import StructuredOutputs
from aotgaudi.errors import AotGaudiError, RequestError, SpecError, TargetError
from aotgaudi.runtime.seccomp import forbid_processes, leave_others_alone
from aotgaudi.server.preprocess.body import BodyError
from aotgaudi.server.preprocess.prepare import Kind, PreparedRequest, Preparer, TokenizeKind, get_ready
from aotgaudi.server.preprocess.tokenizing import Tokenized
from aotgaudi.server.reply.plan import ReplyPlan

if TYPE_CHECKING:  # The API server imports this module too, and needs neither tokenizer nor templates.
    from aotgaudi.llm.chat import ChatTemplate
    from aotgaudi.llm.grammars import GrammarCompiler
    from aotgaudi.llm.tokenizer import Tokenizer

Cause = Literal["none", "done", "time", "memory", "killed"]
"""Why a worker ended: "none" if there was none before, "done" if it had grown, the limit that it hit, or another reason."""

MAX_PACKET_BYTES = 1 << 20
"""The largest packet between server and fork server."""

GRAMMARS = "grammar"
"""The worker that compiles grammars, which may occupy it fully."""

LARGE_BODY_BYTES = 64 * 1024
"""Bodies above this size go to a separate worker."""

LENGTHS_BYTES = 8
_LENGTHS = struct.Struct("!II")
_MAX_MESSAGE_BYTES = 64 << 20
_ARRAY_TYPE = "I"
_LOAD_SECONDS = 60
"""Processor time to load tokenizer and template. A template is only compiled then, but one of 32 MiB may take long."""
_SECONDS_PER_BYTE = 1e-6
_KEPT_BYTES = 16 << 20
"""A worker that has grown by more than this ends, so that its memory is freed."""


_TOO_COMPLEX = "its grammar is too complex"


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
        compiles_grammars: Whether it prepares requests with a grammar. Otherwise it passes them on.
    """

    seconds: float
    memory_bytes: int
    memory_bytes_per_token: int = 0
    niceness: int = 0
    wall_seconds: float = 60.0
    compiles_grammars: bool = False

    def for_model(self, max_len: int) -> WorkerLimits:
        """Returns the limits for a model whose length is `max_len` tokens."""
        num_bytes = self.memory_bytes + max_len * self.memory_bytes_per_token
        return replace(self, memory_bytes=num_bytes, memory_bytes_per_token=0)

    def seconds_for(self, num_bytes: int) -> float:
        """Returns the processor time for a request with a body of `num_bytes`: `seconds`, and a second for each MB."""
        return self.seconds + num_bytes * _SECONDS_PER_BYTE

    def too_large(self, grammar: str | None = None) -> RequestError:
        """Returns the refusal of a request that needs too much memory. `grammar` names the parameter if its grammar did."""
        return RequestError(
            f"This request needs more than {self.memory_bytes >> 20} MiB of memory to prepare: "
            + (
                _TOO_COMPLEX
                if grammar
                else "the model's chat template grows without end, or the body has too much in it"
            ),
            param=grammar,
        )

    def too_slow(self, num_bytes: int, grammar: str | None = None) -> RequestError:
        """Returns the refusal of a request that needs too much time. `grammar` is as for `too_large`."""
        return RequestError(
            f"This request took more than {self.seconds_for(num_bytes):.3g} s of processor time to prepare: "
            + (
                _TOO_COMPLEX
                if grammar
                else "the model's chat template runs without end, or the body has too much in it"
            ),
            param=grammar,
        )


WORKERS: Mapping[str, WorkerLimits] = {
    "completion": WorkerLimits(seconds=2.0, memory_bytes=32 << 20),
    "chat": WorkerLimits(seconds=2.0, memory_bytes=32 << 20),
    "large": WorkerLimits(seconds=2.0, memory_bytes=64 << 20, memory_bytes_per_token=1024, niceness=10),
    GRAMMARS: WorkerLimits(
        seconds=2.0, memory_bytes=64 << 20, memory_bytes_per_token=1024, niceness=10, compiles_grammars=True
    ),
}
"""The workers, by name. No chat template delays a completion, no large body a small one, no grammar a request without one.

Together they may use 208 MiB for a model of 8,192 tokens.
"""


# Messages between the server and a worker


@dataclass(frozen=True, slots=True)
class Message:
    """One message, in either direction."""

    head: Mapping[str, Any]
    tail: bytes = b""

    def __bytes__(self) -> bytes:
        head = json.dumps(self.head).encode()
        return b"".join((_LENGTHS.pack(len(head), len(self.tail)), head, self.tail))


class WorkerGoneError(ConnectionError):
    """The other side has closed the connection, or has sent something that is not a message. Stays in this package."""


def lengths_of(opening: bytes) -> tuple[int, int]:
    """Returns the lengths of head and tail from the first `LENGTHS_BYTES` of a message."""
    lengths = _LENGTHS.unpack(opening)
    if max(lengths) > _MAX_MESSAGE_BYTES:
        raise WorkerGoneError(f"a message of {lengths} bytes")
    return lengths


def message_of(head: bytes, tail: bytes) -> Message:
    """Returns the message with this head and tail."""
    try:
        value = json.loads(head)
    except ValueError as error:
        raise WorkerGoneError("a message whose head is not JSON") from error
    if not isinstance(value, dict):
        raise WorkerGoneError("a message whose head is not a JSON object")
    return Message(value, tail)


def receive(connection: socket.socket) -> Message:
    """Waits for the next message and returns it. Raises WorkerGoneError if there will be none."""
    num_head_bytes, num_tail_bytes = lengths_of(_received(connection, LENGTHS_BYTES))
    return message_of(_received(connection, num_head_bytes), _received(connection, num_tail_bytes))


def _received(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:  # A signal may cut it short.
        received = connection.recv(num_bytes - len(data), socket.MSG_WAITALL)
        if not received:
            raise WorkerGoneError("the connection was closed")
        data += received
    return data


def question(kind: Kind | TokenizeKind, raw: bytes) -> Message:
    """Returns the server's question to a worker."""
    return Message({"kind": kind}, raw)


def answer(prepared: PreparedRequest | Tokenized) -> Message:
    """Returns a worker's answer."""
    if isinstance(prepared, Tokenized):
        strings = None if prepared.strings is None else list(prepared.strings)
        ignored = list(prepared.ignored)
        head: dict[str, object] = {"strings": strings, "text": prepared.text, "ignored": ignored}
        return Message(head, array(_ARRAY_TYPE, prepared.token_ids).tobytes())
    params = {each.name: getattr(prepared.params, each.name) for each in fields(SamplingParams) if each.init}
    if prepared.params.structured_outputs is not None:
        params["structured_outputs"] = prepared.params.structured_outputs.as_json()
    head = {
        "model": prepared.model,
        "lengths": list(map(len, prepared.prompts)),
        "params": params,
        "stream": prepared.stream,
        "stream_usage": prepared.stream_usage,
        "own_names": dict(prepared.own_names),
        "ignored": list(prepared.ignored),
        "cache_salt": prepared.cache_salt,
        "num_choices": prepared.num_choices,
        "echoes": list(prepared.echoes),
        "reply": None if prepared.reply is None else asdict(prepared.reply),
        "shows_output": prepared.shows_output,
        "shows_prompt_logprobs": prepared.shows_prompt_logprobs,
    }
    return Message(head, b"".join(array(_ARRAY_TYPE, prompt).tobytes() for prompt in prepared.prompts))


class _PassOn(Exception):  # noqa: N818 - no error
    """A request has a grammar in the named parameter, and this worker compiles none. Stays in this module."""


def passed_on(grammar: str) -> Message:
    """Returns a worker's answer that passes on a request because of the grammar in the parameter `grammar`."""
    return Message({"grammar": grammar})


def grammar_in(message: Message) -> str | None:
    """Returns the parameter with the grammar if the message passes on a request; None if it is an answer."""
    grammar = message.head.get("grammar")
    return grammar if isinstance(grammar, str) else None


def refusal(error: RequestError) -> Message:
    """Returns a worker's answer that refuses a request."""
    return Message({"refusal": [str(error), error.param, error.http_status, isinstance(error, BodyError)]})


def failure(what: str) -> Message:
    """Returns a worker's answer that reports that the worker itself failed."""
    return Message({"failure": what})


def tokenized_of(message: Message) -> Tokenized:
    """Returns the tokens or the text in a worker's answer. Raises what `prepared_of` does."""
    head = _checked(message)
    token_ids = array(_ARRAY_TYPE, message.tail).tolist()
    return Tokenized(
        token_ids=token_ids, strings=head["strings"], text=head["text"], ignored=tuple(head["ignored"])
    )


def prepared_of(message: Message) -> PreparedRequest:
    """Returns the prepared request in a worker's answer.

    Raises:
        RequestError: the worker refused the request.
        AotGaudiError: the worker failed.
    """
    head = _checked(message)
    return PreparedRequest(
        model=head["model"],
        prompts=_split(message.tail, head["lengths"]),
        params=_params_of(head["params"]),
        stream=head["stream"],
        stream_usage=head["stream_usage"],
        own_names=head["own_names"],
        ignored=tuple(head["ignored"]),
        cache_salt=head["cache_salt"],
        num_choices=head["num_choices"],
        echoes=tuple(head["echoes"]),
        reply=None if head["reply"] is None else ReplyPlan(**head["reply"]),
        shows_output=head["shows_output"],
        shows_prompt_logprobs=head["shows_prompt_logprobs"],
    )


def _params_of(values: Mapping[str, Any]) -> SamplingParams:
    """Returns the parameters from their JSON form, in which tuples are lists."""
    params: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    params["logit_bias"] = tuple(map(tuple, params["logit_bias"]))
    if params["structured_outputs"] is not None:
        params["structured_outputs"] = StructuredOutputs(**params["structured_outputs"])
    return SamplingParams(**params)


def _checked(message: Message) -> Mapping[str, Any]:
    head = message.head
    if "refusal" in head:
        text, param, status, is_of_body = head["refusal"]
        raise (BodyError if is_of_body else RequestError)(text, param=param, http_status=status)
    if "failure" in head:
        raise AotGaudiError(f"the preprocessor could not prepare a request: {head['failure']}")
    return head


def _split(tail: bytes, lengths: Iterable[int]) -> list[list[int]]:
    token_ids, start = array(_ARRAY_TYPE, tail), 0
    prompts = []
    for length in lengths:
        prompts.append(token_ids[start : start + length].tolist())
        start += length
    return prompts


# A worker


def run_worker(connection: socket.socket, preparer: Preparer, limits: WorkerLimits) -> NoReturn:
    """Answers questions over `connection` until it closes or this worker has grown too much, and then ends this process."""
    _confine(limits)
    size_at_start = _peak_bytes()
    if not limits.compiles_grammars:
        preparer = replace(preparer, on_grammar=_pass_on)
    with suppress(OSError):  # The server is gone.
        is_last = False
        while not is_last:
            asked = receive(connection)
            signal.setitimer(signal.ITIMER_PROF, limits.seconds_for(len(asked.tail)))
            answered = _answer(preparer, asked, limits)
            signal.setitimer(signal.ITIMER_PROF, 0)
            is_last = _peak_bytes() - size_at_start > _KEPT_BYTES
            connection.sendall(bytes(Message({**answered.head, "is_last": is_last}, answered.tail)))
    os._exit(0)


def _pass_on(param: str) -> NoReturn:
    raise _PassOn(param)


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


def _answer(preparer: Preparer, asked: Message, limits: WorkerLimits) -> Message:
    try:
        kind = asked.head["kind"]
        if kind in get_args(TokenizeKind):
            return answer(preparer.tokenize(kind, asked.tail))
        return answer(preparer.prepare(kind, asked.tail))
    except RequestError as error:
        return refusal(error)
    except _PassOn as grammar:
        return passed_on(str(grammar))
    except MemoryError:
        return refusal(limits.too_large())
    except Exception as error:
        place = extract_tb(error.__traceback__)[-1]
        return failure(f"{type(error).__name__} at {place.filename}:{place.lineno}")
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
            run_worker(connection, self._preparer, self._workers[name])
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
    import aotgaudi.llm.chat
    import aotgaudi.llm.grammars
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
    from aotgaudi.llm.grammars import GrammarCompiler
    from aotgaudi.llm.tokenizer import Tokenizer

    signal.setitimer(signal.ITIMER_PROF, _LOAD_SECONDS)
    try:
        tokenizer, chat_template = Tokenizer.load(model), ChatTemplate.load(model, template_file)
        grammars = GrammarCompiler.over_bytes(tokenizer)
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
