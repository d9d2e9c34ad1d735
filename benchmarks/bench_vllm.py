"""Ours beside vLLM for CPUs and llama.cpp's server, through HTTP: the same requests, client, cores and threads.

``python benchmarks/bench_vllm.py --bundle BUNDLE --model MODEL --work WORK``

Prompts are slices of a licence's text, each another one, as token ids; decoding is greedy, streams, and does not end early.

============  ==================================================================================================
cell          what is sent
============  ==================================================================================================
``decode``    as many requests at once as the batch: tokens/s while all of them decode, and the time to first tokens
``arrivals``  as many clients, each with one request after the other: time between tokens while others' prompts run
``ready``     nothing: the starts of this run are timed
============  ==================================================================================================

All servers are started, and all but one are stopped (SIGSTOP) at any time; rounds go round them, so that a slow moment of
the machine meets all. Each cell leaves what it measured in WORK and is not measured again while that is there: ``--cells
'decode-t1-*'`` measures some of them only. The result is written of all that is there. vLLM and llama.cpp are installed
by ci/guests and ci/peers, where --vllm and --llama name none. vLLM compiles in its first start, which takes minutes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import harness
import peers
from harness import Spread, Table, percentile, verdict
from peers import Peer, Running, Sizes
from streams import Answer, Turn, stream_all

from aotgaudi.manifest.manifest import loads

SERVERS = ("ours", "vllm", "llama.cpp")
PROMPT_LENS = {256: 200, 1024: 900}
"""Context of a cell, in tokens -> length of its prompts: the context is reached while 128 more tokens are generated."""
NEW_TOKENS = 128
ARRIVAL_TOKENS, ARRIVAL_REQUESTS, ARRIVAL_DELAY_SECONDS = 64, 3, 0.2
RATE_TARGET, FIRST_TARGET, GAP_TARGET = 1.1, 1.0, 2.0


@dataclass(frozen=True)
class Cell:
    """`context` in tokens, `batch` in requests at once; both 0 in ``ready``."""

    kind: str
    threads: int
    context: int = 0
    batch: int = 0

    def __str__(self) -> str:
        return f"{self.kind}-t{self.threads}" + (f"-c{self.context}-b{self.batch}" if self.batch else "")

    def turns(self, text: list[int], seed: str, new_tokens: int | None = None) -> list[Turn]:
        """The requests of one round. Another seed gives other prompts, so that no server has seen them."""
        random = Random(f"{self} {seed}")
        is_arrivals = self.kind == "arrivals"
        count = new_tokens or (ARRIVAL_TOKENS if is_arrivals else NEW_TOKENS)
        return [
            Turn(
                tuple(
                    _body(text, PROMPT_LENS[self.context], count, random)
                    for _ in range(ARRIVAL_REQUESTS if is_arrivals else 1)
                ),
                number * ARRIVAL_DELAY_SECONDS if is_arrivals else 0.0,
            )
            for number in range(self.batch)
        ]


def _body(text: list[int], length: int, new_tokens: int, random: Random) -> dict[str, Any]:
    start = random.randrange(len(text))
    slice_ = [text[(start + number) % len(text)] for number in range(length - 1)]
    return {
        "model": peers.MODEL_NAME,
        "prompt": [random.choice(text), *slice_],
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def main() -> None:
    """Measures what is missing, prints, writes."""
    args = _arguments()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("told to end")
    )  # So that no server is left behind, stopped.
    machine = harness.environment(args.threads)
    work: Path = args.work.resolve()
    (work / "cells").mkdir(parents=True, exist_ok=True)
    chosen = [cell for cell in _cells(args) if any(fnmatch(str(cell), pattern) for pattern in args.cells)]
    for threads in args.threads:
        missing = [cell for cell in chosen if cell.threads == threads and not _path(work, cell).exists()]
        if missing:
            _measure(threads, missing, args, work)
    measured = sorted((_read(path) for path in (work / "cells").glob("*.json")), key=_order)
    found = {str(_cell(row)): row for row in measured}
    starts = [json.loads(line) for line in _lines(work / "starts.jsonl")]
    machine["peers"] = {start["server"]: start["version"] for start in starts}
    tables = [table for table in _tables(args, found, starts, machine["peers"]) if table.rows]
    harness.finish("vllm", args, machine, {"cells": found, "starts": starts}, tables)


def _arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="keeps what was measured, and caches")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--contexts", type=int, nargs="+", choices=sorted(PROMPT_LENS), default=[256, 1024])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--cells", nargs="+", default=["*"], metavar="PATTERN", help="e.g. 'decode-t1-c256-*'"
    )
    parser.add_argument(
        "--cores", type=int, nargs="+", help="those of every server [default: this process's]"
    )
    parser.add_argument(
        "--vllm",
        type=Path,
        help="its interpreter [default: $AOTGAUDI_GUEST_PYTHON, or ci/guests' installation]",
    )
    parser.add_argument(
        "--llama", type=Path, help="its folder [default: $AOTGAUDI_LLAMA, or ci/peers' build]"
    )
    return parser.parse_args()


def _cells(args: argparse.Namespace) -> Iterator[Cell]:
    for threads in args.threads:
        yield Cell("ready", threads)
        for context in args.contexts:
            for batch in args.batches:
                yield Cell("decode", threads, context, batch)
        for batch in args.batches:
            if batch > 1:
                yield Cell("arrivals", threads, min(args.contexts), batch)


def _path(work: Path, cell: Cell) -> Path:
    return work / "cells" / f"{cell}.json"


def _read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_bytes())
    return value


def _cell(row: Mapping[str, Any]) -> Cell:
    return Cell(row["kind"], row["threads"], row["context"], row["batch"])


def _order(row: Mapping[str, Any]) -> tuple[str, int, int, int]:
    return row["kind"], row["threads"], row["context"], row["batch"]


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


# Measuring


def _measure(threads: int, cells: list[Cell], args: argparse.Namespace, work: Path) -> None:
    """Starts all servers with these threads, and measures these cells."""
    text = _text(args.model)
    cores = frozenset(args.cores or ())
    with ExitStack() as stack:
        servers: list[Running] = []
        for peer in _peers(args, threads, work):
            servers.append(stack.enter_context(peers.running(peer, threads, cores)))
            _record_start(work, servers[-1], threads, is_timed=any(cell.kind == "ready" for cell in cells))
        for cell in cells:
            if cell.batch:
                rounds = {server.peer.name: _rounds_begun(server, cell, text) for server in servers}
                for number in range(args.rounds):
                    for server in servers[number % len(servers) :] + servers[: number % len(servers)]:
                        rounds[server.peer.name].append(_round(server, cell, text, str(number)))
                found = {"rounds": rounds}
            else:
                found = {"rounds": {}}
            found |= {**asdict(cell), "date": datetime.date.today().isoformat(), "load": os.getloadavg()[0]}
            _path(work, cell).write_text(json.dumps(found) + "\n", encoding="utf-8")
            print(cell, {name: _told(cell, rows) for name, rows in found["rounds"].items()}, flush=True)


def _peers(args: argparse.Namespace, threads: int, work: Path) -> Iterator[Peer]:
    manifest = loads((args.bundle / "manifest.json").read_bytes())
    sizes = Sizes(manifest.spec.limits.max_num_seqs, manifest.spec.limits.max_model_len)
    if "ours" in args.servers:
        yield peers.ours(args.bundle, args.model)
    if "llama.cpp" in args.servers:
        folder = _installed(
            args.llama, "AOTGAUDI_LLAMA", "build/peers/llama.cpp", "peers", "build/bin/llama-server"
        )
        gguf = work / "model.bf16.gguf"
        peers.convert_to_gguf(folder, args.model, gguf)
        yield peers.llama(folder, gguf, threads, sizes)
    if "vllm" in args.servers:
        default = "build/guests/vllm/bin/python"
        yield peers.vllm(
            _installed(args.vllm, "AOTGAUDI_GUEST_PYTHON", default, "guests"),
            args.model,
            sizes,
            work / "vllm",
        )


def _installed(given: Path | None, variable: str, default: str, script: str, inside: str = "") -> Path:
    """Returns where a peer is. Only where nobody says so, and it is not there, it is installed."""
    named = given or (Path(os.environ[variable]) if variable in os.environ else None)
    path = (named or harness.ROOT / default).absolute()
    if named is None and not (path / inside).exists():
        subprocess.run(["bash", str(harness.ROOT / "ci" / script)], check=True)
    if not (path / inside).exists():
        sys.exit(f"{path / inside}: no such file; bash ci/{script} makes it")
    return path


def _text(model: Path) -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids: list[int] = tokenizer.encode((harness.ROOT / "LICENSE").read_text(encoding="utf-8")).ids
    return ids


def _record_start(work: Path, server: Running, threads: int, *, is_timed: bool) -> None:
    row = {
        "server": server.peer.name,
        "version": server.peer.version,
        "threads": threads,
        "ready_seconds": server.ready_seconds,
        "is_timed": is_timed,
    }
    with (work / "starts.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(row, flush=True)


def _rounds_begun(server: Running, cell: Cell, text: list[int]) -> list[dict[str, Any]]:
    """Warms up: every shape of the cell once, which is not counted. Returns no rounds yet."""
    with server.awake():
        stream_all(server.port, cell.turns(text, "warm up", new_tokens=8))
    return []


def _round(server: Running, cell: Cell, text: list[int], seed: str) -> dict[str, Any]:
    with server.awake():
        counters, cpu = server.metrics(), server.cpu_seconds()
        clients = stream_all(server.port, cell.turns(text, seed))
        used = server.cpu_seconds() - cpu
        steps = _steps(counters, server.metrics())
    answers = [answer for client in clients for answer in client]
    seconds = max(a.token_times[-1] for a in answers) - min(a.sent_at for a in answers)
    gaps = [gap for answer in answers for gap in answer.gaps]
    tokens = sum(answer.num_tokens for answer in answers)
    return {
        "decode_rate": _decode_rate(answers) if cell.kind == "decode" else None,
        "whole_rate": tokens / seconds,
        "first_token_seconds": [answer.first_token_seconds for answer in answers],
        "gaps": {f"p{share}": percentile(gaps, share / 100) for share in (50, 90, 99, 100)},
        "events": sum(len(answer.token_times) for answer in answers),
        "tokens": tokens,
        "seconds": seconds,
        "cpu_seconds": used,
        "steps": steps,
        "text": answers[0].text,
    }


def _decode_rate(answers: list[Answer]) -> float:
    """Tokens/s from when the last stream had its first token until the first one ended."""
    begin = max(answer.token_times[0] for answer in answers)
    end = min(answer.token_times[-1] for answer in answers)
    if end <= begin:
        sys.exit("a stream ended before the last one had begun: the server does not run them at once")
    return sum(answer.tokens_within(begin, end) for answer in answers) / (end - begin)


def _steps(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """How many steps of each kind ours ran meanwhile, and for how many seconds; nothing of others."""
    found = {}
    for kind in ("prompt", "decode"):
        names = [f'aotgaudi_step_seconds_{what}{{kind="{kind}"}}' for what in ("count", "sum")]
        if all(name in after for name in names):
            count, seconds = (after[name] - before.get(name, 0.0) for name in names)
            found[kind] = {"count": count, "seconds": seconds}
    return found


def _told(cell: Cell, rounds: list[dict[str, Any]]) -> str:
    if cell.kind == "arrivals":
        return f"p50 {_gap(rounds, 'p50') * 1e3:.1f} p99 {_gap(rounds, 'p99') * 1e3:.1f} ms"
    return f"{_rates(rounds).median:.1f}/s, first {_first(rounds).median * 1e3:.0f} ms"


# Tables


def _rates(rounds: list[dict[str, Any]], which: str = "decode_rate") -> Spread:
    return Spread(tuple(row[which] for row in rounds))


def _first(rounds: list[dict[str, Any]]) -> Spread:
    """The median over the clients, of each round."""
    return Spread(tuple(median(row["first_token_seconds"]) for row in rounds))


def _gap(rounds: list[dict[str, Any]], which: str) -> float:
    return median(row["gaps"][which] for row in rounds)


def _tables(
    args: argparse.Namespace,
    found: Mapping[str, Mapping[str, Any]],
    starts: list[dict[str, Any]],
    versions: Mapping[str, str],
) -> Iterator[Table]:
    names = [name for name in SERVERS if name in versions]
    cells = [cell for cell in found.values() if cell["batch"]]
    peer_names = ", ".join(f"{name} {versions[name]}" for name in names[1:])
    how = f"Medians of {_num_rounds(cells)} rounds, least and most in brackets, one client process, HTTP. {peer_names}."
    decode = [cell for cell in cells if cell["kind"] == "decode"]
    yield _compared("Decode, tokens/s", decode, names, _rates, RATE_TARGET, how, at_least=True)
    first = [cell for cell in decode if cell["batch"] in (min(args.batches), max(args.batches))]
    yield _compared("Median time to first token, s", first, names, _first, FIRST_TARGET, "All sent at once.")
    yield _arrivals([cell for cell in cells if cell["kind"] == "arrivals"], names)
    yield _ready([start for start in starts if start.get("is_timed")], names)
    yield _profile(cells, names)


def _num_rounds(cells: list[Any]) -> str:
    """How many rounds the cells have: what was measured by itself may have others."""
    numbers = {len(rounds) for cell in cells for rounds in cell["rounds"].values()}
    return " to ".join(map(str, sorted({min(numbers, default=0), max(numbers, default=0)})))


def _compared(
    title: str,
    cells: list[Any],
    names: list[str],
    value: Any,
    target: float,
    note: str,
    *,
    at_least: bool = False,
) -> Table:
    """A row a cell: each server's value, and ours in relation to each peer's; the target is against vLLM."""
    rows = []
    digits = 1 if at_least else 2
    for cell in cells:
        spreads = {name: value(cell["rounds"][name]) for name in names if name in cell["rounds"]}
        ratios = {
            name: spreads["ours"].median / spreads[name].median
            for name in names[1:]
            if name in spreads and "ours" in spreads
        }
        rows.append(
            (
                *(str(cell[key]) for key in ("threads", "context", "batch")),
                *(spreads[name].text(digits) if name in spreads else "-" for name in names),
                *(f"{ratios[name]:.2f}" if name in ratios else "-" for name in names[1:]),
                verdict(ratios["vllm"], target, at_least=at_least) if "vllm" in ratios else "",
            )
        )
    columns = ("threads", "context", "batch", *names, *(f"ours/{name}" for name in names[1:]), "target: vllm")
    return Table(title, columns, tuple(rows), note)


def _arrivals(cells: list[Any], names: list[str]) -> Table:
    rows = []
    for cell in cells:
        gaps = {
            name: (_gap(cell["rounds"][name], "p50"), _gap(cell["rounds"][name], "p99"))
            for name in names
            if name in cell["rounds"]
        }
        texts = [f"{gaps[n][0] * 1e3:.1f} / {gaps[n][1] * 1e3:.1f}" if n in gaps else "-" for n in names]
        rates = [f"{_rates(cell['rounds'][n], 'whole_rate').median:.0f}" if n in gaps else "-" for n in names]
        ratio = gaps["ours"][1] / gaps["ours"][0] if "ours" in gaps else None
        told = ("-", "") if ratio is None else (f"{ratio:.2f}", verdict(ratio, GAP_TARGET))
        rows.append((str(cell["threads"]), str(cell["batch"]), *texts, *rates, *told))
    columns = ("threads", "clients", *(f"{name}: p50 / p99 ms" for name in names))
    columns += (*(f"{name}: tokens/s" for name in names), "ours p99/p50", "target")
    note = (
        f"Each client sends {ARRIVAL_REQUESTS} requests, one after the other, {ARRIVAL_DELAY_SECONDS} s after the"
        f" client before it; prompts of {PROMPT_LENS[256]} tokens, {ARRIVAL_TOKENS} new ones."
    )
    return Table("Time between tokens while prompts arrive", columns, tuple(rows), note)


def _ready(starts: list[dict[str, Any]], names: list[str]) -> Table:
    rows = []
    for name in names:
        samples = tuple(start["ready_seconds"] for start in starts if start["server"] == name)
        if samples:
            rows.append((name, str(len(samples)), Spread(samples).text()))
    note = "From the start of the process; the first of vLLM compiles, the others have its cache."
    return Table("Ready, s", ("server", "starts", "median (min to max)"), tuple(rows), note)


def _profile(cells: list[Any], names: list[str]) -> Table:
    """Where ours falls short of the target: what a step takes, and what is outside of steps."""
    rows = []
    for cell in cells:
        if cell["kind"] != "decode" or not {"ours", "vllm"} <= cell["rounds"].keys():
            continue
        ours, theirs = cell["rounds"]["ours"], cell["rounds"]["vllm"]
        if _rates(ours).median / _rates(theirs).median >= RATE_TARGET:
            continue
        prompt, decode = (_step_ms(ours, kind) for kind in ("prompt", "decode"))
        between = median(row["gaps"]["p50"] for row in ours) * 1e3
        cpu = [
            median(row["cpu_seconds"] / row["tokens"] for row in cell["rounds"][name]) * 1e3
            for name in names
            if name in cell["rounds"]
        ]
        rows.append(
            (
                *(str(cell[key]) for key in ("threads", "context", "batch")),
                f"{prompt:.1f}",
                f"{decode:.1f}",
                f"{between:.1f}",
                f"{_gap(theirs, 'p50') * 1e3:.1f}",
                " / ".join(f"{value:.1f}" for value in cpu),
            )
        )
    columns = ("threads", "context", "batch", "ours: prompt step ms", "decode step ms", "between tokens ms")
    columns += ("vllm: between tokens ms", f"CPU ms a token: {' / '.join(names)}")
    note = (
        "Where the decode target is missed. A step is the engine's; between tokens is what the client sees."
    )
    return Table("Where the time goes", columns, tuple(rows), note)


def _step_ms(rounds: list[dict[str, Any]], kind: str) -> float:
    """The mean of all steps of a kind."""
    rows = [row["steps"][kind] for row in rounds if row["steps"].get(kind, {}).get("count")]
    return 1e3 * sum(row["seconds"] for row in rows) / sum(row["count"] for row in rows) if rows else 0.0


if __name__ == "__main__":
    main()
