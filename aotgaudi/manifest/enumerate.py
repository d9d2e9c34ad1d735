"""From a spec to everything that must be warm: a pure function with the same answer on every machine.

The order is: the strategy's tables, as distinct ascending entries; the entries that close them; short queries, if the spec
lists some; samplers, whose sizes are the decode batch sizes; then the entries for other tables of the spec (defrag, mhc,
vision). Samplers and exchanges come in the order in which vllm-gaudi's warm-up runs them.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import starmap
from types import MappingProxyType
from typing import Any, TypeVar

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.mhc_splits import MhcBucket, MhcInputs, StepSplits, warm_up_buckets
from aotgaudi.bucketing.proof import ReachableSteps, closing_entries
from aotgaudi.bucketing.strategy import BucketingInputs
from aotgaudi.bucketing.versions import find_strategy, find_unified
from aotgaudi.bucketing.vision import vision_sizes, warm_sizes
from aotgaudi.entries import (
    DecodeEntry,
    DefragEntry,
    Entry,
    MhcEntry,
    PromptEntry,
    SamplerEntry,
    StepEntry,
    UnifiedEntry,
    VisionEntry,
)
from aotgaudi.errors import SpecError
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.hyper_connections import HyperConnections
from aotgaudi.spec.limits import LARGEST_LIMIT
from aotgaudi.spec.sampler import SamplerSetting, SamplerSpec
from aotgaudi.spec.sampler_signature import PARAMETERS, SamplerSignature, SamplerWork, missing_joins

MAX_SAMPLER_ENTRIES = 1_000_000
"""The most sampler entries of a spec. A usual spec has some dozens."""


def sampler_entries(decode_batch_sizes: Iterable[int], sampler: SamplerSpec) -> tuple[SamplerEntry, ...]:
    """Returns all settings for each batch size: first after a change of the batch's composition, then without one.

    Batch size 1, which a prompt step also samples, comes first, followed by the distinct batch sizes of the decode table
    (vllm-gaudi before v0.16: 0, then 1). Order and choice are those of vllm-gaudi's sampler warm-up
    (vllm_gaudi/v1/worker/hpu_model_runner.py 5343-5464).

    A batch may mix requests of several settings. If no setting has the signature that a mix needs, the least setting that
    has it is added after the spec's own settings, so every mix of legal requests has an entry. All steps return
    log-probabilities in one width, the largest of the settings.

    Raises SpecError for more than `MAX_SAMPLER_ENTRIES`.
    """
    decode_sizes = dict.fromkeys(decode_batch_sizes)
    num_entries = 2 * len(decode_sizes) * len(sampler.settings)
    if num_entries > MAX_SAMPLER_ENTRIES:
        raise SpecError(
            "sampler.settings",
            f"gives {num_entries:,} sampler entries: 2 for each of {len(sampler.settings):,} settings and"
            f" {len(decode_sizes):,} batch sizes",
            f"at most {MAX_SAMPLER_ENTRIES:,}: fewer settings, or a larger step of the decode batch sizes",
        )
    settings = _joined_settings(sampler)
    sizes = dict.fromkeys((*range(sampler.smallest_batch_size, 2), *filter(None, decode_sizes)))
    entries = (
        _entry(size, setting, batch_changed)
        for size in sizes
        for batch_changed in (True, False)
        for setting in settings
    )
    return tuple(dict.fromkeys(entries))


def defrag_entries(spec: BuildSpec) -> tuple[DefragEntry, ...]:
    """Returns one entry for each padded number of exchanges that can occur.

    vLLM's warm-up runs every size if there are two blocks to exchange. Our own engine needs no size beyond the first that
    holds `most_exchanges`.
    """
    sizes, most = spec.defrag.padded_swaps, most_exchanges(spec)
    if not spec.defrag.enabled or most < 1:
        return ()
    if spec.scheduler.engine == "aotgaudi":
        sizes = tuple(size for below, size in zip((0, *sizes), sizes, strict=False) if below < most)
    return tuple(map(DefragEntry, sizes))


def most_exchanges(spec: BuildSpec) -> int:
    """Returns the most pairs of blocks that one defragmentation exchanges, before it is cut to a padded size.

    A pair consists of a used and a free block, so there are at most ``num_blocks // 2``. Our own engine acts only while the
    highest used block is more than `threshold` above the number of used blocks, each of which moves at most once
    (``engine/defragmenter.py``). A result below 1 means that it never acts.
    """
    pairs = spec.limits.num_blocks // 2
    if spec.scheduler.engine != "aotgaudi":
        return pairs
    return min(pairs, spec.limits.num_blocks - spec.defrag.threshold - 1)


def _joined_settings(sampler: SamplerSpec) -> tuple[SamplerSetting, ...]:
    """Returns the settings, and settings for missing joins of their signatures, all with one width of log-probabilities."""
    width = sampler.num_logprobs
    missing = missing_joins(setting.signature for setting in sampler.settings)
    given = (
        setting.model_copy(update={"num_logprobs": width}) if setting.num_logprobs else setting
        for setting in sampler.settings
    )
    return (*given, *(_least_setting(signature, width) for signature in missing))


def _least_setting(signature: SamplerSignature, num_logprobs: int) -> SamplerSetting:
    works = {signature.work, min(signature.work, SamplerWork.RANDOM)}
    values = {
        name: each.neutral
        if each.example is None or not (signature.penalties if each.work is None else each.work in works)
        else each.example
        for name, each in PARAMETERS.items()
    }
    num = num_logprobs if signature.logprobs else 0
    return SamplerSetting.model_validate(
        {**values, "num_logprobs": num, "constraints": signature.constraints}
    )


def _entry(batch_size: int, setting: SamplerSetting, batch_changed: bool) -> SamplerEntry:
    values: dict[str, Any] = {name: getattr(setting, name) for name in PARAMETERS}
    return SamplerEntry(
        batch_size=batch_size,
        batch_changed=batch_changed,
        num_logprobs=setting.num_logprobs,
        constraints=setting.constraints,
        **values,
    )


MHC_SUBLAYERS = ("attn", "ffn")
"""In the order in which SGLang PR #25810 warms them up (deepseek_v4.py, `prewarm_mhc_token_counts`)."""


