"""Our metrics under vLLM's names, where they mean the same: boards that were made for vLLM show this server as well.

The names are those that vLLM documents (https://docs.vllm.ai/en/stable/usage/metrics/), with its labels ``model_name``
and ``engine``; a name that vLLM has given up for another is here as long as its boards ask for it. What has no counterpart
there keeps our name alone (docs/adr/0060-metric-names.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

_OURS, _THEIRS = "aotgaudi_", "vllm:"

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
"""Our names -> vLLM's, both without prefix and suffix. An output is a sequence group of its own here, so its length is the
longest of its group."""
_LABELS = MappingProxyType({"reason": "finished_reason"})


@dataclass(frozen=True)
class WithVllmNames:
    """Families, and after them those that vLLM has, too, under its names."""

    source: Iterable[Metric]
    model_name: str
    labels: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", {"model_name": self.model_name, "engine": "0"})

    def collect(self) -> Iterator[Metric]:
        """Yields all families; an exposition takes this for a registry."""
        families = list(self.source)
        yield from families
        for family in families:
            for name in SAME.get(family.name.removeprefix(_OURS), ()):
                yield self._renamed(family, f"{_THEIRS}{name}")

    def _renamed(self, family: Metric, name: str) -> Metric:
        renamed = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            labels = {_LABELS.get(label, label): value for label, value in sample.labels.items()}
            suffix = sample.name.removeprefix(family.name)
            renamed.samples.append(Sample(f"{name}{suffix}", {**self.labels, **labels}, sample.value))
        return renamed
