"""The registry: which versions of the public bucketing rules are known, and the strategies of each.

A version is data: which rules its strategies follow (``bucketing.history``). Another version is another row of
`VERSIONS`, and its name joins the literals of ``spec.bucketing``, from which editors complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from aotgaudi.bucketing import history
from aotgaudi.bucketing.bucket_file import FileStrategy, SkippedLine, read_bucket_file
from aotgaudi.bucketing.combine import ProductStrategy
from aotgaudi.bucketing.exponential import ExponentialRanges
from aotgaudi.bucketing.exponential_extension import ExtensionExponential
from aotgaudi.bucketing.extension import ExtensionStrategy
from aotgaudi.bucketing.history import ExtensionVersionRules, GaudiRules
from aotgaudi.bucketing.inputs import BucketingInputs
from aotgaudi.bucketing.padding_aware import PaddingAwareRanges
from aotgaudi.bucketing.strategy import Strategy, UnifiedStrategy
from aotgaudi.bucketing.two_dimensional import TwoDimensionalExponential, TwoDimensionalLinear
from aotgaudi.bucketing.unified import UnifiedRanges
from aotgaudi.bucketing.upstream_lookup import LookupRules, UpstreamLookup
from aotgaudi.errors import SpecError
from aotgaudi.spec.bucketing import BucketingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketingVersion:
    """The strategies of one public commit.

    `unified` is None where the version has no unified attention, `lookup` where its buckets have two dimensions.
    """

    commit: str
    date: str
    strategies: Mapping[str, Strategy]
    unified: UnifiedStrategy | None = None
    lookup: LookupRules | None = None

    @property
    def strategy_names(self) -> tuple[str, ...]:
        """The names that a spec may give with this version."""
        return (*self.strategies, *(("unified",) if self.unified else ()))


def _gaudi(commit: str, date: str, rules: GaudiRules) -> BucketingVersion:
    strategies: dict[str, Strategy] = {
        "exponential": ProductStrategy(ExponentialRanges(rules.exponential), rules.product),
        "linear": ProductStrategy(rules.linear, rules.product),
        "file": FileStrategy(rules.file, rules.product),
    }
    if rules.has_padding_aware:
        strategies["padding_aware"] = ProductStrategy(PaddingAwareRanges(), rules.product)
    unified = UnifiedRanges() if rules.has_unified else None
    return BucketingVersion(
        commit=commit, date=date, strategies=strategies, unified=unified, lookup=rules.lookup
    )


def _extension(commit: str, date: str, rules: ExtensionVersionRules) -> BucketingVersion:
    strategies: dict[str, Strategy] = {
        "exponential": ExtensionStrategy(ExtensionExponential(rules.exponential), rules.product),
        "linear": ExtensionStrategy(rules.linear, replace(rules.product, limits_query=False)),
    }
    return BucketingVersion(commit=commit, date=date, strategies=strategies, lookup=rules.lookup)


def _two_dimensional(commit: str, date: str, *, heeds_contiguous_pa: bool) -> BucketingVersion:
    strategies: dict[str, Strategy] = {
        "exponential": TwoDimensionalExponential(heeds_contiguous_pa),
        "linear": TwoDimensionalLinear(heeds_contiguous_pa),
    }
    return BucketingVersion(commit=commit, date=date, strategies=strategies)


VERSIONS: Mapping[str, BucketingVersion] = MappingProxyType(
    {
        "vllm-gaudi@091bbad": _gaudi(
            "091bbadda10bee4fd3f6d0efc1844d2610dd2707", "2026-08-21", history.GAUDI_MAIN
        ),
        "vllm-gaudi@v0.24.0": _gaudi("90815f2f2c19", "2026-07-13", history.GAUDI_0_24_0),
        "vllm-gaudi@v0.21.0": _gaudi("fbf227524ae1", "2026-06-01", history.GAUDI_0_21_0),
        "vllm-gaudi@v0.19.1": _gaudi("f2ebadf96ed0", "2026-05-08", history.GAUDI_0_19_1),
        "vllm-gaudi@v0.20.0rc0": _gaudi("8a9d69851a77", "2026-04-15", history.GAUDI_0_20_0_RC0),
        "vllm-gaudi@v0.17.1": _gaudi("dafb170c4cb1", "2026-03-31", history.GAUDI_0_17_1),
        "vllm-gaudi@v0.16.0": _gaudi("da2ce4040782", "2026-03-06", history.GAUDI_0_16_0),
        "vllm-gaudi@v0.14.1": _gaudi("c4ecd716a0fa", "2026-02-04", history.GAUDI_0_14_1),
        "vllm-gaudi@v0.13.0": _gaudi("de3d735d655a", "2026-01-09", history.GAUDI_0_13_0),
        "vllm-gaudi@v0.11.2": _gaudi("f9b644693b1e", "2025-12-05", history.GAUDI_0_11_2),
        "vllm-gaudi@v0.10.1": _extension("ab65f9ba2abb", "2025-08-18", history.GAUDI_0_10_1),
        "vllm-hpu-extension@7717587": _extension(
            "7717587d178061aaab7498c077b41501944bb288", "2025-09-25", history.EXTENSION_7717587
        ),
        "vllm-hpu-extension@8211e0b": _extension(
            "8211e0ba420e976cca07be323328e41fa8a1a9da", "2025-08-22", history.EXTENSION_8211E0B
        ),
        "vllm-hpu-extension@ad55828": _extension("ad55828", "2025-07-04", history.EXTENSION_AD55828),
        "vllm-hpu-extension@29bc7a4": _two_dimensional(
            "29bc7a44a6b79bd78b7c262ac3acbea87258d322", "2025-06-23", heeds_contiguous_pa=True
        ),
        "vllm-hpu-extension@2b4ba56": _two_dimensional(
            "2b4ba562c43c538c2a502d19461f32cb43affbaa", "2025-04-18", heeds_contiguous_pa=False
        ),
    }
)


def find_strategy(version: str, strategy: str) -> Strategy:
    """Returns a strategy of a version. Raises SpecError, which names the known ones."""
    found = _find_version(version).strategies.get(strategy)
    if found is None:
        raise _unknown_strategy(version, strategy)
    return found


def find_unified(version: str) -> UnifiedStrategy:
    """Returns the unified strategy of a version. Raises SpecError where it has none."""
    found = _find_version(version).unified
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
    tables, rules = find_strategy(version, strategy), _find_version(version).lookup
    if rules is None:
        raise SpecError("bucketing.version", f"is {version!r}", "one with three-dimensional buckets")
    seeds = tables.decode_seed_table(inputs) if inputs.num_speculative_tokens else ()
    return UpstreamLookup(rules, inputs, tables.prompt_table(inputs), tables.decode_table(inputs), seeds)


def _find_version(version: str) -> BucketingVersion:
    if version not in VERSIONS:
        raise SpecError("bucketing.version", f"is {version!r}", f"known: {', '.join(VERSIONS)}")
    return VERSIONS[version]


def _unknown_strategy(version: str, strategy: str) -> SpecError:
    names = ", ".join(VERSIONS[version].strategy_names)
    return SpecError("bucketing.strategy", f"is {strategy!r}", f"{version} has: {names}")
