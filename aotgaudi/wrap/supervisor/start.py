"""What was admitted is restored, started, watched and judged: from the first thing that is written to the guest's end."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aotgaudi.bundle.bundle import Bundle
from aotgaudi.bundle.restore import restore
from aotgaudi.bundle.sealed import capture_of
from aotgaudi.wrap.adapters.base import Phase
from aotgaudi.wrap.supervisor.admission import Admitted, RunOptions
from aotgaudi.wrap.supervisor.app import Answers, Front
from aotgaudi.wrap.supervisor.judge import Case, Judge
from aotgaudi.wrap.supervisor.metrics import Metrics
from aotgaudi.wrap.supervisor.options import Policy
from aotgaudi.wrap.supervisor.signals import Signals
from aotgaudi.wrap.watch.place import Place, taken
from aotgaudi.wrap.watch.plan import link_model, plan_for
from aotgaudi.wrap.watch.session import Session

_log = logging.getLogger(__name__)


def start(options: RunOptions, admitted: Admitted, signals: Signals) -> int:
    """Runs what was admitted until it ends; returns its exit code. Raises as `launch.run`, but for what `admit` refuses."""
    bundle, why_cold = admitted.bundle, admitted.why_cold
    metrics = Metrics()
    metrics.set("aotgaudi_verify_seconds", time.monotonic() - options.began)
    metrics.set("aotgaudi_guest_residuals", len(capture_of(bundle).residuals))
    metrics.set("aotgaudi_capture_info", 1, *_about(bundle).values())
    reception = _Reception(metrics)
    with (
        Front(options.listen, reception.answers()) as front,
        taken(Path(admitted.here.place.root), needed_bytes=capture_of(bundle).num_bytes) as place,
    ):
        _log.info("http://%s:%d: /ready /live /metrics /report", options.listen.host, front.port)
        if not why_cold:
            _restore(bundle, place, metrics)
        link_model(admitted.found, admitted.launch, place)
        case = _case(bundle, options, why_cold)
        phase, byte = _phase(options.policy, why_cold)
        plan = plan_for(admitted.found, admitted.launch, place, phase, **_sealed(bundle, why_cold))
        signals.hold()
        grace_seconds = options.policy.grace_seconds
        with Session(plan, place, phase=byte, adopts=True, grace_seconds=grace_seconds) as session:
            judge = Judge(session, case, options.policy, metrics, signals)
            reception.judge = judge
            return judge.run()


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
        residuals=receipt.residuals,
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
