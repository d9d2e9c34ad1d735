"""A server that drives a recipe cache as vllm-gaudi does, on whatever bridge is installed: in tests, the double.

::

    gaudi_server.py serve MODEL --num-gpu-blocks-override N --block-size N --max-model-len N --max-num-batched-tokens N
                                --max-num-seqs N [--port N] ...
    VLLM_BUCKETING_FROM_FILE   its buckets
    VLLM_T_COMPILE_DYNAMIC_SHAPES   unless false: one function for all buckets, traced as Dynamo decides
    STANDIN_FAULT              drifts: the shapes of its graphs are others at each start; drifts-1: those of rank 1

As in vLLM there is an API server and an EngineCore, each of which loads the plugins of ``vllm.general_plugins``. The
EngineCore batches continuously: in each step it decodes all running sequences together, padded to a bucket, and runs
chunks of prompts beside them. Its "model" is one graph for each bucket, and its sampler one for each number of rows and
kind of batch, if shapes are static. Before it serves, it runs a dummy step for each bucket, and the plugin's six kinds
of batches through the sampler. With ``--tensor-parallel-size N`` each rank is a process of the EngineCore with a bridge of
its own, and ranks add up what they compute over gloo.

What it says of vllm-gaudi follows the plugin's source at v0.26.0, and nothing of it is ours: `Buckets`
(vllm_gaudi/extension/bucketing/file_strategy.py 35-64, common.py 397-462 and 534-550), dummy steps
(vllm_gaudi/v1/worker/hpu_model_runner.py 5418 and 5575), the sampler's kinds (5295; hpu_input_batch.py 628 and 765).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock, Thread
from typing import Any, NamedTuple

WIDTH = 8
STEP_SECONDS = 0.003
"""What a step takes at least. A card takes longer; without it answers are over before their readers have a turn."""
TICK_SECONDS = 0.02
LIMITS = ("num-gpu-blocks-override", "block-size", "max-model-len", "max-num-batched-tokens", "max-num-seqs")
Bucket = tuple[int, int, int]


def load_plugins() -> None:
    """What vLLM does first in each process (vllm/plugins/__init__.py)."""
    for point in importlib.metadata.entry_points(group="vllm.general_plugins"):
        point.load()()


class Buckets:
    """A bucket file and the look-up, by the plugin's rules."""

    def __init__(self, text: str, options: Mapping[str, int]) -> None:
        self.block_size, self.max_model_len = options["block-size"], options["max-model-len"]
        most = -(-self.max_model_len // self.block_size)
        prompts, decodes = set(), set()
        for line in text.splitlines():
            if line and not line.startswith("#"):
                parts = eval(line, {"range": range})
                rows = [[part] if isinstance(part, int) else part for part in parts]
                for size, query, blocks in itertools.product(*rows):
                    if query > 1:
                        prompts.add((size, query, blocks))
                    elif size <= blocks:  # Without contiguous attention.
                        decodes.add((size, query, min(blocks, size * most)))
        self.prompts = sorted(
            (size, query, blocks)
            for size, query, blocks in prompts
            if query <= self.max_model_len
            and blocks <= -(-(self.max_model_len - 1) // self.block_size)
            and size * query <= options["max-num-batched-tokens"]
        )
        self.decodes = sorted(decodes)

    def prompt(self, query: int, num_context_tokens: int) -> Bucket:
        """Where a chunk of one prompt runs."""
        return self._first(self.prompts, (1, query, -(-num_context_tokens // self.block_size)))

    def decode(self, lengths: Sequence[int]) -> Bucket:
        """Where sequences with so many tokens in the cache decode one more; it is looked up twice, first for the rows."""
        blocks = sum(-(-(length + 1) // self.block_size) for length in lengths)
        rows = self._first(self.decodes, (len(lengths), 1, blocks))[0]
        return rows, 1, self._first(self.decodes, (rows, 1, blocks))[2]

    def dummies(self) -> Iterator[Bucket]:
        """What the warm-up runs: each table from its end."""
        for _, query, blocks in reversed(self.prompts):
            most = max(0, self.max_model_len - query) // self.block_size
            fits = query + blocks * self.block_size <= self.max_model_len
            yield self.prompt(query, (blocks if fits else most) * self.block_size)
        for size, _, blocks in reversed(self.decodes):
            each = [blocks // size + (number < blocks % size) for number in range(size)]
            yield self.decode([min(num * self.block_size, self.max_model_len) - 1 for num in each])

    def _first(self, table: Sequence[Bucket], wanted: Bucket) -> Bucket:
        """Upstream adds a bucket where there is none; here the step runs as it is, so that it is a new graph, too."""
        fitting = (one for one in table if all(have >= want for have, want in zip(one, wanted, strict=True)))
        return next(fitting, wanted)


class Kind(NamedTuple):
    """What decides the sampler's graph besides the number of rows: all requests of the batch, and whose rows have seeds."""

    mode: str
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    seeds: str = "none"


WARMED_UP = (Kind("greedy"), Kind("random"), Kind("random", True, True), Kind("random", False, True))


@dataclass(eq=False)
class Asked:
    """A request under way."""

    number: int
    num_prompt: int
    num_wanted: int
    sampling: Mapping[str, Any]
    num_computed: int = 0
    texts: list[str] = field(default_factory=list)

    @property
    def heat(self) -> float:
        temperature = float(self.sampling.get("temperature", 1.0))
        return 1 / temperature if temperature else 0.0


class Step(NamedTuple):
    """One forward pass: its bucket, what is in each row that gives logits, and how these are sampled.

    Without context it is the sampler's warm-up, which makes logits up.
    """

    bucket: Bucket
    rows: Mapping[int, float] = {}
    heats: Sequence[float] = ()
    kind: Kind | None = None


class Runner:
    """The graphs of one rank."""

    def __init__(self, rank: int = 0, ranks: int = 1, meeting: str = "") -> None:
        from aotgaudi.doctor.hpu.bridge import Bridge

        self._bridge = Bridge()
        config = importlib.import_module("torch._dynamo.config")
        config.recompile_limit = config.accumulated_recompile_limit = 10_000  # As the plugin raises it.
        self._graphs: dict[object, Any] = {}
        drifts = os.environ.get("STANDIN_FAULT") in ("drifts", f"drifts-{rank}")
        self._more_blocks = os.getpid() if drifts else 0
        self._is_static = os.environ.get("VLLM_T_COMPILE_DYNAMIC_SHAPES", "true").lower() == "false"
        self._group: Any = None
        if ranks > 1:
            self._group = self._bridge.torch.distributed
            self._group.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)

    def run(self, step: Step) -> list[float]:
        """Returns the "token" of each row that was asked for."""
        (size, query, blocks), torch = step.bucket, self._bridge.torch
        tokens, context = torch.zeros(size * query, WIDTH), torch.zeros(blocks + 1 + self._more_blocks, WIDTH)
        context[0] = 1.0
        for row, value in step.rows.items():
            tokens[row] = value
        hidden = tokens
        if blocks or query > 1:
            hidden = self._ran("model", step.bucket, _model, tokens, context).reshape(size * query, WIDTH)
        if self._group is not None:
            self._group.all_reduce(hidden)
        if step.kind is None:
            return []
        heats = torch.zeros(size, 1)
        heats[: len(step.heats), 0] = torch.tensor(step.heats)
        rows = [*step.rows, *[next(iter(step.rows))] * (size - len(step.rows))]
        found = self._ran(
            step.kind, size, _sampler(step.kind), hidden[rows], heats, (heats == 0).to(hidden.dtype)
        )
        return [float(total) for total in found.sum(-1)[: len(step.rows)]]

    def flush(self) -> None:
        """Waits until what was compiled is stored."""
        self._bridge.flush()

    def num_compiled(self) -> int:
        """Returns how many recipes this process has compiled."""
        return self._bridge.counts().compiled

    def _ran(self, name: object, shape: object, function: Any, *inputs: Any) -> Any:
        key = (name, shape) if self._is_static else name
        if key not in self._graphs:
            self._graphs[key] = self._bridge.compiled(function, self._is_static)
        return self._graphs[key](*self._bridge.placed(*inputs)).cpu()


def _model(tokens: Any, context: Any) -> Any:
    mixed = (tokens @ context.t() * 0.125).relu() @ context + tokens
    # A size in the text, as models have it; a view cannot be the output (K-34).
    return mixed.reshape(tokens.shape[0] * 2, WIDTH // 2) * 0.5


def _sampler(kind: Kind) -> Any:
    mode, *truncations, seeds = kind

    def run(logits: Any, heats: Any, greedy: Any) -> Any:
        scaled = logits * heats
        for number, is_there in enumerate(truncations):
            if is_there:
                scaled = (scaled * (0.5 + number)).relu()
        scaled = scaled * {"none": 1.25, "some": 1.5, "all": 1.75}[seeds]
        return {"greedy": logits * greedy, "random": scaled, "mixed": logits * greedy + scaled}[mode]

    return run


class Engine:
    """The scheduler: forms steps of the sequences under way, decodes first."""

    def __init__(self, options: Mapping[str, int], runner: Runner | Ranks) -> None:
        file = Path(os.environ["VLLM_BUCKETING_FROM_FILE"])
        self._buckets, self.runner = Buckets(file.read_text(encoding="utf-8"), options), runner
        self._most_tokens, self._most_running = options["max-num-batched-tokens"], options["max-num-seqs"]
        self._waiting: deque[Asked] = deque()
        self._running: list[Asked] = []

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._running)

    def warm_up(self) -> None:
        """A dummy step for each bucket, and the sampler for each number of rows."""
        for size in dict.fromkeys([1, *(size for size, _, _ in self._buckets.decodes)]):
            for kind in WARMED_UP:
                self.runner.run(Step((size, 1, 0), {0: 1.0}, [float(kind.mode == "random")], kind))
        for bucket in self._buckets.dummies():
            self.runner.run(Step(bucket))

    def add(self, number: int, num_prompt: int, num_wanted: int, sampling: Mapping[str, Any]) -> None:
        """Takes a request."""
        most = self._buckets.max_model_len - num_wanted
        self._waiting.append(Asked(number, max(1, min(num_prompt, most)), num_wanted, sampling))

    def step(self) -> list[tuple[int, str, bool]]:
        """Runs the next step. Returns for each request that got a token its number, the token, and whether it is done."""
        time.sleep(STEP_SECONDS)
        left, parts = self._most_tokens, []
        for one in [*self._running, *self._waiting]:
            if not left or (not one.num_computed and len(self._running) == self._most_running):
                break
            if not one.num_computed:
                self._running.append(self._waiting.popleft())
            parts.append((one, min(left, max(1, one.num_prompt - one.num_computed))))
            left -= parts[-1][1]
        decoding = [one for one, _ in parts if one.texts]
        if decoding:
            bucket = self._buckets.decode([one.num_computed for one in decoding])
            self._forward(bucket, dict(enumerate(decoding)))
        for one, chunk in (part for part in parts if part[0] not in decoding):
            is_last = one.num_computed + chunk == one.num_prompt
            self._forward(self._buckets.prompt(chunk, one.num_computed), {chunk - 1: one} if is_last else {})
        for one, chunk in parts:
            one.num_computed += chunk
        told = [
            (one.number, one.texts[-1], len(one.texts) == one.num_wanted) for one, _ in parts if one.texts
        ]
        self._running = [one for one in self._running if len(one.texts) < one.num_wanted]
        return told

    def _forward(self, bucket: Bucket, rows: Mapping[int, Asked]) -> None:
        values = {row: 1 + (one.num_prompt + len(one.texts)) % 16 / 16 for row, one in rows.items()}
        kind = self._kind([*rows.values()], bucket[0]) if rows else None
        tokens = self.runner.run(Step(bucket, values, [one.heat for one in rows.values()], kind))
        for one, token in zip(rows.values(), tokens, strict=True):
            one.texts.append(f"{token:.3f} ")

    def _kind(self, rows: Sequence[Asked], size: int) -> Kind:
        """The parameters of all requests count, the seeds of those in these rows. Padding repeats the first row."""
        random = [one for one in self._running if one.heat]
        mode = "greedy" if not random else "random" if len(random) == len(self._running) else "mixed"
        used = [any(one.sampling.get(name, off) != off for one in random) for name, off in OFF.items()]
        seeded = [one.heat > 0 and "seed" in one.sampling for one in rows]
        seeded += seeded[:1] * (size - len(rows))
        return Kind(mode, *used, seeds="all" if all(seeded) else "some" if any(seeded) else "none")


OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def worker(pipe: Connection, *of_runner: Any) -> None:
    """A rank: runs the steps that it is given."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    load_plugins()
    runner = Runner(*of_runner)
    while (step := pipe.recv()) is not None:
        pipe.send(runner.run(step))
    runner.flush()


class Ranks:
    """Stands in for a `Runner`: processes that each run all steps. The first one's answer counts."""

    def __init__(self, num: int) -> None:
        # No port: one that is free now may be another's by the time that a rank has imported torch and listens.
        meeting = f"file://{tempfile.mkdtemp()}/meeting"
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num):
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num))
            ours, theirs = context.Pipe()
            process = context.Process(
                target=worker, args=(theirs, rank, num, meeting), name=f"VllmWorker-{rank}"
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, step: Step) -> list[float]:
        """Has every rank run a step."""
        for pipe in self._pipes:
            pipe.send(step)
        first, *_ = [pipe.recv() for pipe in self._pipes]
        return list(first)

    def flush(self) -> None:
        """Has every rank flush and end."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


def engine_core(options: dict[str, int], ranks: int, pipe: Connection) -> None:
    """The EngineCore: warms up, says so, then answers."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # The API server ends it.
    load_plugins()
    engine = Engine(options, Runner() if ranks == 1 else Ranks(ranks))
    engine.warm_up()
    pipe.send("ready")
    while True:
        while engine.is_idle or pipe.poll():
            asked = pipe.recv()
            if asked is None:
                engine.runner.flush()
                return
            engine.add(*asked)
        pipe.send(engine.step())


class Server(ThreadingHTTPServer):
    """The API server."""

    daemon_threads = True

    def __init__(self, port: int, pipe: Connection) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.pipe, self.lock, self._numbers = pipe, Lock(), itertools.count()
        self._told: dict[int, queue.SimpleQueue[tuple[str, bool]]] = {}
        Thread(target=self._read, daemon=True).start()

    def ask(self, body: dict[str, Any]) -> Iterator[str]:
        """Has the engine answer one request."""
        prompt, number = body["prompt"], next(self._numbers)
        told = self._told[number] = queue.SimpleQueue()
        num_tokens = len(prompt) if isinstance(prompt, list) else len(str(prompt).split())
        with self.lock:
            self.pipe.send((number, num_tokens, int(body.get("max_tokens", 1)), body))
        is_last = False
        while not is_last:
            text, is_last = told.get()
            yield text

    def _read(self) -> None:
        while not self.pipe.closed:
            try:
                told = self.pipe.recv()
            except (EOFError, OSError):  # The EngineCore has ended.
                told = [(number, "", True) for number in self._told]
                self.pipe.close()
            for number, text, is_last in told:
                self._told[number].put((text, is_last))


class Handler(BaseHTTPRequestHandler):
    """``/health`` and ``/v1/completions``."""

    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send(200 if self.path == "/health" else 404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not body.get("stream"):
            self._send(200, {"choices": [{"text": "".join(self.server.ask(body))}]})
            return
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        for text in self.server.ask(body):
            self.wfile.write(b"data: %s\n\n" % json.dumps({"choices": [{"text": text}]}).encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def _send(self, status: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    for name in LIMITS:
        parser.add_argument(f"--{name}", type=int, required=True, dest=name)
    options = vars(parser.parse_known_args()[0])
    load_plugins()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    limits = {name: options[name] for name in LIMITS}
    engine = context.Process(
        target=engine_core, args=(limits, options["tensor_parallel_size"], theirs), name="EngineCore_DP0"
    )
    engine.start()
    theirs.close()
    try:
        ours.recv()
    except EOFError:
        sys.exit("the EngineCore has ended")
    server = Server(options["port"], ours)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))  # To start a thread takes a lock.
    Thread(target=server.serve_forever, args=(TICK_SECONDS,), daemon=True).start()
    while not asked:
        time.sleep(TICK_SECONDS)
    server.shutdown()
    ours.send(None)
    engine.join()


if __name__ == "__main__":
    main()
