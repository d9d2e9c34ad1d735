"""Steps 3 to 5 of a run (`aotgaudi.wrap.run`): restores the sealed files, and starts and supervises the server."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path

from aotgaudi.bundle.bundle import Bundle
from aotgaudi.bundle.capture_receipt import StartCost
from aotgaudi.bundle.launch import Launch, WarmUpRequest
from aotgaudi.gaudi.live_graphs import not_closed
from aotgaudi.wrap.adapters.base import Phase
from aotgaudi.wrap.exercise import adapter_names, with_adapters
from aotgaudi.wrap.http import Answers, HttpServer, Metrics
from aotgaudi.wrap.launch import Found
from aotgaudi.wrap.launch_comparison import Checked
from aotgaudi.wrap.restore import restore
from aotgaudi.wrap.run_options import RunOptions
from aotgaudi.wrap.sandbox import Sandbox, open_sandbox
from aotgaudi.wrap.session import STATE_BYTES, Session, link_model, plan_for
from aotgaudi.wrap.signals import Signals
from aotgaudi.wrap.supervise import Case, Supervisor

_log = logging.getLogger(__name__)


def start(options: RunOptions, checked: Checked, signals: Signals) -> int:
    """Restores, starts and supervises a server until it ends. Returns its exit code. Raises like `run.run`."""
    bundle, why_cold = checked.bundle, checked.why_cold
    receipt = bundle.require_capture()
    about = _about(bundle)
    metrics = Metrics()
    metrics.set("aotgaudi_verify_seconds", time.monotonic() - options.began)
    metrics.set("aotgaudi_guest_residuals", len(receipt.residuals))
    metrics.set("aotgaudi_capture_info", 1, *about.values())
    restoring = Answers(
        not_ready=lambda: "the sealed files are being restored",
        not_live=lambda: "",
        report=lambda: {"stage": "restoring"},
        metrics=metrics,
        notes={"not_exercised": receipt.not_exercised, "not_closed": not_closed(receipt.live_graphs)},
    )
    with (
        HttpServer(options.listen, restoring) as server,
        open_sandbox(Path(checked.here.place.root), needed_bytes=receipt.num_bytes) as sandbox,
    ):
        _log.info("http://%s:%d: /ready /live /metrics /report", options.listen.host, server.port)
        if not why_cold:
            _restore(bundle, sandbox, metrics)
        link_model(checked.found, checked.launch, sandbox)
        asked = _asked_here(bundle.launch, checked.found, receipt.start)
        if receipt.start is not None and options.exercises and not why_cold:
            _log.info("a start sends %s", receipt.start)
        answers = tuple(one for index, one in enumerate(receipt.expected.answers) if index in asked)
        case = Case(
            expected=None if why_cold else receipt.expected.model_copy(update={"answers": answers}),
            requests=tuple(asked.values()) if options.exercises else (),
            why_cold=why_cold,
            about=about,
            residuals=receipt.residuals,
            not_exercised=receipt.not_exercised,
            live_graphs=receipt.live_graphs,
        )
        phase: Phase = "cold" if why_cold else "load" if options.policy.require_warm else "measure"
        sealed = {} if why_cold else {file.path: file.digest for file in receipt.files}
        left_out = tuple(one.pattern for one in receipt.left_out)
        plan = plan_for(checked.found, checked.launch, sandbox, phase, sealed=sealed, left_out=left_out)
        signals.hold()
        with Session(
            plan,
            sandbox,
            phase=STATE_BYTES[phase],
            adopts=True,
            termination_seconds=options.policy.termination_seconds,
        ) as session:
            supervisor = Supervisor(session, case, options.policy, metrics, signals)
            server.answer_by(
                replace(
                    restoring,
                    not_ready=supervisor.not_ready,
                    not_live=supervisor.not_live,
                    report=supervisor.report,
                )
            )
            return supervisor.run()


def _asked_here(sealed: Launch, found: Found, cost: StartCost | None) -> dict[int, WarmUpRequest]:
    """Returns the sealed requests that a start sends, in the form in which they are sent here, by position."""
    start = found.adapter.starts_at(sealed.words)
    words = sealed.words if start is None else sealed.words[start[1] :]
    then, now = (
        adapter_names(values.get("lora-modules", []))
        for values in (found.adapter.read(words, {}).values, found.flags.values)
    )
    asks_all = cost is None or cost.asks_all
    asked = with_adapters(sealed.exercise.requests, then, now)
    return {index: request for index, request in asked.items() if asks_all or request.at_start}


def _restore(bundle: Bundle, sandbox: Sandbox, metrics: Metrics) -> None:
    restored = restore(bundle, sandbox.root)
    metrics.set("aotgaudi_restore_seconds", restored.seconds)
    _log.info(
        "%d files, %d bytes, verified and restored in %.2f s",
        restored.files,
        restored.bytes,
        restored.seconds,
    )


def _about(bundle: Bundle) -> dict[str, str]:
    """Returns the labels of ``aotgaudi_capture_info``, in its order."""
    return {"launch": bundle.receipt.manifest_id, "bundle": str(bundle.path)}
