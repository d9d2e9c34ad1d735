"""One run of a guest, watched: started in a place, its witnesses read, asked, and ended. For a build and for a supervisor.

::

    with taken(root) as place, Session(plan, place, phase="c") as session:
        session.wait_healthy(600)
        session.set_phase("e")
        answers = session.send_all(requests)
        session.set_phase("v")
        session.settle(10)
        seen = session.look(compares=True)     # -> verdict.judge(seen, expected)
        session.end()

Nothing of the guest outlives the block. One thread only.

From a command and the place that it is given to what a session runs: the same in a build and in a run.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from aotgaudi.bundle.launch import Launch, WarmUpRequest
from aotgaudi.digest import Digest
from aotgaudi.errors import store_error
from aotgaudi.wrap.adapters.base import Phase, PlaceRoot
from aotgaudi.wrap.client import (
    ANSWER_SECONDS,
    Address,
    Answer,
    WrappedServerError,
    is_healthy,
    require_free,
    send_all,
)
from aotgaudi.wrap.events import Event, EventLog, EventReader
from aotgaudi.wrap.file_watch import NO_FILES, FileChanges, FileRules, Watcher, compare
from aotgaudi.wrap.launch import Found
from aotgaudi.wrap.run_options import TERMINATION_SECONDS
from aotgaudi.wrap.sandbox import Child, Sandbox
from aotgaudi.wrap.verdict import Seen, is_settled
from aotgaudi.wrap.witness import SITE

SETTLE_SECONDS = 10.0
"""How long the guest's processes may take to say that they have said everything; they look four times a second."""
_POLL_SECONDS = 0.05
_OF_WITNESS = frozenset({"AOTGAUDI_WITNESS_ALLOWED", "AOTGAUDI_WITNESS_ROLE"})
"""Variables by which whoever has set them for another run would tell this one's witnesses what is not so."""


