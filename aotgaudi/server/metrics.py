"""The metrics of one server, in their own registry. Some are counted here, others read from the engine at each scrape.

Each is exported under our name. If vLLM has a metric with the same meaning, it is exported under vLLM's name too, so that
boards made for vLLM show this server (docs/adr/0019-metrics-and-reports.md). ``docs/metrics.md`` lists them all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily as CounterFamily
from prometheus_client.core import GaugeMetricFamily as GaugeFamily
from prometheus_client.core import HistogramMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.samples import Sample

from aotgaudi.engine.output import Usage
from aotgaudi.engine.stats import GAP_BOUNDS, CounterSnapshot, EngineStats, EntryCounters, Total
from aotgaudi.entries import Entry
from aotgaudi.llm.running import Warmth
from aotgaudi.phases import Phase
from aotgaudi.runtime.guard import LAYERS

_Kind: TypeAlias = "type[CounterFamily | GaugeFamily | SummaryMetricFamily]"
_Row: TypeAlias = tuple[Sequence[str], "tuple[float, ...]"]
"""The values of a sample's labels, and its value; of a summary, its count and its sum."""

_OURS, _THEIRS = "aotgaudi_", "vllm:"

MAX_BUCKETS = 200
"""How many entries have their own label. They are those that ran first, so that no figure ever changes its label."""
OTHER = "other"

_LABELS = ("kind", "bucket")

_TOTALS: Sequence[tuple[str, str, Callable[[EntryCounters], Total]]] = (
    ("step", "Steps of an entry, and their seconds.", lambda c: c.steps),
    ("queue", "Requests whose first chunk an entry computed, and how long they had waited.", lambda c: c.queue),
    ("first_token", "First tokens that an entry gave, and the time from the request's arrival.", lambda c: c.first_token),
    ("inter_token", "Further tokens that an entry gave, and the time since the token before.", lambda c: c.gaps),
)  # fmt: skip
"""What is summed for each entry: name (of ``aotgaudi_entry_NAME_seconds``), help, and where the sum is counted."""


def bucket_of(entry: Entry) -> str:
    """Returns the numbers of an entry as a label: ``8,1,64``."""
    return ",".join(map(str, entry.row()))


def labelled(
    entries: Mapping[Entry, EntryCounters], most: int = MAX_BUCKETS
) -> Iterator[tuple[tuple[str, str], EntryCounters]]:
    """Yields labels and counters of the first `most` entries, and then the sum of the other entries of each kind."""
    others: dict[str, EntryCounters] = {}
    for number, (entry, counters) in enumerate(entries.items()):
        if number < most:
            yield (entry.kind, bucket_of(entry)), counters
        else:
            others[entry.kind] = others.get(entry.kind, EntryCounters()) + counters
    for kind, counters in others.items():
        yield (kind, OTHER), counters


def entry_families(snapshot: CounterSnapshot) -> Iterator[Metric]:
    """Yields the families with one sample per entry. What an entry never does has no sample: decodes have no queue."""
    rows = list(labelled(snapshot.entries))
    for name, text, of in _TOTALS:
        totals = [(labels, of(counters)) for labels, counters in rows]
        sums = [(labels, (total.num, total.seconds)) for labels, total in totals if total.num]
        yield _family(SummaryMetricFamily, f"entry_{name}_seconds", text, _LABELS, sums)
    yield from _work_families("entry_", _LABELS, rows)
    prefixes = [(labels, counters) for labels, counters in rows if counters.num_prefix_tokens]
    yield _family(
        CounterFamily,
        "entry_prefix_tokens",
        "Prompt tokens of requests whose first chunk an entry computed: found in the prefix cache, or not.",
        (*_LABELS, "found"),
        [
            ((*labels, found), (num,))
            for labels, each in prefixes
            for found, num in (
                ("cached", each.num_cached_tokens),
                ("computed", each.num_prefix_tokens - each.num_cached_tokens),
            )
        ],
    )


def kind_families(snapshot: CounterSnapshot) -> Iterator[Metric]:
    """Yields the families with one sample per kind of entry, and the histogram of times between tokens."""
    yield from _work_families(
        "step_", ("kind",), [((kind,), counters) for kind, counters in snapshot.by_kind().items()]
    )
    sums = map(float, itertools.accumulate(snapshot.gap_counts))
    yield HistogramMetricFamily(
        f"{_OURS}inter_token_latency_seconds",
        "Time between two tokens of a request, when they were sampled.",
        buckets=list(zip((*map(str, GAP_BOUNDS), "+Inf"), sums, strict=True)),
        sum_value=snapshot.gap_seconds,
    )


