"""The known versions of the public bucketing rules: one row each, from the newest backwards.

There are three families: vllm-gaudi from v0.11.2 on; the out-of-tree extension with three-dimensional buckets, and
vllm-gaudi v0.10.1; and the extension of Gaudi 1.21, whose buckets have two dimensions.

A row has a version's commit, its date, and what differs from the next newer version of its family: buckets, look-up, and how
the environment is read. Rows are ordered by date: v0.20.0rc0 is older than v0.19.1. To add a version, add a row, name it in
`HISTORY`, and add its name to ``spec.bucketing.VersionName``, from which editors take completions.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from aotgaudi.bucketing.bucket_file import (
    EVALUATED,
    LITERAL,
    Dialect,
    FileStrategy,
    SkippedLine,
    read_bucket_file,
)
from aotgaudi.bucketing.combine import ProductRules, ProductStrategy
from aotgaudi.bucketing.exponential import (
    ExponentialRanges,
    ExponentialRules,
    RangeRule,
    all_sequences,
    limit_of_blocks,
    limit_of_cache,
    limit_of_few_blocks,
    sequences_or_shared_cache,
    sequences_within_cache,
    sequences_within_quarter,
    shared_cache,
)
from aotgaudi.bucketing.extension import (
    ExtensionExponential,
    ExtensionExponentialRules,
    ExtensionLinear,
    ExtensionRules,
    ExtensionStrategy,
    TwoDimensionalExponential,
    TwoDimensionalLinear,
)
from aotgaudi.bucketing.linear import LinearRanges, PaddingAwareRanges
from aotgaudi.bucketing.strategy import BucketingInputs, Strategy, TunedStrategy, UnifiedStrategy
from aotgaudi.bucketing.unified import UnifiedRanges
from aotgaudi.bucketing.upstream import LookupRules, UpstreamLookup
from aotgaudi.errors import SpecError
from aotgaudi.spec.bucketing import BucketingSpec, VersionName


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentRules:
    """What one version does with its environment. The defaults are those of 091bbad. Paths are vllm-gaudi's.

    Attributes:
        strategy: how the strategy is chosen. ``named``: by VLLM_EXPONENTIAL_BUCKETING, else by VLLM_BUCKETING_STRATEGY
            (extension/bucketing/common.py ``get_bucketing_strategy``). ``flag``: by the former alone, exponential if
            unset. ``opt_in``: likewise, but linear if unset. ``opt_in_word``: likewise, and only the word true counts.
        contiguous_pa: what decides if VLLM_CONTIGUOUS_PA is unset. ``environment``: off, because prefix caching is derived
            from that same variable (extension/environment.py ``_get_prefix``). ``command``: off exactly if the command line
            enables prefix caching. ``on``: on; only the word true counts.
        has_file, has_unified, has_sliding, has_context: whether bucket files, unified attention, sliced
            attention, and bounds of the context exist.
        query_names: the names of the query dimension in variables; the first that is set wins.
        has_limits: whether VLLM_*_BUCKET_LIMIT count, in the exponential strategy.
        has_query_min_one: whether the exponential strategy heeds VLLM_PROMPT_QUERY_BUCKET_MIN=1.
        has_context_edge: whether it heeds VLLM_PROMPT_CTX_BUCKET_MAX.
        prefill: most prompts of a step. ``environment``: VLLM_PROMPT_BS_BUCKET_MAX, else 1. ``one``: 1.
            ``scheduler``: --max-num-prefill-seqs, else max_num_seqs (the V0 engine).
        defrag: what enables the defragmenter if VLLM_DEFRAG is unset; None if the version has no defragmenter.
        sampler: the smallest batch size that the sampler is warmed with; None if it is not warmed.
        has_dummy_block: whether one KV block is reserved when blocks are counted.
        mamba: how the chunk size of mamba layers is found (v1/worker/hpu_model_runner.py). ``none``: not at all.
            ``model``: the model's or vLLM's 2048. ``explicit``: the model's or 128.
        lora_extra_vocab_size: how many tokens adapters may add to the vocabulary by default; 0 for none.
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
    """One public commit, of `date` (YYYY-MM-DD). `lookup` is None if buckets have two dimensions."""

    name: VersionName
    commit: str
    date: str
    environment: EnvironmentRules
    lookup: LookupRules | None

    @property
    @abstractmethod
    def strategies(self) -> Mapping[str, Strategy]:
        """The strategies by name, except the unified one."""

    @property
    def unified(self) -> UnifiedStrategy | None:
        """The strategy of unified attention; None if the version has none."""
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


_MAIN = GaudiVersion(
    name="vllm-gaudi@091bbad",
    commit="091bbadda10bee4fd3f6d0efc1844d2610dd2707",
    date="2026-08-21",
    product=ProductRules(),
    exponential=ExponentialRules(),
    linear=LinearRanges(),
    file=LITERAL,
    has_padding_aware=True,
    environment=EnvironmentRules(),
    lookup=LookupRules(),
)

_Version = TypeVar("_Version", bound=BucketingVersion)


