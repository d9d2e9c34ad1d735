"""``aotgaudi doctor --hpu``: which lines of the contract with the bridge hold on this machine's Gaudi."""

from __future__ import annotations

import functools
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from aotgaudi.atomicfile import make_directories, write_atomic
from aotgaudi.backends.hpu.probe import hpu_target
from aotgaudi.cli.options.common import Command
from aotgaudi.doctor.hpu.examination import acquire, examine, selected
from aotgaudi.doctor.hpu.findings import HpuCheck, LineFinding
from aotgaudi.doctor.hpu.lab import Lab
from aotgaudi.doctor.hpu.report import JSON_NAME, MARKDOWN_NAME, DoctorReport
from aotgaudi.errors import SpecError, TargetError
from aotgaudi.gaudi.inventory import Inventory, find_cards

_OPTIONS = (
    click.option(
        "--hpu", is_flag=True, help="Examine a Gaudi instead: about ten minutes, on a card that is idle."
    ),
    click.option(
        "--card", type=click.IntRange(min=0), metavar="N", help="With --hpu: which card  [default: any]"
    ),
    click.option("--only", metavar="H-nn,...", help="With --hpu: only these checks."),
    click.option(
        "--out",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="DIR",
        help=f"With --hpu: where {JSON_NAME} and {MARKDOWN_NAME} go  [default: here]",
    ),
    click.option(
        "--write-target",
        "target_file",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="With --hpu: write what this machine compiles for, for `build plan --target` elsewhere.",
    ),
)

_TARGET_CHECKS = frozenset({"H-05", "H-06", "H-09"})
"""What the mode of keys is learnt from."""


@dataclass(frozen=True, slots=True)
class _Request:
    """What is asked of ``--hpu``."""

    card: int | None
    only: str | None
    out: Path | None
    target_file: Path | None

    def given(self) -> str:
        """Returns the first option that was given; empty if none was."""
        options = {
            "--card": self.card,
            "--only": self.only,
            "--out": self.out,
            "--write-target": self.target_file,
        }
        return next((name for name, value in options.items() if value is not None), "")


def hpu_options(function: Command) -> Command:
    """Adds ``--hpu`` and what belongs to it; with it, a Gaudi is examined in place of running the command."""

    @functools.wraps(function)
    def command(
        *,
        hpu: bool,
        card: int | None,
        only: str | None,
        out: Path | None,
        target_file: Path | None,
        **others: Any,
    ) -> Any:
        request = _Request(card, only, out, target_file)
        if hpu:
            return _examine_hpu(request)
        if request.given():
            raise click.UsageError(f"{request.given()} is about a Gaudi: it needs --hpu")
        return function(**others)

    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def _examine_hpu(request: _Request) -> None:
    checks = selected(tuple(part.strip() for part in (request.only or "").split(",") if part.strip()))
    missing = _TARGET_CHECKS - {check.id for check in checks}
    if request.target_file is not None and missing:
        raise SpecError(
            "--write-target", f"needs {', '.join(sorted(_TARGET_CHECKS))}", "name them in --only, too"
        )
    out = request.out or Path()
    make_directories(out)
    with tempfile.TemporaryDirectory(prefix="aotgaudi-doctor-") as directory:
        lab = Lab(Path(directory), environment=os.environ, module_id=_module_id(request.card, find_cards()))
        prefix = "this is a double: " if acquire(lab).is_double else ""
        report = examine(lab, checks, lambda check, found: click.echo(_line(prefix, check, found)))
        write_atomic(out / JSON_NAME, report.dumps())
        write_atomic(out / MARKDOWN_NAME, report.as_markdown().encode())
        click.echo(f"{report.summary()}\n{out / JSON_NAME}, {out / MARKDOWN_NAME}")
        if request.target_file is not None:
            _write_target(request.target_file, report, Path(directory))
    if report.lacks():
        raise TargetError(f"target: {', '.join(report.lacks())} did not hold: see {out / MARKDOWN_NAME}")


def _module_id(card: int | None, inventory: Inventory) -> int | None:
    if card is None:
        return None
    if not inventory.cards:
        return card  # Nobody tells of cards here, in some containers: modules are counted alike.
    for found in inventory.cards:
        if found.index == card:
            return card if found.module_id is None else found.module_id
    raise SpecError("--card", f"is {card}", f"0 to {len(inventory.cards) - 1}")


def _line(prefix: str, check: HpuCheck, findings: tuple[LineFinding, ...]) -> str:
    verdicts = ", ".join(f"{finding.line} {finding.verdict}" for finding in findings)
    rows = [f"{prefix}{check.id}  {check.title:<30}{verdicts}"]
    for finding in findings:
        if finding.verdict in ("refuted", "unclear"):
            rows.append(f"{prefix}      {finding.line}: {finding.observation}")
    return "\n".join(rows)


def _write_target(path: Path, report: DoctorReport, memory: Path) -> None:
    if report.key_mode == "unknown" or report.device_type == "unknown":
        raise TargetError(
            "target: --write-target: how keys repeat here, or the type of the device, is not known"
        )
    target = hpu_target(
        report.device_type, report.versions["synapse"], report.key_mode, os.environ, memory=memory
    )
    write_atomic(path, f"{target.as_file()}\n".encode())
