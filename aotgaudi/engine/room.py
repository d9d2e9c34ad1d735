"""How much may be open at once: requests that wait or run, and the tokens of their prompts. No torch, no threads.

A server has a limit of each. A connection has a share: a quarter of what the others leave. So the more is taken, the less
a greedy connection gets, and one that asks for a single prompt is refused only when the server is full. The rule is that
of shared packet buffers: Choudhury and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches",
IEEE/ACM Transactions on Networking 6(2), 1998.

Thousands of connections with one prompt each are greedy as well, but none of them alone. What sets them apart is that they
are new: a connection that has had an answer before has an eighth of the server to itself and the likes of it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from aotgaudi.errors import RequestError

_SHARE = 4
"""A connection gets one part in so many of what the others leave."""
_RESERVED = 8
"""One part in so many of a limit is not for new connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomLimits:
    """The most that may be open at once, each at least 1. docs/adr/0030 has the memory that the defaults take."""

    max_requests: int = 1024
    max_prompt_tokens: int = 524_288


UNLIMITED = RoomLimits(max_requests=sys.maxsize, max_prompt_tokens=sys.maxsize)
"""For owners that bound what they ask for themselves, as callers of the Python API do."""


@dataclass(slots=True)
class _Quota:
    """One resource: how much of `limit` is taken, and by which connections."""

    name: str
    limit: int
    num_taken: int = 0
    by_connection: Counter[Hashable] = field(default_factory=Counter)

    def reserved(self, num_taken: int) -> int:
        """How much of it is not for new connections where `num_taken` is taken; nothing while nothing is."""
        return self.limit // _RESERVED if num_taken else 0

    def share(self, connection: Hashable) -> int:
        """Returns how much `connection` may hold of what the others leave."""
        return (self.limit - self.num_taken + self.by_connection[connection]) // _SHARE

    def add(self, connection: Hashable, amount: int) -> None:
        """Takes `amount`, or gives it back where it is negative."""
        self.num_taken += amount
        self.by_connection[connection] += amount
        if not self.by_connection[connection]:
            del self.by_connection[connection]


class Room:
    """Counts what is open, and refuses what would be too much. Not thread-safe: the engine's lock guards it.

    A `connection` is any value that stands for one; None is an owner without a share, bound by the server's limits only.
    `is_new`: it has had no answer yet.
    """

    def __init__(self, limits: RoomLimits, max_model_len: int) -> None:
        """One prompt of `max_model_len` tokens always has room on an empty server."""
        self._requests = _Quota("requests", limits.max_requests)
        self._tokens = _Quota("tokens", max(limits.max_prompt_tokens, max_model_len))
        self._num_refused = {
            f"{whose}_{quota.name}": 0
            for whose in ("server", "connection")
            for quota in (self._requests, self._tokens)
        }

    @property
    def num_refused(self) -> Mapping[str, int]:
        """How often something was refused, by reason: whose limit, and of what."""
        return dict(self._num_refused)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is open."""
        return self._requests.num_taken == 0

    def is_crowd(self, connection: Hashable, num_prompts: int) -> bool:
        """Returns whether these prompts, with what the connection has open, are several."""
        return connection is not None and num_prompts + self._requests.by_connection[connection] > 1

    def check(self, connection: Hashable, prompt_lens: Sequence[int], *, is_new: bool = False) -> None:
        """Raises RequestError: 429 where there is no room for all these prompts now, 400 where there never is."""
        has_share = self.is_crowd(connection, len(prompt_lens))
        for quota, amount in ((self._requests, len(prompt_lens)), (self._tokens, sum(prompt_lens))):
            self._check(quota, amount, connection, has_share=has_share, is_new=is_new)

    def turns_away(self, num_before: int) -> bool:
        """Returns whether `enter` would refuse one prompt of a new connection once `num_before` have entered.

        If so, it counts as refused.
        """
        for quota, num_prompts in ((self._requests, num_before), (self._tokens, 0)):
            num_taken = quota.num_taken + num_prompts
            if num_taken + 1 > quota.limit - quota.reserved(num_taken):
                self._num_refused[f"server_{quota.name}"] += 1
                return True
        return False

    def enter(self, connection: Hashable, prompt_lens: Sequence[int], *, is_new: bool = False) -> None:
        """Takes room for all these prompts, or for none. `leave` gives it back, prompt by prompt. Raises as `check` does."""
        self.check(connection, prompt_lens, is_new=is_new)
        self._requests.add(connection, len(prompt_lens))
        self._tokens.add(connection, sum(prompt_lens))

    def leave(self, connection: Hashable, prompt_len: int) -> None:
        """Gives back the room of one request that `enter` has let in."""
        self._requests.add(connection, -1)
        self._tokens.add(connection, -prompt_len)

    def _check(
        self, quota: _Quota, amount: int, connection: Hashable, *, has_share: bool, is_new: bool
    ) -> None:
        num_held = quota.by_connection[connection]
        most = max(quota.limit // _SHARE, 1) if has_share else quota.limit
        what = "prompts" if quota is self._requests else "prompt tokens"
        if amount > most:
            raise RequestError(
                f"{amount} {what} are more than the {most} that this server takes at once", param="prompt"
            )
        reserved = quota.reserved(quota.num_taken) if is_new else 0
        if quota.num_taken + amount > quota.limit - reserved:
            self._refuse(
                "server", quota, f"the server is full: {quota.num_taken} {what} of {quota.limit} wait or run"
            )
        if has_share and num_held + amount > quota.share(connection):
            self._refuse(
                "connection",
                quota,
                f"the server is too full for {amount} more {what} of one connection, which has {num_held} "
                f"and may have {quota.share(connection)}",
            )

    def _refuse(self, whose: str, quota: _Quota, message: str) -> None:
        self._num_refused[f"{whose}_{quota.name}"] += 1
        raise RequestError(f"{message}; try again later", http_status=429)
