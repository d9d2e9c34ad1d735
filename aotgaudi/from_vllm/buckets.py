"""The buckets that an environment asks for: ``VLLM_*`` and ``PT_HPU_*`` as one public version reads them.

The bounds are ``VLLM_{PROMPT,DECODE}_<DIMENSION>_BUCKET_<PARAMETER>``. Version and strategy decide which of them count.

Sources, at vllm-gaudi@091bbad unless a rule of ``bucketing.versions`` says otherwise: vllm_gaudi/extension/features.py
and environment.py (modes), extension/bucketing/common.py 66-155 (strategy), linear.py 90-127 and padding_aware.py
100-150 (bounds), v1/worker/hpu_model_runner.py 1505-1533 (prompts of a step).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from aotgaudi.bucketing.versions import EnvironmentRules, find_version
from aotgaudi.commands.values import python_integer
from aotgaudi.errors import SpecError
from aotgaudi.from_vllm.plugin_start import check_variables
from aotgaudi.from_vllm.variables import VariableReader, is_looked_at
from aotgaudi.spec.bucketing import AxisBounds, DecodeBounds, PromptBounds, SlidingSpec, StrategyName
from aotgaudi.spec.limits import LARGEST_LIMIT

_PATTERN = re.compile(
    r"VLLM_(PROMPT|DECODE)_(BS|QUERY|SEQ|CTX|BLOCK)_BUCKET_(MIN|STEP|MAX|LIMIT|PAD_MAX|PAD_PERCENT)"
)
_AXES = {("PROMPT", "BS"), ("PROMPT", "QUERY"), ("PROMPT", "CTX"), ("DECODE", "BS"), ("DECODE", "BLOCK")}
_LINEAR = ("MIN", "STEP", "MAX")
_PADDING = (*_LINEAR, "PAD_MAX", "PAD_PERCENT")

_MOST_PAD_PERCENT = 50

ReadInteger = Callable[[str], "int | None"]
"""Returns the number in a variable; None for an unset one."""


@dataclass(frozen=True, slots=True, order=True)
class BoundVariable:
    """A variable that bounds buckets. `dimension` is ``QUERY`` for both of its spellings."""

    phase: str
    dimension: str
    parameter: str
    spelling: str

    @classmethod
    def of(cls, name: str) -> BoundVariable | None:
        """Returns the bound that a variable's name stands for; None for any other variable."""
        match = _PATTERN.fullmatch(name)
        if match is None:
            return None
        phase, spelling, parameter = match.groups()
        return cls(phase, "QUERY" if spelling == "SEQ" else spelling, parameter, spelling)

    @property
    def is_of_an_axis(self) -> bool:
        """Whether the phase has this dimension. A decode query, for example, is always one token."""
        return (self.phase, self.dimension) in _AXES


def heeded_parameters(
    rules: EnvironmentRules, strategy: StrategyName, phase: str, dimension: str, *, merged_prefill: bool
) -> tuple[str, ...]:
    """Returns the parameters of a dimension that a strategy reads from the environment."""
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
    """Returns the bounds of both phases. Reads only variables that count, through `read`, and raises what that raises."""

    def axis(phase: str, dimension: str) -> AxisBounds:
        parameters = heeded_parameters(rules, strategy, phase, dimension, merged_prefill=merged_prefill)
        names = _spellings(rules, strategy, dimension)
        found = {name: _first(read, phase, names, name) for name in parameters}
        given = {name: bound for name, bound in found.items() if bound is not None}
        return AxisBounds(**dict(_bounds(given, strategy, dimension)))

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


def _first(
    read: ReadInteger, phase: str, spellings: tuple[str, ...], parameter: str
) -> tuple[str, int] | None:
    """Returns the variable that counts, and its number; None if none is set."""
    for spelling in spellings:
        name = variable(phase, spelling, parameter)
        value = read(name)
        if value is not None:
            return name, value
    return None


