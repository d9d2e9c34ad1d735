"""``aotgaudi doctor``: what this machine can build and serve, or with ``--hpu`` what holds on its Gaudi."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from aotgaudi.backends.hpu.probe import hpu_target
from aotgaudi.cli.options import STORE, json_option, option, options_of
from aotgaudi.cli.progress import interrupted_by_sigterm
from aotgaudi.cli.show import emit
from aotgaudi.doctor.hpu.lab import PROBE_SECONDS, HpuCheck, Lab, LineFinding
from aotgaudi.doctor.hpu.report import (
    JSON_NAME,
    LINES,
    MARKDOWN_NAME,
    DoctorReport,
    acquire,
    examine,
    require_bridge,
    selected,
)
from aotgaudi.doctor.hpu.whole import fitting
from aotgaudi.doctor.machine import MachineFinding, Purpose, examine_machine
from aotgaudi.errors import SpecError, TargetError, store_errors
from aotgaudi.files import temporary_file, write_atomic
from aotgaudi.gaudi.environment import ENGINE_RULES, sealed_variables
from aotgaudi.gaudi.identity import Installation, Inventory, find_cards
from aotgaudi.manifest.manifest import load_manifest_or_spec

_TARGET_CHECKS = frozenset({"H-05", "H-06", "H-09"})
"""The checks that show the mode of keys."""

_FIT_SECONDS = 600.0
"""Tracing a step of a large model takes minutes."""


@dataclass(frozen=True)
class _Request:
    """The options; all but the store's are of ``--hpu``."""

    hpu: bool = option(
        "Examine a Gaudi instead, on a card that no process holds (how long it takes on one was never measured).",
        default=False,
    )
    card: int | None = option(
        "With --hpu: which card, as `hl-smi` counts them  [default: any]",
        type=click.IntRange(min=0),
        metavar="N",
    )
    only: str | None = option("With --hpu: only these checks.", metavar="H-nn,...")
    out: Path | None = option(
        f"With --hpu: where {JSON_NAME} and {MARKDOWN_NAME} go  [default: here]",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="DIR",
    )
    target_file: Path | None = option(
        "With --hpu: write what this machine compiles for, for `build plan --target` elsewhere.",
        "--write-target",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
    )
    fit: Path | None = option(
        "With --hpu: examine nothing; say what of the card's memory a server of this spec would take, and how many KV blocks"
        " fit.",
        metavar="SPEC",
    )
    store_root: Path = Path()

    def __post_init__(self) -> None:
        of_examination = {"--only": self.only, "--out": self.out, "--write-target": self.target_file}
        of_hpu = {"--card": self.card, **of_examination, "--fit": self.fit}
        given = [name for name, value in of_hpu.items() if value is not None]
        if given and not self.hpu:
            raise click.UsageError(f"{given[0]} is about a Gaudi: it needs --hpu")
        others = [name for name in given if name in of_examination]
        if self.fit is not None and others:
            raise click.UsageError(f"{others[0]} is for an examination, and --fit examines nothing")


def _refuse_without_hpu(context: click.Context) -> None:
    """Raises UsageError for an option that ``--hpu`` does not accept."""
    for name, text in {"store_root": "--store", "as_json": "--json"}.items():
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"{text} is not for --hpu, which writes {JSON_NAME} and {MARKDOWN_NAME} (--out DIR)"
            )


def _examine_hpu(request: _Request) -> None:
    checks = _checks(request)
    out = request.out or Path()
    require_bridge()
    _prepare(out, request.target_file)
    for name, reason in ENGINE_RULES.changes(os.environ).items():
        click.echo(f"examined without your {name}: {reason}", err=True)
    with _lab(request.card) as lab:
        prefix = "this is a double: " if acquire(lab).is_double else ""

        def tell(check: HpuCheck, found: tuple[LineFinding, ...], so_far: DoctorReport) -> None:
            click.echo(_line(prefix, check, found))
            write_atomic(
                out / JSON_NAME, so_far.dumps()
            )  # Each time, so that an interrupted doctor keeps its findings.
            write_atomic(out / MARKDOWN_NAME, so_far.as_markdown().encode())

        report = examine(lab, checks, tell)
        click.echo(f"{report.summary()}\n{out / JSON_NAME}, {out / MARKDOWN_NAME}")
        if request.target_file is not None:
            _write_target(request.target_file, report, lab.directory)
    if report.lacks():
        raise TargetError(
            f"target: {', '.join(report.lacks())}: not found to hold, and nothing can be built or served without:"
            f" {out / MARKDOWN_NAME} says what was seen"
        )


@contextlib.contextmanager
def _lab(card: int | None, seconds: float = PROBE_SECONDS) -> Iterator[Lab]:
    module_id = _module_id(card, find_cards())
    with tempfile.TemporaryDirectory(prefix="aotgaudi-doctor-") as directory:
        yield Lab(Path(directory), environment=os.environ, module_id=module_id, seconds=seconds)


def _fit(spec: Path, card: int | None) -> None:
    manifest = load_manifest_or_spec(spec)
    require_bridge()
    with _lab(card, _FIT_SECONDS) as lab:
        prefix = "this is a double: " if acquire(lab).is_double else ""
        need, memory = fitting(lab, manifest)
    need.require(memory, "the card")
    click.echo(f"{prefix}{manifest.spec.model.name} fits: {need.described(memory)}")


