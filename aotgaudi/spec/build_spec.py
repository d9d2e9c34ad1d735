"""The whole spec. A value is always consistent: contradictions raise on construction."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from aotgaudi.errors import SpecError
from aotgaudi.spec.base import SpecValue
from aotgaudi.spec.bucketing import BucketingSpec
from aotgaudi.spec.hyper_connections import HyperConnections, MhcSpec
from aotgaudi.spec.limits import LARGEST_LIMIT, ServingLimits, check_limits
from aotgaudi.spec.model import ModelSpec
from aotgaudi.spec.sampler import SamplerSpec, default_settings
from aotgaudi.spec.scheduler import DefragSpec, SchedulerSpec, check_scheduler, defragments_by_default
from aotgaudi.spec.target import TargetSpec
from aotgaudi.spec.vision import VisionSpec

LARGEST_WORLD = 4096
"""More devices than any server has; a larger number is a mistake."""

_DUMMY_TOKENS = 128  # What a replica computes that has no prompt while another has one.


class ParallelSpec(SpecValue):
    """`tensor_parallel_size` devices share each layer, `pipeline_parallel_size` groups of them share the layers.

    `expert_parallel`: the devices of a group hold whole experts instead of a part of each. `data_parallel_size`: replicas of
    all of these that run their steps in lockstep, and pad them to each other's. Independent replicas are one each.
    """

    ABSENT_BY_DEFAULT: ClassVar[frozenset[str]] = frozenset({"data_parallel_size"})

    tensor_parallel_size: int = Field(default=1, ge=1, le=LARGEST_WORLD)
    pipeline_parallel_size: int = Field(default=1, ge=1, le=LARGEST_WORLD)
    expert_parallel: bool = False
    data_parallel_size: int = Field(default=1, ge=1, le=LARGEST_WORLD)

    @property
    def world_size(self) -> int:
        """Devices of a replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def kv_heads_of_rank(self, num_kv_heads: int) -> int:
        """Returns the key and value heads of each rank: a share, or one copied to several ranks."""
        return max(1, num_kv_heads // self.tensor_parallel_size)

    def share_of_rank(self, size: int) -> int:
        """Returns the part of a dimension that is split among the ranks of a layer, rounded up."""
        return -(-size // self.tensor_parallel_size)

    def layers_of_rank(self, num_layers: int) -> int:
        """Returns the number of layers of the rank that has most."""
        return -(-num_layers // self.pipeline_parallel_size)


class LoraSpec(SpecValue):
    """The slots of a server with --enable-lora; which adapters fill them changes no graph.

    A step's adapter mask has ``max_loras * max_lora_rank`` columns (vllm_gaudi/v1/worker/hpu_model_runner.py
    ``create_lora_mask``). `max_lora_rank` is one of vLLM's ranks (vllm/config/lora.py). `dtype`: of adapters;
    ``auto`` is the model's. `fully_sharded`: both factors of an adapter are split among ranks.
    `extra_vocab_size`: tokens that adapters may add to the vocabulary, in releases that allow it (vLLM up to 0.11).
    """

    max_loras: int = Field(default=1, ge=1, le=LARGEST_LIMIT)
    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = 16
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    fully_sharded: bool = False
    extra_vocab_size: int = Field(default=0, ge=0, le=LARGEST_LIMIT)


SPEC_SCHEMA = "aotgaudi.spec/1"


class BuildSpec(SpecValue):
    """A resolved spec: every default filled in, the model's config embedded; depends on no other file.

    `lora` is None for a server that takes no adapters.
    """

    ABSENT_BY_DEFAULT: ClassVar[frozenset[str]] = frozenset({"scheduler", "parallel", "lora"})

    schema_: Literal["aotgaudi.spec/1"] = Field(alias="schema")
    model: ModelSpec
    limits: ServingLimits
    scheduler: SchedulerSpec = SchedulerSpec()
    parallel: ParallelSpec = ParallelSpec()
    lora: LoraSpec | None = None
    bucketing: BucketingSpec = BucketingSpec()
    sampler: SamplerSpec = SamplerSpec()
    defrag: DefragSpec = DefragSpec()
    mhc: MhcSpec = MhcSpec()
    vision: VisionSpec = VisionSpec()
    target: TargetSpec = TargetSpec()

    @model_validator(mode="after")
    def _fill_num_blocks(self) -> BuildSpec:
        """The default number of blocks depends on whose scheduler hands them out."""
        limits = self.limits.with_num_blocks(has_null_block=self.scheduler.engine == "vllm")
        object.__setattr__(self, "limits", limits)  # Before anybody has seen the frozen value.
        return self

    @model_validator(mode="after")
    def _fill_sampler(self) -> BuildSpec:
        """The default sampler settings depend on whose scheduler forms the steps."""
        if "settings" not in self.sampler.model_fields_set:
            sampler = self.sampler.model_copy(update={"settings": default_settings(self.scheduler.engine)})
            object.__setattr__(self, "sampler", sampler)  # Before anybody has seen the frozen value.
        return self

    @model_validator(mode="after")
    def _fill_mhc(self) -> BuildSpec:
        """The default rule depends on who computes the hyper-connections. On a CPU more than one sum saves no time."""
        is_open = "rule" not in self.mhc.model_fields_set and not self.mhc.enabled
        if is_open and self.has_own_steps and HyperConnections.of(self.model) is not None:
            object.__setattr__(self, "mhc", self.mhc.model_copy(update={"rule": "one"}))
        return self

    @model_validator(mode="after")
    def _fill_defrag(self) -> BuildSpec:
        """Where nothing in our own engine's steps depends on block ids, the default moves no blocks."""
        if "enabled" not in self.defrag.model_fields_set:
            enabled = defragments_by_default(
                self.scheduler.engine, self.target.backend, self.bucketing.contiguous_pa
            )
            object.__setattr__(self, "defrag", self.defrag.model_copy(update={"enabled": enabled}))
        return self

    @property
    def has_own_steps(self) -> bool:
        """Whether our own engine runs the steps, in graphs that we trace. CUDA targets are enumerated for their servers."""
        return self.scheduler.engine == "aotgaudi" and self.target.backend != "cuda"

    @property
    def reads_contiguous_blocks(self) -> bool:
        """Whether our own decodes read the cache from its first block to the highest one in use, without a gather.

        Each block then is read for one sequence, so prompts share none, whatever `prefix_caching` says.
        """
        return (
            self.scheduler.engine == "aotgaudi"
            and self.target.backend == "hpu"
            and self.bucketing.contiguous_pa
        )

    @model_validator(mode="after")
    def _check_consistency(self) -> BuildSpec:
        check_limits(self.limits, is_ours=self.scheduler.engine == "aotgaudi")
        check_scheduler(self.scheduler, self.limits)
        check_parallel(self.parallel, self.model)
        self._check_mhc()
        self._check_short_queries()
        self._check_tuned()
        self._check_replicas()
        limits = self.limits
        positions = None if limits.allow_long_max_model_len else self.model.max_position_embeddings
        if positions is not None and limits.max_model_len > positions:
            raise SpecError(
                "limits.max_model_len",
                f"is {limits.max_model_len}, more than the model's positions",
                f"at most max_position_embeddings {positions}, or allow_long_max_model_len = true",
            )
        return self

    def _check_mhc(self) -> None:
        """Every step of our engine mixes the streams of such a model, so its classes cannot be left out."""
        if not self.has_own_steps or HyperConnections.of(self.model) is None:
            return
        if self.mhc.enabled is False:
            raise SpecError(
                "mhc.enabled",
                f"is false, but every step of {self.model.model_type!r} has hyper-connections",
                "leave it out",
            )

    def _check_short_queries(self) -> None:
        """Only our own scheduler looks its steps up in nothing but the manifest's entries."""
        queries = self.bucketing.short_queries
        if queries and self.scheduler.engine != "aotgaudi":
            raise SpecError(
                "bucketing.short_queries",
                f"is {list(queries)}, with engine {self.scheduler.engine!r}",
                'engine = "aotgaudi", or leave it out',
            )
        if queries and queries[-1] > self.limits.max_num_batched_tokens:
            raise SpecError(
                "bucketing.short_queries",
                f"has {queries[-1]}, more than a step has tokens",
                f"at most max_num_batched_tokens {self.limits.max_num_batched_tokens}",
            )

    def _check_replicas(self) -> None:
        """The steps of replicas in lockstep are known for vLLM's plain prompts and decodes (``bucketing.replicas``)."""
        size, bucketing, engine = self.parallel.data_parallel_size, self.bucketing, self.scheduler.engine
        problem, remedy = "", ""
        if engine != "vllm":
            problem, remedy = f"with engine {engine!r}", 'engine = "vllm"'
        elif bucketing.num_speculative_tokens or bucketing.strategy == "unified":
            problem, remedy = "with speculation or unified attention, whose steps are not padded alike", "1"
        elif min(self.limits.max_num_batched_tokens, self.limits.max_model_len - 1) < _DUMMY_TOKENS:
            problem = f"and replicas without requests compute {_DUMMY_TOKENS} tokens"
            remedy = f"at least {_DUMMY_TOKENS} tokens a step and {_DUMMY_TOKENS + 1} a sequence"
        if size > 1 and problem:
            raise SpecError("parallel.data_parallel_size", f"is {size}, {problem}", remedy)

    def _check_tuned(self) -> None:
        """A vLLM server makes its buckets itself, or reads them from a file."""
        if self.bucketing.strategy == "tuned" and self.scheduler.engine != "aotgaudi":
            raise SpecError(
                "bucketing.strategy",
                f"is 'tuned', with engine {self.scheduler.engine!r}",
                'strategy = "file": `aotgaudi tune --bucket-file` writes the file',
            )

    def to_json(self) -> dict[str, Any]:
        """Returns the spec as a JSON value, from which ``spec.parse.spec_from_json`` makes an equal spec."""
        return self.model_dump(mode="json", by_alias=True)


def check_parallel(parallel: ParallelSpec, model: ModelSpec) -> None:
    """Raises SpecError if vLLM cannot spread the model like this; sizes that the config lacks are not checked.

    The rules are vLLM's: ``vllm/config/model.py`` (``verify_with_parallel_config``, ``get_num_kv_heads``),
    ``vllm/model_executor/layers/linear.py`` (``QKVParallelLinear``) and ``vllm/distributed/utils.py`` (``get_pp_indices``).
    """
    size, where = parallel.tensor_parallel_size, "parallel.tensor_parallel_size"
    if size > 1 and model.states("num_attention_heads"):
        heads, kv_heads = model.num_attention_heads, model.num_kv_heads
        if heads % size:
            raise SpecError(where, f"is {size}", f"a divisor of the model's {heads} attention heads")
        if kv_heads % size and size % kv_heads:
            remedy = f"a divisor or a multiple of the model's {kv_heads} key and value heads"
            raise SpecError(where, f"is {size}", remedy)
    stages = parallel.pipeline_parallel_size
    if stages > 1 and model.states("num_hidden_layers") and stages > model.num_layers:
        where = "parallel.pipeline_parallel_size"
        raise SpecError(where, f"is {stages}", f"at most the model's {model.num_layers} layers")
