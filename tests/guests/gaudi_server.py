"""A server that drives a recipe cache as vllm-gaudi does, on whatever bridge is installed: in tests, the double.

::

    gaudi_server.py serve MODEL --num-gpu-blocks-override N --block-size N --max-model-len N --max-num-batched-tokens N
                                --max-num-seqs N [--port N] ...
    VLLM_BUCKETING_FROM_FILE   its buckets
    VLLM_T_COMPILE_DYNAMIC_SHAPES   unless false: one function for all buckets, traced as Dynamo decides
    STANDIN_FAULT              drifts: the shapes of its graphs are others at each start; drifts-1: those of rank 1

As in vLLM there is an API server and an EngineCore, each of which loads the plugins of ``vllm.general_plugins``. The
EngineCore runs a dummy step for each bucket before it serves, and looks every step up as upstream does
(vllm_gaudi/extension/bucketing/common.py); its "model" is one graph for each padded shape, if shapes are static. With
``--tensor-parallel-size N`` each rank is a process of the EngineCore with a bridge of its own, and ranks add up what they
compute over gloo.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import signal
import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock, Thread
from typing import Any

VERSION = "vllm-gaudi@091bbad"
WIDTH = 8
LIMITS = ("num-gpu-blocks-override", "block-size", "max-model-len", "max-num-batched-tokens", "max-num-seqs")


def load_plugins() -> None:
    """What vLLM does first in each process (vllm/plugins/__init__.py)."""
    for point in importlib.metadata.entry_points(group="vllm.general_plugins"):
        point.load()()


class Engine:
    """Buckets, the graphs that run them, and the look-up."""

    def __init__(self, options: dict[str, int], rank: int = 0, ranks: int = 1, meeting: str = "") -> None:
        from aotgaudi.bucketing.strategy import BucketingInputs
        from aotgaudi.bucketing.upstream import UpstreamLookup
        from aotgaudi.bucketing.versions import GaudiVersion, find_version
        from aotgaudi.doctor.hpu.bridge import Bridge

        version = find_version(VERSION)
        assert isinstance(version, GaudiVersion)
        inputs = BucketingInputs(
            max_num_seqs=options["max-num-seqs"],
            max_num_prefill_seqs=1,
            block_size=options["block-size"],
            max_num_batched_tokens=options["max-num-batched-tokens"],
            max_model_len=options["max-model-len"],
            num_blocks=options["num-gpu-blocks-override"],
            file_text=Path(os.environ["VLLM_BUCKETING_FROM_FILE"]).read_text(encoding="utf-8"),
        )
        strategy = version.strategies["file"]
        self._inputs = inputs
        self._prompt, self._decode = strategy.prompt_table(inputs), strategy.decode_table(inputs)
        self._lookup = UpstreamLookup(version.lookup, inputs, self._prompt, self._decode)
        self._bridge = Bridge()
        self._graphs: dict[tuple[int, int, int], Any] = {}
        drifts = os.environ.get("STANDIN_FAULT") in ("drifts", f"drifts-{rank}")
        self._more_blocks = os.getpid() if drifts else 0
        self._is_static = os.environ.get("VLLM_T_COMPILE_DYNAMIC_SHAPES", "true").lower() == "false"
        self._group: Any = None
        if ranks > 1:
            self._group = self._bridge.torch.distributed
            self._group.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)

    def warm_up(self) -> None:
        """A dummy step for each bucket, the largest first."""
        for _, query, blocks in reversed(self._prompt):
            left = max(0, (self._inputs.max_model_len - query) // self._inputs.block_size)
            is_long = query + blocks * self._inputs.block_size > self._inputs.max_model_len
            self._run(self._lookup.find_prompt(1, query, left if is_long else blocks).bucket)
        for size, _, blocks in reversed(self._decode):
            self._run(self._lookup.find_decode(size, blocks).bucket)

    def answer(self, num_tokens: int, num_generated: int) -> str:
        """The steps of one sequence: its prompt in chunks, then token by token."""
        inputs, done, sums = self._inputs, 0, []
        num_tokens = min(num_tokens, inputs.max_model_len - num_generated)
        while done < num_tokens:
            query = min(inputs.max_num_batched_tokens, num_tokens - done)
            bucket = self._lookup.find_prompt(1, query, -(-done // inputs.block_size)).bucket
            sums.append(self._run(bucket))
            done += query
        for length in range(num_tokens, num_tokens + num_generated):
            sums.append(self._run(self._lookup.find_decode(1, -(-(length + 1) // inputs.block_size)).bucket))
        return " ".join(f"{value:.3f}" for value in sums)

    def flush(self) -> None:
        """Waits until what was compiled is stored."""
        self._bridge.flush()

    def num_compiled(self) -> int:
        """Returns how many recipes this process has compiled."""
        return self._bridge.counts().compiled

    def _run(self, bucket: tuple[int, int, int]) -> float:
        size, query, blocks = bucket
        torch = self._bridge.torch
        tokens, context = torch.ones(size * query, WIDTH), torch.ones(blocks + 1 + self._more_blocks, WIDTH)
        if bucket not in self._graphs:
            self._graphs[bucket] = self._compiled()
        total = self._graphs[bucket](*self._bridge.placed(tokens, context)).cpu().sum()
        if self._group is not None:
            self._group.all_reduce(total)
        return float(total)

    def _compiled(self) -> Any:
        if self._graphs and not self._is_static:
            return next(iter(self._graphs.values()))
        self._bridge.forget()
        return self._bridge.compiled(_graph, self._is_static)


def _graph(tokens: Any, context: Any) -> Any:
    weights = (tokens @ context.t() * 0.125).relu()
    mixed = weights @ context + tokens
    return (
        mixed.reshape(tokens.shape[0] * 2, WIDTH // 2) * 0.5
    )  # A size in the graph's text, as models have it.


def worker(pipe: Connection, *of_engine: Any) -> None:
    """A rank: warms up, says so, then answers."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    load_plugins()
    serve(Engine(*of_engine), pipe)


