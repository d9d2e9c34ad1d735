"""Metrics of one server, in a registry of their own. ``docs/metrics.md`` lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from aotgaudi.engine.output import Usage
from aotgaudi.engine.stats import EngineStats
from aotgaudi.llm.running import Warmth
from aotgaudi.phases import Phase
from aotgaudi.runtime.guard import LAYERS
from aotgaudi.server.entry_metrics import entry_families, kind_families
from aotgaudi.server.front.limits import REASONS, Reason
from aotgaudi.server.vllm_names import WithVllmNames

FINISH_REASONS = ("stop", "length", "abort", "error")
_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5)
_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
_WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.05, *_REQUEST_BUCKETS)
_LENGTH_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


class _EngineCollector(Collector):
    """Reads the engine's counters and gauges when they are scraped."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def describe(self) -> list[Metric]:
        """Returns nothing: the engine need not be there when this is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yields the families of one snapshot."""
        stats = self._stats()
        yield GaugeMetricFamily(
            "aotgaudi_requests_running", "Requests that hold KV blocks.", stats.num_running
        )
        yield GaugeMetricFamily("aotgaudi_requests_waiting", "Requests in the queue.", stats.num_waiting)
        num_blocks = stats.num_blocks_used + stats.num_blocks_free
        yield GaugeMetricFamily(
            "aotgaudi_kv_cache_usage_perc",
            "Share of the KV blocks that is in use, 0 to 1.",
            stats.num_blocks_used / max(1, num_blocks),
        )
        yield GaugeMetricFamily("aotgaudi_kv_blocks_used", "KV blocks in use.", stats.num_blocks_used)
        yield GaugeMetricFamily(
            "aotgaudi_kv_block_highest", "The highest KV block in use; 0 when none is.", stats.max_block_used
        )
        yield GaugeMetricFamily("aotgaudi_kv_blocks_free", "KV blocks not in use.", stats.num_blocks_free)
        yield GaugeMetricFamily(
            "aotgaudi_kv_blocks_cached",
            "KV blocks not in use that hold cached prefixes.",
            stats.num_blocks_kept,
        )
        yield CounterMetricFamily(
            "aotgaudi_kv_blocks_evicted",
            "KV blocks of cached prefixes that were given up for new tokens.",
            stats.num_blocks_evicted,
        )
        yield CounterMetricFamily(
            "aotgaudi_prefix_cache_queries",
            "Prompt tokens that were looked up in the prefix cache.",
            stats.num_prefix_queries,
        )
        yield CounterMetricFamily(
            "aotgaudi_prefix_cache_hits",
            "Prompt tokens that were found in the prefix cache, and not computed again.",
            stats.num_prefix_hits,
        )
        yield CounterMetricFamily(
            "aotgaudi_preemptions", "Requests put back in the queue.", stats.num_preemptions
        )
        yield CounterMetricFamily(
            "aotgaudi_defrag_swaps", "KV block pairs exchanged.", stats.num_defrag_swaps
        )
        yield CounterMetricFamily("aotgaudi_failed_steps", "Steps that raised.", stats.num_failed_steps)
        yield CounterMetricFamily(
            "aotgaudi_invalid_logits",
            "Requests for which the model computed NaN or infinite logits.",
            stats.num_invalid_logits,
        )
        yield GaugeMetricFamily(
            "aotgaudi_oldest_waiting_request_seconds",
            "How long the oldest request in the queue has waited; 0 for an empty queue.",
            stats.oldest_waiting_seconds,
        )
        yield GaugeMetricFamily(
            "aotgaudi_stalled_seconds",
            "How long no step has ended although requests wait or run.",
            stats.stalled_seconds,
        )
        finished = CounterMetricFamily(
            "aotgaudi_requests_finished", "Outputs that ended, by why.", labels=["reason"]
        )
        for reason in FINISH_REASONS:
            finished.add_metric([reason], stats.num_finished.get(reason, 0))
        yield finished
        refused = CounterMetricFamily(
            "aotgaudi_requests_refused", "HTTP requests refused for want of room.", labels=["reason"]
        )
        for reason, num in stats.num_refused.items():
            refused.add_metric([reason], num)
        yield refused
        yield from kind_families(stats.tallies)
        yield from entry_families(stats.tallies)


