"""The versions of the public bucketing rules that are known: one row each, from the newest backwards.

A row is a version's commit, its date, and what differs from the next newer version of its family: buckets, look-up,
and what the environment says. The order is by date: v0.20.0rc0 is older than v0.19.1. To add a version, add a row,
name it in `HISTORY`, and add its name to ``spec.bucketing.VersionName``, from which editors complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from aotgaudi.bucketing.bucket_file import FileStrategy, SkippedLine, read_bucket_file
from aotgaudi.bucketing.bucket_line import EVALUATED, LITERAL
from aotgaudi.bucketing.exponential import (
    ExponentialRules,
    all_sequences,
    limit_of_blocks,
    limit_of_cache,
    limit_of_few_blocks,
    sequences_or_shared_cache,
    sequences_within_cache,
    sequences_within_quarter,
    shared_cache,
)
from aotgaudi.bucketing.exponential_range import RangeRule
from aotgaudi.bucketing.extension import ExtensionRules
from aotgaudi.bucketing.extension_ranges import ExtensionExponentialRules, ExtensionLinear
from aotgaudi.bucketing.filters import ProductRules
from aotgaudi.bucketing.linear import LinearRanges
from aotgaudi.bucketing.rules import (
    BucketingVersion,
    EnvironmentRules,
    ExtensionVersion,
    GaudiVersion,
    TwoDimensionalVersion,
)
from aotgaudi.bucketing.strategy import BucketingInputs, Strategy, UnifiedStrategy
from aotgaudi.bucketing.tuned import TunedStrategy
from aotgaudi.bucketing.upstream_lookup import LookupRules, UpstreamLookup
from aotgaudi.errors import SpecError
from aotgaudi.spec.bucketing import BucketingSpec

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

_V0_24_0 = replace(
    _MAIN,
    name="vllm-gaudi@v0.24.0",
    commit="90815f2f2c19",
    date="2026-07-13",
    exponential=replace(_MAIN.exponential, decode_max=all_sequences),
)

_V0_21_0 = replace(
    _V0_24_0,
    name="vllm-gaudi@v0.21.0",
    commit="fbf227524ae1",
    date="2026-06-01",
    exponential=replace(_V0_24_0.exponential, decode_limit=limit_of_blocks),
)

_V0_19_1 = replace(
    _V0_21_0,
    name="vllm-gaudi@v0.19.1",
    commit="f2ebadf96ed0",
    date="2026-05-08",
    exponential=replace(
        _V0_21_0.exponential, decode_max=sequences_or_shared_cache, contiguous_within_sequences=False
    ),
    linear=LinearRanges(clamps_always=True),
    has_padding_aware=False,
    environment=replace(_V0_21_0.environment, strategy="flag"),
)

_V0_20_0_RC0 = replace(
    _V0_19_1,
    name="vllm-gaudi@v0.20.0rc0",
    commit="8a9d69851a77",
    date="2026-04-15",
    product=replace(_V0_19_1.product, prompt_fit="total", mamba_floors_decode=True),
    exponential=replace(_V0_19_1.exponential, decode_max=shared_cache, decode_limit=limit_of_few_blocks),
    has_padding_aware=True,
    environment=replace(_V0_19_1.environment, strategy="named", defrag="off"),
    lookup=replace(_V0_19_1.lookup, prompt_cap="decode_table", caps_decode=False),
)

_V0_17_1 = replace(
    _V0_20_0_RC0,
    name="vllm-gaudi@v0.17.1",
    commit="dafb170c4cb1",
    date="2026-03-31",
    product=replace(_V0_20_0_RC0.product, mamba_rounding="always"),
    exponential=replace(_V0_20_0_RC0.exponential, decode_limit=limit_of_blocks),
    has_padding_aware=False,
    environment=replace(
        _V0_20_0_RC0.environment, strategy="flag", has_unified=True, defrag="unified", mamba="model"
    ),
)

_V0_16_0 = replace(
    _V0_17_1,
    name="vllm-gaudi@v0.16.0",
    commit="da2ce4040782",
    date="2026-03-06",
    product=replace(_V0_17_1.product, mamba_divides_step=False),
    exponential=replace(
        _V0_17_1.exponential, decode_max=sequences_within_quarter, decode_limit=limit_of_cache
    ),
    file=EVALUATED,
    lookup=replace(_V0_17_1.lookup, prompt_cap="cache", decode_cap="cache", widens_with_mamba=False),
)

_V0_14_1 = replace(
    _V0_16_0,
    name="vllm-gaudi@v0.14.1",
    commit="c4ecd716a0fa",
    date="2026-02-04",
    product=replace(_V0_16_0.product, edge="unbounded"),
    environment=replace(_V0_16_0.environment, has_context_edge=False, sampler=0),
)

_V0_13_0 = replace(
    _V0_14_1,
    name="vllm-gaudi@v0.13.0",
    commit="de3d735d655a",
    date="2026-01-09",
    product=replace(_V0_14_1.product, edge="none", mamba_rounding="never", mamba_floors_decode=False),
    exponential=replace(
        _V0_14_1.exponential,
        points=RangeRule(clips_last=False, knows_long_context=True),
        shortens_long_contexts=False,
        decode_max=sequences_within_cache,
    ),
    environment=replace(_V0_14_1.environment, mamba="none"),
    lookup=replace(_V0_14_1.lookup, caps_batch=False),
)

_V0_11_2 = replace(
    _V0_13_0,
    name="vllm-gaudi@v0.11.2",
    commit="f9b644693b1e",
    date="2025-12-05",
    product=replace(_V0_13_0.product, speculates=False),
    exponential=replace(
        _V0_13_0.exponential,
        points=RangeRule(special_minima=frozenset({0}), clips_last=False, knows_long_context=True),
        heeds_query_min=False,
    ),
    environment=replace(_V0_13_0.environment, has_query_min_one=False, lora_extra_vocab_size=256),
    lookup=replace(_V0_13_0.lookup, has_seeds=False),
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

_EXTENSION_8211E0B = replace(
    _EXTENSION_7717587,
    name="vllm-hpu-extension@8211e0b",
    commit="8211e0ba420e976cca07be323328e41fa8a1a9da",
    date="2025-08-22",
    product=ExtensionRules(),
    linear=ExtensionLinear(blocks_past_end=1),
    environment=replace(_EXTENSION_7717587.environment, defrag=None),
)

_EXTENSION_AD55828 = replace(
    _EXTENSION_8211E0B,
    name="vllm-hpu-extension@ad55828",
    commit="ad55828",
    date="2025-07-04",
    product=ExtensionRules(slices=False),
    exponential=ExtensionExponentialRules(
        batch_size_step=1, long_context="never", dense_contexts=True, heeds_limits=True
    ),
    linear=ExtensionLinear(blocks_past_end=0),
    environment=replace(
        _EXTENSION_8211E0B.environment, strategy="opt_in", has_sliding=False, has_limits=True
    ),
    lookup=replace(_V0_10_1.lookup, rounding="power_of_two", prompt_cap="none", decode_cap="none"),
)

_EXTENSION_29BC7A4 = TwoDimensionalVersion(
    name="vllm-hpu-extension@29bc7a4",
    commit="29bc7a44a6b79bd78b7c262ac3acbea87258d322",
    date="2025-06-23",
    heeds_contiguous_pa=True,
    environment=replace(_EXTENSION_AD55828.environment, strategy="opt_in_word", contiguous_pa="on"),
)

_EXTENSION_2B4BA56 = replace(
    _EXTENSION_29BC7A4,
    name="vllm-hpu-extension@2b4ba56",
    commit="2b4ba562c43c538c2a502d19461f32cb43affbaa",
    date="2025-04-18",
    heeds_contiguous_pa=False,
)

HISTORY: tuple[BucketingVersion, ...] = (
    *(_MAIN, _V0_24_0, _V0_21_0, _V0_19_1, _V0_20_0_RC0, _V0_17_1, _V0_16_0, _V0_14_1, _V0_13_0, _V0_11_2),
    *(_V0_10_1, _EXTENSION_7717587, _EXTENSION_8211E0B, _EXTENSION_AD55828),
    *(_EXTENSION_29BC7A4, _EXTENSION_2B4BA56),
)

VERSIONS: Mapping[str, BucketingVersion] = MappingProxyType({version.name: version for version in HISTORY})


def find_version(name: str) -> BucketingVersion:
    """Returns a version. Raises SpecError, which names the known ones."""
    if name not in VERSIONS:
        raise SpecError("bucketing.version", f"is {name!r}", f"known: {', '.join(VERSIONS)}")
    return VERSIONS[name]


def find_strategy(version: str, strategy: str) -> Strategy:
    """Returns a strategy of a version; ``tuned`` is ours, and all have it. Raises SpecError, which names the known ones."""
    if strategy == "tuned":
        return TunedStrategy()
    found = find_version(version).strategies.get(strategy)
    if found is None:
        raise _unknown_strategy(version, strategy)
    return found


def find_unified(version: str) -> UnifiedStrategy:
    """Returns the unified strategy of a version. Raises SpecError where it has none."""
    found = find_version(version).unified
    if found is None:
        raise _unknown_strategy(version, "unified")
    return found


def skipped_lines(bucketing: BucketingSpec) -> tuple[SkippedLine, ...]:
    """Returns the lines of a bucket file that its version leaves out; none where there is no file.

    Raises SpecError as the file strategy's tables do.
    """
    if bucketing.file_text is None:
        return ()
    strategy = find_strategy(bucketing.version, bucketing.strategy)
    assert isinstance(strategy, FileStrategy)
    return read_bucket_file(bucketing.file_text, strategy.dialect).skipped


def open_upstream_lookup(version: str, strategy: str, inputs: BucketingInputs) -> UpstreamLookup:
    """Returns upstream's look-up over the tables of a strategy. Raises SpecError as they do."""
    tables, rules = find_strategy(version, strategy), find_version(version).lookup
    if rules is None:
        raise SpecError("bucketing.version", f"is {version!r}", "one with three-dimensional buckets")
    seeds = tables.decode_seed_table(inputs) if inputs.num_speculative_tokens else ()
    return UpstreamLookup(rules, inputs, tables.prompt_table(inputs), tables.decode_table(inputs), seeds)


def _unknown_strategy(version: str, strategy: str) -> SpecError:
    names = ", ".join(VERSIONS[version].strategy_names)
    return SpecError("bucketing.strategy", f"is {strategy!r}", f"{version} has: {names}")