def _work_families(
    infix: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], EntryCounters]]
) -> Iterator[Metric]:
    """Yields what steps computed. A defragmentation computes no tokens, and moves blocks without reading them."""
    tokens: list[_Row] = []
    blocks: list[_Row] = []
    for values, work in ((values, counters.work) for values, counters in rows if values[0] != "defrag"):
        needed, padding = (*values, "needed"), (*values, "padding")
        tokens += (needed, (work.num_tokens,)), (padding, (work.num_padding_tokens,))
        blocks += (needed, (work.num_blocks,)), (padding, (work.num_padding_blocks,))
    names = (*labels, "work")
    yield _family(
        CounterFamily, f"{infix}tokens", "Tokens that steps computed, needed and padding.", names, tokens
    )
    yield _family(
        CounterFamily, f"{infix}blocks", "KV blocks that steps read, needed and padding.", names, blocks
    )


def _family(kind: _Kind, name: str, text: str, labels: Sequence[str], rows: Iterable[_Row]) -> Metric:
    family = kind(f"{_OURS}{name}", text, labels=labels)
    for values, number in rows:
        family.add_metric(values, *number)  # type: ignore[arg-type]
    return family


def _labelled(kind: _Kind, name: str, text: str, label: str, values: Mapping[Any, float]) -> Metric:
    return _family(kind, name, text, [label], [([value], (number,)) for value, number in values.items()])


SAME: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "requests_running": ("num_requests_running",),
        "requests_waiting": ("num_requests_waiting",),
        "kv_cache_usage_perc": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
        "preemptions": ("num_preemptions",),
        "prefix_cache_queries": ("prefix_cache_queries",),
        "prefix_cache_hits": ("prefix_cache_hits",),
        "prompt_tokens": ("prompt_tokens",),
        "generation_tokens": ("generation_tokens",),
        "requests_finished": ("request_success",),
        "time_to_first_token_seconds": ("time_to_first_token_seconds",),
        "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
        "time_per_output_token_seconds": ("request_time_per_output_token_seconds",),
        "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
        "request_queue_time_seconds": ("request_queue_time_seconds",),
        "request_inference_time_seconds": ("request_inference_time_seconds",),
        "request_prefill_time_seconds": ("request_prefill_time_seconds",),
        "request_decode_time_seconds": ("request_decode_time_seconds",),
        "request_prompt_tokens": ("request_prompt_tokens",),
        "request_generation_tokens": ("request_generation_tokens", "request_max_num_generation_tokens"),
    }
)
"""Our names -> vLLM's (https://docs.vllm.ai/en/stable/usage/metrics/), both without prefix and suffix.

Old names of vLLM stay here as long as boards use them. Each of our outputs is its own sequence group, so its length is also
the longest of its group.
"""
_VLLM_LABELS = MappingProxyType({"reason": "finished_reason"})


def _with_vllm_names(families: Iterable[Metric], model_name: str) -> Iterator[Metric]:
    """Yields the families, followed by copies under vLLM's names."""
    families = list(families)
    yield from families
    common = {"model_name": model_name, "engine": "0"}
    for family in families:
        for theirs in SAME.get(family.name.removeprefix(_OURS), ()):
            renamed = Metric(f"{_THEIRS}{theirs}", family.documentation, family.type)
            for sample in family.samples:
                labels = {_VLLM_LABELS.get(label, label): value for label, value in sample.labels.items()}
                name = f"{renamed.name}{sample.name.removeprefix(family.name)}"
                renamed.samples.append(Sample(name, {**common, **labels}, sample.value))
            yield renamed


FINISH_REASONS = ("stop", "length", "abort", "error")
_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5)
_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
_WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.05, *_REQUEST_BUCKETS)
_LENGTH_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

_HISTOGRAMS: tuple[tuple[str, str, Sequence[float], Sequence[str]], ...] = (
    ("step_seconds", "Time of an engine step.", _STEP_BUCKETS, ["kind"]),
    ("time_to_first_token_seconds", "From a request's arrival to its first token.", _FIRST_TOKEN_BUCKETS, []),
    (
        "time_per_output_token_seconds",
        "Mean time between the tokens of one output, the first excluded.",
        _TOKEN_BUCKETS,
        [],
    ),
    ("e2e_request_latency_seconds", "From a request's arrival to its last token.", _REQUEST_BUCKETS, []),
    ("request_queue_time_seconds", "From a request's arrival to its first step.", _WAIT_BUCKETS, []),
    ("request_prefill_time_seconds", "From a request's first step to its first token.", _WAIT_BUCKETS, []),
    ("request_decode_time_seconds", "From a request's first token to its last.", _WAIT_BUCKETS, []),
    ("request_inference_time_seconds", "From a request's first step to its last token.", _WAIT_BUCKETS, []),
    ("request_prompt_tokens", "Tokens of a request's prompt.", _LENGTH_BUCKETS, []),
    ("request_generation_tokens", "Tokens of a whole output.", _LENGTH_BUCKETS, []),
)
"""Histograms: name without prefix, help, upper bounds of the buckets, and labels."""

