"""From a bundle and a command to a guest that serves warm. The order is the guarantee, and this page has all of it.

1. The signature, if keys are trusted; then the index; then launch and receipt, which must be those that it names.
2. What is asked for here is compared with what was sealed: command, variables, model, versions, machine. What differs is
   named, before anything is read of the cache.
3. Every file is hashed while it is copied into a private place. What the guest loads is what was hashed.
4. The guest starts there, with a witness in each of its processes.
5. It is watched, asked the exercise, and judged; only then is it ready.

Nothing of the bundle is interpreted before its signature holds, and nothing of the cache is by us at all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aotgaudi.bundle.bundle import ANY_BUNDLE, Acceptance, Bundle, open_bundle
from aotgaudi.bundle.restore import restore
from aotgaudi.bundle.sealed import capture_of
from aotgaudi.errors import AotGaudiError, NotWarmError, TargetError
from aotgaudi.guests.base import Phase
from aotgaudi.guests.compare import EXIT_OTHER_MACHINE, compare
from aotgaudi.guests.describe import describe_here
from aotgaudi.guests.found import Found
from aotgaudi.guests.launch import Launch
from aotgaudi.supervisor.app import Answers, Front, Listen
from aotgaudi.supervisor.judge import Case, Judge, Policy
from aotgaudi.supervisor.metrics import Metrics
from aotgaudi.supervisor.signals import Signals
from aotgaudi.watch.place import Place, taken
from aotgaudi.watch.plan import link_model, plan_for
from aotgaudi.watch.session import Session

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What ``aotgaudi run`` is asked for.

    Attributes:
        bundle: Of a capture.
        words: The guest's command; empty for the sealed one.
        extra_words: Words behind that, which must change no code.
        environ: The environment that the guest would have without us.
        acceptance: Which bundles may be used.
        policy: What is demanded.
        exercises: Whether the sealed exercise is replayed before ready.
        repairs: Whether the sealed repairs are made.
        root: Where the guest sees its files; None: where it saw them in the build.
        listen: Where we answer.
        began: `time.monotonic` of the process's start.
    """

    bundle: Path
    environ: Mapping[str, str]
    words: tuple[str, ...] = ()
    extra_words: tuple[str, ...] = ()
    acceptance: Acceptance = ANY_BUNDLE
    policy: Policy = field(default_factory=Policy)
    exercises: bool = True
    repairs: bool = True
    root: Path | None = None
    listen: Listen = field(default_factory=Listen)
    began: float = 0.0


def run(options: RunOptions) -> int:
    """Runs a guest from a bundle until it ends; returns its exit code. For the main thread of a process of its own.

    Raises:
        CorruptError, UntrustedError: the bundle's bytes are not what was sealed, or not to be trusted.
        NotWarmError, TargetError: the launch, or this machine, is another one, or the guest was not warm.
        SpecError, StoreError: the command, the root or the address cannot be used.
        GuestError: the guest ended or hung before it was ready.
    """
    with Signals() as signals:
        bundle = open_bundle(options.bundle, options.acceptance)
        found, here, why_cold = _compared(bundle, options)
        metrics = Metrics()
        metrics.set("aotgaudi_verify_seconds", time.monotonic() - options.began)
        metrics.set("aotgaudi_guest_residuals", len(capture_of(bundle).residuals))
        metrics.set("aotgaudi_capture_info", 1, *_about(bundle).values())
        reception = _Reception(metrics)
        with (
            Front(options.listen, reception.answers()) as front,
            taken(Path(here.place.root), needed_bytes=capture_of(bundle).num_bytes) as place,
        ):
            _log.info("http://%s:%d: /ready /live /metrics /report", options.listen.host, front.port)
            if not why_cold:
                _restore(bundle, place, metrics)
            link_model(found, place)
            case = _case(bundle, options, why_cold)
            phase, byte = _phase(options.policy, why_cold)
            plan = plan_for(
                found, here if why_cold else bundle.launch, place, phase, **_sealed(bundle, why_cold)
            )
            signals.hold()
            grace_seconds = options.policy.grace_seconds
            with Session(plan, place, phase=byte, adopts=True, grace_seconds=grace_seconds) as session:
                judge = Judge(session, case, options.policy, metrics, signals)
                reception.judge = judge
                return judge.run()


def _compared(bundle: Bundle, options: RunOptions) -> tuple[Found, Launch, str]:
    """Returns what the command starts, as a launch, and why that must start cold: empty where it need not.

    Raises NotWarmError or TargetError where it must not start cold.
    """
    sealed = bundle.launch
    words = (*(options.words or sealed.words), *options.extra_words)
    root = sealed.place.root if options.root is None else str(options.root)
    found, here = describe_here(sealed, words, options.environ, root=root)
    if not options.repairs:
        here = here.model_copy(update={"repairs": ()})
    comparison = compare(sealed, here, found.guest.variable_rules)
    why, exit_code = comparison.sentence(), comparison.exit_code
    if comparison.is_same and root != sealed.place.root:
        why, exit_code = f"--root is {root}, and the sealed files hold the path {sealed.place.root}", 3
    elif comparison.is_same:
        return found, here, ""
    if options.policy.require_warm:
        error: type[AotGaudiError] = TargetError if exit_code == EXIT_OTHER_MACHINE else NotWarmError
        raise error(f"the guest would not be warm: {why}")
    _log.warning("starting cold, in a private cache: %s", why)
    return found, here, why


def _restore(bundle: Bundle, place: Place, metrics: Metrics) -> None:
    restored = restore(bundle, place.here)
    metrics.set("aotgaudi_restore_seconds", restored.seconds)
    _log.info(
        "%d files, %d bytes, verified and restored in %.2f s",
        restored.files,
        restored.bytes,
        restored.seconds,
    )


def _sealed(bundle: Bundle, why_cold: str) -> dict[str, Any]:
    receipt = capture_of(bundle)
    left_out = tuple(one.pattern for one in receipt.left_out)
    sealed = {} if why_cold else {file.path: file.digest for file in receipt.files}
    return {"sealed": sealed, "left_out": left_out}


def _phase(policy: Policy, why_cold: str) -> tuple[Phase, str]:
    if why_cold:
        return "cold", "c"
    return ("load", "l") if policy.require_warm else ("measure", "m")


def _case(bundle: Bundle, options: RunOptions, why_cold: str) -> Case:
    receipt = capture_of(bundle)
    return Case(
        expected=None if why_cold else receipt.expected,
        requests=bundle.launch.exercise.requests if options.exercises else (),
        why_cold=why_cold,
        about=_about(bundle),
    )


def _about(bundle: Bundle) -> dict[str, str]:
    """The labels of ``aotgaudi_capture_info``, in its order."""
    epoch = "" if bundle.statement is None else str(bundle.statement.epoch)
    return {"launch": bundle.receipt.manifest_id, "bundle": str(bundle.path), "epoch": epoch}


class _Reception:
    """What the front is told before there is a guest, and then by its judge."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.judge: Judge | None = None

    def answers(self) -> Answers:
        return Answers(self._not_ready, self._not_live, self._report, self._metrics)

    def _not_ready(self) -> str:
        return "the sealed files are being restored" if self.judge is None else self.judge.not_ready()

    def _not_live(self) -> str:
        return "" if self.judge is None else self.judge.not_live()

    def _report(self) -> Mapping[str, Any]:
        return {"stage": "restoring"} if self.judge is None else self.judge.report()
