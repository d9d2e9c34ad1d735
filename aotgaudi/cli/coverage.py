"""``aotgaudi coverage``: does every step that the server can form have an entry, and how much padding does it cost?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from aotgaudi.backends.base import Target
from aotgaudi.cli.manifests import load_manifest_of, planned_target_option, refuse_other_target
from aotgaudi.cli.options import json_option, path_argument
from aotgaudi.cli.show import emit, first_lines
from aotgaudi.errors import CoverageError, counted
from aotgaudi.gaudi.live_graphs import State
from aotgaudi.manifest.summary import Summary, coverage_document

_SHOWN = 12


@click.command("coverage")
@path_argument("manifest_path", metavar="MANIFEST|BUNDLE")
@planned_target_option
@json_option("Print the result as JSON.")
def coverage(manifest_path: Path, described: Target | None, as_json: bool) -> None:
    """Prove that every step that can be formed under the limits of MANIFEST (or a spec, or a BUNDLE) has an entry.

    The steps are those of the scheduler that the spec describes. Where that is vLLM's, the table that the server makes
    for itself is judged as well, and what is left out of the proof is named.

    Exits with 0 if every step has an entry in the manifest; else exits with 7 and prints the holes and a smallest
    counterexample. What the server's own table lacks does not change the exit code. No entry depends on --target: it is
    checked to be one for MANIFEST, and changes nothing.
    """
    summary = Summary(load_manifest_of(manifest_path))
    refuse_other_target(described, summary.manifest.spec)
    document = coverage_document(summary)
    emit(document, as_json, _lines(manifest_path, document))
    if not summary.coverage.is_closed:
        raise CoverageError(f"{manifest_path}: {summary.coverage}")


def _lines(path: Path, document: Mapping[str, Any]) -> Iterator[str]:
    state = "closed" if document["closed"] else "has holes" if document["smallest"] else "not proved"
    yield f'{path}: {state} (coverage = "{document["mode"]}")'
    if document["scheduler"] != "aotgaudi":
        yield f"  the steps are those of {document['scheduler']}"
    if document["phases"]:
        yield f"  {'':<11}{'can be formed':>18}{'no entry':>18}{'padding: mean':>16}{'worst':>10}"
    elif document["closed"]:
        yield "  nothing has to be warm: the target runs without graphs"
    yield from map(_phase_line, document["phases"])
    yield from _listed("no entry for", document["holes"])
    if document["smallest"]:
        yield f"the smallest of them: {document['smallest']['text']}"
    if document["mend"]:
        yield f"fix: {document['mend']}"
    yield from _listed("which then has", document["closing_entries"])
    yield from server_lines(document["server_table"])
    if document["not_proved"]:
        yield f"of {', '.join(document['not_proved'])} entries nothing is proved"
    yield from (f"left out of the proof: {text}" for text in document["left_out"])
    yield from live_graph_lines(document["live_graphs"])


def _phase_line(phase: Mapping[str, Any]) -> str:
    reachable, holes = phase["num_reachable"], phase["num_uncovered"]
    missing = f"{holes:,}" + (f" ({100 * holes / reachable:.1f} %)" if holes else "")
    line = f"  {phase['kind']:<11}{reachable:>12,} {phase['unit']:<5}{missing:>{23 - max(5, len(phase['unit']))}}"
    if phase["padding"] is None:
        return line
    mean, worst = phase["padding"]["mean"], phase["padding"]["worst"]
    error = phase["padding"]["error"]
    sampled = f", mean within {error:.2f}" if error else ""
    return f"{line}{mean:>16.2f}{worst:>10.2f}  {_step(phase)}{sampled}"


def _step(phase: Mapping[str, Any]) -> str:
    """Returns the step of the worst padding, in words."""
    batch_size, query_len, blocks = phase["padding"]["worst_step"]
    if phase["kind"] == "prompt":
        return f"{counted(query_len, 'token')} after {counted(blocks, 'block')}"
    return f"{counted(batch_size, 'sequence')} over {counted(blocks, 'block')}"


def _listed(title: str, lines: list[str]) -> Iterator[str]:
    if not lines:
        return
    yield f"{title}:"
    yield from first_lines([f"  {line}" for line in lines], _SHOWN, "  and {:,} more (--json lists all)")


_WORDS: Mapping[State, str] = {"closed": "closed", "bounded": "bounded", "open": "not closed"}


def live_graph_lines(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yields which traffic compiles graphs although everything was captured, and which does not, from JSON values."""
    for number, row in enumerate(
        sorted(rows, key=lambda row: list(_WORDS).index(row["state"]), reverse=True)
    ):
        if number == 0:
            yield "traffic on a server that `build capture --shapes` captured:"
        yield f"  {_WORDS[row['state']]}: {row['kind']}: {row['text']}"


def server_lines(document: Mapping[str, Any] | None) -> Iterator[str]:
    """Yields the content of `_server_document` in words."""
    if document is None:
        return
    table = f"the server's own table ({document['version']}, {document['strategy']})"
    if document["closed"]:
        yield f"{table} has a bucket for each of these steps"
        yield from _cold_lines(document["cold"])
        return
    lacking = (phase for phase in document["phases"] if phase["num_uncovered"])
    yield f"{table} has no bucket for " + ", ".join(
        f"{phase['num_uncovered']:,} of {phase['num_reachable']:,} {phase['kind']} {phase['unit']}"
        for phase in lacking
    )
    yield f"  the smallest: {document['smallest']['text']}"
    if document["fallback"]:
        fallback = ", ".join(map(str, document["fallback"]))
        yield f"  it then compiles ({fallback}) while the request waits, unless that is warm"
    yield from _cold_lines(document["cold"])


def _cold_lines(cold: list[list[int]]) -> Iterator[str]:
    if cold:
        first = ", ".join(map(str, cold[0]))
        yield f"  {len(cold):,} of its buckets its warm-up does not compile, ({first}) for one: the first step in each does"
