"""``aotgaudi build manifest``: enumerates a spec's entries into a manifest file, or checks one."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import click

from aotgaudi.cli.options.common import memory_budget_option
from aotgaudi.cli.options.spec_source import SpecSource, spec_source
from aotgaudi.cli.show.bucket_report import bucket_document, bucket_lines
from aotgaudi.cli.show.manifest_report import show, summarize
from aotgaudi.errors import SpecError, StaleManifestError
from aotgaudi.files import write_atomic
from aotgaudi.manifest.bucket_file import bucket_file_of
from aotgaudi.manifest.codec import dumps, read_manifest, write_manifest
from aotgaudi.manifest.difference import difference
from aotgaudi.manifest.manifest import Manifest

_SHOWN_DIFFERENCES = 8


@click.command("manifest")
@spec_source
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The manifest file  [default: SPEC with .manifest.json for .toml]",
)
@click.option(
    "--bucket-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the closed table as a file for VLLM_BUCKETING_FROM_FILE, in place of the manifest (with -o: as well).",
)
@click.option("--check", is_flag=True, help="Write nothing; fail when the file is out of date.")
@memory_budget_option
@click.option("--strict", is_flag=True, help="If there is a warning, write nothing and exit with 2.")
@click.option(
    "--warm-up-log",
    "with_log",
    is_flag=True,
    help="Print what vllm-gaudi's warm-up of sampler and defragmenter logs for this, in place of the summary.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def build_manifest(
    source: SpecSource,
    output: Path | None,
    bucket_file: Path | None,
    check: bool,
    memory_budget: int | None,
    strict: bool,
    with_log: bool,
    as_json: bool,
) -> None:
    """Enumerate everything that SPEC says must be warm. Compiles nothing, and needs no torch.

    Warns if the spec makes more steps than anyone wants to compile, or needs more memory than the budget. A warning
    does not change the manifest or, without --strict, the exit code.

    --bucket-file FILE gives a vLLM server the closed table: it is read back by the rules of the server's version, and
    written only if each step is looked up to a bucket that the server warms up; else exits with 7 and names the
    smallest step without. What the server has to be given besides is printed.
    """
    if bucket_file is not None:
        _give_buckets(source, bucket_file, output, check=check, with_log=with_log, as_json=as_json)
        if output is None:
            return
    path = output or source.manifest_path
    manifest = Manifest.of(source.spec)
    if check:
        _check(
            path,
            manifest,
            f"aotgaudi build manifest {source.arguments}" + (f" -o {output}" if output else ""),
        )
    summary = summarize(path, manifest, memory_budget)
    for warning in summary["warnings"]:
        click.echo(f"warning: {warning}", err=True)
    if strict and summary["warnings"]:
        raise SpecError(source.arguments, "has warnings, and --strict is given", "nothing was written")
    if not check:
        write_manifest(path, manifest)
    log = _warm_up_lines(manifest) if with_log else []
    if as_json:
        click.echo(json.dumps({**summary, "warm_up_log": log} if with_log else summary, indent=2))
    elif with_log:
        click.echo("\n".join(log))
    else:
        show(summary)


def _give_buckets(
    source: SpecSource, path: Path, output: Path | None, *, check: bool, with_log: bool, as_json: bool
) -> None:
    """Writes, or checks, the bucket file, and prints what its server needs."""
    if with_log and output is None:
        raise click.UsageError("--warm-up-log is of a manifest: give -o FILE as well.")
    found = bucket_file_of(source.spec)
    text = found.text.encode()
    if not check:
        write_atomic(path, text)
    elif not path.exists() or path.read_bytes() != text:
        problem = "is out of date" if path.exists() else "there is no bucket file"
        mend = f"aotgaudi build manifest {source.arguments} --bucket-file {path}"
        raise StaleManifestError(f"{path}: {problem} (run `{mend}`)")
    document = bucket_document(path, found)
    if as_json and output is None:
        click.echo(json.dumps(document, indent=2))
    elif not as_json:
        click.echo("\n".join(bucket_lines(document)))


def _warm_up_lines(manifest: Manifest) -> list[str]:
    from aotgaudi.wrap.vllm.warm_up import warm_up_log  # Only here: it loads what reads vLLM's variables.

    return [f"{line.level} {line.text}" for line in warm_up_log(manifest)]


def _check(path: Path, manifest: Manifest, mend: str) -> None:
    """Raises StaleManifestError when the file at `path` is not, byte for byte, what would be written."""
    if not path.exists():
        raise StaleManifestError(f"{path}: there is no manifest (run `{mend}`)")
    found = difference(read_manifest(path), manifest)
    lines = list(islice(found.lines(), _SHOWN_DIFFERENCES + 1))
    if not lines and path.read_bytes() != dumps(manifest):
        lines = ["it is formatted otherwise"]
    if lines:
        more = "; and more (see `aotgaudi diff`)" if len(lines) > _SHOWN_DIFFERENCES else ""
        shown = "; ".join(lines[:_SHOWN_DIFFERENCES])
        raise StaleManifestError(f"{path}: is out of date: {shown}{more} (run `{mend}`)")
