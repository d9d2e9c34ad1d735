"""Decode and prefill tokens/s: ours against transformers, eager and under torch.compile, on equal threads.

=============  =====================================================================================
system         what runs
=============  =====================================================================================
ours           ProgramRunner.run: inputs, compiled programs, greedy sampling; malloc as the server sets it
ours-malloc    the same with the C library's default malloc
engine         Engine: scheduling, detokenizing and events besides; concurrent requests, no HTTP
http           ``aotgaudi serve``, a process of its own: concurrent streams, read by one client on the same cores
eager          transformers' forward and argmax; decode on a DynamicCache of the same context
compile        the same forward under torch.compile (default mode, dynamic=False) on a StaticCache
=============  =====================================================================================

Each system is a process of its own, which is idle while another is measured; rounds go round the systems, so
that a slow moment of the machine meets all. All compute on a second thread, as the server's engine does.
Transformers gets our malloc setting too, unless --baseline-malloc default. A context of n tokens includes
the newest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import select
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol

import harness
from harness import Spread, Table

SYSTEMS = ("ours", "ours-malloc", "engine", "http", "eager", "compile")
ANSWER_TIMEOUT_SECONDS = 1800.0
EVENT_TIMEOUT_SECONDS = 300.0
WARM_UPS = 3


@dataclass(frozen=True)
class Case:
    """`context`: tokens of every sequence, the newest included; in prefill, the prompt's length."""

    phase: str
    batch: int
    context: int


class SkippedError(Exception):
    """This system cannot run this case; says why."""


class System(Protocol):
    """`prepare` gets a case ready, warm-up included; `rate` runs it once and returns tokens/s."""

    def prepare(self, case: Case) -> None: ...

    def rate(self, case: Case, steps: int) -> float: ...


def main() -> None:
    """Measures, prints, writes; or is one of its own worker processes."""
    args = _arguments()
    if args.worker:
        _work(args)
        return
    machine = harness.environment(args.threads)
    machine["baseline_malloc"] = args.baseline_malloc
    results = [result for threads in args.threads for result in _measure(threads, args)]
    tables = [
        _table(phase, [r for r in results if r["phase"] == phase], args) for phase in ("decode", "prefill")
    ]
    harness.finish("decode", args, machine, {"results": results}, tables)


def _arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, default=["ours", "engine", "eager", "compile"]
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--prompts", type=int, nargs="*", default=[256, 1024], help="lengths for prefill")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=32, help="decode steps a round")
    parser.add_argument("--baseline-malloc", choices=["tuned", "default"], default="tuned")
    parser.add_argument("--worker", choices=SYSTEMS, help=argparse.SUPPRESS)
    return parser.parse_args()


# The measuring process


