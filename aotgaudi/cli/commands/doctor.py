"""``aotgaudi doctor``: what this machine can build and serve."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from aotgaudi.cli.commands.doctor_hpu import hpu_options
from aotgaudi.cli.options.common import FiniteRange, store_option
from aotgaudi.doctor.machine import examine_machine
from aotgaudi.doctor.machine_finding import MachineFinding, Purpose
from aotgaudi.doctor.trial import TRIAL_SECONDS, try_to_compile
from aotgaudi.errors import TargetError

_PURPOSES: tuple[Purpose, ...] = ("build", "serve")


@click.command("doctor")
@hpu_options
@store_option
@click.option(
    "--no-trial", is_flag=True, help="Compile nothing: leaves out the trial, which takes about a minute."
)
@click.option(
    "--trial-timeout",
    "trial_seconds",
    type=FiniteRange(min=0, min_open=True),
    default=TRIAL_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="How long each part of the trial may take.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what is found as JSON.")
def doctor(store_root: Path, no_trial: bool, trial_seconds: float, as_json: bool) -> None:
    """Say what this machine can build and serve, and what would be right where it cannot.

    Looks at Python, packages, compiler, CPU, memory, the store's place and the kernel, and compiles one step of a tiny
    model in a store of its own. Changes nothing. Exits with 5 where something is broken; what is merely not installed is
    a warning.

    With --hpu, examines on a Gaudi which lines of the contract with Intel's software hold there (see
    docs/reference/hpu-contract.md), and writes two files that can be sent to anybody. Exits with 5 where one does not
    hold that building or serving needs, and with 6 where no card could be examined.
    """
    found = []
    for finding in _examine(store_root, None if no_trial else trial_seconds):
        found.append(finding)
        if not as_json:
            click.echo("\n".join(_lines(finding)))
    click.echo(json.dumps(_document(found), indent=2) if as_json else _summary(found))
    broken = [finding for finding in found if finding.status == "error"]
    if broken:
        raise TargetError(
            "; ".join(f"{one.subject}: {one.observation} (right: {one.remedy})" for one in broken)
        )


def _examine(store_root: Path, trial_seconds: float | None) -> Iterator[MachineFinding]:
    can_build = True
    for finding in examine_machine(store_root):
        can_build &= "build" not in finding.prevents
        yield finding
    if trial_seconds is not None and can_build:
        click.echo("compiling one step of a tiny model, about a minute (--no-trial leaves it out)", err=True)
        yield try_to_compile(trial_seconds)


def _lines(finding: MachineFinding) -> Iterator[str]:
    yield f"{finding.status:<9}{finding.subject:<17}{finding.observation}"
    if finding.remedy:
        yield f"{'':26}right: {finding.remedy}"


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
