"""``aotgaudi build manifest``: enumerates a spec's entries into a manifest file, or checks one."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import click

from aotgaudi.bucketing.bucket_file import DYNAMIC_SHAPES_VARIABLE
from aotgaudi.bucketing.padding import Padding
from aotgaudi.cli.coverage import live_graph_lines, server_lines
from aotgaudi.cli.from_vllm import VllmOptions, manifest_name, spec_of_options
from aotgaudi.cli.options import (
    json_option,
    options_of,
    parse_byte_count,
    parsed_by,
    path_argument,
    path_option,
)
from aotgaudi.cli.show import emit
from aotgaudi.entries import ENTRY_KINDS
from aotgaudi.errors import SpecError, StaleManifestError, counted
from aotgaudi.files import write_atomic
from aotgaudi.manifest.bucket_file import BucketFile, bucket_file_of
from aotgaudi.manifest.coverage import described_scheduler, left_out, live_graphs_of
from aotgaudi.manifest.difference import difference
from aotgaudi.manifest.manifest import Manifest, dumps, read_manifest, write_manifest
from aotgaudi.manifest.memory import sized
from aotgaudi.manifest.summary import Memory, Summary, proof_document
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.parse import load_spec


def bucket_document(path: Path, found: BucketFile) -> dict[str, Any]:
    """Returns, as a JSON value, what was written to `path`, and for which server."""
    return {
        "bucket_file": str(path),
        "model": found.spec.model.name,
        "version": found.spec.bucketing.version,
        "scheduler": described_scheduler(found.spec),
        "num_buckets": {"prompt": len(found.prompt), "decode": len(found.decode)},
        "flags": {**found.pinned, **found.switches},
        "set": dict(found.variables(str(path.absolute()))),
        "unset": list(found.unset),
        "left_out": list(left_out(found.spec, is_static=DYNAMIC_SHAPES_VARIABLE in found.variables(""))),
        "live_graphs": [row.model_dump() for row in live_graphs_of(found.spec)],
    }


def bucket_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yields the content of `bucket_document` in words."""
    buckets = document["num_buckets"]
    sizes = " and ".join(counted(number, f"{phase} bucket") for phase, number in buckets.items())
    yield f"{document['bucket_file']}: {sizes} for {document['model']}"
    yield (
        f"each step of {document['scheduler']} is looked up to one of them that {document['version']} warms up"
    )
    if document["left_out"]:
        yield f"left out of the proof: {'; '.join(document['left_out'])}"
    yield from live_graph_lines(document["live_graphs"])
    yield f"set: {' '.join(f'{name}={shlex.quote(value)}' for name, value in document['set'].items())}"
    yield f"unset: {' '.join(document['unset'])}"
    yield f"the server's flags: {' '.join(_flag(name, value) for name, value in document['flags'].items())}"


def _flag(name: str, value: bool | int) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {value}"


@dataclass(frozen=True)
class SpecSource:
    """A spec that was read. `arguments` named it on the command line.

    `manifest_path` is the default path of its manifest.
    """

    spec: BuildSpec
    arguments: str
    manifest_path: Path


def default_manifest_path(spec_path: Path) -> Path:
    """Returns the default path of a spec's manifest: next to the spec, ``x.toml`` -> ``x.manifest.json``."""
    return spec_path.with_name(f"{spec_path.name.removesuffix('.toml')}.manifest.json")


def _read(spec_path: Path | None, options: VllmOptions, *, check: bool) -> SpecSource:
    if not options.is_given:
        if spec_path is None:
            raise SpecError("SPEC", "is missing", "the path of a spec (.toml), or --from-vllm COMMAND")
        return SpecSource(load_spec(spec_path), str(spec_path), default_manifest_path(spec_path))
    if spec_path is not None:
        raise click.UsageError("SPEC and --from-vllm both name a spec: give one.")
    if options.spec_out is not None and check:
        raise click.UsageError("--check writes nothing: leave out --spec-out.")
    spec = spec_of_options(options)
    if options.spec_out is not None:
        return SpecSource(spec, str(options.spec_out), default_manifest_path(options.spec_out))
    return SpecSource(spec, options.arguments, Path(manifest_name(spec)))


_SHOWN_DIFFERENCES = 8