@dataclass(frozen=True)
class Plan:
    """What to run, and how.

    Attributes:
        words: The whole command.
        environment: Its environment, but for what the witness needs.
        address: Where it will listen.
        rules: What may lie below the place's root.
        repairs: Ids of the repairs that the witness is to make.
        witness_site: The folder that is put on the guest's PYTHONPATH, as a copy.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str]
    address: Address
    rules: FileRules
    repairs: tuple[str, ...] = ()
    witness_site: Path = SITE


class Session:
    """A guest that runs, and what is known of it. A context manager."""

    def __init__(
        self,
        plan: Plan,
        place: Sandbox,
        *,
        phase: str,
        adopts: bool = False,
        output: IO[Any] | int | None = None,
        grace_seconds: float = TERMINATION_SECONDS,
    ) -> None:
        """Starts the guest in `place`, whose files have been restored, at the state byte `phase`.

        `adopts`, `output` and `grace_seconds` are as for `Child`. Raises StoreError, and SpecError if its port is in use.
        """
        require_free(plan.address)
        self.plan, self.place, self.phase = plan, place, phase
        self.account = EventLog()
        self._news: list[Event] = []
        self._answers: tuple[str, ...] | None = None
        self._compared = FileChanges()
        try:
            shutil.copytree(plan.witness_site, place.folder("witness"), dirs_exist_ok=True)
            self._write_allowed()
        except OSError as error:
            raise store_error("prepare", place.here, error) from error
        place.set_state(phase)
        self._reader = EventReader(place.folder("events"))
        self._watcher = Watcher(place.here, plan.rules) if plan.rules.has_sealed else None
        self.started = time.monotonic()
        environment = self._environment()
        try:
            self.child = Child(
                plan.words, environment, place, adopts=adopts, output=output, grace_seconds=grace_seconds
            )
        except OSError as error:  # Too many processes, or a command line that is too long.
            raise store_error("start the guest in", place.here, error) from error

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def seconds(self) -> float:
        """How long ago the guest was started."""
        return time.monotonic() - self.started

    def read(self) -> None:
        """Takes in what its processes have said by now."""
        self._news += self.account.add(self._reader.read())

    def news(self) -> list[Event]:
        """Returns what its processes have said since the last call, by time."""
        self.read()
        news, self._news = self._news, []
        return news

    def set_phase(self, byte: str) -> None:
        """Tells every process what the guest is at; `settle` waits for their answers."""
        self.phase = byte
        self.place.set_state(byte)

    def wait_healthy(self, deadline_seconds: float, on_wait: Callable[[], object] = lambda: None) -> float:
        """Waits until the guest serves; returns how many seconds that took. `on_wait` may end the wait by raising.

        Raises:
            GuestError: it ended before, or the deadline is over.
        """
        while True:
            on_wait()
            status = self.child.poll()
            if status is not None:
                raise WrappedServerError(f"the guest ended with exit code {status} before it served", status)
            if is_healthy(self.plan.address):
                return self.seconds
            if self.seconds >= deadline_seconds:
                raise WrappedServerError(f"the guest did not serve within {deadline_seconds:.0f} s")
            time.sleep(_POLL_SECONDS)

    def send_all(
        self,
        requests: Iterable[WarmUpRequest],
        *,
        timeout_seconds: float = ANSWER_SECONDS,
        on_answer: Callable[[WarmUpRequest, Answer], object] = lambda request, answer: None,
    ) -> tuple[str, ...]:
        """Asks the exercise; returns the digest of each answer (see `Answer.digest`). Raises GuestError."""
        digests = []
        for request, answer in send_all(self.plan.address, requests, timeout_seconds):
            digests.append(answer.digest(is_greedy=request.is_greedy))
            on_answer(request, answer)
        self._answers = tuple(digests)
        return self._answers

    def settle(
        self, timeout_seconds: float = SETTLE_SECONDS, on_wait: Callable[[], object] = lambda: None
    ) -> bool:
        """Waits until every process that has a witness has answered to the phase; returns whether all did in time."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            on_wait()
            if self.has_settled():
                return True
            if time.monotonic() >= deadline or self.child.poll() is not None:
                return False
            time.sleep(_POLL_SECONDS)

    def has_settled(self) -> bool:
        """Whether every living process that has a witness has answered to the phase."""
        living = self.child.living()
        self.read()
        histories = self.account.histories.values()
        return all(is_settled(one, self.phase) for one in histories if one.pid in living)

    def look(self, *, phase: str | None = None, compares: bool = False) -> Seen:
        """Returns all that is known now.

        Args:
            phase: What every process must have answered to; None: the phase that it is.
            compares: Read and compare every sealed byte first.
        """
        living = self.child.living()
        if compares:
            self._compared = self._compared | compare(self.place.here, self.plan.rules)
        files = self.files()
        self.read()  # Last: a process that has ended, or written a file, has said so before.
        return Seen(
            histories=dict(self.account.histories),
            alive=living,
            rules=self.plan.rules,
            files=files,
            phase=self.phase if phase is None else phase,
            answers=self._answers,
        )

    def files(self) -> FileChanges:
        """Returns what was seen of files since the start: by inotify, and by the comparisons that were made."""
        if self._watcher is None:
            return self._compared
        watched = self._watcher.read()
        return FileChanges(
            tuple(sorted({*watched.added, *self._compared.added})),
            tuple(sorted({*watched.changed, *self._compared.changed})),
            tuple(sorted({*watched.missing, *self._compared.missing})),
            is_compared=self._compared.is_compared,
            is_watched=watched.is_watched,
        )

    def end(self, grace_seconds: float | None = None) -> int:
        """Ends the guest in an orderly way, reads its last words, and returns its exit code."""
        status = self.child.end(grace_seconds)
        self.read()
        return status

    def close(self) -> None:
        """Ends what still runs. Closing again does nothing."""
        self.child.close()
        if self._watcher is not None:
            self._watcher.close()

    def _environment(self) -> dict[str, str]:
        root, before = self.place.root, self.plan.environment.get("PYTHONPATH", "")
        environment = {
            **{name: value for name, value in self.plan.environment.items() if name not in _OF_WITNESS},
            "PYTHONPATH": os.pathsep.join(filter(None, (str(root / "witness"), before))),
            "AOTGAUDI_WITNESS": str(root / "events"),
            "AOTGAUDI_WITNESS_ROOTS": json.dumps([str(root / top) for top in self.plan.rules.tops]),
            "AOTGAUDI_WITNESS_STATE": str(root / "state"),
            "AOTGAUDI_WITNESS_REPAIRS": ",".join(self.plan.repairs),
        }
        if self.plan.rules.has_sealed:
            environment["AOTGAUDI_WITNESS_ALLOWED"] = str(root / "allowed")
        return environment

    def _write_allowed(self) -> None:
        """The sealed paths, as the guest sees them."""
        lines = sorted(str(self.place.root / path) for path in self.plan.rules.sealed)
        self.place.folder("allowed").write_text(
            "".join(f"{line}\n" for line in lines), "utf-8", "surrogateescape"
        )