def _older(newer: _Version, name: VersionName, commit: str, date: str, **changes: Any) -> _Version:
    """Returns the version before `newer`. Of a part that changes, a dict has the fields that differ."""
    parts = {
        part: replace(getattr(newer, part), **change) if isinstance(change, dict) else change
        for part, change in changes.items()
    }
    return replace(newer, name=name, commit=commit, date=date, **parts)


_V0_26_0 = _older(
    _MAIN,
    *("vllm-gaudi@v0.26.0", "b059f9c95d6a", "2026-08-06"),
    exponential={"decode_max": all_sequences},
    lookup={"batches": "fresh"},
)

_V0_24_0 = _older(_V0_26_0, "vllm-gaudi@v0.24.0", "90815f2f2c19", "2026-07-13")

_V0_21_0 = _older(
    _V0_24_0,
    *("vllm-gaudi@v0.21.0", "fbf227524ae1", "2026-06-01"),
    exponential={"decode_limit": limit_of_blocks},
)

_V0_19_1 = _older(
    _V0_21_0,
    *("vllm-gaudi@v0.19.1", "f2ebadf96ed0", "2026-05-08"),
    exponential={"decode_max": sequences_or_shared_cache, "contiguous_within_sequences": False},
    linear={"clamps_always": True},
    has_padding_aware=False,
    environment={"strategy": "flag"},
)

_V0_20_0_RC0 = _older(
    _V0_19_1,
    *("vllm-gaudi@v0.20.0rc0", "8a9d69851a77", "2026-04-15"),
    product={"prompt_fit": "total", "mamba_floors_decode": True},
    exponential={"decode_max": shared_cache, "decode_limit": limit_of_few_blocks},
    has_padding_aware=True,
    environment={"strategy": "named", "defrag": "off"},
    lookup={"prompt_cap": "decode_table", "caps_decode": False},
)

_V0_17_1 = _older(
    _V0_20_0_RC0,
    *("vllm-gaudi@v0.17.1", "dafb170c4cb1", "2026-03-31"),
    product={"mamba_rounding": "always"},
    exponential={"decode_limit": limit_of_blocks},
    has_padding_aware=False,
    environment={"strategy": "flag", "has_unified": True, "defrag": "unified", "mamba": "model"},
)

_V0_16_0 = _older(
    _V0_17_1,
    *("vllm-gaudi@v0.16.0", "da2ce4040782", "2026-03-06"),
    product={"mamba_divides_step": False},
    exponential={"decode_max": sequences_within_quarter, "decode_limit": limit_of_cache},
    file=EVALUATED,
    lookup={"prompt_cap": "cache", "decode_cap": "cache", "widens_with_mamba": False},
)

_V0_14_1 = _older(
    _V0_16_0,
    *("vllm-gaudi@v0.14.1", "c4ecd716a0fa", "2026-02-04"),
    product={"edge": "unbounded"},
    environment={"has_context_edge": False, "sampler": 0},
)

_V0_13_0 = _older(
    _V0_14_1,
    *("vllm-gaudi@v0.13.0", "de3d735d655a", "2026-01-09"),
    product={"edge": "none", "mamba_rounding": "never", "mamba_floors_decode": False},
    exponential={
        "points": RangeRule(clips_last=False, knows_long_context=True),
        "shortens_long_contexts": False,
        "decode_max": sequences_within_cache,
    },
    environment={"mamba": "none"},
    lookup={"caps_batch": False, "batches": "all"},
)

_V0_11_2 = _older(
    _V0_13_0,
    *("vllm-gaudi@v0.11.2", "f9b644693b1e", "2025-12-05"),
    product={"speculates": False},
    exponential={
        "points": RangeRule(special_minima=frozenset({0}), clips_last=False, knows_long_context=True),
        "heeds_query_min": False,
    },
    environment={"has_query_min_one": False, "lora_extra_vocab_size": 256},
    lookup={"has_seeds": False},
)

_V0_10_1 = ExtensionVersion(
    name="vllm-gaudi@v0.10.1",
    commit="ab65f9ba2abb",
    date="2025-08-18",
    product=ExtensionRules(slices=False),
    exponential=ExtensionExponentialRules(long_context="always"),
    linear=ExtensionLinear(blocks_past_end=1),
    environment=EnvironmentRules(
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
        lora_extra_vocab_size=256,
    ),
    lookup=replace(_V0_11_2.lookup, slices=False),
)

_EXTENSION_7717587 = ExtensionVersion(
    name="vllm-hpu-extension@7717587",
    commit="7717587d178061aaab7498c077b41501944bb288",
    date="2025-09-25",
    product=ExtensionRules(removes_repetitions=True),
    exponential=ExtensionExponentialRules(),
    linear=ExtensionLinear(blocks_past_end=0),
    environment=replace(
        _V0_10_1.environment,
        has_sliding=True,
        prefill="scheduler",
        defrag="off",
        has_dummy_block=False,
        is_extension=True,
    ),
    lookup=_V0_11_2.lookup,
)

_EXTENSION_8211E0B = _older(
    _EXTENSION_7717587,
    *("vllm-hpu-extension@8211e0b", "8211e0ba420e976cca07be323328e41fa8a1a9da", "2025-08-22"),
    product=ExtensionRules(),
    linear=ExtensionLinear(blocks_past_end=1),
    environment={"defrag": None},
)

