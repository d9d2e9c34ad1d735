"""The scheduler that forms the steps of the server that a spec describes, and when that server moves KV blocks."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from aotgaudi.errors import SpecError
from aotgaudi.spec.base import SpecValue
from aotgaudi.spec.limits import LARGEST_LIMIT, ServingLimits
from aotgaudi.spec.policy import Policy

Engine = Literal["aotgaudi", "vllm"]


class SchedulerSpec(SpecValue):
    """What decides, together with the limits, which steps can be formed.

    `engine`: ``aotgaudi`` is our own scheduler, ``vllm`` that of vLLM with its Gaudi plugin, whose buckets and look-up
    are those of ``bucketing.version``. `chunked_prefill`: prompts may be computed in chunks of any length; without
    it vLLM computes each in one step. Our own scheduler always computes prompts in chunks. Prefix caching and speculation
    are in ``bucketing``, because tables depend on them, too.

    `policy`: how our own scheduler shares its time between prompts and decodes; it forms the same set of steps with
    either. ``latency``: they take turns, and a prompt's chunk takes about as long as a decode step while others decode, so
    that texts arrive evenly. ``throughput``: prompts go first while there are seats, in the longest chunks, so that steps
    fill up soon and little is computed twice or padded.

    `kv_transfer`: prompts may start after the tokens whose KV blocks another server, or a store, has sent (vLLM's
    --kv-transfer-config). No role has fewer steps: a consumer computes what was not sent, and whoever asks a producer, not
    the producer, limits it to one token.

    Two facts about a vLLM server decide which graphs traffic may compile, and no entry: `static_shapes`, whether
    VLLM_T_COMPILE_DYNAMIC_SHAPES is false; `max_logprobs`, its --max-logprobs, -1 for no bound, None for vLLM's default.
    """

    ABSENT_BY_DEFAULT: ClassVar[frozenset[str]] = frozenset(
        {"policy", "kv_transfer", "static_shapes", "max_logprobs"}
    )

    engine: Engine = "aotgaudi"
    chunked_prefill: bool = True
    policy: Policy = "latency"
    kv_transfer: bool = False
    static_shapes: bool = False
    max_logprobs: int | None = Field(default=None, ge=-1, le=LARGEST_LIMIT)


def check_scheduler(scheduler: SchedulerSpec, limits: ServingLimits) -> None:
    """Raises SpecError for what the engine cannot do: vLLM refuses whole prompts that may not fit a step."""
    if scheduler.kv_transfer and scheduler.engine != "vllm":
        raise SpecError(
            "scheduler.kv_transfer", f"is true, with engine {scheduler.engine!r}", 'engine = "vllm"'
        )
    if scheduler.chunked_prefill:
        return
    if scheduler.engine != "vllm":
        raise SpecError(
            "scheduler.chunked_prefill",
            f"is false, with engine {scheduler.engine!r}",
            'engine = "vllm", or leave it out: our own scheduler computes prompts in chunks',
        )
    if limits.max_num_batched_tokens < limits.max_model_len:
        raise SpecError(
            "limits.max_num_batched_tokens",
            f"is {limits.max_num_batched_tokens}, less than max_model_len {limits.max_model_len}, and"
            " scheduler.chunked_prefill is false",
            "at least max_model_len: vLLM refuses to start otherwise",
        )


class DefragSpec(SpecValue):
    """The defragmenter. Defaults are vllm-gaudi's (vllm_gaudi/extension/defragmentation.py).

    It acts when the highest block in use minus `threshold` exceeds the number of blocks in use. `enabled`: where a spec
    leaves it out, it follows from what can be gained (``defragments_by_default``).
    `padded_swaps`: the numbers of block exchanges that one step is padded to, ascending; more exchanges than
    the largest take several steps. `with_graphs` (VLLM_DEFRAG_WITH_GRAPHS, hpu targets only): the exchange is a
    captured graph.
    """

    enabled: bool = True
    threshold: int = Field(default=32, ge=1, le=LARGEST_LIMIT)
    with_graphs: bool = True
    padded_swaps: tuple[Annotated[int, Field(ge=1, le=LARGEST_LIMIT)], ...] = (8, 16, 32, 64, 128, 256, 512)

    @model_validator(mode="after")
    def _check_padded_swaps(self) -> DefragSpec:
        if self.enabled and not self.padded_swaps:
            raise SpecError("defrag.padded_swaps", "is empty", "at least one size, or enabled = false")
        if list(self.padded_swaps) != sorted(set(self.padded_swaps)):
            raise SpecError(
                "defrag.padded_swaps", f"is {list(self.padded_swaps)}", "ascending sizes, each one once"
            )
        return self


def defragments_by_default(engine: str, backend: str, is_contiguous: bool) -> bool:
    """Returns whether the cache is defragmented where a spec does not say so.

    Where decodes read up to the highest block in use, exchanges make them shorter. Our own engine's decodes gather their
    blocks, and read as many wherever those lie, unless `is_contiguous` (``bucketing.contiguous_pa``), which only hpu heeds.
    """
    if engine == "aotgaudi" and backend in ("cpu", "hpu"):
        return backend == "hpu" and is_contiguous
    return True
