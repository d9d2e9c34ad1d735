"""A command, an environment and a config.json become a spec; what a spec cannot say becomes a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from aotgaudi.bucketing.rules import EnvironmentRules
from aotgaudi.bucketing.versions import find_version
from aotgaudi.errors import SpecError
from aotgaudi.spec.base import SpecValue
from aotgaudi.spec.build_spec import SPEC_SCHEMA, BuildSpec
from aotgaudi.spec.parse import spec_from_json
from aotgaudi.spec.target import ExecutionMode
from aotgaudi.spec.vision import VisionSpec
from aotgaudi.vllm.blocks import Pin
from aotgaudi.vllm.bounds import check_bounds
from aotgaudi.vllm.command import VllmCommand
from aotgaudi.vllm.environment import BucketingEnvironment
from aotgaudi.vllm.ignored import PREFIXES
from aotgaudi.vllm.limits import Limits, read_limits
from aotgaudi.vllm.model_facts import DTYPES, DtypeName, ModelFacts
from aotgaudi.vllm.other_variables import OtherVariables
from aotgaudi.vllm.report import Report
from aotgaudi.vllm.serving import LAZY_VARIABLE, MODE_NOTES, MODES, ServingEnvironment
from aotgaudi.vllm.speculation import num_speculative_tokens
from aotgaudi.vllm.values import shown
from aotgaudi.vllm.vision_flags import takes_images

_FLAGS_OF_LIMITS: Mapping[str, str] = MappingProxyType(
    {
        "limits.max_num_seqs": "--max-num-seqs",
        "limits.max_num_batched_tokens": "--max-num-batched-tokens",
        "limits.max_model_len": "--max-model-len",
        "limits.block_size": "--block-size",
        "limits.num_blocks": "the number of KV blocks",
        "model.name": "--served-model-name",
        "model.config": "the model's config.json",
        "model.config.model_type": "the model's config.json: model_type",
        "model.config.max_position_embeddings": "the model's config.json: max_position_embeddings",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSetup:
    """All that a person has.

    Attributes:
        environment: ``VLLM_*`` and ``PT_HPU*`` variables; others may be there and are not looked at. What the
            command assigns in front of itself comes before it.
        config: the content of the model's config.json.
        version: whose rules, one of ``spec.bucketing.VersionName``.
        pin: where the number of KV blocks is from, unless --num-gpu-blocks-override says it.
        read_file: returns the text of the bucket file at a path; raises SpecError.
    """

    command: VllmCommand
    environment: Mapping[str, str]
    config: Mapping[str, Any]
    version: str
    pin: Pin
    read_file: Callable[[str], str]


def spec_from_vllm(setup: VllmSetup) -> tuple[BuildSpec, Report]:
    """Returns the spec of a server, for an hpu target, and what the spec does not say.

    Raises:
        SpecError: a malformed or contradictory value, with the flag or variable named; or what cannot be
            expressed, with the reason.
    """
    environment = {**setup.environment, **setup.command.assignments}
    rules = find_version(setup.version).environment
    bucketing = BucketingEnvironment.parse(
        environment,
        setup.version,
        enable_prefix_caching=setup.command.switches.get("enable-prefix-caching"),
    )
    serving = ServingEnvironment.parse(environment, setup.version)
    if not bucketing.is_enabled:
        raise SpecError(
            "VLLM_ENABLE_BUCKETING",
            "is false: upstream then compiles every shape on first use",
            "leave it unset",
        )
    check_bounds(bucketing.prompt, bucketing.decode, environment)
    parts = _Parts.of(setup, rules, bucketing, serving)
    return parts.spec(setup), Report(
        notes=(*setup.command.notes, *bucketing.notes, *serving.notes, *parts.notes(setup.command)),
        assumed=tuple(parts.assumed()),
        ignored=bucketing.ignored,
        **_others(setup.command, environment, bucketing, serving),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What was read, side by side, before it is put together."""

    rules: EnvironmentRules
    bucketing: BucketingEnvironment
    serving: ServingEnvironment
    facts: ModelFacts
    limits: Limits
    dtype: DtypeName
    dtype_notes: tuple[str, ...]
    num_speculative_tokens: int

    @classmethod
    def of(
        cls,
        setup: VllmSetup,
        rules: EnvironmentRules,
        bucketing: BucketingEnvironment,
        serving: ServingEnvironment,
    ) -> _Parts:
        facts = ModelFacts.of(setup.config, rules)
        dtype, dtype_notes = _dtype(setup.command, facts, rules)
        return cls(
            rules=rules,
            bucketing=bucketing,
            serving=serving,
            facts=facts,
            limits=read_limits(setup.command, bucketing, serving, facts, dtype, setup.pin),
            dtype=dtype,
            dtype_notes=dtype_notes,
            num_speculative_tokens=num_speculative_tokens(setup.command.values),
        )

    @property
    def is_lazy(self) -> bool:
        """PT_HPU_LAZY_MODE: where it is unset, 1 up to Gaudi 1.22, whose releases the extension is of; then 0."""
        return self.rules.is_extension if self.serving.is_lazy is None else self.serving.is_lazy

    def spec(self, setup: VllmSetup) -> BuildSpec:
        """Returns the spec; what it refuses is reported by the flag that it is from."""
        smallest = 1 if self.rules.sampler is None else self.rules.sampler
        vision = VisionSpec(
            enabled=takes_images(setup.command) and self.facts.has_vision,
            buckets=self.serving.vision_buckets,
            resolutions=self.serving.vision_resolutions,
        )
        tables = {
            "schema": SPEC_SCHEMA,
            "model": {
                "name": setup.command.values.get("served-model-name", setup.command.model),
                "dtype": self.dtype,
                "config": dict(setup.config),
            },
            "limits": dict(self.limits.table),
            "bucketing": self._bucketing(setup),
            "sampler": {"smallest_batch_size": smallest},
            "defrag": _json(self.serving.defrag_spec(self.bucketing, is_lazy=self.is_lazy)),
            "vision": _json(vision),
            "target": {"backend": "hpu", "execution_mode": self.mode(setup.command)},
        }
        try:
            return spec_from_json(tables)
        except SpecError as error:
            where = _FLAGS_OF_LIMITS.get(error.where, error.where)
            raise SpecError(where, error.problem, error.remedy) from error

    def mode(self, command: VllmCommand) -> ExecutionMode:
        """Returns how graphs are run."""
        return MODES[self.is_lazy, command.switches.get("enforce-eager", False)]

    def _bucketing(self, setup: VllmSetup) -> dict[str, Any]:
        environment = self.bucketing
        file_text = None if environment.file is None else setup.read_file(environment.file)
        return {
            "strategy": environment.strategy,
            "version": environment.version,
            "contiguous_pa": environment.contiguous_pa,
            "prefix_caching": environment.prefix_caching,
            "merged_prefill": environment.merged_prefill,
            "num_speculative_tokens": self.num_speculative_tokens,
            "mamba_chunk_size": self.facts.mamba_chunk_size,
            "mamba_chunk_size_is_explicit": self.facts.mamba_chunk_size_is_explicit,
            "skip_decode_block_clamp": self.facts.has_mamba or self.facts.has_interleaved_windows,
            "sliding": None if environment.sliding is None else _json(environment.sliding),
            "prompt": _json(environment.prompt),
            "decode": _json(environment.decode),
            "file_text": file_text,
        }

    def notes(self, command: VllmCommand) -> Iterator[str]:
        yield MODE_NOTES[self.mode(command)]
        yield from self.dtype_notes
        yield from self.limits.notes
        if self.serving.skips_warmup:
            yield (
                "VLLM_SKIP_WARMUP: upstream would warm up nothing and compile on first use; the manifest lists"
                " what must be warm all the same"
            )
        if self.rules.sampler is None:
            yield f"{self.bucketing.version} warms up no sampler; the spec does, as its first use would compile"
        if self.num_speculative_tokens:
            yield "the graphs of the draft model are not enumerated, only the longer decode steps"
        if self.facts.is_quantized:
            yield "the checkpoint is quantized: the shapes are the same, the compiled code is not"
        if self.facts.has_mamba:
            yield "a model with recurrent layers: upstream may raise --block-size; give the one that its log shows"

    def assumed(self) -> Iterator[str]:
        yield from self.limits.assumed
        if self.serving.is_lazy is None:
            yield f"{LAZY_VARIABLE}={int(self.is_lazy)} (its default changed between releases: always set it)"