def vision_entries(spec: BuildSpec) -> tuple[VisionEntry, ...]:
    """Returns one entry for each size of the vision tower. Upstream looks the sizes up by the config's model type.

    Raises:
        SpecError: there are resolutions that cannot become entries.
    """
    if not spec.vision.enabled:
        return ()
    is_batch = vision_sizes(spec.model.model_type, spec.vision).is_batch
    return tuple(VisionEntry(size, is_batch) for size in warm_sizes(spec.model, spec.vision))


def _mhc_entries(spec: BuildSpec, steps: _Steps) -> tuple[MhcEntry, ...]:
    """Returns the hyper-connection entries in warm-up order: for each representative, attention, then ffn.

    Our own engine has those that its steps call, up to the largest step. For other servers ``mhc.enabled`` decides; None
    means, as upstream, that a CUDA target has them if its model does. If the device's numbers are missing, that is an error:
    the machine that enumerates is never asked.

    Raises:
        SpecError: they are requested and the model has none, the largest count is less than a step has, or the rule lacks
            something (see ``bucketing.mhc_splits.warm_up_buckets``).
    """
    own = StepSplits.of(spec)
    if own is not None:
        buckets = own.buckets(_most_tokens(spec, (*steps.prompt, *steps.decode)))
    else:
        buckets = _buckets_of_server(spec)
    return tuple(
        MhcEntry(bucket.last_token, bucket.n_splits, sublayer)
        for bucket in buckets
        for sublayer in MHC_SUBLAYERS
    )


def _most_tokens(spec: BuildSpec, steps: Iterable[StepEntry]) -> int:
    """Returns the largest token count of our own engine. A step of several rows may exceed the limits' tokens."""
    largest = max(steps, key=lambda entry: entry.num_tokens, default=None)
    if largest is None:  # A unified table: our engine can form no step.
        return spec.mhc.max_num_tokens or spec.limits.max_num_batched_tokens
    most = spec.mhc.max_num_tokens or largest.num_tokens
    if most < largest.num_tokens:
        raise SpecError(
            "mhc.max_num_tokens",
            f"is {most}, and a step of {largest} has {largest.num_tokens} tokens",
            f"leave it out, or at least {largest.num_tokens}",
        )
    return most


def _buckets_of_server(spec: BuildSpec) -> tuple[MhcBucket, ...]:
    streams = _streams(spec)
    if streams is None:
        return ()
    inputs = MhcInputs(
        max_num_tokens=spec.mhc.max_num_tokens or spec.limits.max_num_batched_tokens,
        hc_mult=streams.hc_mult,
        hidden_size=streams.hidden_size,
        num_sms=spec.target.resolved_num_sms,
    )
    return warm_up_buckets(spec.mhc.rule, inputs)


def _streams(spec: BuildSpec) -> HyperConnections | None:
    """Returns the hyper-connections that must be warm, or None."""
    if spec.mhc.enabled is False or (spec.mhc.enabled is None and spec.target.backend != "cuda"):
        return None
    streams = HyperConnections.of(spec.model)
    if streams is None and spec.mhc.enabled:
        raise SpecError(
            "mhc.enabled",
            f"is true, but {spec.model.model_type!r} has no hyper-connections with a Sinkhorn projection",
            "leave it out; a model that has them says hc_mult and hc_sinkhorn_iters in its config",
        )
    return streams


_E = TypeVar("_E", PromptEntry, DecodeEntry, UnifiedEntry)

_LEAST: Mapping[type[Entry], tuple[int, ...]] = MappingProxyType(
    {PromptEntry: (1, 1, 0), DecodeEntry: (1, 1, 1), UnifiedEntry: (1, 0, 0)}
)
"""The smallest value of each column. Upstream's lists may hold impossible buckets."""


@dataclass(frozen=True, slots=True)
class _Steps:
    """The entries of the engine's steps, distinct and ascending: prompt and decode, or unified ones."""

    prompt: tuple[PromptEntry, ...] = ()
    decode: tuple[DecodeEntry, ...] = ()
    unified: tuple[UnifiedEntry, ...] = ()


_SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")
_SIZES_TRACED = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
"""Sizes of a config. Those that only our own graphs need may be 0 in a model of another kind, which another server runs."""


def require_sizes(spec: BuildSpec) -> None:
    """Raises SpecError, which names the key, for a size in the model's config that no model can have."""
    model = spec.model
    for name in (*_SIZES, *(_SIZES_TRACED if spec.has_own_steps else ())):
        value = model.config_value(name)
        if isinstance(value, (int, float)) and not (type(value) is int and value >= 1):
            raise SpecError(f"model.config.{name}", f"is {value!r}", "a positive integer")
    heads, width = model.config_value("num_attention_heads"), model.config_value("hidden_size")
    if not spec.has_own_steps or type(heads) is not int:
        return
    key_heads = model.config_value("num_key_value_heads")
    if type(key_heads) is int and heads % key_heads:
        raise SpecError(
            "model.config.num_key_value_heads",
            f"is {key_heads}, with num_attention_heads {heads}",
            "a divisor of it: query heads share key and value heads evenly",
        )
    if type(width) is int and width < heads and not model.states("head_dim"):
        raise SpecError(
            "model.config.num_attention_heads",
            f"is {heads}, with hidden_size {width} and no head_dim",
            "at most hidden_size",
        )


def enumerate_entries(spec: BuildSpec) -> tuple[Entry, ...]:
    """Returns every entry of a spec, kind by kind in the order of ``ENTRY_KINDS``.

    Entries of a kind ascend, except sampler, defrag and mhc entries, which are in warm-up order. A target that runs without
    graphs (execution mode ``eager``) has no entries.

    Raises:
        SpecError: the spec leaves no prompt or no decode entry, or asks for more than can be enumerated.
    """
    if spec.target.execution_mode == "eager":
        return ()
    steps = _with_short_queries(spec, _closed(spec, _steps(spec)))
    return (
        *steps.prompt,
        *steps.decode,
        *steps.unified,
        *vision_entries(spec),
        *sampler_entries((entry.batch_size for entry in steps.decode), spec.sampler),
        *defrag_entries(spec),
        *_mhc_entries(spec, steps),
    )


def _steps(spec: BuildSpec) -> _Steps:
    """Returns the entries of the public table."""
    bucketing = spec.bucketing
    inputs = BucketingInputs.from_spec(spec.limits, bucketing)
    if bucketing.strategy == "unified":
        rows = find_unified(bucketing.version).unified_table(inputs)
        flagged = ((query, shared, unique, bool(causal)) for query, shared, unique, causal in rows)
        return _Steps(unified=_entries(UnifiedEntry, flagged))
    strategy = find_strategy(bucketing.version, bucketing.strategy)
    return _Steps(
        prompt=_entries(PromptEntry, strategy.prompt_table(inputs)),
        decode=_entries(DecodeEntry, strategy.decode_table(inputs)),
    )


def _entries(entry: type[_E], buckets: Iterable[tuple[int, ...]]) -> tuple[_E, ...]:
    """Returns distinct, ascending entries. Upstream's lists may repeat a bucket, or have another order."""
    distinct = dict.fromkeys(sorted(buckets))
    for name, values, least in zip(entry.columns(), zip(*distinct, strict=True), _LEAST[entry], strict=False):
        if min(values) < least or max(values) > LARGEST_LIMIT:
            wrong = min(values) if min(values) < least else max(values)
            raise SpecError(
                "bucketing",
                f"gives a {entry.kind} entry with {name} {wrong:,}",
                f"{least:,} to {LARGEST_LIMIT:,}: other bounds, or lower limits",
            )
    return tuple(starmap(entry, distinct))


def _closed(spec: BuildSpec, steps: _Steps) -> _Steps:
    """Returns the steps with the entries that close them, if the spec asks for that."""
    reachable = ReachableSteps.of(spec.limits, spec.bucketing, spec.scheduler, spec.parallel)
    added = closing_entries(reachable, spec.bucketing, BucketTable(steps.prompt, steps.decode))
    return replace(
        steps,
        prompt=_inserted(steps.prompt, (entry for entry in added if isinstance(entry, PromptEntry))),
        decode=_inserted(steps.decode, (entry for entry in added if isinstance(entry, DecodeEntry))),
    )


def _with_short_queries(spec: BuildSpec, steps: _Steps) -> _Steps:
    """Returns the steps with a one-row prompt entry for each short query after each context of the table."""
    contexts = {entry.num_ctx_blocks for entry in steps.prompt}
    short = {PromptEntry(1, query, ctx) for query in spec.bucketing.short_queries for ctx in contexts}
    return replace(steps, prompt=_inserted(steps.prompt, sorted(short.difference(steps.prompt))))


def _inserted(entries: tuple[_E, ...], added: Iterable[_E]) -> tuple[_E, ...]:
    """Inserts a few entries into ascending ones. Sorting a million again would take a second."""
    merged = list(entries)
    for entry in added:
        insort(merged, entry)
    return tuple(merged)
