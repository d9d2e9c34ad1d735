"""Who is let in: a request that can run, under an id of its own, while there is room. No torch, no threads."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from aotgaudi.engine.admission import Admission
from aotgaudi.engine.request import NewRequest
from aotgaudi.engine.room import Room, RoomLimits
from aotgaudi.errors import RequestError


class Gate:
    """Which requests are open, and which others may come in. Not thread-safe: its owner's lock guards it.

    `connection` stands for the connection that requests come over; None: for none. `is_new`: it has had no answer yet.
    """

    def __init__(self, admission: Admission, limits: RoomLimits) -> None:
        """`limits`: how much may be open at once."""
        self.admission, self.room = admission, Room(limits, admission.limits.max_model_len)
        self._open: dict[str, tuple[Hashable, int]] = {}
        self._refusal: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no request is open."""
        return not self._open

    def close(self, reason: str) -> None:
        """Lets nobody in from now on; the first `reason` is the one that is given."""
        self._refusal = self._refusal or reason

    def check(self, requests: Sequence[NewRequest], connection: Hashable, *, is_new: bool) -> None:
        """Refuses what `enter` would refuse, for less than it costs to make something of a request.

        Raises:
            RequestError: 400 when an id is in use, or there is never room; 429 when there is none now; 503 when closed.
        """
        self._check_open(requests)
        self.room.check(connection, _prompt_lens(requests), is_new=is_new)

    def enter(self, requests: Sequence[NewRequest], connection: Hashable, *, is_new: bool) -> None:
        """Lets all of `requests` in, or none. Raises as `check` does."""
        self._check_open(requests)
        self.room.enter(connection, _prompt_lens(requests), is_new=is_new)
        for request in requests:
            self._open[request.request_id] = (connection, len(request.prompt_token_ids))

    def leave(self, request_id: str) -> None:
        """Notes that a request has ended."""
        self.room.leave(*self._open.pop(request_id))

    def _check_open(self, requests: Sequence[NewRequest]) -> None:
        if self._refusal is not None:
            raise RequestError(self._refusal, http_status=503)
        seen: set[str] = set()
        for name in (request.request_id for request in requests):
            if name in self._open or name in seen:
                raise RequestError(f"request id {name!r} is in use", param="request_id")
            seen.add(name)


def _prompt_lens(requests: Sequence[NewRequest]) -> list[int]:
    return [len(request.prompt_token_ids) for request in requests]