def _checks(request: _Request) -> tuple[HpuCheck, ...]:
    ids = tuple(part.strip() for part in (request.only or "").split(","))
    if request.only is not None and not all(ids):
        raise SpecError("--only", f"is {request.only!r}", "checks with commas between them: H-05,H-06")
    checks = selected(tuple(filter(None, ids)))
    missing = _TARGET_CHECKS - {check.id for check in checks}
    if request.target_file is not None and missing:
        raise SpecError(
            "--write-target", f"needs {', '.join(sorted(_TARGET_CHECKS))}", "name them in --only, too"
        )
    return checks


def _prepare(out: Path, target_file: Path | None) -> None:
    """Checks at once what would otherwise fail after minutes: whether files can be written, and a target can be made.

    Raises:
        StoreError: a directory cannot be made or written to.
        TargetError: the software lacks a part that a target names.
        SpecError: a variable whose file's content goes into the target names no such file.
    """
    for folder in (out,) if target_file is None else (out, target_file.parent):
        with store_errors("write to", folder), temporary_file(folder):
            pass
    if target_file is not None:
        Installation.find(os.environ).components()
        sealed_variables(ENGINE_RULES.applied(os.environ))


def _module_id(card: int | None, inventory: Inventory) -> int | None:
    if card is None:
        return None
    if not inventory.cards:
        return card  # In some containers no source names cards. Modules are counted alike.
    for found in inventory.cards:
        if found.index == card:
            return card if found.module_id is None else found.module_id
    indices = ", ".join(str(found.index) for found in inventory.cards)
    raise SpecError("--card", f"is {card}", f"one of {indices}, as `hl-smi` counts")


def _line(prefix: str, check: HpuCheck, findings: tuple[LineFinding, ...]) -> str:
    verdicts = ", ".join(f"{finding.line} {finding.verdict}" for finding in findings)
    rows = [f"{prefix}{check.id}  {check.title:<36}{verdicts}"]
    for finding in findings:
        if finding.verdict in ("refuted", "unclear"):
            rows.append(f"{prefix}      {finding.line}: {finding.observation}")
        if finding.verdict == "refuted":
            rows.append(f"{prefix}      {finding.line}: what follows: {LINES[finding.line].consequence}")
    return "\n".join(rows)


def _write_target(path: Path, report: DoctorReport, memory: Path) -> None:
    if report.key_mode != "stable" or report.device_type == "unknown":
        raise TargetError(
            f"target: --write-target: {path} is not written: that keys repeat here, or the type of the device, was not"
            " found out (H-06, K-08)"
        )
    target = hpu_target(report.device_type, report.versions["synapse"], os.environ, memory=memory)
    write_atomic(path, f"{target.as_file()}\n".encode())


_PURPOSES: tuple[Purpose, ...] = ("build", "serve")


@click.command("doctor")
@options_of(_Request, "request", store_root=STORE)
@json_option("Print what is found as JSON.")
@click.pass_context
def doctor(context: click.Context, request: _Request, as_json: bool) -> None:
    """Say what this machine can build and serve, and what would be right where it cannot.

    Looks at Python and packages, torch, compiler, CPU, memory and the store's place. Changes nothing. Exits with 5 where
    something is broken; what is merely not installed is a warning.

    With --hpu, examines on a Gaudi which lines of the contract with Intel's software hold there (see
    docs/reference/hpu-contract.md), and writes two files that can be sent to anybody. Exits with 5 where one does not
    hold that building or serving needs, and with 6 where no card could be examined. --fit SPEC traces a step of a spec
    instead, and exits with 5 where weights and KV cache do not fit on the card.
    """
    context.with_resource(interrupted_by_sigterm())  # A probe, in a group of its own, would keep the card.
    if request.hpu:
        _refuse_without_hpu(context)
        if request.fit is None:
            _examine_hpu(request)
        else:
            _fit(request.fit, request.card)
        return
    found = []
    for finding in examine_machine(request.store_root):
        found.append(finding)
        if not as_json:
            right = f"\n{'':26}right: {finding.remedy}" if finding.remedy else ""
            click.echo(f"{finding.status:<9}{finding.subject:<17}{finding.observation}{right}")
    emit(_document(found), as_json, _summary(found))
    broken = [finding for finding in found if finding.status == "error"]
    if broken:
        raise TargetError(
            "; ".join(f"{one.subject}: {one.observation} (right: {one.remedy})" for one in broken)
        )


def _summary(found: list[MachineFinding]) -> str:
    can = ["enumerate, plan and verify", *(one for one in _PURPOSES if not _obstacles(found, one))]
    cannot = [f"{one} ({', '.join(_obstacles(found, one))})" for one in _PURPOSES if _obstacles(found, one)]
    return f"this machine can {', '.join(can)}" + (f"; it cannot {', nor '.join(cannot)}" if cannot else "")


def _obstacles(found: list[MachineFinding], purpose: Purpose) -> list[str]:
    return [finding.subject for finding in found if purpose in finding.prevents]


def _document(found: list[MachineFinding]) -> dict[str, Any]:
    return {
        **{f"can_{purpose}": not _obstacles(found, purpose) for purpose in _PURPOSES},
        "findings": [dataclasses.asdict(finding) for finding in found],
    }