_EXTENSION_AD55828 = _older(
    _EXTENSION_8211E0B,
    *("vllm-hpu-extension@ad55828", "ad55828", "2025-07-04"),
    product=ExtensionRules(slices=False),
    exponential=ExtensionExponentialRules(
        batch_size_step=1, long_context="never", dense_contexts=True, heeds_limits=True
    ),
    linear=ExtensionLinear(blocks_past_end=0),
    environment={"strategy": "opt_in", "has_sliding": False, "has_limits": True},
    lookup=replace(_V0_10_1.lookup, rounding="power_of_two", prompt_cap="none", decode_cap="none"),
)

_EXTENSION_29BC7A4 = TwoDimensionalVersion(
    name="vllm-hpu-extension@29bc7a4",
    commit="29bc7a44a6b79bd78b7c262ac3acbea87258d322",
    date="2025-06-23",
    heeds_contiguous_pa=True,
    environment=replace(_EXTENSION_AD55828.environment, strategy="opt_in_word", contiguous_pa="on"),
)

_EXTENSION_2B4BA56 = _older(
    _EXTENSION_29BC7A4,
    *("vllm-hpu-extension@2b4ba56", "2b4ba562c43c538c2a502d19461f32cb43affbaa", "2025-04-18"),
    heeds_contiguous_pa=False,
)

HISTORY: tuple[BucketingVersion, ...] = (
    *(_MAIN, _V0_26_0, _V0_24_0, _V0_21_0, _V0_19_1, _V0_20_0_RC0),
    *(_V0_17_1, _V0_16_0, _V0_14_1, _V0_13_0, _V0_11_2),
    *(_V0_10_1, _EXTENSION_7717587, _EXTENSION_8211E0B, _EXTENSION_AD55828),
    *(_EXTENSION_29BC7A4, _EXTENSION_2B4BA56),
)

VERSIONS: Mapping[str, BucketingVersion] = MappingProxyType({version.name: version for version in HISTORY})


def find_version(name: str) -> BucketingVersion:
    """Returns a version. Raises SpecError, naming the known ones."""
    if name not in VERSIONS:
        raise SpecError("bucketing.version", f"is {name!r}", f"known: {', '.join(VERSIONS)}")
    return VERSIONS[name]


def released_as(text: str) -> BucketingVersion | None:
    """Returns the rules for an installed plugin's version: those of the newest release that is not newer than it.

    None for a version before the first release, and for a text that is not a version.
    """
    wanted = _release(text)
    rows = [(_release(row.name.rpartition("@v")[2]), row) for row in HISTORY if "vllm-gaudi@v" in row.name]
    found = [(release, row) for release, row in rows if release and wanted and release <= wanted]
    return max(found, key=lambda one: one[0])[1] if found else None


def _release(text: str) -> tuple[int, ...]:
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, match.groups())) if match else ()


def have_same_rules(one: BucketingVersion, other: BucketingVersion) -> bool:
    """Returns whether two versions make the same buckets from the same settings."""
    return type(one) is type(other) and vars(other) == {
        **vars(one),
        "name": other.name,
        "commit": other.commit,
        "date": other.date,
    }


def find_strategy(version: str, strategy: str) -> Strategy:
    """Returns a strategy of a version. All have our ``tuned``. Raises SpecError, naming the known ones."""
    if strategy == "tuned":
        return TunedStrategy()
    found = find_version(version).strategies.get(strategy)
    if found is None:
        raise _unknown_strategy(version, strategy)
    return found


def find_unified(version: str) -> UnifiedStrategy:
    """Returns the unified strategy of a version. Raises SpecError if it has none."""
    found = find_version(version).unified
    if found is None:
        raise _unknown_strategy(version, "unified")
    return found


def skipped_lines(bucketing: BucketingSpec) -> tuple[SkippedLine, ...]:
    """Returns the lines of a bucket file that its version leaves out; none without a file.

    Raises SpecError like the file strategy's tables.
    """
    if bucketing.file_text is None:
        return ()
    strategy = find_strategy(bucketing.version, bucketing.strategy)
    assert isinstance(strategy, FileStrategy)
    return read_bucket_file(bucketing.file_text, strategy.dialect).skipped


def open_upstream_lookup(version: str, strategy: str, inputs: BucketingInputs) -> UpstreamLookup:
    """Returns upstream's look-up over the tables of a strategy. Raises SpecError like they do."""
    tables, rules = find_strategy(version, strategy), find_version(version).lookup
    if rules is None:
        raise SpecError("bucketing.version", f"is {version!r}", "one with three-dimensional buckets")
    seeds = tables.decode_seed_table(inputs) if inputs.num_speculative_tokens else ()
    return UpstreamLookup(rules, inputs, tables.prompt_table(inputs), tables.decode_table(inputs), seeds)


def _unknown_strategy(version: str, strategy: str) -> SpecError:
    names = ", ".join(VERSIONS[version].strategy_names)
    return SpecError("bucketing.strategy", f"is {strategy!r}", f"{version} has: {names}")