_ENGINE_TABLE: Sequence[
    tuple[str, Callable[[str, str, float], Metric], str, Callable[[EngineStats], float]]
] = (
    ("requests_running", GaugeFamily, "Requests that hold KV blocks.", lambda s: s.num_running),
    ("requests_waiting", GaugeFamily, "Requests in the queue.", lambda s: s.num_waiting),
    (
        "kv_cache_usage_perc",
        GaugeFamily,
        "Share of the KV blocks that is in use, 0 to 1.",
        lambda s: s.num_blocks_used / max(1, s.num_blocks_used + s.num_blocks_free),
    ),
    ("kv_blocks_used", GaugeFamily, "KV blocks in use.", lambda s: s.num_blocks_used),
    (
        "kv_block_highest",
        GaugeFamily,
        "The highest KV block in use; 0 when none is.",
        lambda s: s.max_block_used,
    ),
    ("kv_blocks_free", GaugeFamily, "KV blocks not in use.", lambda s: s.num_blocks_free),
    (
        "kv_blocks_cached",
        GaugeFamily,
        "KV blocks not in use that hold cached prefixes.",
        lambda s: s.num_blocks_kept,
    ),
    (
        "kv_blocks_evicted",
        CounterFamily,
        "KV blocks of cached prefixes that were given up for new tokens.",
        lambda s: s.num_blocks_evicted,
    ),
    (
        "prefix_cache_queries",
        CounterFamily,
        "Prompt tokens that were looked up in the prefix cache.",
        lambda s: s.num_prefix_queries,
    ),
    (
        "prefix_cache_hits",
        CounterFamily,
        "Prompt tokens that were found in the prefix cache, and not computed again.",
        lambda s: s.num_prefix_hits,
    ),
    ("preemptions", CounterFamily, "Requests put back in the queue.", lambda s: s.num_preemptions),
    ("defrag_swaps", CounterFamily, "KV block pairs exchanged.", lambda s: s.num_defrag_swaps),
    ("failed_steps", CounterFamily, "Steps that raised.", lambda s: s.num_failed_steps),
    (
        "invalid_logits",
        CounterFamily,
        "Requests for which the model computed NaN or infinite logits.",
        lambda s: s.num_invalid_logits,
    ),
    (
        "oldest_waiting_request_seconds",
        GaugeFamily,
        "How long the oldest request in the queue has waited; 0 for an empty queue.",
        lambda s: s.oldest_waiting_seconds,
    ),
    (
        "stalled_seconds",
        GaugeFamily,
        "How long no step has ended although requests wait or run.",
        lambda s: s.stalled_seconds,
    ),
)
"""Metrics with a single value: name without prefix, kind, help, and how to read it from a snapshot of the engine."""


def _engine_families(stats: EngineStats) -> Iterator[Metric]:
    for name, kind, text, read in _ENGINE_TABLE:
        yield kind(f"{_OURS}{name}", text, read(stats))
    finished = {reason: stats.num_finished.get(reason, 0) for reason in FINISH_REASONS}
    yield _labelled(CounterFamily, "requests_finished", "Outputs that ended, by why.", "reason", finished)
    yield _labelled(
        CounterFamily,
        "requests_refused",
        "HTTP requests refused because the server is full.",
        "reason",
        stats.num_refused,
    )
    yield from kind_families(stats.counters)
    yield from entry_families(stats.counters)


def _warmth_families(warmth: Warmth) -> Iterator[Metric]:
    yield _labelled(
        CounterFamily,
        "compilations",
        "Compilations after the server was ready, done or refused, by cause; 0 under --require-warm.",
        "cause",
        warmth.compilations,
    )
    layers = {layer: float(layer in warmth.layers) for layer in LAYERS}
    text = "1 for each layer of the guard that is in force, else 0."
    yield _labelled(GaugeFamily, "guard", text, "layer", layers)
    steps = {str(counts.n_splits): float(counts.num_steps) for counts in warmth.splits}
    tokens = {str(counts.n_splits): float(counts.num_tokens) for counts in warmth.splits}
    text = "Steps, by the partial sums of their hyper-connections."
    yield _labelled(CounterFamily, "mhc_steps", text, "n_splits", steps)
    text = "Tokens of these steps, padding included."
    yield _labelled(CounterFamily, "mhc_tokens", text, "n_splits", tokens)
    yield CounterFamily(
        "aotgaudi_mhc_cold_steps",
        "Steps of a class of hyper-connections that was not prewarmed; 0 under --require-warm.",
        warmth.num_cold_splits,
    )
    yield GaugeFamily("aotgaudi_entries_warm", "Entries that are loaded.", warmth.num_warm)
    yield GaugeFamily("aotgaudi_entries", "Entries of the manifest.", warmth.num_total)


