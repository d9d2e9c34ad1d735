"""Which environment variables the public code reads, version by version. A version is data: one row of `RULES`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from aotgaudi.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentRules:
    """What one public version does with its environment. Paths are those of vllm-gaudi.

    Attributes:
        strategy: how the strategy is chosen. ``named``: VLLM_BUCKETING_STRATEGY, and VLLM_EXPONENTIAL_BUCKETING
            before it (extension/bucketing/common.py ``get_bucketing_strategy``). ``flag``: only the latter,
            exponential where unset. ``opt_in``: linear where unset. ``opt_in_word``: only the word true counts.
        contiguous_pa: what decides where VLLM_CONTIGUOUS_PA is unset. ``environment``: off, since prefix caching
            is derived from that same variable (extension/environment.py ``_get_prefix``). ``command``: off
            exactly with prefix caching, as the command line has it. ``on``: on; only the word true counts.
        has_file, has_unified, has_sliding, has_context: whether bucket files, unified attention, sliced
            attention, and bounds of the context exist.
        query_names: the names of the query dimension in variables; the first that is set wins.
        has_limits: whether VLLM_*_BUCKET_LIMIT count, in the exponential strategy.
        has_query_min_one: whether the exponential strategy heeds VLLM_PROMPT_QUERY_BUCKET_MIN=1.
        has_context_edge: whether it heeds VLLM_PROMPT_CTX_BUCKET_MAX.
        prefill: most prompts of a step. ``environment``: VLLM_PROMPT_BS_BUCKET_MAX, else 1. ``one``: 1.
            ``scheduler``: --max-num-prefill-seqs, else max_num_seqs (the V0 engine).
        defrag: what enables the defragmenter where VLLM_DEFRAG is unset; None where there is none.
        sampler: the smallest batch size that the sampler is warmed with; None where it is not warmed.
        has_dummy_block: whether one KV block is set aside when blocks are counted.
        mamba: how the chunk size of mamba layers is found (v1/worker/hpu_model_runner.py): ``none``; ``model``,
            the model's or vLLM's 2048; ``explicit``, the model's or 128.
        is_extension: whether this is the out-of-tree extension, with vllm-fork's engine.
    """

    strategy: Literal["named", "flag", "opt_in", "opt_in_word"] = "named"
    contiguous_pa: Literal["environment", "command", "on"] = "environment"
    has_file: bool = True
    has_unified: bool = False
    has_sliding: bool = True
    has_context: bool = True
    query_names: tuple[str, ...] = ("QUERY", "SEQ")
    has_limits: bool = False
    has_query_min_one: bool = True
    has_context_edge: bool = True
    prefill: Literal["environment", "one", "scheduler"] = "environment"
    defrag: Literal["contiguous_pa", "unified", "off"] | None = "contiguous_pa"
    sampler: Literal[0, 1] | None = 1
    has_dummy_block: bool = True
    mamba: Literal["none", "model", "explicit"] = "explicit"
    is_extension: bool = False


_NEWEST = EnvironmentRules()
_V0_17_1 = dataclasses.replace(_NEWEST, strategy="flag", has_unified=True, defrag="unified", mamba="model")
_V0_14_1 = dataclasses.replace(_V0_17_1, has_context_edge=False, sampler=0)
_V0_13_0 = dataclasses.replace(_V0_14_1, mamba="none")
_V0_10_1 = EnvironmentRules(
    strategy="flag",
    contiguous_pa="command",
    has_file=False,
    has_sliding=False,
    has_context=False,
    query_names=("SEQ",),
    has_query_min_one=False,
    has_context_edge=False,
    prefill="one",
    defrag=None,
    sampler=None,
    mamba="none",
)
_EXTENSION = dataclasses.replace(
    _V0_10_1, has_sliding=True, prefill="scheduler", has_dummy_block=False, is_extension=True
)
_AD55828 = dataclasses.replace(_EXTENSION, strategy="opt_in", has_sliding=False, has_limits=True)
_GAUDI_1_21 = dataclasses.replace(_AD55828, strategy="opt_in_word", contiguous_pa="on")

RULES: Mapping[str, EnvironmentRules] = MappingProxyType(
    {
        "vllm-gaudi@091bbad": _NEWEST,
        "vllm-gaudi@v0.24.0": _NEWEST,
        "vllm-gaudi@v0.21.0": _NEWEST,
        "vllm-gaudi@v0.19.1": dataclasses.replace(_NEWEST, strategy="flag"),
        "vllm-gaudi@v0.20.0rc0": dataclasses.replace(_NEWEST, defrag="off"),
        "vllm-gaudi@v0.17.1": _V0_17_1,
        "vllm-gaudi@v0.16.0": _V0_17_1,
        "vllm-gaudi@v0.14.1": _V0_14_1,
        "vllm-gaudi@v0.13.0": _V0_13_0,
        "vllm-gaudi@v0.11.2": dataclasses.replace(_V0_13_0, has_query_min_one=False),
        "vllm-gaudi@v0.10.1": _V0_10_1,
        "vllm-hpu-extension@7717587": dataclasses.replace(_EXTENSION, defrag="off"),
        "vllm-hpu-extension@8211e0b": _EXTENSION,
        "vllm-hpu-extension@ad55828": _AD55828,
        "vllm-hpu-extension@29bc7a4": _GAUDI_1_21,
        "vllm-hpu-extension@2b4ba56": _GAUDI_1_21,
    }
)
"""By the names of ``spec.bucketing.VersionName``. v0.20.0rc0 is older than v0.19.1: tags are not in date order."""


def find_rules(version: str) -> EnvironmentRules:
    """Returns the rules of a version. Raises SpecError, which names the known ones."""
    if version not in RULES:
        raise SpecError("bucketing.version", f"is {version!r}", f"known: {', '.join(RULES)}")
    return RULES[version]
