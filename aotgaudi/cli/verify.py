"""``aotgaudi verify``: is a bundle what was sealed, does it answer every entry, and can a machine serve it?"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from aotgaudi.backends.base import Target
from aotgaudi.backends.online import check_target, this_machine
from aotgaudi.bundle.bundle import Bundle, open_bundle
from aotgaudi.bundle.capture_receipt import CaptureReceipt
from aotgaudi.bundle.model_directory import ModelDirectory, open_model
from aotgaudi.bundle.receipt import Receipt, SealedReceipt
from aotgaudi.bundle.trust import TrustPolicy
from aotgaudi.bundle.verify import Report, require_memory, verify_bundle
from aotgaudi.cli.manifests import read_target
from aotgaudi.cli.options import acceptance_options, find_model, json_option, path_argument, path_option
from aotgaudi.errors import (
    AotGaudiError,
    CorruptError,
    MissingPackageError,
    NotWarmError,
    TargetError,
    UntrustedError,
)
from aotgaudi.gaudi.live_graphs import not_closed
from aotgaudi.wrap.launch import describe_here
from aotgaudi.wrap.launch_comparison import compare

_PRINTED = "what `aotgaudi verify --print-target` prints on the machine that serves"
_NO_COMMAND = "no command was given to compare (aotgaudi verify BUNDLE -- COMMAND)"
_NO_CHECK = "the next `aotgaudi build` does it"
_NO_TORCH = "torch is not installed, so this machine cannot serve (pip install 'aotgaudi[serve]')"


@dataclass(frozen=True)
class _Fit:
    """Whether a machine (`of`: this one, or a file that describes it) can serve the bundle; None: not checked."""

    of: str
    is_satisfied: bool | None
    reason: str | None = None
    error: AotGaudiError | None = None


def _print_target(context: click.Context, parameter: click.Parameter, is_asked: bool) -> None:
    if not is_asked or context.resilient_parsing:
        return
    machine = this_machine()
    if machine is None:
        raise MissingPackageError("torch", "serve")
    click.echo(machine.as_file())
    context.exit()


@click.command()
@path_argument("path", metavar="BUNDLE")
@click.argument("words", metavar="[-- COMMAND...]", nargs=-1, type=click.UNPROCESSED)
@path_option(
    "--target",
    "target_path",
    metavar="FILE",
    help="Check against the machine that FILE describes (what --print-target printed there).",
)
@click.option("--no-target", is_flag=True, help="Do not check whether this machine can serve the bundle.")
@click.option(
    "--no-memory",
    is_flag=True,
    help="Do not check whether this machine has the memory to serve it: it makes an image for another.",
)
@click.option(
    "--print-target",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_target,
    help="Describe this machine, as --target reads it, and do nothing else.",
)
@json_option("Print the report as JSON.")
@click.option(
    "--model", metavar="DIR", help="Compare this model directory (or hub id) with what the bundle binds."
)
@acceptance_options
@click.pass_context
def verify(  # noqa: PLR0913 - one argument per option
    context: click.Context,
    *,
    path: Path,
    words: tuple[str, ...],
    target_path: Path | None,
    no_target: bool,
    no_memory: bool,
    as_json: bool,
    model: str | None,
    acceptance: TrustPolicy,
) -> None:
    """Re-hash every object of BUNDLE, and check that its entries are answered and that this machine can serve it.

    Of captured caches every file is looked at, and with a COMMAND its launch is compared with the sealed one, as `run` does.

    Exits with what `serve` would: 0 when all is well, 3 when entries are missing, 4 when something is corrupt or not
    trusted, 5 when the machine does not satisfy the bundle's target.
    """
    if no_target and target_path is not None:
        raise click.UsageError("--no-target and --target exclude each other")
    described = None if target_path is None else read_target(target_path, _PRINTED)
    bundle = open_bundle(path, acceptance)
    if model is not None:
        _verify_model(bundle, find_model(model))
    if no_target:
        fit = _Fit("", None, "--no-target")
    elif words or isinstance(bundle.receipt, CaptureReceipt):
        fit = _check_launch(bundle, words)
    else:
        fit = _check_machine(bundle, target_path, described)
    report = verify_bundle(bundle)
    if fit.is_satisfied and isinstance(bundle.receipt, Receipt) and described is None and not no_memory:
        fit = _check_memory(bundle, report, fit)
    errors = [error for error in (fit.error, _failure(report, path)) if error is not None]
    if as_json:
        click.echo(json.dumps(_document(bundle, report, fit), indent=2))
    elif not errors:
        click.echo(_summary(bundle, report, fit))
    else:
        for error in errors:
            click.echo(f"error: {error}", err=True)  # A table, which would not survive as one line.
    context.exit(errors[0].exit_code if errors else 0)


def _verify_model(bundle: Bundle, path: Path) -> None:
    """Raises CorruptError or UntrustedError if the directory is not the one that the bundle is bound to."""
    if bundle.require_programs().model is None:
        raise UntrustedError(
            f"bundle {bundle.path} binds no model, so nothing says what {path} should be"
            " (bind it: aotgaudi build bundle MANIFEST -o DIR --model DIR)"
        )
    open_model(bundle, path).verify()


def _check_launch(bundle: Bundle, words: tuple[str, ...]) -> _Fit:
    """Checks what `run` checks before it restores anything. Raises SpecError for programs."""
    of = "this command"
    bundle.require_capture()
    if not words:
        return _Fit(of, None, _NO_COMMAND)
    found, here = describe_here(bundle.launch, words, dict(os.environ))
    result = compare(bundle.launch, here, found.adapter.variable_rules)
    if result.is_same:
        return _Fit(of, True)
    return _Fit(of, False, result.sentence(), result.error(result.sentence()))


def _check_machine(bundle: Bundle, path: Path | None, described: Target | None) -> _Fit:
    """Checks what `serve` checks before it maps anything."""
    of = "this machine" if path is None else str(path)
    if described is None and this_machine() is None:
        return _Fit(of, None, _NO_TORCH)
    try:
        check_target(bundle.receipt.target, described)
    except TargetError as error:
        return _Fit(of, False, str(error), error)
    return _Fit(of, True)


def _check_memory(bundle: Bundle, report: Report, fit: _Fit) -> _Fit:
    """Checks what `serve` checks before it allocates anything."""
    try:
        require_memory(bundle.manifest, report)
    except TargetError as error:
        return dataclasses.replace(fit, is_satisfied=False, reason=str(error), error=error)
    return fit


def _failure(report: Report, path: Path) -> AotGaudiError | None:
    try:
        report.raise_if_bad(path)
    except (CorruptError, NotWarmError) as error:
        return error
    return None


def _summary(bundle: Bundle, report: Report, fit: _Fit) -> str:
    receipt = bundle.receipt
    target = receipt.target
    torch = f", torch {target.toolchain['torch']}" if "torch" in target.toolchain else ""
    rows = (
        ("bundle", f"{bundle.path}: intact"),
        ("launch" if isinstance(receipt, CaptureReceipt) else "manifest", receipt.manifest_id),
        ("target", f"{target.backend} {target.machine}{torch}"),
        ("machine", f"not checked: {fit.reason}" if fit.is_satisfied is None else f"{fit.of} can serve it"),
        *_contents(receipt, report),
        ("objects", f"{report.num_objects}, {report.object_bytes} bytes, all re-hashed"),
        ("signed", _signed(bundle)),
        *_model(bundle),
    )
    return "\n".join(f"{name:10}{value}" for name, value in rows)


def _contents(receipt: SealedReceipt, report: Report) -> tuple[tuple[str, str], ...]:
    if isinstance(receipt, Receipt):
        return (("entries", f"{report.num_entries}, all answered"),)
    counts = ", ".join(f"{count} {name}" for name, count in sorted(receipt.proof.counts.items()))
    proof = f"{counts} (witnesses: {', '.join(receipt.proof.witnesses)})"
    rows = [("files", f"{report.num_entries}, {receipt.num_bytes} bytes"), ("proof", proof)]
    rows += [("start", str(receipt.start))] if receipt.start is not None else []
    rows += [("not asked", line) for line in receipt.not_exercised]
    return (*rows, *(("live", f"not closed: {line}") for line in not_closed(receipt.live_graphs)))


def _model(bundle: Bundle) -> tuple[tuple[str, str], ...]:
    if not isinstance(bundle.receipt, Receipt):
        return ()
    check = bundle.receipt.model_check
    compared = f"not compared with transformers ({_NO_CHECK})" if check is None else check.describe()
    return (
        ("graphs", compared),
        ("model", ModelDirectory(bundle.path, bundle.receipt.model).describe()),
    )


def _signed(bundle: Bundle) -> str:
    if bundle.statement is None:
        return "not asked for (--trusted-key)"
    return f"by one of {len(bundle.policy.keys)} trusted keys"


def _document(bundle: Bundle, report: Report, fit: _Fit) -> dict[str, Any]:
    receipt = bundle.receipt
    check, model = (receipt.model_check, receipt.model) if isinstance(receipt, Receipt) else (None, None)
    capture = receipt if isinstance(receipt, CaptureReceipt) else None
    return {
        "bundle": str(bundle.path),
        "intact": report.is_intact,
        "manifest_id": bundle.receipt.manifest_id,
        "backend": bundle.index.backend,
        "target": bundle.receipt.target.model_dump(mode="json"),
        "machine": {"of": fit.of or None, "satisfies_target": fit.is_satisfied, "reason": fit.reason},
        "model": None if model is None else {name: str(digest) for name, digest in model.items()},
        "model_check": check.model_dump(mode="json") if check else None,
        "not_exercised": list(capture.not_exercised) if capture else [],
        "live_graphs": [row.model_dump() for row in capture.live_graphs] if capture else [],
        **dataclasses.asdict(report),
    }