def _measure(threads: int, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    cases = [Case("decode", batch, context) for context in args.contexts for batch in args.batches]
    cases += [Case("prefill", 1, length) for length in args.prompts]
    with ExitStack() as stack:
        workers = {name: stack.enter_context(_worker(name, threads, args)) for name in args.systems}
        for case in cases:
            result = _measure_case(case, workers, args)
            print(json.dumps({"threads": threads, **result["medians"], **asdict(case)}), flush=True)
            yield {"threads": threads, **asdict(case), **result}


Ask = Callable[[str, Case], dict[str, Any]]


def _measure_case(case: Case, workers: dict[str, Ask], args: argparse.Namespace) -> dict[str, Any]:
    prepared = {name: ask("prepare", case) for name, ask in workers.items()}
    able = [name for name, answer in prepared.items() if "skipped" not in answer]
    rates: dict[str, list[float]] = {name: [] for name in able}
    for _ in range(args.rounds):
        for name in able:
            rates[name].append(workers[name]("rate", case)["rate"])
    spreads = {name: Spread(tuple(values)) for name, values in rates.items()}
    return {
        "systems": {name: spread.json() for name, spread in spreads.items()},
        "medians": {name: round(spread.median, 2) for name, spread in spreads.items()},
        "first_call_seconds": {name: prepared[name]["first_call_seconds"] for name in able},
        "skipped": {name: answer["skipped"] for name, answer in prepared.items() if "skipped" in answer},
    }


@contextmanager
def _worker(name: str, threads: int, args: argparse.Namespace) -> Iterator[Ask]:
    """A process that answers one line of JSON with another."""
    with tempfile.TemporaryDirectory(prefix="aotgaudi-bench-") as cache:
        process = subprocess.Popen(
            [
                *[sys.executable, __file__, "--worker", name, "--threads", str(threads)],
                *["--bundle", str(args.bundle), "--model", str(args.model), "--steps", str(args.steps)],
                *["--baseline-malloc", args.baseline_malloc],
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**harness.process_environment(threads), "TORCHINDUCTOR_CACHE_DIR": cache},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def ask(what: str, case: Case) -> dict[str, Any]:
            requests.write(json.dumps([what, asdict(case)]) + "\n")
            requests.flush()
            ready, _, _ = select.select([answers], [], [], ANSWER_TIMEOUT_SECONDS)
            line = answers.readline() if ready else ""
            if not line:
                sys.exit(f"{name} did not answer {what} {case}")
            answer: dict[str, Any] = json.loads(line)
            return answer

        try:
            yield ask
        finally:
            with contextlib.suppress(BrokenPipeError):
                requests.close()  # The worker ends at the end of its input.
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _table(phase: str, results: list[dict[str, Any]], args: argparse.Namespace) -> Table:
    others = [name for name in args.systems if name != "ours"]
    has_compile = "compile" in args.systems
    rows = []
    for result in results:
        rates = {name: value["median"] for name, value in result["systems"].items()}
        cells = [f"{rates[name]:.1f}" if name in rates else "-" for name in args.systems]
        ratios = [
            f"{rates['ours'] / rates[name]:.2f}" if "ours" in rates and name in rates else "-"
            for name in others
        ]
        seconds = result["first_call_seconds"].get("compile")
        compiled = ["-" if seconds is None else f"{seconds:.0f}"] if has_compile else []
        rows.append(
            (*(str(result[key]) for key in ("threads", "batch", "context")), *cells, *ratios, *compiled)
        )
    columns = ("threads", "batch", "context" if phase == "decode" else "prompt", *args.systems)
    columns += (*(f"ours/{name}" for name in others), *(["torch.compile s"] if has_compile else []))
    skipped = {f"{name}: {why}" for result in results for name, why in result["skipped"].items()}
    note = f"Medians of {args.rounds} rounds, one process a system, {args.baseline_malloc} malloc in transformers."
    note += f" Skipped: {'; '.join(sorted(skipped))}." if skipped else ""
    return Table(f"{phase.capitalize()}, tokens/s", columns, tuple(rows), note)


# The workers


def _work(args: argparse.Namespace) -> None:
    """Answers requests until their end. Whatever else prints, prints to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    system = _make(args)

    def answer_all() -> None:
        for line in sys.stdin:
            what, fields = json.loads(line)
            print(json.dumps(_answer(system, what, Case(**fields), args.steps)), file=answers, flush=True)

    harness.on_engine_thread(answer_all)
    answers.close()
    _close(system)


def _answer(system: System, what: str, case: Case, steps: int) -> dict[str, Any]:
    try:
        if what == "rate":
            return {"rate": system.rate(case, steps)}
        started = time.perf_counter()
        system.prepare(case)
        first = time.perf_counter() - started
        for _ in range(WARM_UPS):
            system.rate(case, 1)
        return {"first_call_seconds": first}
    except SkippedError as why:
        return {"skipped": str(why)}


def _make(args: argparse.Namespace) -> System:
    threads = args.threads[0]
    if args.worker in ("eager", "compile"):
        return Transformers(args.model, args.bundle, threads, args.worker, args.baseline_malloc == "tuned")
    if args.worker == "http":
        return OurServer(args.bundle, args.model, threads)
    import online

    loaded = online.load(args.bundle, args.model, threads, keep_memory=args.worker != "ours-malloc")
    return OurEngine(loaded) if args.worker == "engine" else OurRunner(loaded)


def _close(system: System) -> None:
    if isinstance(system, (OurEngine, OurServer)):
        system.close()


class OurRunner:
    """Steps through ProgramRunner, sampling included."""

    def __init__(self, loaded: Any) -> None:
        self._loaded, self._random, self._steps = loaded, Random(0), list[Any]()

    def prepare(self, case: Case) -> None:
        if case.phase == "prefill":
            steps = self._loaded.prefill(case.context, self._random)
        else:
            step = self._loaded.decode(case.batch, case.context, self._random)
            steps = step if isinstance(step, str) else [step]
        if isinstance(steps, str):
            raise SkippedError(steps)
        self._steps = steps
        self.rate(case, 1)

    def rate(self, case: Case, steps: int) -> float:
        repeats = steps if case.phase == "decode" else 1
        started = time.perf_counter()
        for _ in range(repeats):
            for step in self._steps:
                self._loaded.runner.run(step)
        return _tokens(case, repeats) / (time.perf_counter() - started)


class OurEngine:
    """Requests through Engine. Prompts are random, so that no prefix is cached."""

    def __init__(self, loaded: Any) -> None:
        self._loaded, self._random, self._count = loaded, Random(0), 0
        self._engine = loaded.engine()
        self._engine.start()

    def close(self) -> None:
        self._engine.shutdown(30)

    def prepare(self, case: Case) -> None:
        limits = self._loaded.manifest.spec.limits
        if case.batch > limits.max_num_seqs:
            raise SkippedError(f"max_num_seqs is {limits.max_num_seqs}")
        chunks = -(-case.context // limits.max_num_batched_tokens)
        generated = 2 if case.phase == "prefill" else case.batch * chunks + 64
        grown = case.context + generated
        if grown > limits.max_model_len:
            raise SkippedError(f"context {case.context} and what is generated exceed max_model_len")
        if case.batch * -(-grown // limits.block_size) > limits.num_blocks:
            raise SkippedError(f"num_blocks is {limits.num_blocks}")
        self.rate(case, 1)

    def rate(self, case: Case, steps: int) -> float:
        events: queue.Queue[tuple[float, Any]] = queue.Queue()
        started = time.perf_counter()
        request_ids = [self._add(case, events) for _ in range(case.batch)]
        try:
            return (
                self._prefill_rate(case, events, started)
                if case.phase == "prefill"
                else self._decode_rate(case, events, steps)
            )
        finally:
            for request_id in request_ids:
                self._engine.abort(request_id)
            self._drain(events, set(request_ids))

    def _add(self, case: Case, events: queue.Queue[tuple[float, Any]]) -> str:
        from aotgaudi.engine.request import NewRequest
        from aotgaudi.engine.sampling_params import SamplingParams

        self._count += 1
        spec = self._loaded.manifest.spec
        max_tokens = 1 if case.phase == "prefill" else spec.limits.max_model_len - case.context
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        request_id = f"r{self._count}"
        prompt = [self._random.randrange(spec.model.vocab_size) for _ in range(case.context)]
        self._engine.add(
            [NewRequest(request_id, prompt, params, max_tokens=max_tokens)],
            lambda event: events.put((time.perf_counter(), event)),
        )
        return request_id

    def _prefill_rate(self, case: Case, events: queue.Queue[tuple[float, Any]], started: float) -> float:
        now, event = self._next(events)
        self._ended = {event.request_id} if event.finish_reason else set()
        return case.context / (now - started)

    def _decode_rate(self, case: Case, events: queue.Queue[tuple[float, Any]], steps: int) -> float:
        """Tokens/s from when the last request got its first token on."""
        started_ids: set[str] = set()
        self._ended = set()
        begin = end = 0.0
        count = 0
        while len(started_ids) < case.batch or count < steps * case.batch:
            now, event = self._next(events)
            if len(started_ids) == case.batch:
                count, end = count + len(event.token_ids), now
            else:
                started_ids.add(event.request_id)
                begin = now
            if event.finish_reason:
                self._ended.add(event.request_id)
                break
        if not count:
            raise SkippedError("a request ended before the last one had started")
        return count / (end - begin)

    def _next(self, events: queue.Queue[tuple[float, Any]]) -> tuple[float, Any]:
        now, event = events.get(timeout=EVENT_TIMEOUT_SECONDS)
        if hasattr(event, "error"):
            raise event.error
        return now, event

    def _drain(self, events: queue.Queue[tuple[float, Any]], expected: set[str]) -> None:
        """Waits until every request has ended, so that the next round starts with an idle engine."""
        while self._ended < expected:
            _, event = events.get(timeout=EVENT_TIMEOUT_SECONDS)
            if getattr(event, "finish_reason", "error"):
                self._ended.add(event.request_id)


class OurServer:
    """Streams of completions, as many as a case has rows. A piece of text counts as a token: few tokens have none."""

    def __init__(self, bundle: Path, model: Path, threads: int) -> None:
        manifest = json.loads((bundle / "manifest.json").read_bytes())
        self._limits, self._vocab_size = (
            manifest["spec"]["limits"],
            manifest["spec"]["model"]["config"]["vocab_size"],
        )
        self._random, self._stack = Random(0), ExitStack()
        self.port = self._stack.enter_context(harness.serving(bundle, model, threads)).port

    def close(self) -> None:
        self._stack.close()

    def prepare(self, case: Case) -> None:
        if case.batch > self._limits["max_num_seqs"]:
            raise SkippedError(f"max_num_seqs is {self._limits['max_num_seqs']}")
        if case.context + 128 > self._limits["max_model_len"]:
            raise SkippedError(f"context {case.context} and what is generated exceed max_model_len")
        self.rate(case, 1)

    def rate(self, case: Case, steps: int) -> float:
        """Tokens/s from when the last stream had its first token on."""
        started = time.perf_counter()
        with ExitStack() as stack, selectors.DefaultSelector() as selector:
            for _ in range(case.batch):
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", self.port)))
                connection.sendall(self._request(case))
                selector.register(connection, selectors.EVENT_READ)
            if case.phase == "prefill":
                self._read(selector, {})
                return case.context / (time.perf_counter() - started)
            counts: dict[int, int] = {}
            while len(counts) < case.batch:
                self._read(selector, counts)
            begin, first = time.perf_counter(), sum(counts.values())
            while (count := sum(counts.values()) - first) < steps * case.batch:
                if not self._read(selector, counts):
                    break
            return count / (time.perf_counter() - begin)

    def _request(self, case: Case) -> bytes:
        body = {
            "prompt": [self._random.randrange(self._vocab_size) for _ in range(case.context)],
            "max_tokens": 1 if case.phase == "prefill" else self._limits["max_model_len"] - case.context,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        text = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length:"
        return f"{head} {len(text)}\r\n\r\n".encode() + text

    def _read(self, selector: selectors.BaseSelector, counts: dict[int, int]) -> bool:
        """Reads what has come, and counts it by connection. Returns whether all go on."""
        for key, _ in selector.select(EVENT_TIMEOUT_SECONDS):
            data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            if not data or b"[DONE]" in data:
                return False
            num_pieces = data.count(b"data: {")
            if num_pieces:
                counts[key.fd] = counts.get(key.fd, 0) + num_pieces
        return True


class Transformers:
    """transformers' model and argmax, eager or compiled."""

    def __init__(self, model: Path, bundle: Path, threads: int, mode: str, tuned_malloc: bool) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from aotgaudi.manifest.manifest import loads
        from aotgaudi.runtime.memory import keep_freed_memory

        if tuned_malloc:
            keep_freed_memory()
        torch.set_num_threads(1)  # The computing thread sets its own: see `prepare`.
        self._threads = threads
        torch.manual_seed(0)
        self._torch, self._is_compiled = torch, mode == "compile"
        spec = loads((bundle / "manifest.json").read_bytes()).spec
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, spec.model.dtype)
        ).eval()

    def prepare(self, case: Case) -> None:
        """Makes the cache and the input; compiles, where it does, by the first call."""
        new_tokens = case.context if case.phase == "prefill" else 1
        self._torch.set_num_threads(self._threads)  # Settings of the thread.
        self._torch.set_grad_enabled(False)
        self._ids = self._torch.randint(0, self._model.config.vocab_size, (case.batch, new_tokens))
        self._cached = case.context - new_tokens
        self._step: Callable[..., Any] = self._forward
        if self._is_compiled:
            self._torch._dynamo.reset()
            self._step = self._torch.compile(self._forward, dynamic=False)
            self._cache = self._static_cache(case)
        else:
            self._cache = self._dynamic_cache(case)
        self.rate(case, 1)

    def rate(self, case: Case, steps: int) -> float:
        repeats = steps if case.phase == "decode" else 1
        started = time.perf_counter()
        for _ in range(repeats):
            self._rewind(case)
            self._step(self._ids, self._cache).tolist()
        return _tokens(case, repeats) / (time.perf_counter() - started)

    def _forward(self, ids: Any, cache: Any) -> Any:
        output = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1].argmax(-1)

    def _static_cache(self, case: Case) -> Any:
        """A cache of exactly the context, whose tensors one eager call makes."""
        from transformers import StaticCache

        cache = StaticCache(config=self._model.config, max_cache_len=case.context)
        self._forward(self._ids[:, :1], cache)
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        return cache

    def _dynamic_cache(self, case: Case) -> Any:
        """A cache of all but the newest token, of random values."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        if self._cached:
            self._forward(self._ids[:, :1], cache)
            for number, layer in enumerate(cache.layers):
                shape = (*layer.keys.shape[:2], self._cached - 1)
                cache.update(
                    self._torch.randn(*shape, layer.keys.shape[3]).to(layer.keys.dtype),
                    self._torch.randn(*shape, layer.values.shape[3]).to(layer.values.dtype),
                    number,
                )
        return cache

    def _rewind(self, case: Case) -> None:
        """Takes the last step's tokens out of the cache again: some microseconds, inside the timed loop."""
        if self._is_compiled:
            for layer in self._cache.layers:
                layer.cumulative_length.fill_(self._cached)
        elif not self._cached:
            self._cache = self._dynamic_cache(case)
        else:
            for layer in self._cache.layers:
                if layer.keys.shape[-2] > self._cached:
                    layer.keys = layer.keys[:, :, : self._cached]
                    layer.values = layer.values[:, :, : self._cached]


def _tokens(case: Case, repeats: int) -> int:
    return case.context if case.phase == "prefill" else case.batch * repeats


if __name__ == "__main__":
    main()
