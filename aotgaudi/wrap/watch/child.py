"""A guest as our child: in a session of its own, its signals and exit code passed on, and nothing of it left behind.

* It is started through an entrance (`aotgaudi.wrap.watch.entrance`), which dies with us.
* A keeper (`aotgaudi.wrap.watch.keeper`) ends its whole family if we are killed.
* As PID 1, or where asked to, we adopt and reap what it orphans.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO, Any

from aotgaudi.wrap.watch.boot import boot
from aotgaudi.wrap.watch.grace import GRACE_SECONDS
from aotgaudi.wrap.watch.keeper import GOODBYE
from aotgaudi.wrap.watch.place import MARK, Place
from aotgaudi.wrap.watch.processes import Family, adopt_orphans, send


class Child:
    """A guest that runs. Use it as a context manager: at its end nothing of the guest is left. One thread only."""

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        place: Place,
        *,
        adopts: bool = False,
        output: IO[Any] | int | None = None,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        """Starts `words` in `environment`, to which the mark is added.

        Args:
            words: The command; the first is looked up in the guest's own PATH.
            environment: The guest's, whole.
            place: What the guest sees as its root.
            adopts: Adopt and reap what it orphans. For a process that has no other children of its own.
            output: Where its standard output and error go; None: where ours go.
            grace_seconds: How long it has after SIGTERM, also where we are killed.
        """
        self._adopts, self._grace_seconds = adopts, grace_seconds
        if adopts:
            adopt_orphans()
        self._process = subprocess.Popen(
            [
                *boot("entrance"),
                str(os.getpid()),
                str(place.here),
                str(place.root),
                "--",
                *words,
            ],
            env={**environment, MARK: str(place.here)},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
        )
        self.pid = self._process.pid
        try:
            self._keeper = _start_keeper(self.pid, place, grace_seconds)
        except OSError:
            Family(self.pid, place.mark).end(0.0, self._process.poll)
            raise
        strangers = frozenset({self._keeper.pid})
        self.family = Family(self.pid, place.mark, os.getpid() if adopts else 0, strangers)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def poll(self) -> int | None:
        """Returns what the guest ended with, 128 + n for signal n; None while it runs. Reaps what was adopted."""
        status = self._process.poll()
        if self._adopts:
            self._keeper.poll()
            self._reap()
        return None if status is None else exit_code(status)

    def send(self, number: int) -> None:
        """Passes a signal on to the process that was started; it knows its own."""
        if self._process.poll() is None:
            send(self.pid, number)

    def living(self) -> frozenset[int]:
        """Returns the guest's processes that live."""
        return self.family.living()

    def end(self, grace_seconds: float | None = None) -> int:
        """Ends the whole family: SIGTERM for the first process, SIGKILL for what is left; returns its exit code."""
        self.family.end(self._grace_seconds if grace_seconds is None else grace_seconds, self.poll)
        found = self.poll()
        return exit_code(self._process.wait()) if found is None else found

    def close(self) -> None:
        """Ends what still runs, and the keeper. Closing again does nothing."""
        if self._keeper.stdin is None or self._keeper.stdin.closed:
            return
        if self.living() or self._process.poll() is None:
            self.end()
        with contextlib.suppress(OSError):  # It has been killed.
            self._keeper.stdin.write(GOODBYE)
        with contextlib.suppress(OSError):
            self._keeper.stdin.close()
        self._keeper.wait()

    def _reap(self) -> None:
        """Waits for what was adopted and has ended, but not for the guest or the keeper, who are asked by name."""
        known = {self.pid, self._keeper.pid}
        with contextlib.suppress(ChildProcessError):
            while True:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if found is None or found.si_pid in known:
                    return
                os.waitpid(found.si_pid, 0)


def exit_code(status: int) -> int:
    """Returns what a shell would say: a status that is negative stands for a signal, and becomes 128 + n."""
    return status if status >= 0 else 128 - status


def _start_keeper(leader: int, place: Place, grace_seconds: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*boot("keeper"), str(leader), place.mark, str(grace_seconds)],
        env={"PATH": os.defpath},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=place.descriptors,
        bufsize=0,
    )
