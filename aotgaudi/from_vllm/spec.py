"""Makes a spec from a vLLM command, an environment and a config.json, and reports what the spec cannot express."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypeVar

from aotgaudi.bucketing.versions import EnvironmentRules, find_version
from aotgaudi.commands.flags import FLAGS, is_looked_at
from aotgaudi.commands.words import Remark
from aotgaudi.errors import SpecError
from aotgaudi.from_vllm.buckets import (
    BucketingEnvironment,
    IgnoredVariable,
    check_attention,
    check_bounds,
    check_modes,
    check_slices,
)
from aotgaudi.from_vllm.command import OtherVariables, VllmCommand
from aotgaudi.from_vllm.limits import Limits, Pin, StepRules, read_limits
from aotgaudi.from_vllm.model import CONFIG, Device, ModelFacts, served_dtype, vllm_release
from aotgaudi.from_vllm.overrides import overridden
from aotgaudi.from_vllm.serving import (
    LAZY_VARIABLE,
    MODE_NOTES,
    MODES,
    QUANTIZATION_VARIABLE,
    ServingEnvironment,
    has_kv_transfer,
    lora_table,
    max_logprobs,
    most_images,
    num_speculative_tokens,
    parallel_table,
    quantization_table,
)
from aotgaudi.spec.base import SpecValue
from aotgaudi.spec.bucketing import NEWEST_RELEASE
from aotgaudi.spec.build_spec import SPEC_SCHEMA, BuildSpec, ParallelSpec
from aotgaudi.spec.parse import finite_json, spec_from_json, value_from_json
from aotgaudi.spec.quantization import QuantizationSpec
from aotgaudi.spec.target import ExecutionMode
from aotgaudi.spec.vision import VisionSpec

_WHERE: Mapping[str, str] = MappingProxyType(
    {
        **{flag.reason: f"--{flag.name}" for flag in tuple(FLAGS.values())[::-1] if flag.effect == "taken"},
        "limits.num_blocks": "the number of KV blocks",
        "model.config": CONFIG,
    }
)
"""Field of a spec -> the user's option for it, for error messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSetup:
    """Everything that a spec is made from.

    Attributes:
        environment: the variables of vLLM and the bridge; others are ignored. Assignments in front of the command take
            precedence.
        config: the content of the model's config.json.
        version: the version whose rules apply, one of ``spec.bucketing.VersionName``; None assumes the default.
        pin: the number of KV blocks, unless --num-gpu-blocks-override gives it.
        read_file: returns the text of the bucket file at a path; raises SpecError.
        digest_file: returns the sha256 of the JSON content of the file at a path, which QUANT_CONFIG names; raises
            SpecError.
    """

    command: VllmCommand
    environment: Mapping[str, str]
    config: Mapping[str, Any]
    version: str | None
    pin: Pin
    read_file: Callable[[str], str]
    digest_file: Callable[[str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the spec does not say, but the user should know about the command and the environment.

    Attributes:
        notes: other remarks.
        assumed: defaults that were filled in.
        ignored: variables that upstream does not heed, each with the reason.
        unknown: flags and variables that may change what is warm but have no field in a spec.
        harmless: flags and variables that do not change what is warm, with the reason.
    """

    notes: tuple[str, ...]
    assumed: tuple[str, ...]
    ignored: tuple[IgnoredVariable, ...]
    unknown: tuple[Remark, ...]
    harmless: tuple[Remark, ...]

    def lines(self) -> Iterator[str]:
        """Yields the lines of the report."""
        yield from (f"note: {note}" for note in self.notes)
        yield from (f"assumed: {default}" for default in self.assumed)
        yield from (f"ignored: {one.name}={one.value}: {one.reason}" for one in self.ignored)
        yield from (f"may change what is warm: {one.name}: {one.text}" for one in self.unknown)
        for reason, remarks in groupby(sorted(self.harmless, key=attrgetter("text")), attrgetter("text")):
            yield f"no effect on what is warm: {', '.join(one.name for one in remarks)}: {reason}"


def spec_from_vllm(setup: VllmSetup) -> tuple[BuildSpec, Report]:
    """Returns the spec of a server, for an hpu target, and the report of what the spec does not say.

    Raises:
        SpecError: a value is malformed, contradicts another, or cannot be expressed in a spec. Names the flag or the
        variable.
    """
    environment = {**setup.environment, **setup.command.assignments}
    version = setup.version or NEWEST_RELEASE
    config, config_notes = overridden(setup.config, setup.command.values, vllm_release(version))
    setup = replace(setup, config=config)
    facts = ModelFacts.of(config, find_version(version).environment)
    caching = StepRules(vllm_release(version)).is_caching(setup.command, facts)
    bucketing = BucketingEnvironment.parse(environment, version, enable_prefix_caching=caching)
    serving = ServingEnvironment.parse(environment, version)
    if not bucketing.is_enabled:
        raise SpecError(
            "VLLM_ENABLE_BUCKETING",
            "is false: upstream then compiles every shape on first use",
            "leave it unset",
        )
    check_bounds(bucketing.prompt, bucketing.decode, environment)
    merged = bucketing.merged_prefill
    check_modes(environment, version, unified=bucketing.unified, merged_prefill=merged)
    parts = _Parts.of(setup, bucketing, serving, facts)
    tokens, block_size = (parts.limits.table[name] for name in ("max_num_batched_tokens", "block_size"))
    check_slices(environment, bucketing.sliding, tokens)
    check_attention(environment, version, merged_prefill=merged, tokens=tokens, block_size=block_size)
    named = {one.name for one in bucketing.ignored} | serving.read | bucketing.read
    others = OtherVariables.of(name for name in environment if is_looked_at(name) and name not in named)
    return parts.spec(setup), Report(
        notes=(*setup.command.notes, *config_notes, *bucketing.notes, *serving.notes, *parts.notes(setup)),
        assumed=tuple(parts.assumed(setup)),
        ignored=bucketing.ignored,
        unknown=(*setup.command.unknown, *others.unknown),
        harmless=(*setup.command.harmless, *others.harmless),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """The parts of a spec, before they are put together."""

    rules: EnvironmentRules
    bucketing: BucketingEnvironment
    serving: ServingEnvironment
    facts: ModelFacts
    limits: Limits
    device: Device
    own_notes: tuple[str, ...]

    @classmethod
    def of(
        cls, setup: VllmSetup, bucketing: BucketingEnvironment, serving: ServingEnvironment, facts: ModelFacts
    ) -> _Parts:
        rules = find_version(bucketing.version).environment
        dtype, dtype_notes = served_dtype(setup.command.values.get("dtype", "auto"), facts, rules)
        sizes, replica_notes = parallel_table(
            setup.command, vllm_release(bucketing.version), has_experts=facts.has_experts
        )
        parallel = _value(ParallelSpec, sizes, "parallel")
        table = quantization_table(setup.command, serving, setup.digest_file)
        quantization = None if table is None else _value(QuantizationSpec, table, "model.quantization")
        device = Device(dtype=dtype, quantization=quantization, parallel=parallel)
        return cls(
            rules=rules,
            bucketing=bucketing,
            serving=serving,
            facts=facts,
            limits=read_limits(setup.command, bucketing, serving, facts, device, setup.pin),
            device=device,
            own_notes=(*dtype_notes, *replica_notes),
        )

    def spec(self, setup: VllmSetup) -> BuildSpec:
        """Returns the spec. If the spec refuses a value, raises SpecError, naming the flag."""
        smallest = 1 if self.rules.sampler is None else self.rules.sampler
        release, quantization = vllm_release(self.bucketing.version), self.device.quantization
        num_images = most_images(setup.command)
        vision = VisionSpec(
            enabled=num_images > 0 and self.facts.has_vision,
            max_images=max(1, num_images),
            buckets=self.serving.vision_buckets,
            resolutions=self.serving.vision_resolutions,
        )
        tables = {
            "schema": SPEC_SCHEMA,
            "model": {
                "name": setup.command.values.get("served-model-name", setup.command.model),
                "dtype": self.device.dtype,
                "config": finite_json(setup.config),
                "quantization": None if quantization is None else _json(quantization),
            },
            "limits": dict(self.limits.table),
            "scheduler": {
                "engine": "vllm",
                "chunked_prefill": StepRules(release).is_chunked(setup.command, self.facts),
                "kv_transfer": has_kv_transfer(setup.command, release),
                "static_shapes": self.serving.static_shapes,
                "max_logprobs": max_logprobs(setup.command.values),
            },
            "parallel": _json(self.device.parallel),
            "lora": lora_table(setup.command, self.rules),
            "bucketing": self._bucketing(setup),
            "sampler": {"smallest_batch_size": smallest},
            "defrag": _json(self.serving.defrag_spec(self.bucketing)),
            "vision": _json(vision),
            "target": {"backend": "hpu", "execution_mode": self.mode(setup.command)},
        }
        try:
            return spec_from_json(tables)
        except SpecError as error:
            raise SpecError(_place(error.where), error.problem, error.remedy) from error

    def mode(self, command: VllmCommand) -> ExecutionMode:
        """Returns how graphs are executed."""
        return MODES[bool(self.serving.is_lazy), command.switches.get("enforce-eager", False)]

    def _bucketing(self, setup: VllmSetup) -> dict[str, Any]:
        environment = self.bucketing
        file_text = None if environment.file is None else setup.read_file(environment.file)
        return {
            "strategy": environment.strategy,
            "version": environment.version,
            "contiguous_pa": environment.contiguous_pa,
            "prefix_caching": environment.prefix_caching,
            "merged_prefill": environment.merged_prefill,
            "num_speculative_tokens": num_speculative_tokens(setup.command.values),
            "mamba_chunk_size": self.facts.mamba_chunk_size,
            "mamba_chunk_size_is_explicit": self.facts.mamba_chunk_size_is_explicit,
            "skip_decode_block_clamp": self.facts.has_mamba or self.facts.has_interleaved_windows,
            "sliding": None if environment.sliding is None else _json(environment.sliding),
            "prompt": _json(environment.prompt),
            "decode": _json(environment.decode),
            "file_text": file_text,
        }

    def notes(self, setup: VllmSetup) -> Iterator[str]:
        yield MODE_NOTES[self.mode(setup.command)]
        yield from self.own_notes
        yield from self.limits.notes
        yield from self._quantization_notes(setup.command)
        if (size := self.device.parallel.world_size) > 1:
            yield f"{size} devices: each runs the same entries, on its share of the model"
        if self.serving.skips_warmup:
            yield (
                "VLLM_SKIP_WARMUP: upstream would warm up nothing and compile on first use; the manifest lists"
                " what must be warm all the same"
            )
        if self.rules.sampler is None:
            yield f"{self.bucketing.version} warms up no sampler; the spec does, as its first use would compile"
        if num_speculative_tokens(setup.command.values):
            yield "the graphs of the draft model are not enumerated, only the longer decode steps"
        if self.facts.has_mamba:
            yield "a model with recurrent layers: upstream may raise --block-size; give the one that its log shows"

    def _quantization_notes(self, command: VllmCommand) -> Iterator[str]:
        if self.facts.is_quantized:
            yield "the checkpoint is quantized: the shapes are the same, the compiled code is not"
        if self.device.quantization is None or self.device.quantization.config_sha256 is None:
            return
        if "quantization" not in command.values:
            yield f"{QUANTIZATION_VARIABLE} alone turns on quantization by Intel Neural Compressor (inc)"
        yield (
            f"{QUANTIZATION_VARIABLE}: the spec has the digest of the file; the measurements that it names are not"
            " read, and decide the code where scales are constants"
        )

    def assumed(self, setup: VllmSetup) -> Iterator[str]:
        if setup.version is None:
            yield f"--bucketing-version {self.bucketing.version} (the newest release; give your server's)"
        yield from self.limits.assumed
        if self.serving.is_lazy is None:
            yield f"{LAZY_VARIABLE}=0 (its default changed between releases: always set it)"


_V = TypeVar("_V", bound=SpecValue)


def _json(value: SpecValue) -> dict[str, Any]:
    return value.model_dump(mode="json")


def _value(kind: type[_V], table: Mapping[str, Any], where: str) -> _V:
    """Returns a table as a value of a spec. Raises SpecError, naming the flag."""
    try:
        return value_from_json(kind, dict(table))
    except SpecError as error:
        raise SpecError(_place(f"{where}.{error.where}"), error.problem, error.remedy) from error


def _place(where: str) -> str:
    """Returns the user's option for a field of a spec, or the key of config.json."""
    section, _, key = where.partition("model.config.")
    return f"{CONFIG}: {key}" if key and not section else _WHERE.get(where, where)