def _bounds(
    given: Mapping[str, tuple[str, int]], strategy: StrategyName, dimension: str
) -> Iterator[tuple[str, int]]:
    """Yields the bounds of a dimension. Raises SpecError for a number with which the plugin has no table.

    A number that a spec cannot have becomes one of the same effect: a negative maximum of the exponential strategy is 0, a
    negative step of the linear one a step beyond the maximum, a negative padding in tokens is 1 (every value is kept).
    """
    numbers = {parameter: value for parameter, (_, value) in given.items()}
    if strategy == "exponential":
        given = {name: bound for name, bound in given.items() if name != "MIN" or bound[1] == 1}
    starts_at_zero = numbers.get("MIN", 0 if dimension == "CTX" else 1) == 0
    for parameter, (name, value) in given.items():
        least = 1 if parameter in ("STEP", "LIMIT") else 0
        if parameter == "PAD_PERCENT" and not 0 <= value <= _MOST_PAD_PERCENT:
            raise SpecError(name, f"is {value}: the plugin has no table", f"from 0 to {_MOST_PAD_PERCENT}")
        if value >= least or (parameter == "MAX" and strategy == "exponential"):
            yield parameter.lower(), min(max(value, 0), LARGEST_LIMIT)
        elif parameter == "PAD_MAX":
            yield "pad_max", 1
        elif (
            parameter == "STEP"
            and strategy == "linear"
            and starts_at_zero
            and (value or numbers.get("MAX") == 0)
        ):
            yield "step", LARGEST_LIMIT
        else:
            raise SpecError(name, f"is {value}: the plugin has no table", f"at least {least}")


def _heeded_by_exponential(rules: EnvironmentRules, phase: str, dimension: str) -> tuple[str, ...]:
    if rules.has_limits and dimension != "CTX":
        return ("LIMIT",)
    if dimension == "QUERY" and rules.has_query_min_one:
        return ("MIN",)
    if dimension == "CTX" and rules.has_context_edge:
        return ("MAX",)
    return ()


def _spellings(rules: EnvironmentRules, strategy: StrategyName, dimension: str) -> tuple[str, ...]:
    """Returns the spellings of a dimension; the first that is set wins. The exponential strategy knows no alias."""
    if dimension != "QUERY":
        return (dimension,)
    return rules.query_names[:1] if strategy == "exponential" else rules.query_names


def all_parameters(strategy: StrategyName) -> tuple[str, ...]:
    """Returns the parameters of a strategy whose ranges have steps."""
    return _PADDING if strategy == "padding_aware" else _LINEAR