class Ranks:
    """Stands in for an `Engine`: processes that each do all steps. The first one's answer counts."""

    def __init__(self, options: dict[str, int], num: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            meeting = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num):
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num))
            ours, theirs = context.Pipe()
            arguments = (theirs, options, rank, num, meeting)
            process = context.Process(target=worker, args=arguments, name=f"VllmWorker-{rank}")
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def warm_up(self) -> None:
        """Waits until every rank has."""
        for pipe in self._pipes:
            pipe.recv()

    def answer(self, *asked: int) -> str:
        """Has every rank do the steps of one sequence."""
        for pipe in self._pipes:
            pipe.send(asked)
        first, *_ = [str(pipe.recv()) for pipe in self._pipes]
        return first

    def flush(self) -> None:
        """Has every rank flush and end."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


def engine_core(options: dict[str, int], ranks: int, pipe: Connection) -> None:
    """The EngineCore."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # The API server ends it.
    load_plugins()
    serve(Engine(options) if ranks == 1 else Ranks(options, ranks), pipe)


def serve(engine: Engine | Ranks, pipe: Connection) -> None:
    """Warms up, says so, then answers."""
    engine.warm_up()
    pipe.send("ready")
    while True:
        asked = pipe.recv()
        if asked is None:
            engine.flush()
            return
        pipe.send(engine.answer(*asked))


class Server(ThreadingHTTPServer):
    """The API server."""

    daemon_threads = True

    def __init__(self, port: int, pipe: Connection) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.pipe, self.lock = pipe, Lock()

    def ask(self, body: dict[str, Any]) -> str:
        """Has the engine answer one request."""
        prompt = body["prompt"]
        num_tokens = len(prompt) if isinstance(prompt, list) else len(str(prompt).split())
        with self.lock:
            self.pipe.send((num_tokens, int(body.get("max_tokens", 1))))
            return str(self.pipe.recv())


class Handler(BaseHTTPRequestHandler):
    """``/health`` and ``/v1/completions``."""

    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send(200 if self.path == "/health" else 404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._send(200, {"choices": [{"text": self.server.ask(body)}]})

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
    signal.signal(signal.SIGTERM, lambda *_: Thread(target=server.shutdown).start())
    server.serve_forever()
    ours.send(None)
    engine.join()


if __name__ == "__main__":
    main()
