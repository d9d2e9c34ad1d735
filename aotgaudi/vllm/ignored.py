"""Why a variable that is set changes nothing: one sentence for each that the public code does not heed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from aotgaudi.bucketing.rules import EnvironmentRules
from aotgaudi.spec.bucketing import StrategyName
from aotgaudi.vllm.bounds import BoundVariable, heeded_parameters, variable

PREFIXES = ("VLLM_", "PT_HPU")
"""What the variables of the public code begin with."""

_FORK_ONLY = "only vllm-fork's V0 engine reads it"
_NOT_READ_BY_PLUGIN: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "VLLM_HPU_LOG_STEP_GRAPH_COMPILATION",
                "VLLM_HPU_LOG_STEP_GRAPH_COMPILATION_ALL",
                "VLLM_HPU_LOG_STEP_CPU_FALLBACKS",
                "VLLM_HPU_LOG_STEP_CPU_FALLBACKS_ALL",
            ),
            f"documented, but not read by vllm-gaudi: {_FORK_ONLY}",
        ),
        **dict.fromkeys(
            (
                "VLLM_GRAPH_PROMPT_RATIO",
                "VLLM_GRAPH_PROMPT_STRATEGY",
                "VLLM_GRAPH_DECODE_STRATEGY",
                "VLLM_DELAYED_SAMPLING",
            ),
            _FORK_ONLY,
        ),
    }
)

STRATEGY_VARIABLES = ("VLLM_BUCKETING_STRATEGY", "VLLM_EXPONENTIAL_BUCKETING", "VLLM_BUCKETING_FROM_FILE")
SLIDING_SWITCH = "PT_HPU_SDPA_QKV_SLICE_MODE_FWD"
SLIDING_VARIABLES = ("PT_HPU_SDPA_BC_FACTOR", "VLLM_FUSEDSDPA_SLIDE_THLD")
DEFRAG_VARIABLES = ("VLLM_DEFRAG", "VLLM_DEFRAG_THRESHOLD", "VLLM_DEFRAG_WITH_GRAPHS")


@dataclass(frozen=True, slots=True)
class IgnoredVariable:
    """A variable that is set and that the public code, at this version and with this strategy, does not heed."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class Situation:
    """What decides which variables count."""

    version: str
    rules: EnvironmentRules
    strategy: StrategyName
    merged_prefill: bool


def why_ignored(name: str, situation: Situation) -> str | None:
    """Returns why a variable that was not heeded does nothing; None where the public code does heed it."""
    bound = BoundVariable.of(name)
    if bound is not None:
        return _why_bound(bound, situation)
    if name in STRATEGY_VARIABLES:
        return _why_strategy(name, situation)
    if name == SLIDING_SWITCH or name in SLIDING_VARIABLES:
        return _why_sliding(name, situation)
    return _why_mode(name, situation)


def _why_mode(name: str, situation: Situation) -> str | None:
    if name == "VLLM_UNIFIED_ATTN":
        return f"{situation.version} has no unified attention (v0.11.2 to v0.17.1 have)"
    if name == "VLLM_PREFIX_CACHING":
        return "VLLM_CONTIGUOUS_PA decides, set or by its default"
    if name in DEFRAG_VARIABLES:
        return f"{situation.version} has no defragmenter" if situation.rules.defrag is None else None
    return None if situation.rules.is_extension else _NOT_READ_BY_PLUGIN.get(name)


def _why_bound(bound: BoundVariable, situation: Situation) -> str:
    """Returns the first reason that applies."""
    rules, strategy, version = situation.rules, situation.strategy, situation.version
    known = variable(bound.phase, rules.query_names[0], bound.parameter)
    reasons = (
        (not bound.is_of_an_axis, f"the {bound.phase.lower()} phase has no such dimension"),
        (_is_unknown_alias(bound, rules), f"{version} reads {known}"),
        (
            bound.parameter == "LIMIT" and not rules.has_limits,
            f"{version} no longer reads limits (the extension up to ad55828 does)",
        ),
        (bound.dimension == "CTX" and not rules.has_context, f"{version} has no bounds of the context"),
        (strategy == "file", "the bucket file says it all"),
        (_is_heeded(bound, situation), _why_alias(bound, known, situation)),
        (
            situation.merged_prefill
            and strategy != "exponential"
            and bound.parameter in ("MIN", "STEP", "MAX"),
            "merged prefill sets it",
        ),
    )
    return next(
        (reason for applies, reason in reasons if applies), f"the {strategy} strategy does not read it"
    )


def _is_unknown_alias(bound: BoundVariable, rules: EnvironmentRules) -> bool:
    return bound.dimension == "QUERY" and bound.spelling not in rules.query_names


def _is_heeded(bound: BoundVariable, situation: Situation) -> bool:
    return bound.parameter in heeded_parameters(
        situation.rules,
        situation.strategy,
        bound.phase,
        bound.dimension,
        merged_prefill=situation.merged_prefill,
    )


def _why_alias(bound: BoundVariable, known: str, situation: Situation) -> str:
    """Returns why a variable whose parameter counts was not the one: its alias is set, or its value is none."""
    if situation.strategy != "exponential":
        return f"{known} is set, which comes before it"
    if bound.spelling != situation.rules.query_names[0]:
        return f"the exponential strategy reads {known} only"
    return "of the exponential strategy only the value 1 counts"


def _why_strategy(name: str, situation: Situation) -> str:
    rules = situation.rules
    if name == "VLLM_BUCKETING_FROM_FILE" and not rules.has_file:
        return f"{situation.version} reads no bucket file (vllm-gaudi from v0.11.2 on does)"
    if name == "VLLM_BUCKETING_STRATEGY" and rules.strategy != "named":
        return f"{situation.version} chooses by VLLM_EXPONENTIAL_BUCKETING alone"
    if situation.strategy == "unified":
        return "unified attention has its own strategy"
    if situation.strategy == "file":
        return "VLLM_BUCKETING_FROM_FILE is set, which comes before it"
    return "VLLM_EXPONENTIAL_BUCKETING is set, which comes before it"


def _why_sliding(name: str, situation: Situation) -> str:
    if not situation.rules.has_sliding:
        return f"the buckets of {situation.version} do not depend on it"
    return f"{SLIDING_SWITCH} is not on"