def check_bounds(prompt: PromptBounds, decode: DecodeBounds, environment: Mapping[str, str]) -> None:
    """Raises SpecError, naming the variable, if a minimum is above its maximum.

    Decode blocks are not checked: upstream lowers their minimum itself (extension/bucketing/linear.py 76-82).
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
    """The version, strategy and mode, which decide which variables count."""

    version: str
    rules: EnvironmentRules
    strategy: StrategyName
    merged_prefill: bool


def why_bound_ignored(bound: BoundVariable, situation: Situation) -> str:
    """Returns the first reason why a bound that was not heeded has no effect."""
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
    """Returns why a bound has no effect although its parameter counts: an alias is set, or its value has no meaning."""
    if situation.strategy != "exponential":
        return f"{known} is set, which comes before it"
    if bound.spelling != situation.rules.query_names[0]:
        return f"the exponential strategy reads {known} only"
    return "of the exponential strategy only the value 1 counts"


PREFILL_VARIABLE = "VLLM_PROMPT_BS_BUCKET_MAX"
STRATEGY_VARIABLES = ("VLLM_BUCKETING_STRATEGY", "VLLM_EXPONENTIAL_BUCKETING", "VLLM_BUCKETING_FROM_FILE")
SLIDING_SWITCH = "PT_HPU_SDPA_QKV_SLICE_MODE_FWD"
SLIDING_VARIABLES = ("PT_HPU_SDPA_BC_FACTOR", "VLLM_FUSEDSDPA_SLIDE_THLD")
DEFRAG_VARIABLES = ("VLLM_DEFRAG", "VLLM_DEFRAG_THRESHOLD", "VLLM_DEFRAG_WITH_GRAPHS")

_FORK_ONLY: Mapping[str, str] = dict.fromkeys(
    (
        "VLLM_HPU_LOG_STEP_GRAPH_COMPILATION",
        "VLLM_HPU_LOG_STEP_GRAPH_COMPILATION_ALL",
        "VLLM_HPU_LOG_STEP_CPU_FALLBACKS",
        "VLLM_HPU_LOG_STEP_CPU_FALLBACKS_ALL",
        "VLLM_GRAPH_PROMPT_RATIO",
        "VLLM_GRAPH_PROMPT_STRATEGY",
        "VLLM_GRAPH_DECODE_STRATEGY",
    ),
    "only vllm-fork's V0 engine reads it",
)

_STRATEGY_NAMES: Mapping[str, StrategyName] = {"exp": "exponential", "lin": "linear", "pad": "padding_aware"}


@dataclass(frozen=True, slots=True)
class IgnoredVariable:
    """A variable that is set, and that the public code of this version and strategy does not heed."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketingEnvironment:
    """What an environment says about buckets, as `version` reads it.

    Attributes:
        prompt, decode: only bounds that the strategy heeds.
        contiguous_pa: the resolved value, set or by default.
        prefix_caching: whether prompts may start after cached blocks. Contiguous paged attention turns it off from
            v0.11.2 on (vllm_gaudi/platform.py 241).
        max_num_prefill_seqs: VLLM_PROMPT_BS_BUCKET_MAX, if it is set and decides the number.
        file: the path of the bucket file, as given; None for other strategies.
        is_enabled: VLLM_ENABLE_BUCKETING.
        heeded: the variables that had an effect.
        ignored: every variable that is set and that this version and strategy do not heed, by name.
        notes: values that upstream reads differently from what the user may expect.
    """

    version: str
    strategy: StrategyName
    prompt: PromptBounds
    decode: DecodeBounds
    contiguous_pa: bool
    prefix_caching: bool
    merged_prefill: bool
    max_num_prefill_seqs: int | None
    sliding: SlidingSpec | None
    file: str | None
    is_enabled: bool
    heeded: frozenset[str]
    ignored: tuple[IgnoredVariable, ...]
    notes: tuple[str, ...]

    @property
    def unified(self) -> bool:
        """Whether attention is unified (v0.11.2 to v0.17.1)."""
        return self.strategy == "unified"

    @classmethod
    def parse(
        cls, environment: Mapping[str, str], version: str, *, enable_prefix_caching: bool | None = None
    ) -> BucketingEnvironment:
        """Reads the variables of vLLM and the bridge in an environment, as `version` does.

        Args:
            environment: names and texts.
            version: one of ``spec.bucketing.VersionName``.
            enable_prefix_caching: the command line's setting; None means the engine's default, which is off in vllm-fork
                and on elsewhere.

        Raises:
            SpecError: a malformed value (the error names the variable), or an unknown version.
        """
        rules, reader = find_version(version).environment, VariableReader(environment)
        check_variables(environment, version)
        unified = rules.has_unified and bool(reader.boolean("VLLM_UNIFIED_ATTN"))
        merged = reader.boolean("VLLM_MERGED_PREFILL")
        merged_prefill = unified if merged is None else merged
        caching = not rules.is_extension if enable_prefix_caching is None else enable_prefix_caching
        contiguous_pa = _contiguous_pa(rules, reader, unified=unified, prefix_caching=caching)
        strategy = _strategy(rules, reader, unified=unified)
        prompt, decode = read_bounds(rules, strategy, reader.integer, merged_prefill=merged_prefill)
        file = reader.text("VLLM_BUCKETING_FROM_FILE") if strategy == "file" else None
        sliding = _sliding(rules, reader)
        prefill_seqs = _prefill_seqs(rules, reader, merged_prefill=merged_prefill)
        is_enabled = reader.boolean("VLLM_ENABLE_BUCKETING") is not False
        ignored = _ignored(environment, reader, Situation(version, rules, strategy, merged_prefill))
        is_cached_apart = rules.contiguous_pa == "environment" and contiguous_pa and not unified
        return cls(
            version=version,
            strategy=strategy,
            prompt=prompt,
            decode=decode,
            contiguous_pa=contiguous_pa,
            prefix_caching=caching and not is_cached_apart,
            merged_prefill=merged_prefill,
            max_num_prefill_seqs=prefill_seqs,
            sliding=sliding,
            file=file,
            is_enabled=is_enabled,
            heeded=reader.heeded - {one.name for one in ignored},
            ignored=ignored,
            notes=reader.notes,
        )