class Metrics:
    """The server's metrics. The attributes are objects of prometheus_client, which any thread may use."""

    def __init__(self, model_name: str = "", version: str = "") -> None:
        """`model_name` is a label of the metrics under vLLM's names, `version` a label of ``aotgaudi_build_info``."""
        self._model_name = model_name
        self._registry = registry = CollectorRegistry()
        self._read_engine: Callable[[], Iterable[Metric]] = tuple
        ProcessCollector(registry=registry)
        Info("aotgaudi_build", "The program that runs.", registry=registry).info({"version": version})
        self.requests = Counter(
            "aotgaudi_requests", "HTTP requests answered.", ["endpoint", "status"], registry=registry
        )
        self.prompt_tokens = Counter(
            "aotgaudi_prompt_tokens", "Prompt tokens of accepted requests.", registry=registry
        )
        self.ignored_members = Counter(
            "aotgaudi_ignored_members",
            "Members of requests that were ignored: unknown ones, and tools where the chat template shows none.",
            registry=registry,
        )
        self.generation_tokens = Counter("aotgaudi_generation_tokens", "Tokens generated.", registry=registry)
        self.connections = Gauge("aotgaudi_connections", "Open connections.", registry=registry)
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
        self._histograms = {
            name: Histogram(f"{_OURS}{name}", text, labels, buckets=buckets, registry=registry)
            for name, text, buckets, labels in _HISTOGRAMS
        }

    def watch(
        self, stats: Callable[[], EngineStats], warmth: Callable[[], Warmth], is_ready: Callable[[], bool]
    ) -> None:
        """Exports the values of these functions, which are called at each scrape. Call it once."""
        self._read_engine = lambda: (*_engine_families(stats()), *_warmth_families(warmth()))
        self.ready.set_function(lambda: float(is_ready()))

    def tell_start(self, seconds: float, phases: Iterable[Phase]) -> None:
        """Records how long the start and its phases took."""
        self.time_to_ready.set(seconds)
        for phase in phases:
            self._phase_begin.labels(phase.name).set(phase.begin)
            self._phase_end.labels(phase.name).set(phase.end)

    def observe(self, name: str, value: float) -> None:
        """Adds `value` to the histogram `name`, which has no labels."""
        self._histograms[name].observe(value)

    def observe_step(self, kind: str, seconds: float) -> None:
        """Records one step of an entry of this kind."""
        self._histograms["step_seconds"].labels(kind).observe(seconds)

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """Returns the metrics in the format that the `Accept` header asks for, and their content type."""
        encode, content_type = choose_encoder(accept)
        if isinstance(encode, partial):  # Else prometheus_client 0.26 turns vllm:x into vllm_x.
            encode = partial(encode.func, **{**encode.keywords, "escaping": "allow-utf-8"})
        return encode(cast("CollectorRegistry", self)), content_type

    def collect(self) -> Iterator[Metric]:
        """Yields all families, as a registry does."""
        return _with_vllm_names((*self._registry.collect(), *self._read_engine()), self._model_name)


class OutputTimer:
    """Measures one output's time to the first token, between tokens, and in total. Use it on one thread only."""

    def __init__(self, metrics: Metrics, arrival: float, clock: Callable[[], float]) -> None:
        self._metrics, self._arrival, self._clock = metrics, arrival, clock
        self._first: float | None = None
        self._num_tokens = 0

    def count_tokens(self, num_tokens: int) -> None:
        """Records `num_tokens` more tokens."""
        if num_tokens == 0:
            return
        if self._first is None:
            self._first = self._clock()
            self._metrics.observe("time_to_first_token_seconds", self._first - self._arrival)
        self._num_tokens += num_tokens
        self._metrics.generation_tokens.inc(num_tokens)

    def finish(self, usage: Usage | None) -> None:
        """Records the end of an output that was neither aborted nor failed."""
        now, gaps, observe = self._clock(), self._num_tokens - 1, self._metrics.observe
        observe("e2e_request_latency_seconds", now - self._arrival)
        if usage is not None:
            observe("request_prompt_tokens", usage.num_prompt_tokens)
            observe("request_generation_tokens", usage.num_output_tokens)
        if self._first is None:
            return
        if gaps >= 1:
            observe("time_per_output_token_seconds", (now - self._first) / gaps)
        queue_seconds = 0.0 if usage is None else usage.queue_seconds
        started = min(self._arrival + queue_seconds, self._first)
        observe("request_queue_time_seconds", queue_seconds)
        observe("request_prefill_time_seconds", self._first - started)
        observe("request_decode_time_seconds", now - self._first)
        observe("request_inference_time_seconds", now - started)
