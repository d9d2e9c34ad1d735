"""The variables ``VLLM_{PROMPT,DECODE}_<DIMENSION>_BUCKET_<PARAMETER>``: which of them count, and their values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

from aotgaudi.bucketing.versions import EnvironmentRules
from aotgaudi.errors import SpecError
from aotgaudi.spec.bucketing import AxisBounds, DecodeBounds, PromptBounds, StrategyName

_PATTERN = re.compile(
    r"VLLM_(PROMPT|DECODE)_(BS|QUERY|SEQ|CTX|BLOCK)_BUCKET_(MIN|STEP|MAX|LIMIT|PAD_MAX|PAD_PERCENT)"
)
_AXES = {("PROMPT", "BS"), ("PROMPT", "QUERY"), ("PROMPT", "CTX"), ("DECODE", "BS"), ("DECODE", "BLOCK")}
_LINEAR = ("MIN", "STEP", "MAX")
_PADDING = (*_LINEAR, "PAD_MAX", "PAD_PERCENT")

LOWEST = {"MIN": 0, "STEP": 1, "MAX": 0, "LIMIT": 1, "PAD_MAX": 0, "PAD_PERCENT": 0}
"""The least value of each parameter, as ``spec.bucketing.AxisBounds`` has it."""

HIGHEST_PAD_PERCENT = 50

BOUND_VARIABLES = tuple(
    f"VLLM_{phase}_{dimension}_BUCKET_{parameter}"
    for phase, dimension, parameter in product(
        ("PROMPT", "DECODE"), ("BS", "QUERY", "SEQ", "CTX", "BLOCK"), LOWEST
    )
)
"""Every such variable, those of no axis among them."""

ReadInteger = Callable[[str, int, "int | None"], "int | None"]
"""``(variable, least, most) -> its value``; None where it is unset."""


@dataclass(frozen=True, slots=True, order=True)
class BoundVariable:
    """One such variable. `dimension` is ``QUERY`` under either of its names."""

    phase: str
    dimension: str
    parameter: str
    spelling: str

    @classmethod
    def of(cls, name: str) -> BoundVariable | None:
        """Returns what a variable's name stands for; None where it is no bound."""
        match = _PATTERN.fullmatch(name)
        if match is None:
            return None
        phase, spelling, parameter = match.groups()
        return cls(phase, "QUERY" if spelling == "SEQ" else spelling, parameter, spelling)

    @property
    def is_of_an_axis(self) -> bool:
        """Whether its phase has its dimension; a decode query, for example, is always one token."""
        return (self.phase, self.dimension) in _AXES


def heeded_parameters(
    rules: EnvironmentRules, strategy: StrategyName, phase: str, dimension: str, *, merged_prefill: bool
) -> tuple[str, ...]:
    """Returns the parameters of a dimension that a strategy takes from the environment."""
    if strategy in ("file", "unified"):
        return ()
    if strategy == "exponential":
        return _heeded_by_exponential(rules, phase, dimension)
    if dimension == "CTX" and not rules.has_context:
        return ()
    if merged_prefill and not rules.is_extension and phase == "PROMPT" and dimension != "CTX":
        overridden = _LINEAR if dimension == "BS" else ("MAX",)
        return tuple(name for name in all_parameters(strategy) if name not in overridden)
    return all_parameters(strategy)


def read_bounds(
    rules: EnvironmentRules, strategy: StrategyName, read: ReadInteger, *, merged_prefill: bool
) -> tuple[PromptBounds, DecodeBounds]:
    """Returns the bounds of both phases, reading through `read` only what counts. Raises what `read` raises."""

    def axis(phase: str, dimension: str) -> AxisBounds:
        parameters = heeded_parameters(rules, strategy, phase, dimension, merged_prefill=merged_prefill)
        names = _spellings(rules, strategy, dimension)
        found = {name.lower(): _first(read, phase, names, name) for name in parameters}
        if strategy == "exponential" and found.get("min") != 1:
            found.pop("min", None)
        return AxisBounds(**found)

    return (
        PromptBounds(
            batch_size=axis("PROMPT", "BS"),
            query_len=axis("PROMPT", "QUERY"),
            num_ctx_blocks=axis("PROMPT", "CTX"),
        ),
        DecodeBounds(batch_size=axis("DECODE", "BS"), num_blocks=axis("DECODE", "BLOCK")),
    )


def variable(phase: str, spelling: str, parameter: str) -> str:
    """Returns a variable's name."""
    return f"VLLM_{phase}_{spelling}_BUCKET_{parameter}"


def _first(read: ReadInteger, phase: str, spellings: tuple[str, ...], parameter: str) -> int | None:
    most = HIGHEST_PAD_PERCENT if parameter == "PAD_PERCENT" else None
    for spelling in spellings:
        value = read(variable(phase, spelling, parameter), LOWEST[parameter], most)
        if value is not None:
            return value
    return None


def _heeded_by_exponential(rules: EnvironmentRules, phase: str, dimension: str) -> tuple[str, ...]:
    if rules.has_limits and dimension != "CTX":
        return ("LIMIT",)
    if dimension == "QUERY" and rules.has_query_min_one:
        return ("MIN",)
    if dimension == "CTX" and rules.has_context_edge:
        return ("MAX",)
    return ()


def _spellings(rules: EnvironmentRules, strategy: StrategyName, dimension: str) -> tuple[str, ...]:
    """Returns the names of a dimension, the first of which wins. Exponential knows no alias."""
    if dimension != "QUERY":
        return (dimension,)
    return rules.query_names[:1] if strategy == "exponential" else rules.query_names


def all_parameters(strategy: StrategyName) -> tuple[str, ...]:
    """Returns the parameters that a strategy of ranges with steps knows."""
    return _PADDING if strategy == "padding_aware" else _LINEAR


def check_bounds(prompt: PromptBounds, decode: DecodeBounds, environment: Mapping[str, str]) -> None:
    """Raises SpecError, which names the variable, where a minimum is above its maximum.

    Of decode blocks upstream lowers the least value itself (extension/bucketing/linear.py 76-82).
    """
    axes = {
        "PROMPT_BS": prompt.batch_size,
        "PROMPT_QUERY": prompt.query_len,
        "PROMPT_CTX": prompt.num_ctx_blocks,
    }
    for name, axis in {**axes, "DECODE_BS": decode.batch_size}.items():
        if axis.min is not None and axis.max is not None and axis.min > axis.max:
            spelling = name if f"VLLM_{name}_BUCKET_MIN" in environment else name.replace("QUERY", "SEQ")
            where, most = f"VLLM_{spelling}_BUCKET_MIN", f"VLLM_{name}_BUCKET_MAX {axis.max}"
            raise SpecError(where, f"is {axis.min}, more than {most}", "at most that")


@dataclass(frozen=True, slots=True)
class Situation:
    """What decides which variables count."""

    version: str
    rules: EnvironmentRules
    strategy: StrategyName
    merged_prefill: bool


def why_bound_ignored(bound: BoundVariable, situation: Situation) -> str:
    """Returns why a bound that was not heeded does nothing: the first reason that applies."""
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
