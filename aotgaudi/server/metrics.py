"""Metrics of one server, in a registry of their own. ``docs/metrics.md`` lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from aotgaudi.engine.core import EngineStats
from aotgaudi.entries import Entry

_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5)
_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)


@dataclass(frozen=True, slots=True)
class WarmCounts:
    """How many of the manifest's entries are loaded, of how many."""

    num_warm: int
    num_total: int


class _EngineCollector(Collector):
    """Reads the engine's counters and gauges when they are scraped."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def describe(self) -> list[Metric]:
        """Nothing: the engine need not be there when this is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The families of one snapshot."""
        stats = self._stats()
        yield GaugeMetricFamily(
            "aotgaudi_requests_running", "Requests that hold KV blocks.", stats.num_running
        )
        yield GaugeMetricFamily("aotgaudi_requests_waiting", "Requests in the queue.", stats.num_waiting)
        yield GaugeMetricFamily("aotgaudi_kv_blocks_used", "KV blocks in use.", stats.num_blocks_used)
        yield GaugeMetricFamily("aotgaudi_kv_blocks_free", "KV blocks not in use.", stats.num_blocks_free)
        yield CounterMetricFamily(
            "aotgaudi_preemptions", "Requests put back in the queue.", stats.num_preemptions
        )
        yield CounterMetricFamily(
            "aotgaudi_defrag_swaps", "KV block pairs exchanged.", stats.num_defrag_swaps
        )
        yield CounterMetricFamily("aotgaudi_failed_steps", "Steps that raised.", stats.num_failed_steps)


class _Refusals(Collector):
    def __init__(self, num_refused: Callable[[], int]) -> None:
        self._num_refused = num_refused

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        help_text = "Attempts to compile or to start a process that the guard refused; 0 is expected."
        yield CounterMetricFamily("aotgaudi_refused_attempts", help_text, self._num_refused())


class Metrics:
    """Every method may be called from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._add_compile_metrics()
        self._add_request_metrics()
        self._add_readiness_metrics()

    def _add_compile_metrics(self) -> None:
        registry = self.registry
        self._compilations = Counter(
            "aotgaudi_compilations",
            "Units compiled for this server after it was ready; 0 under --require-warm.",
            registry=registry,
        )
        self._not_warmed = Counter(
            "aotgaudi_not_warmed", "Steps whose entry was not loaded when it was needed.", registry=registry
        )
        self._step_seconds = Histogram(
            "aotgaudi_step_seconds",
            "Time of an engine step.",
            ["kind"],
            buckets=_STEP_BUCKETS,
            registry=registry,
        )

    def _add_request_metrics(self) -> None:
        registry = self.registry
        self._requests = Counter(
            "aotgaudi_requests", "HTTP requests answered.", ["endpoint", "status"], registry=registry
        )
        self._prompt_tokens = Counter(
            "aotgaudi_prompt_tokens", "Prompt tokens of accepted requests.", registry=registry
        )
        self._generation_tokens = Counter(
            "aotgaudi_generation_tokens", "Tokens generated.", registry=registry
        )
        self._time_to_first_token = Histogram(
            "aotgaudi_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self._time_per_output_token = Histogram(
            "aotgaudi_time_per_output_token_seconds",
            "Mean time between the tokens of one output, the first excluded.",
            buckets=_TOKEN_BUCKETS,
            registry=registry,
        )
        self._request_latency = Histogram(
            "aotgaudi_e2e_request_latency_seconds",
            "From a request's arrival to its last token.",
            buckets=_REQUEST_BUCKETS,
            registry=registry,
        )

    def _add_readiness_metrics(self) -> None:
        registry = self.registry
        self._entries_warm = Gauge("aotgaudi_entries_warm", "Entries that are loaded.", registry=registry)
        self._entries_total = Gauge("aotgaudi_entries_total", "Entries of the manifest.", registry=registry)
        self._ready = Gauge("aotgaudi_ready", "1 while the server takes requests.", registry=registry)
        self._time_to_ready = Gauge(
            "aotgaudi_time_to_ready_seconds", "From the process's start to ready.", registry=registry
        )

    @property
    def num_compilations(self) -> int:
        """What ``aotgaudi_compilations_total`` says."""
        return int(self.registry.get_sample_value("aotgaudi_compilations_total") or 0)

    def watch_engine(self, stats: Callable[[], EngineStats]) -> None:
        """Exports what `stats` says whenever the metrics are scraped. To be called once."""
        self.registry.register(_EngineCollector(stats))

    def watch_readiness(self, is_ready: Callable[[], bool], warm: Callable[[], WarmCounts]) -> None:
        """Exports readiness and warm entries as they are at each scrape."""
        self._ready.set_function(lambda: float(is_ready()))
        self._entries_warm.set_function(lambda: float(warm().num_warm))
        self._entries_total.set_function(lambda: float(warm().num_total))

    def watch_refusals(self, num_refused: Callable[[], int]) -> None:
        """Exports how often the guard has refused to compile or to start a process. To be called once."""
        self.registry.register(_Refusals(num_refused))

    def set_time_to_ready(self, seconds: float) -> None:
        """Records how long the start took."""
        self._time_to_ready.set(seconds)

    def count_compilation(self) -> None:
        """Records that a unit was compiled on first use (by the builder that this server started)."""
        self._compilations.inc()

    def count_not_warmed(self) -> None:
        """Records that a step met an entry that was not loaded."""
        self._not_warmed.inc()

    def count_request(self, endpoint: str, status: int) -> None:
        """Records an answer; `endpoint` must be one of a few, for it is a label."""
        self._requests.labels(endpoint, str(status)).inc()

    def count_prompt_tokens(self, num_tokens: int) -> None:
        """Records the prompt of an accepted request."""
        self._prompt_tokens.inc(num_tokens)

    def observe_step(self, entry: Entry, seconds: float, num_rows: int) -> None:
        """Records one step; has the shape of the engine's `OnStep`."""
        del num_rows
        self._step_seconds.labels(entry.kind).observe(seconds)

    def observe_first_token(self, seconds: float) -> None:
        """Records the time from a request's arrival to its first token."""
        self._time_to_first_token.observe(seconds)

    def observe_output(self, seconds: float, seconds_per_token: float | None) -> None:
        """Records a complete output; `seconds_per_token` is None for an output of one token."""
        self._request_latency.observe(seconds)
        if seconds_per_token is not None:
            self._time_per_output_token.observe(seconds_per_token)

    def count_generation_tokens(self, num_tokens: int) -> None:
        """Records generated tokens."""
        self._generation_tokens.inc(num_tokens)

    def time_output(self, arrival: float, clock: Callable[[], float]) -> OutputTimer:
        """A timer for one output of a request that arrived at `arrival` on `clock`, in seconds."""
        return OutputTimer(self, arrival, clock)

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """The metrics, and their content type, in the format that the `Accept` header asks for."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


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
            self._metrics.observe_first_token(self._first - self._arrival)
        self._num_tokens += num_tokens
        self._metrics.count_generation_tokens(num_tokens)

    def finish(self) -> None:
        """Records that the output has ended in the ordinary way."""
        now, gaps = self._clock(), self._num_tokens - 1
        per_token = None if self._first is None or gaps < 1 else (now - self._first) / gaps
        self._metrics.observe_output(now - self._arrival, per_token)