class _WarmthCollector(Collector):
    """Reads how warm the model is when it is scraped; every cause of a compilation is there from the start."""

    def __init__(self, warmth: Callable[[], Warmth]) -> None:
        self._warmth = warmth

    def describe(self) -> list[Metric]:
        """Returns nothing: the model need not be there when this is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yields the families of one snapshot."""
        warmth = self._warmth()
        compilations = CounterMetricFamily(
            "aotgaudi_compilations",
            "Compilations after the server was ready, done or refused, by cause; 0 under --require-warm.",
            labels=["cause"],
        )
        for cause, num in warmth.compilations.items():
            compilations.add_metric([cause], num)
        yield compilations
        guard = GaugeMetricFamily(
            "aotgaudi_guard", "1 for each layer of the guard that is in force, else 0.", labels=["layer"]
        )
        for layer in LAYERS:
            guard.add_metric([layer], float(layer in warmth.layers))
        yield guard
        yield CounterMetricFamily(
            "aotgaudi_not_warmed",
            "Steps whose entry was not loaded when it was needed.",
            warmth.num_not_warmed,
        )
        yield GaugeMetricFamily("aotgaudi_entries_warm", "Entries that are loaded.", warmth.num_warm)
        yield GaugeMetricFamily("aotgaudi_entries", "Entries of the manifest.", warmth.num_total)