def _json(value: SpecValue) -> dict[str, Any]:
    return value.model_dump(mode="json")


def _dtype(
    command: VllmCommand, facts: ModelFacts, rules: EnvironmentRules
) -> tuple[DtypeName, tuple[str, ...]]:
    """Returns the dtype, and a note where Gaudi replaces what was asked for (vllm_gaudi/platform.py 234)."""
    text = command.values.get("dtype", "auto")
    if text != "auto" and text not in DTYPES:
        raise SpecError("--dtype", f"is {shown(text)}", f"auto, or one of {', '.join(sorted(DTYPES))}")
    asked = (facts.dtype or "float32") if text == "auto" else DTYPES[text]
    if asked == "bfloat16" or (asked == "float32" and rules.is_extension):
        return asked, ()
    origin = (
        "--dtype"
        if text != "auto"
        else "config.json"
        if facts.dtype
        else "vLLM, where config.json says none,"
    )
    return "bfloat16", (f"{origin} asks for {asked}; Gaudi serves bfloat16 in its place",)


def _others(
    command: VllmCommand,
    environment: Mapping[str, str],
    bucketing: BucketingEnvironment,
    serving: ServingEnvironment,
) -> dict[str, tuple[str, ...]]:
    named = {one.name for one in bucketing.ignored} | serving.heeded | bucketing.heeded
    rest = (name for name in environment if name.startswith(PREFIXES) and name not in named)
    others = OtherVariables.of(rest)
    return {
        "changing_code": others.changing_code,
        "without_effect": (*command.without_effect, *others.without_effect),
    }
