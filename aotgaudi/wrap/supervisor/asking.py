"""What asks a guest while its judge looks elsewhere: whether it serves, and its exercise. A thread each."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from aotgaudi.bundle.exercise import ExerciseRequest
from aotgaudi.wrap.watch.drive import GuestError, is_healthy
from aotgaudi.wrap.watch.session import Session

_BETWEEN_SECONDS, _UNTIL_GOOD_SECONDS = 1.0, 0.1


class Health:
    """Asks the guest again and again, in a thread of its own, whether it serves: `is_good` says what it answered last."""

    def __init__(self, session: Session) -> None:
        self._address = session.plan.address
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="aotgaudi-health", daemon=True)
        self.is_good = False

    def start(self) -> None:
        """Begins to ask."""
        self._thread.start()

    def stop(self) -> None:
        """Asks no more."""
        self._stopped.set()

    def _ask(self) -> None:
        while not self._stopped.is_set():
            self.is_good = is_healthy(self._address)
            self._stopped.wait(_BETWEEN_SECONDS if self.is_good else _UNTIL_GOOD_SECONDS)


class Exercising(threading.Thread):
    """Sends the exercise, in a thread of its own; `error` says why it did not come to its end."""

    def __init__(self, session: Session, requests: Sequence[ExerciseRequest]) -> None:
        super().__init__(name="aotgaudi-exercise", daemon=True)
        self._session, self._requests = session, requests
        self.error: GuestError | None = None

    def run(self) -> None:
        """Part of threading."""
        try:
            self._session.exercise(self._requests)
        except GuestError as error:
            self.error = error