OUTSIDE: Mapping[str, str] = {
    "home/*": "a server's home is that of its user again when it serves",
    "tmp/tmp*": "a temporary file of one run",
    "tmp/pymp-*": "what processes of one run shared",
}
"""Patterns of paths below a place's root that are no part of any capture, whatever the guest is; with the reason."""


def plan_for(
    found: Found,
    launch: Launch,
    place: Sandbox,
    phase: Phase,
    *,
    sealed: Mapping[str, Digest] = NO_FILES,
    left_out: Iterable[str] = (),
) -> Plan:
    """Returns what to run in `place` at `phase`.

    Args:
        found: The command.
        launch: What is built, or the sealed launch: its conditions are established, the model's alias and variables.
        place: Where.
        phase: The first one of the run.
        sealed: What lies below the place's root, by path.
        left_out: Patterns of files that may appear there, besides the guest's own.
    """
    guest, root, flags = found.adapter, PlaceRoot(str(place.root)), found.flags
    patterns = (*(pattern for pattern, _ in guest.left_out), *OUTSIDE, *left_out)
    environment = guest.environment(root, phase, _established(found, launch)).applied(
        _established(found, launch)
    )
    if any(path.startswith("home/") for path in sealed):
        environment["HOME"] = root.home
    return Plan(
        words=guest.command(found.words, flags, root, is_aliased=launch.is_aliased),
        environment=environment,
        address=Address(
            host=flags.host,
            port=flags.port,
            uds=_seen_from_here(flags.uds, place),
            health_path=guest.health_path(),
            served_name=flags.served_name,
            authorization=flags.authorization,
        ),
        rules=FileRules(place.root, sealed=sealed, left_out=tuple(dict.fromkeys(patterns))),
        repairs=launch.repairs,
    )


def _established(found: Found, launch: Launch) -> dict[str, str]:
    """The command's environment; what the guest hashes of it, and is not the pod's own, is as in the launch."""
    hashed = found.adapter.variable_rules.hashed
    ours = {name for name, rule in hashed.items() if not rule.is_of_pod}
    kept = {name: value for name, value in found.environ.items() if name not in ours}
    return {**kept, **{name: value for name, value in launch.place.variables.items() if name in ours}}


def _seen_from_here(uds: str | None, place: Sandbox) -> str | None:
    """A socket below the root lies where we see the place; any other where its name says."""
    prefix = f"{place.root}/"
    return str(place.here / uds[len(prefix) :]) if uds is not None and uds.startswith(prefix) else uds


def link_model(found: Found, launch: Launch, place: Sandbox) -> None:
    """Makes the alias of the model's directory, where `launch` has it seen by that. Raises StoreError."""
    if not launch.is_aliased:
        return
    link = place.folder("model")
    try:
        os.symlink(os.path.abspath(found.model), link)
    except OSError as error:
        raise store_error("make", link, error) from error