class Metrics:
    """What is counted. The attributes are prometheus_client's own: any thread may use them."""

    def __init__(self, model_name: str = "") -> None:
        """`model_name` is the label that vLLM's names have."""
        self._model_name = model_name
        self.start_seconds, self.start_phases = 0.0, tuple[Phase, ...]()
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "aotgaudi_requests", "HTTP requests answered.", ["endpoint", "status"], registry=registry
        )
        self.prompt_tokens = Counter(
            "aotgaudi_prompt_tokens", "Prompt tokens of accepted requests.", registry=registry
        )
        self.generation_tokens = Counter("aotgaudi_generation_tokens", "Tokens generated.", registry=registry)
        self.connections = Gauge("aotgaudi_connections", "Open connections.", registry=registry)
        self._closed = Counter(
            "aotgaudi_connections_closed",
            "Connections that the server ended, or did not begin, for a reason of its own.",
            ["reason"],
            registry=registry,
        )
        for reason in REASONS:
            self._closed.labels(reason)
        self.ready = Gauge("aotgaudi_ready", "1 while the server takes requests.", registry=registry)
        self.time_to_ready = Gauge(
            "aotgaudi_time_to_ready_seconds", "From the process's start to ready.", registry=registry
        )
        self._phase_begin, self._phase_end = (
            Gauge(
                f"aotgaudi_start_phase_{edge}_seconds",
                f"When a phase of the start {past}, from the process's start.",
                ["phase"],
                registry=registry,
            )
            for edge, past in (("begin", "began"), ("end", "ended"))
        )
        self.step_seconds = self._histogram(
            "aotgaudi_step_seconds", "Time of an engine step.", _STEP_BUCKETS, "kind"
        )
        self.time_to_first_token = self._histogram(
            "aotgaudi_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            _FIRST_TOKEN_BUCKETS,
        )
        self.time_per_output_token = self._histogram(
            "aotgaudi_time_per_output_token_seconds",
            "Mean time between the tokens of one output, the first excluded.",
            _TOKEN_BUCKETS,
        )
        self.request_latency = self._histogram(
            "aotgaudi_e2e_request_latency_seconds",
            "From a request's arrival to its last token.",
            _REQUEST_BUCKETS,
        )
        self.queue_time, self.prefill_time, self.decode_time, self.inference_time = (
            self._histogram(f"aotgaudi_request_{part}_time_seconds", f"From {text}.", _WAIT_BUCKETS)
            for part, text in (
                ("queue", "a request's arrival to its first step"),
                ("prefill", "a request's first step to its first token"),
                ("decode", "a request's first token to its last"),
                ("inference", "a request's first step to its last token"),
            )
        )
        self.request_prompt_tokens, self.request_generation_tokens = (
            self._histogram(f"aotgaudi_request_{part}_tokens", f"Tokens of {text}.", _LENGTH_BUCKETS)
            for part, text in (("prompt", "a request's prompt"), ("generation", "a whole output"))
        )

    def watch(
        self, stats: Callable[[], EngineStats], warmth: Callable[[], Warmth], is_ready: Callable[[], bool]
    ) -> None:
        """Exports what these say whenever the metrics are scraped. To be called once."""
        self.registry.register(_EngineCollector(stats))
        self.registry.register(_WarmthCollector(warmth))
        self.ready.set_function(lambda: float(is_ready()))

    def tell_start(self, seconds: float, phases: Iterable[Phase]) -> None:
        """Records how long the start took, and its phases."""
        self.time_to_ready.set(seconds)
        self.start_seconds, self.start_phases = seconds, tuple(phases)
        for phase in self.start_phases:
            self._phase_begin.labels(phase.name).set(phase.begin)
            self._phase_end.labels(phase.name).set(phase.end)

    def observe_step(self, kind: str, seconds: float) -> None:
        """Records one step of an entry of this kind."""
        self.step_seconds.labels(kind).observe(seconds)

    def count_closed(self, reason: Reason) -> None:
        """Counts a connection that the server ended, or did not begin."""
        self._closed.labels(reason).inc()

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """Returns the metrics, and their content type, in the format that the `Accept` header asks for."""
        encode, content_type = choose_encoder(accept)
        if isinstance(
            encode, partial
        ):  # Else it makes vllm_x of vllm:x (prometheus_client 0.26); no name of ours needs it.
            encode = partial(encode.func, **{**encode.keywords, "escaping": "allow-utf-8"})
        return encode(WithVllmNames(self.registry.collect(), self._model_name)), content_type

    def _histogram(self, name: str, help_text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, help_text, labels, buckets=buckets, registry=self.registry)


class OutputTimer:
    """Times one output: first token, token by token, whole. One thread only."""

    def __init__(self, metrics: Metrics, arrival: float, clock: Callable[[], float]) -> None:
        self._metrics, self._arrival, self._clock = metrics, arrival, clock
        self._first: float | None = None
        self._num_tokens = 0

    def count_tokens(self, num_tokens: int) -> None:
        """Records that `num_tokens` more tokens have come."""
        if num_tokens == 0:
            return
        if self._first is None:
            self._first = self._clock()
            self._metrics.time_to_first_token.observe(self._first - self._arrival)
        self._num_tokens += num_tokens
        self._metrics.generation_tokens.inc(num_tokens)

    def finish(self, usage: Usage | None) -> None:
        """Records that the output has ended in the ordinary way."""
        now, gaps, metrics = self._clock(), self._num_tokens - 1, self._metrics
        metrics.request_latency.observe(now - self._arrival)
        if usage is not None:
            metrics.request_prompt_tokens.observe(usage.num_prompt_tokens)
            metrics.request_generation_tokens.observe(usage.num_output_tokens)
        if self._first is None:
            return
        if gaps >= 1:
            metrics.time_per_output_token.observe((now - self._first) / gaps)
        queue_seconds = 0.0 if usage is None else usage.queue_seconds
        started = min(self._arrival + queue_seconds, self._first)
        metrics.queue_time.observe(queue_seconds)
        metrics.prefill_time.observe(self._first - started)
        metrics.decode_time.observe(now - self._first)
        metrics.inference_time.observe(now - started)