def _contiguous_pa(
    rules: EnvironmentRules, reader: VariableReader, *, unified: bool, prefix_caching: bool
) -> bool:
    is_word_only = rules.contiguous_pa == "on"
    given = reader.boolean("VLLM_CONTIGUOUS_PA", is_word_only=is_word_only)
    if given is not None:
        return given
    if is_word_only:
        return True
    configured = reader.boolean("VLLM_PREFIX_CACHING")
    if configured is None:
        configured = prefix_caching or rules.contiguous_pa == "environment"
    return unified or not configured


def _strategy(rules: EnvironmentRules, reader: VariableReader, *, unified: bool) -> StrategyName:
    """Returns the strategy. An earlier rule here takes precedence over a later one."""
    if unified:
        return "unified"
    if rules.has_file and reader.text("VLLM_BUCKETING_FROM_FILE"):
        return "file"
    named: StrategyName = "exponential" if rules.strategy in ("named", "flag") else "linear"
    if rules.strategy == "named":
        named = _named_strategy(reader)
    flag = reader.boolean("VLLM_EXPONENTIAL_BUCKETING", is_word_only=rules.strategy == "opt_in_word")
    if flag is None:
        return named
    reader.disregard("VLLM_BUCKETING_STRATEGY")
    return "exponential" if flag else "linear"


def _named_strategy(reader: VariableReader) -> StrategyName:
    name = reader.text("VLLM_BUCKETING_STRATEGY")
    return "exponential" if name is None else _STRATEGY_NAMES[name]


def _prefill_seqs(rules: EnvironmentRules, reader: VariableReader, *, merged_prefill: bool) -> int | None:
    if rules.prefill != "environment" or merged_prefill:
        return None
    most = reader.integer(PREFILL_VARIABLE)
    if most is not None and not 1 <= most <= LARGEST_LIMIT:
        raise SpecError(
            PREFILL_VARIABLE, f"is {most}", f"from 1 to {LARGEST_LIMIT}: as many prompts at most share a step"
        )
    return most


def _sliding(rules: EnvironmentRules, reader: VariableReader) -> SlidingSpec | None:
    if not (rules.has_sliding and reader.boolean(SLIDING_SWITCH)):
        return None
    slice_len, threshold = (reader.integer(name) for name in SLIDING_VARIABLES)
    given = {"slice_len": None if slice_len is None else abs(slice_len), "threshold": threshold}
    return SlidingSpec(
        **{name: min(max(value, 1), LARGEST_LIMIT) for name, value in given.items() if value is not None}
    )


def _ignored(
    environment: Mapping[str, str], reader: VariableReader, situation: Situation
) -> tuple[IgnoredVariable, ...]:
    """Lists the variables that are set and not heeded."""
    found = []
    for name in sorted(environment):
        if not is_looked_at(name) or _is_variable_heeded(name, environment, reader, situation):
            continue
        reason = _why_ignored(name, situation)
        if reason is not None:
            found.append(IgnoredVariable(name, environment[name], reason))
    return tuple(found)


def _is_variable_heeded(
    name: str, environment: Mapping[str, str], reader: VariableReader, situation: Situation
) -> bool:
    """Returns whether a variable had an effect. The exponential strategy heeds a query minimum only if it is 1."""
    bound = BoundVariable.of(name)
    is_query_min = bound is not None and (bound.dimension, bound.parameter) == ("QUERY", "MIN")
    if name in reader.heeded and is_query_min and situation.strategy == "exponential":
        return python_integer(name, environment[name]) == 1
    return name in reader.heeded


def _why_ignored(name: str, situation: Situation) -> str | None:
    """Returns why a variable that was not heeded has no effect; None if the public code does heed it."""
    bound = BoundVariable.of(name)
    if bound is not None:
        return why_bound_ignored(bound, situation)
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
    return _FORK_ONLY.get(name) if not situation.rules.is_extension else None


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
