"""What a version of the public bucketing rules consists of. ``bucketing.versions`` has one row for each.

There are three families: vllm-gaudi from v0.11.2 on, the out-of-tree extension with three-dimensional buckets (and
vllm-gaudi v0.10.1), and the extension of Gaudi 1.21, whose buckets have two dimensions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from aotgaudi.bucketing.bucket_file import FileStrategy
from aotgaudi.bucketing.bucket_line import Dialect
from aotgaudi.bucketing.combine import ProductStrategy
from aotgaudi.bucketing.exponential import ExponentialRanges, ExponentialRules
from aotgaudi.bucketing.extension import ExtensionRules, ExtensionStrategy
from aotgaudi.bucketing.extension_ranges import (
    ExtensionExponential,
    ExtensionExponentialRules,
    ExtensionLinear,
)
from aotgaudi.bucketing.filters import ProductRules
from aotgaudi.bucketing.linear import LinearRanges
from aotgaudi.bucketing.padding_aware import PaddingAwareRanges
from aotgaudi.bucketing.strategy import Strategy, UnifiedStrategy
from aotgaudi.bucketing.two_dimensional import TwoDimensionalExponential, TwoDimensionalLinear
from aotgaudi.bucketing.unified import UnifiedRanges
from aotgaudi.bucketing.upstream_lookup import LookupRules
from aotgaudi.spec.bucketing import VersionName


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentRules:
    """What one version does with its environment; the defaults are those of 091bbad. Paths are vllm-gaudi's.

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
        lora_extra_vocab_size: how many tokens adapters may add to the vocabulary by default; 0 where none.
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
    lora_extra_vocab_size: int = 0
    is_extension: bool = False


@dataclass(frozen=True, kw_only=True)
class BucketingVersion(ABC):
    """One public commit, of `date` (YYYY-MM-DD). `lookup` is None where buckets have two dimensions."""

    name: VersionName
    commit: str
    date: str
    environment: EnvironmentRules
    lookup: LookupRules | None

    @property
    @abstractmethod
    def strategies(self) -> Mapping[str, Strategy]:
        """The strategies by name, without the unified one."""

    @property
    def unified(self) -> UnifiedStrategy | None:
        """The strategy of unified attention; None where the version has none."""
        return UnifiedRanges() if self.environment.has_unified else None

    @property
    def strategy_names(self) -> tuple[str, ...]:
        """The names that a spec may give with this version."""
        return (*self.strategies, *(("unified",) if self.unified else ()))


@dataclass(frozen=True, kw_only=True)
class GaudiVersion(BucketingVersion):
    """vllm-gaudi from v0.11.2 on."""

    product: ProductRules
    exponential: ExponentialRules
    linear: LinearRanges
    file: Dialect
    has_padding_aware: bool
    lookup: LookupRules

    @property
    def strategies(self) -> Mapping[str, Strategy]:
        """The strategies by name."""
        strategies: dict[str, Strategy] = {
            "exponential": ProductStrategy(ExponentialRanges(self.exponential), self.product),
            "linear": ProductStrategy(self.linear, self.product),
            "file": FileStrategy(self.file, self.product),
        }
        if self.has_padding_aware:
            strategies["padding_aware"] = ProductStrategy(PaddingAwareRanges(), self.product)
        return strategies


@dataclass(frozen=True, kw_only=True)
class ExtensionVersion(BucketingVersion):
    """The extension with three-dimensional buckets, and vllm-gaudi v0.10.1."""

    product: ExtensionRules
    exponential: ExtensionExponentialRules
    linear: ExtensionLinear
    lookup: LookupRules

    @property
    def strategies(self) -> Mapping[str, Strategy]:
        """The strategies by name."""
        return {
            "exponential": ExtensionStrategy(ExtensionExponential(self.exponential), self.product),
            "linear": ExtensionStrategy(self.linear, replace(self.product, limits_query=False)),
        }


@dataclass(frozen=True, kw_only=True)
class TwoDimensionalVersion(BucketingVersion):
    """The extension of Gaudi 1.21."""

    heeds_contiguous_pa: bool
    lookup: None = None

    @property
    def strategies(self) -> Mapping[str, Strategy]:
        """The strategies by name."""
        return {
            "exponential": TwoDimensionalExponential(self.heeds_contiguous_pa),
            "linear": TwoDimensionalLinear(self.heeds_contiguous_pa),
        }
