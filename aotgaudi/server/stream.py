"""An answer as a stream of server-sent events: one for each token, as vLLM sends them, and as few writes as there can be.

Text that is held back (half a character, the beginning of a stop string) comes with a later token; the event of a token that
brings none is sent all the same, so that whoever measures the time between tokens by events measures that.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from json.encoder import encode_basestring

from aotgaudi.engine.output import TokenEvent
from aotgaudi.errors import RequestError
from aotgaudi.server.generation import Generation
from aotgaudi.server.http import DONE, body_of, escape_line_ends, sse
from aotgaudi.server.responses import AnswerFormat

logger = logging.getLogger(__name__)

_PLACE = "\x00text\x00"
"""Stands where a chunk's text goes; no name of a model has it."""
_MOST_BYTES = 65536
"""As much as is written at once, more or less: whoever reads slowly must not fill the server's memory."""
_WRITTEN_PLACE = encode_basestring(_PLACE).encode()


class ChunkWriter:
    """Writes the chunks of one answer.

    Most carry text and nothing else, and are equal but for it: what stands before and after the text is written once.
    """

    def __init__(self, answer_format: AnswerFormat) -> None:
        self._format = answer_format
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def chunk(self, index: int, event: TokenEvent) -> bytes:
        """Returns the server-sent event that carries `event` for the choice `index`."""
        if event.logprobs or event.finish_reason is not None or not event.text:
            return sse(self._format.chunk(index, event))
        before, after = self._frames.get(index) or self._frame(index)
        return before + escape_line_ends(encode_basestring(event.text)).encode() + after

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        sample = TokenEvent(request_id="", text=_PLACE, token_ids=())
        before, _, after = sse(self._format.chunk(index, sample)).rpartition(_WRITTEN_PLACE)
        self._frames[index] = before, after
        return before, after


async def stream(
    generation: Generation, answer_format: AnswerFormat, num_choices: int, *, include_usage: bool
) -> AsyncIterator[bytes]:
    """Yields whole events until all choices have ended, several at once where several are there."""
    writer, ready = ChunkWriter(answer_format), bytearray()
    try:
        for opening in filter(None, map(answer_format.opening, range(num_choices))):
            yield sse(opening)
        async for index, event in generation.events():
            ready += writer.chunk(index, event)
            if ready and (generation.must_wait or len(ready) >= _MOST_BYTES):
                yield bytes(ready)
                ready.clear()
        if include_usage:
            ready += sse(answer_format.usage_chunk(generation.token_counts))
    except Exception as error:  # The edge of a request; its status is already sent.
        log_unexpected(error)
        ready += sse(body_of(error))
    yield bytes(ready + DONE)


def log_unexpected(error: Exception) -> None:
    """Logs an error that nobody raised on purpose."""
    if not isinstance(error, RequestError):
        logger.error("a request failed", exc_info=error)