@click.command("manifest")
@path_argument("spec_path", metavar="[SPEC]", required=False)
@options_of(VllmOptions, "vllm")
@path_option(
    "-o", "--output", metavar="FILE", help="The manifest file  [default: SPEC with .manifest.json for .toml]"
)
@path_option(
    "--bucket-file",
    metavar="FILE",
    help="Write the closed table as a file for VLLM_BUCKETING_FROM_FILE, in place of the manifest (with -o: as well).",
)
@click.option("--check", is_flag=True, help="Write nothing; fail when the file is out of date.")
@click.option(
    "--memory-budget",
    callback=parsed_by(parse_byte_count),
    metavar="SIZE",
    help="Device memory for KV cache and step buffers, weights not counted, e.g. 96GiB; warns if they need more.",
)
@click.option("--strict", is_flag=True, help="If there is a warning, write nothing and exit with 2.")
@click.option(
    "--warm-up-log",
    "with_log",
    is_flag=True,
    help="Print what vllm-gaudi's warm-up of sampler and defragmenter logs for this, in place of the summary.",
)
@json_option("Print the summary as JSON.")
def build_manifest(  # noqa: PLR0913 - one argument per option
    *,
    spec_path: Path | None,
    vllm: VllmOptions,
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
    source = _read(spec_path, vllm, check=check)
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
    summary = Summary(manifest, memory_budget)
    for warning in summary.warnings:
        click.echo(f"warning: {warning}", err=True)
    if strict and summary.warnings:
        raise SpecError(source.arguments, "has warnings, and --strict is given", "nothing was written")
    if not check:
        write_manifest(path, manifest)
    document = _document(path, summary)
    if not with_log:
        emit(document, as_json, _lines(document))
    else:
        log = _warm_up_lines(manifest)
        emit({**document, "warm_up_log": log}, as_json, log)


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
    from aotgaudi.from_vllm.warm_up_log import (
        warm_up_log,  # Only here: it loads what reads vLLM's variables.
    )

    return [f"{line.level} {line.text}" for line in warm_up_log(manifest)]


def _check(path: Path, manifest: Manifest, mend: str) -> None:
    """Raises StaleManifestError unless the file at `path` is byte for byte what would be written."""
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


def _document(path: Path, summary: Summary) -> dict[str, Any]:
    """Returns the content of the manifest at `path` as a JSON value."""
    manifest, coverage = summary.manifest, summary.coverage
    largest = {kind: summary.largest(kind) for kind in ENTRY_KINDS}
    return {
        "manifest": str(path),
        "id": manifest.id,
        "model": manifest.spec.model.name,
        "num_entries": {kind: len(manifest.of_kind(kind)) for kind in ENTRY_KINDS},
        "largest": {kind: str(entry) for kind, entry in largest.items() if entry is not None},
        "coverage": proof_document(
            summary,
            {
                "result": str(coverage),
                "smallest": str(coverage.smallest) if coverage.smallest else None,
            },
        ),
        "uncovered": [str(hole) for hole in summary.holes],
        "padding": {kind: _padding(padding) for kind, padding in summary.padding.items()},
        "memory": _memory_document(summary.memory),
        "warnings": list(summary.warnings),
    }


def _padding(padding: Padding | None) -> dict[str, Any] | None:
    if padding is None:
        return None
    return {
        "mean": round(padding.mean, 4),
        "error": round(padding.error, 4),
        "worst": round(padding.worst, 4),
        "worst_step": list(padding.worst_step),
        "sampled": padding.is_sampled,
    }


def _memory_document(memory: Memory) -> dict[str, Any]:
    if memory.unknown is not None:
        return memory.model_dump(include={"unknown", "num_blocks", "budget_bytes"})
    document = memory.model_dump(exclude={"unknown", *([] if memory.layers else ["layers"])})
    return {**document, "steps": {step.kind: step.model_dump(exclude={"kind"}) for step in memory.steps}}


def _lines(document: dict[str, Any]) -> Iterator[str]:
    yield f"{document['manifest']}: {sum(document['num_entries'].values())} entries for {document['model']}"
    if sys.stdout.isatty():
        yield _table(document)
    else:
        yield from _entry_lines(document)
    yield from _facts(document)


def _entry_lines(document: dict[str, Any]) -> Iterator[str]:
    for kind, largest in document["largest"].items():
        padding = document["padding"].get(kind)
        factors = f"   padding {_factors(padding)}" if padding else ""
        yield f"  {kind:<8}{document['num_entries'][kind]:>9,}   largest {largest}{factors}"


def _table(document: dict[str, Any]) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table("kind", "entries", "largest", "padding")
    table.columns[1].justify = "right"
    for kind, largest in document["largest"].items():
        padding = document["padding"].get(kind)
        count = f"{document['num_entries'][kind]:,}"
        table.add_row(kind, count, largest, _factors(padding) if padding else "")
    console = Console()
    with console.capture() as shown:
        console.print(table)
    return shown.get().rstrip("\n")


def _factors(padding: dict[str, Any]) -> str:
    sampled = ", of a sample" if padding["sampled"] else ""
    return f"x {padding['mean']:.2f} mean, x {padding['worst']:.2f} worst{sampled}"


def _facts(document: dict[str, Any]) -> Iterator[str]:
    coverage = document["coverage"]
    yield f"coverage: {_coverage_line(coverage, len(document['uncovered']))}"
    yield from server_lines(coverage["server_table"])
    if coverage["left_out"]:
        yield f"left out of the proof: {'; '.join(coverage['left_out'])}"
    yield from live_graph_lines(coverage["live_graphs"])
    yield f"memory: {_memory_line(document['memory'])}"
    yield f"id: {document['id']}"


def _coverage_line(coverage: dict[str, Any], num_holes: int) -> str:
    if coverage["smallest"]:
        return f"no entry for {counted(num_holes, 'kind')} of steps, the smallest: {coverage['smallest']}"
    if not coverage["closed"]:
        return str(coverage["result"])
    unproved = ", ".join(coverage["not_proved"])
    but = f" (of {unproved} entries nothing is proved)" if unproved else ""
    scheduler = "the scheduler" if coverage["scheduler"] == "aotgaudi" else coverage["scheduler"]
    return f"every step that {scheduler} can form has an entry{but}"


def _memory_line(memory: dict[str, Any]) -> str:
    if "unknown" in memory:
        return f"{counted(memory['num_blocks'], 'KV block')}, sizes not known: {memory['unknown']}"
    steps = "".join(
        f", {sized(step['total_bytes'])} for {step['entry']}" for step in memory["steps"].values()
    )
    devices = f", on each of {memory['num_devices']} devices" if memory["num_devices"] > 1 else ""
    layers = f"; KV cache: {memory['layers']}" if "layers" in memory else ""
    cache = f"KV cache {sized(memory['kv_cache_bytes'])} for {counted(memory['num_blocks'], 'block')}"
    return f"{cache}{steps} (weights not counted{devices}{layers})"
