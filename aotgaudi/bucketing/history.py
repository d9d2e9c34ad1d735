"""What changed between versions of the public bucketing rules, from the newest backwards.

Each version is written as what differs from the next newer one of its family. The order is by date: v0.20.0rc0 is
older than v0.19.1. ``bucketing.versions`` makes strategies of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from aotgaudi.bucketing.bucket_line import EVALUATED, LITERAL, Dialect
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
from aotgaudi.bucketing.exponential_extension import ExtensionExponentialRules
from aotgaudi.bucketing.exponential_range import RangeRule
from aotgaudi.bucketing.extension import ExtensionRules
from aotgaudi.bucketing.extension_linear import ExtensionLinear
from aotgaudi.bucketing.filters import ProductRules
from aotgaudi.bucketing.linear import LinearRanges
from aotgaudi.bucketing.upstream_lookup import LookupRules


@dataclass(frozen=True, slots=True, kw_only=True)
class GaudiRules:
    """All rules of a version of vllm-gaudi from v0.11.2 on."""

    product: ProductRules
    exponential: ExponentialRules
    linear: LinearRanges
    file: Dialect
    has_padding_aware: bool
    has_unified: bool
    lookup: LookupRules


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtensionVersionRules:
    """All rules of a version of the extension with three-dimensional buckets, and of vllm-gaudi v0.10.1."""

    product: ExtensionRules
    exponential: ExtensionExponentialRules
    linear: ExtensionLinear
    lookup: LookupRules


GAUDI_MAIN = GaudiRules(
    product=ProductRules(),
    exponential=ExponentialRules(),
    linear=LinearRanges(),
    file=LITERAL,
    has_padding_aware=True,
    has_unified=False,
    lookup=LookupRules(),
)

GAUDI_0_24_0 = replace(GAUDI_MAIN, exponential=replace(GAUDI_MAIN.exponential, decode_max=all_sequences))

GAUDI_0_21_0 = replace(
    GAUDI_0_24_0, exponential=replace(GAUDI_0_24_0.exponential, decode_limit=limit_of_blocks)
)

GAUDI_0_19_1 = replace(
    GAUDI_0_21_0,
    exponential=replace(
        GAUDI_0_21_0.exponential, decode_max=sequences_or_shared_cache, contiguous_within_sequences=False
    ),
    linear=LinearRanges(clamps_always=True),
    has_padding_aware=False,
)

GAUDI_0_20_0_RC0 = replace(
    GAUDI_0_19_1,
    product=replace(GAUDI_0_19_1.product, prompt_fit="total", mamba_floors_decode=True),
    exponential=replace(GAUDI_0_19_1.exponential, decode_max=shared_cache, decode_limit=limit_of_few_blocks),
    has_padding_aware=True,
    lookup=replace(GAUDI_0_19_1.lookup, prompt_cap="decode_table", caps_decode=False),
)

GAUDI_0_17_1 = replace(
    GAUDI_0_20_0_RC0,
    product=replace(GAUDI_0_20_0_RC0.product, mamba_rounding="always"),
    exponential=replace(GAUDI_0_20_0_RC0.exponential, decode_limit=limit_of_blocks),
    has_padding_aware=False,
    has_unified=True,
)

GAUDI_0_16_0 = replace(
    GAUDI_0_17_1,
    product=replace(GAUDI_0_17_1.product, mamba_divides_step=False),
    exponential=replace(
        GAUDI_0_17_1.exponential, decode_max=sequences_within_quarter, decode_limit=limit_of_cache
    ),
    file=EVALUATED,
    lookup=replace(GAUDI_0_17_1.lookup, prompt_cap="cache", decode_cap="cache", widens_with_mamba=False),
)

GAUDI_0_14_1 = replace(GAUDI_0_16_0, product=replace(GAUDI_0_16_0.product, edge="unbounded"))

GAUDI_0_13_0 = replace(
    GAUDI_0_14_1,
    product=replace(GAUDI_0_14_1.product, edge="none", mamba_rounding="never", mamba_floors_decode=False),
    exponential=replace(
        GAUDI_0_14_1.exponential,
        points=RangeRule(clips_last=False, knows_long_context=True),
        shortens_long_contexts=False,
        decode_max=sequences_within_cache,
    ),
    lookup=replace(GAUDI_0_14_1.lookup, caps_batch=False),
)

GAUDI_0_11_2 = replace(
    GAUDI_0_13_0,
    product=replace(GAUDI_0_13_0.product, speculates=False),
    exponential=replace(
        GAUDI_0_13_0.exponential,
        points=RangeRule(special_minima=frozenset({0}), clips_last=False, knows_long_context=True),
        heeds_query_min=False,
    ),
    lookup=replace(GAUDI_0_13_0.lookup, has_seeds=False),
)

EXTENSION_7717587 = ExtensionVersionRules(
    product=ExtensionRules(removes_repetitions=True),
    exponential=ExtensionExponentialRules(),
    linear=ExtensionLinear(blocks_past_end=0),
    lookup=GAUDI_0_11_2.lookup,
)

EXTENSION_8211E0B = replace(
    EXTENSION_7717587, product=ExtensionRules(), linear=ExtensionLinear(blocks_past_end=1)
)

GAUDI_0_10_1 = replace(
    EXTENSION_8211E0B,
    product=ExtensionRules(slices=False),
    exponential=ExtensionExponentialRules(long_context="always"),
    lookup=replace(EXTENSION_8211E0B.lookup, slices=False),
)

EXTENSION_AD55828 = ExtensionVersionRules(
    product=ExtensionRules(slices=False),
    exponential=ExtensionExponentialRules(
        batch_size_step=1, long_context="never", dense_contexts=True, heeds_limits=True
    ),
    linear=ExtensionLinear(blocks_past_end=0),
    lookup=replace(GAUDI_0_10_1.lookup, rounding="power_of_two", prompt_cap="none", decode_cap="none"),
)
