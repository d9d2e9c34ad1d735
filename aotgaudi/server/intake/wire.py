"""What the server and a lane of the intake say to each other, over a pair of sockets.

::

    message   = length of head, length of tail (two unsigned 32-bit integers, network order), head (JSON), tail (bytes)
    question    head: {"kind"}                      tail: the body as the client sent it
    answer      head: {"model", "lengths", ...}     tail: the token ids of all prompts, 32-bit integers of this machine
                head: {"refusal": [message, param, HTTP status]}
                head: {"failure": what went wrong, without anything of the request}
                and in each {"is_last"}: the lane ends now, and another takes its place

A lane has seen what clients sent and run the model's template, so the server believes nothing that could run code: no
pickle comes back.
"""

from __future__ import annotations

import json
import socket
import struct
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.errors import AotGaudiError, RequestError
from aotgaudi.server.intake.prepare import Kind, PreparedRequest

Cause = Literal["none", "done", "time", "memory", "killed"]
"""Why a lane ended: there was none, it had grown, a limit, or anything else."""

MAX_PACKET_BYTES = 1 << 20
"""Of what server and companion say to each other."""

ANSWER_FOR_KERNEL = b"answer for kernel"
"""What the server says to the companion with the two descriptors of a `HandOver`."""

_LENGTHS = struct.Struct("!II")
LENGTHS_BYTES = _LENGTHS.size
_MAX_BYTES = 64 << 20
_SHORT_BYTES = 64 << 10
_TYPE_CODE = "I"

Head = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """One message, either way."""

    head: Head
    tail: bytes = b""

    def pieces(self) -> tuple[bytes, ...]:
        """Returns what to send, piece by piece: a short message in one, which wakes the other side once."""
        head = json.dumps(self.head).encode()
        opening = _LENGTHS.pack(len(head), len(self.tail)) + head
        return (opening + self.tail,) if len(self.tail) <= _SHORT_BYTES else (opening, self.tail)


class LaneGoneError(ConnectionError):
    """The other side has closed the connection, or says what cannot be. Never leaves this package."""


def lengths_of(opening: bytes) -> tuple[int, int]:
    """Returns the lengths of head and tail that the first `LENGTHS_BYTES` of a message announce."""
    lengths = _LENGTHS.unpack(opening)
    if max(lengths) > _MAX_BYTES:
        raise LaneGoneError(f"a message of {lengths} bytes")
    return lengths


def message_of(head: bytes, tail: bytes) -> Message:
    """Returns the message that these bytes are."""
    try:
        value = json.loads(head)
    except ValueError as error:
        raise LaneGoneError("a message that is no JSON") from error
    if not isinstance(value, dict):
        raise LaneGoneError("a message that is no JSON object")
    return Message(value, tail)


def receive(connection: socket.socket) -> Message:
    """Waits for the next message. Raises LaneGoneError when there is none any more."""
    num_head_bytes, num_tail_bytes = lengths_of(_received(connection, LENGTHS_BYTES))
    return message_of(_received(connection, num_head_bytes), _received(connection, num_tail_bytes))


def _received(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    view, start = memoryview(data), 0
    while start < num_bytes:
        num = connection.recv_into(view[start:])
        if num == 0:
            raise LaneGoneError("the connection was closed")
        start += num
    return bytes(data)


def send(connection: socket.socket, message: Message) -> None:
    """Sends a message, and waits until it is sent."""
    for piece in message.pieces():
        connection.sendall(piece)


def question(kind: Kind, raw: bytes) -> Message:
    """Returns what a lane is asked."""
    return Message({"kind": kind}, raw)


def answer(prepared: PreparedRequest) -> Message:
    """Returns what a lane answers."""
    params = {each.name: getattr(prepared.params, each.name) for each in fields(SamplingParams) if each.init}
    head = {
        "model": prepared.model,
        "lengths": list(map(len, prepared.prompts)),
        "params": params,
        "stream": prepared.stream,
        "stream_usage": prepared.stream_usage,
        "own_names": dict(prepared.own_names),
        "cache_salt": prepared.cache_salt,
    }
    return Message(head, b"".join(array(_TYPE_CODE, prompt).tobytes() for prompt in prepared.prompts))


def refusal(error: RequestError) -> Message:
    """Returns what a lane answers to a request that it refuses."""
    return Message({"refusal": [str(error), error.param, error.http_status]})


def failure(what: str) -> Message:
    """Returns what a lane answers when something is wrong with itself."""
    return Message({"failure": what})


def prepared_of(message: Message) -> PreparedRequest:
    """Returns what a lane has prepared.

    Raises:
        RequestError: what the lane refused the request with.
        AotGaudiError: something is wrong with the lane.
    """
    head = message.head
    if "refusal" in head:
        text, param, status = head["refusal"]
        raise RequestError(text, param=param, http_status=status)
    if "failure" in head:
        raise AotGaudiError(f"the intake could not prepare a request: {head['failure']}")
    params = {**head["params"], "stop": tuple(head["params"]["stop"])}
    params["stop_token_ids"] = tuple(params["stop_token_ids"])
    return PreparedRequest(
        model=head["model"],
        prompts=_split(message.tail, head["lengths"]),
        params=SamplingParams(**params),
        stream=head["stream"],
        stream_usage=head["stream_usage"],
        own_names=head["own_names"],
        cache_salt=head["cache_salt"],
    )


def _split(tail: bytes, lengths: Iterable[int]) -> list[list[int]]:
    token_ids, start = array(_TYPE_CODE, tail), 0
    prompts = []
    for length in lengths:
        prompts.append(token_ids[start : start + length].tolist())
        start += length
    return prompts
