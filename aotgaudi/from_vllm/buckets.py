"""The buckets that an environment asks for: ``VLLM_*`` and ``PT_HPU_*`` as one public version reads them.

The bounds are ``VLLM_{PROMPT,DECODE}_<DIMENSION>_BUCKET_<PARAMETER>``. Version and strategy decide which of them count.

Sources, at vllm-gaudi@091bbad unless a rule of ``bucketing.versions`` says otherwise: vllm_gaudi/extension/features.py
and environment.py (modes), extension/bucketing/common.py 66-155 (strategy), linear.py 90-127 and padding_aware.py
100-150 (bounds), v1/worker/hpu_model_runner.py 1505-1533 (prompts of a step).

A server reads all of the plugin's variables at once (``finalize_config`` in vllm_gaudi/extension/runtime.py). A number that
is none therefore ends it although nothing uses it; so do modes that exclude each other, and attention in slices that does
not fit (``SlicedFusedSDPABase`` in extension/utils.py). The ``check_`` functions refuse these.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil

from aotgaudi.bucketing.versions import BucketingVersion, EnvironmentRules, find_version
from aotgaudi.commands.flags import is_looked_at
from aotgaudi.commands.words import is_true, python_integer
from aotgaudi.errors import SpecError, shown
from aotgaudi.from_vllm.command import VariableReader
from aotgaudi.spec.bucketing import AxisBounds, DecodeBounds, PromptBounds, SlidingSpec, StrategyName
from aotgaudi.spec.limits import LARGEST_LIMIT

_PATTERN = re.compile(
    r"VLLM_(PROMPT|DECODE)_(BS|QUERY|SEQ|CTX|BLOCK)_BUCKET_(MIN|STEP|MAX|LIMIT|PAD_MAX|PAD_PERCENT)"
)
_AXES = (("PROMPT", "BS"), ("PROMPT", "QUERY"), ("PROMPT", "CTX"), ("DECODE", "BS"), ("DECODE", "BLOCK"))
_LINEAR = ("MIN", "STEP", "MAX")
_PADDING = (*_LINEAR, "PAD_MAX", "PAD_PERCENT")

_MOST_PAD_PERCENT = 50

_FILE, _NAME, _FLAG = "VLLM_BUCKETING_FROM_FILE", "VLLM_BUCKETING_STRATEGY", "VLLM_EXPONENTIAL_BUCKETING"
_STRATEGY_VARIABLES = (_FILE, _NAME, _FLAG)
_PREFILL = "VLLM_PROMPT_BS_BUCKET_MAX"
_SLICES = "PT_HPU_SDPA_QKV_SLICE_MODE_FWD"
_SLICE = "PT_HPU_SDPA_BC_FACTOR"
_SLICE_VARIABLES = (_SLICE, "VLLM_FUSEDSDPA_SLIDE_THLD")
DEFRAG_VARIABLES = ("VLLM_DEFRAG", "VLLM_DEFRAG_THRESHOLD", "VLLM_DEFRAG_WITH_GRAPHS")
_FORK_ONLY = (
    "VLLM_HPU_LOG_STEP_GRAPH_COMPILATION",
    "VLLM_HPU_LOG_STEP_GRAPH_COMPILATION_ALL",
    "VLLM_HPU_LOG_STEP_CPU_FALLBACKS",
    "VLLM_HPU_LOG_STEP_CPU_FALLBACKS_ALL",
    "VLLM_GRAPH_PROMPT_RATIO",
    "VLLM_GRAPH_PROMPT_STRATEGY",
    "VLLM_GRAPH_DECODE_STRATEGY",
)

_STRATEGY_NAMES: Mapping[str, StrategyName] = {"exp": "exponential", "lin": "linear", "pad": "padding_aware"}

_OLD_STRATEGIES = ("exponential_bucketing", "linear_bucketing")
"""The names up to v0.19.1, without an effect: VLLM_EXPONENTIAL_BUCKETING alone decides there."""

_SLICED, _THRESHOLD = "VLLM_HPU_FSDPA_SLICE_ENABLED", "VLLM_HPU_FSDPA_SLICE_SEQ_LEN_THLD"
_CHUNK, _QUERY_PAD = "VLLM_HPU_FSDPA_SLICE_CHUNK_SIZE", "VLLM_PROMPT_QUERY_BUCKET_PAD_MAX"
_V0_13_0, _V0_17_1, _V0_21_0 = "2026-01-09", "2026-03-31", "2026-06-01"
_CHUNK_MULTIPLE = 1024
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "VLLM_HW": ("cpu", "gaudi", "gaudi2", "gaudi3"),
    "VLLM_BRIDGE_MODE": ("eager", "lazy"),
    "VLLM_PROMPT_ATTN_IMPL": ("flex_impl", "fsdpa_impl", "naive_impl"),
}


@dataclass(frozen=True, slots=True)
class _Bound:
    """A variable that bounds buckets. `dimension` is ``QUERY`` for both of its spellings."""

    phase: str
    dimension: str
    parameter: str
    spelling: str

    @classmethod
    def of(cls, name: str) -> _Bound | None:
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


@dataclass(frozen=True, slots=True)
class _Situation:
    """The version, strategy and mode, which decide which variables count."""

    version: str
    rules: EnvironmentRules
    strategy: StrategyName
    merged_prefill: bool

    def parameters(self, phase: str, dimension: str) -> tuple[str, ...]:
        """Returns the parameters of a dimension that the strategy reads from the environment."""
        rules = self.rules
        if self.strategy in ("file", "unified"):
            return ()
        if self.strategy == "exponential":
            are_read = {
                "LIMIT": rules.has_limits and dimension != "CTX",
                "MIN": rules.has_query_min_one and dimension == "QUERY",
                "MAX": rules.has_context_edge and dimension == "CTX",
            }
            return tuple(name for name, is_read in are_read.items() if is_read)
        if dimension == "CTX" and not rules.has_context:
            return ()
        found = _PADDING if self.strategy == "padding_aware" else _LINEAR
        if self.merged_prefill and not rules.is_extension and phase == "PROMPT" and dimension != "CTX":
            overridden = _LINEAR if dimension == "BS" else ("MAX",)
            return tuple(name for name in found if name not in overridden)
        return found

    def spellings(self, dimension: str) -> tuple[str, ...]:
        """Returns the spellings of a dimension; the first that is set wins. The exponential strategy knows no alias."""
        if dimension != "QUERY":
            return (dimension,)
        return self.rules.query_names[:1] if self.strategy == "exponential" else self.rules.query_names

    def reads(self, bound: _Bound) -> bool:
        """Returns whether the strategy reads a bound's parameter, in some spelling."""
        return bound.parameter in self.parameters(bound.phase, bound.dimension)


def _read_bounds(situation: _Situation, reader: VariableReader) -> tuple[PromptBounds, DecodeBounds]:
    """Returns the bounds of both phases. Reads only variables that count. Raises SpecError."""

    def axis(phase: str, dimension: str) -> AxisBounds:
        given: dict[str, tuple[str, int]] = {}
        for parameter in situation.parameters(phase, dimension):
            for spelling in situation.spellings(dimension):
                name = f"VLLM_{phase}_{spelling}_BUCKET_{parameter}"
                value = reader.integer(name)
                if value is not None:
                    given[parameter] = name, value
                    break
        if situation.strategy == "exponential" and "MIN" in given and given["MIN"][1] != 1:
            reader.disregard(given.pop("MIN")[0])
        return AxisBounds(**dict(_bounds(given, situation.strategy, dimension)))

    return (
        PromptBounds(
            batch_size=axis("PROMPT", "BS"),
            query_len=axis("PROMPT", "QUERY"),
            num_ctx_blocks=axis("PROMPT", "CTX"),
        ),
        DecodeBounds(batch_size=axis("DECODE", "BS"), num_blocks=axis("DECODE", "BLOCK")),
    )


def _bounds(
    given: Mapping[str, tuple[str, int]], strategy: StrategyName, dimension: str
) -> Iterator[tuple[str, int]]:
    """Yields the bounds of a dimension. Raises SpecError for a number with which the plugin has no table.

    A number that a spec cannot have becomes one of the same effect: a negative maximum of the exponential strategy is 0, a
    negative step of the linear one a step beyond the maximum, a negative padding in tokens is 1 (every value is kept).
    """
    numbers = {parameter: value for parameter, (_, value) in given.items()}
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


IGNORED_BOUNDS: tuple[tuple[Callable[[_Bound, _Situation], bool], str], ...] = (
    (lambda bound, _: not bound.is_of_an_axis, "the {phase} phase has no such dimension"),
    (
        lambda bound, here: bound.dimension == "QUERY" and bound.spelling not in here.rules.query_names,
        "{version} reads {known}",
    ),
    (
        lambda bound, here: bound.parameter == "LIMIT" and not here.rules.has_limits,
        "{version} no longer reads limits (the extension up to ad55828 does)",
    ),
    (
        lambda bound, here: bound.dimension == "CTX" and not here.rules.has_context,
        "{version} has no bounds of the context",
    ),
    (lambda _, here: here.strategy == "file", "the bucket file says it all"),
    (
        lambda bound, here: here.reads(bound) and here.strategy != "exponential",
        "{known} is set, which comes before it",
    ),
    (
        lambda bound, here: here.reads(bound) and bound.spelling != here.rules.query_names[0],
        "the exponential strategy reads {known} only",
    ),
    (lambda bound, here: here.reads(bound), "of the exponential strategy only the value 1 counts"),
    (
        lambda bound, here: (
            here.merged_prefill and here.strategy != "exponential" and bound.parameter in _LINEAR
        ),
        "merged prefill sets it",
    ),
    (lambda _, __: True, "the {strategy} strategy does not read it"),
)
"""Why a bound has no effect: the first row that applies. `known` is the bound in the version's first spelling."""

IGNORED: tuple[tuple[tuple[str, ...], Callable[[_Situation], bool], str], ...] = (
    (
        (_FILE,),
        lambda here: not here.rules.has_file,
        "{version} reads no bucket file (vllm-gaudi from v0.11.2 on does)",
    ),
    ((_NAME,), lambda here: here.rules.strategy != "named", f"{{version}} chooses by {_FLAG} alone"),
    (
        _STRATEGY_VARIABLES,
        lambda here: here.strategy == "unified",
        "unified attention has its own strategy",
    ),
    (_STRATEGY_VARIABLES, lambda here: here.strategy == "file", f"{_FILE} is set, which comes before it"),
    (_STRATEGY_VARIABLES, lambda _: True, f"{_FLAG} is set, which comes before it"),
    (
        (_SLICES, *_SLICE_VARIABLES),
        lambda here: not here.rules.has_sliding,
        "the buckets of {version} do not depend on it",
    ),
    ((_SLICES, *_SLICE_VARIABLES), lambda _: True, f"{_SLICES} is not on"),
    (
        ("VLLM_UNIFIED_ATTN",),
        lambda _: True,
        "{version} has no unified attention (v0.11.2 to v0.17.1 have)",
    ),
    (("VLLM_PREFIX_CACHING",), lambda _: True, "VLLM_CONTIGUOUS_PA decides, set or by its default"),
    (DEFRAG_VARIABLES, lambda here: here.rules.defrag is None, "{version} has no defragmenter"),
    (_FORK_ONLY, lambda here: not here.rules.is_extension, "only vllm-fork's V0 engine reads it"),
)
"""Why other variables have no effect: names, when that is so, and the reason. The first row that applies counts."""


def _why_ignored(name: str, here: _Situation) -> str | None:
    """Returns why a variable that was not read has no effect; None if the public code does heed it."""
    texts = {"version": here.version, "strategy": here.strategy}
    bound = _Bound.of(name)
    if bound is None:
        rows = (text for names, applies, text in IGNORED if name in names and applies(here))
        return next((text.format(**texts) for text in rows), None)
    known = f"VLLM_{bound.phase}_{here.rules.query_names[0]}_BUCKET_{bound.parameter}"
    text = next(text for applies, text in IGNORED_BOUNDS if applies(bound, here))
    return text.format(**texts, phase=bound.phase.lower(), known=known)


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
        read: the variables that had an effect.
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
    read: frozenset[str]
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
        situation = _Situation(version, rules, strategy, merged_prefill)
        prompt, decode = _read_bounds(situation, reader)
        file = reader.text(_FILE) if strategy == "file" else None
        sliding = _sliding(rules, reader)
        prefill_seqs = _prefill_seqs(rules, reader, merged_prefill=merged_prefill)
        is_enabled = reader.boolean("VLLM_ENABLE_BUCKETING") is not False
        unread = (name for name in sorted(environment) if is_looked_at(name) and name not in reader.read)
        reasons = ((name, _why_ignored(name, situation)) for name in unread)
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
            read=reader.read,
            ignored=tuple(
                IgnoredVariable(name, environment[name], why) for name, why in reasons if why is not None
            ),
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
    if rules.has_file and reader.text(_FILE):
        return "file"
    named: StrategyName = "exponential" if rules.strategy in ("named", "flag") else "linear"
    if rules.strategy == "named":
        named = _named_strategy(reader)
    flag = reader.boolean(_FLAG, is_word_only=rules.strategy == "opt_in_word")
    if flag is None:
        return named
    reader.disregard(_NAME)
    return "exponential" if flag else "linear"


def _named_strategy(reader: VariableReader) -> StrategyName:
    name = reader.text(_NAME)
    return "exponential" if name is None else _STRATEGY_NAMES[name]


def _prefill_seqs(rules: EnvironmentRules, reader: VariableReader, *, merged_prefill: bool) -> int | None:
    if rules.prefill != "environment" or merged_prefill:
        return None
    most = reader.integer(_PREFILL)
    if most is not None and not 1 <= most <= LARGEST_LIMIT:
        raise SpecError(
            _PREFILL, f"is {most}", f"from 1 to {LARGEST_LIMIT}: as many prompts at most share a step"
        )
    return most


def _sliding(rules: EnvironmentRules, reader: VariableReader) -> SlidingSpec | None:
    if not (rules.has_sliding and reader.boolean(_SLICES)):
        return None
    slice_len, threshold = (reader.integer(name) for name in _SLICE_VARIABLES)
    given = {"slice_len": None if slice_len is None else abs(slice_len), "threshold": threshold}
    return SlidingSpec(
        **{name: min(max(value, 1), LARGEST_LIMIT) for name, value in given.items() if value is not None}
    )


# What the plugin refuses


def check_variables(environment: Mapping[str, str], version: str) -> None:
    """Raises SpecError, naming the variable, if the plugin of `version` cannot read one. The extension reads few."""
    row = find_version(version)
    if row.environment.is_extension or not row.environment.has_file:
        return
    for name, read in _readers(row):
        if name in environment:
            read(name, environment[name])


def _readers(row: BucketingVersion) -> Iterator[tuple[str, Callable[[str, str], object]]]:
    parameters = _PADDING if "padding_aware" in row.strategies else _LINEAR
    integers = [
        f"VLLM_{phase}_{spelling}_BUCKET_{parameter}"
        for phase, spelling in (*_AXES, ("PROMPT", "SEQ"))
        for parameter in parameters
    ]
    integers += [*_SLICE_VARIABLES, "VLLM_DEFRAG_THRESHOLD"]
    if row.environment.strategy == "flag":
        integers.append("VLLM_DECODE_BLOCK_BUCKET_LIMIT")
    if row.date >= _V0_17_1:
        integers += ["VLLM_ROW_PARALLEL_CHUNKS", "VLLM_ROW_PARALLEL_CHUNK_THRESHOLD"]
    if _slices(row):
        integers += [_THRESHOLD, _CHUNK]
    yield from ((name, python_integer) for name in integers)
    yield "VLLM_PROFILE_STEPS", _integers
    if row.date >= _V0_13_0:
        yield from (("VLLM_MOE_CHUNK", _integers), ("VLLM_MOE_TOKEN_BOUNDARY", _integers))
    names = tuple(_STRATEGY_NAMES) if row.environment.strategy == "named" else _OLD_STRATEGIES
    for name, choices in {_NAME: names, **_CHOICES}.items():
        yield name, _choice(choices)


def _integers(name: str, text: str) -> None:
    for item in text.split(","):
        python_integer(name, item)


def _choice(choices: tuple[str, ...]) -> Callable[[str, str], None]:
    def check(name: str, text: str) -> None:
        if text not in choices:
            raise SpecError(
                name, f"is {shown(text)}: the plugin does not start", f"one of {', '.join(choices)}"
            )

    return check


def _slices(row: BucketingVersion) -> bool:
    return row.date >= _V0_21_0


def check_modes(environment: Mapping[str, str], version: str, *, unified: bool, merged_prefill: bool) -> None:
    """Raises SpecError for modes that exclude each other (``Unified attn requires merged_prefill!``)."""
    if unified and not merged_prefill and find_version(version).environment.has_unified:
        text = shown(environment.get("VLLM_MERGED_PREFILL", ""))
        problem = f"is {text} with VLLM_UNIFIED_ATTN: the plugin does not start"
        raise SpecError("VLLM_MERGED_PREFILL", problem, "leave it unset")


def check_slices(environment: Mapping[str, str], sliding: SlidingSpec | None, tokens: int) -> None:
    """Raises SpecError if the plugin divides by a slice of 0 tokens, which it does for queries from the threshold on."""
    if sliding is not None and tokens >= sliding.threshold and _given(environment, _SLICE, 1) == 0:
        raise SpecError(_SLICE, "is 0: the plugin divides by it", "the tokens of a slice")


def check_attention(
    environment: Mapping[str, str], version: str, *, merged_prefill: bool, tokens: int, block_size: int
) -> None:
    """Raises SpecError if attention in slices, which ``pad`` turns on from v0.21.0, does not fit the server's numbers."""
    row = find_version(version)
    sliced = environment.get(_SLICED)
    is_off = merged_prefill or environment.get(_NAME) != "pad" or (sliced is not None and not is_true(sliced))
    if is_off or row.environment.is_extension or not _slices(row):
        return
    if _FLAG in environment:
        raise _refused(_FLAG, f"is set beside {_NAME}=pad", "leave one of them out")
    usual = min(tokens, 8192)
    threshold = _given(environment, _THRESHOLD, usual)
    where = _THRESHOLD if _THRESHOLD in environment else "--max-num-batched-tokens"
    if threshold < _CHUNK_MULTIPLE or threshold <= block_size:
        least = max(_CHUNK_MULTIPLE, block_size + 1)
        raise _refused(where, f"is {threshold}, too few for {_NAME}=pad", f"at least {least}")
    chunk = _given(environment, _CHUNK, ceil(threshold // 2 / _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE)
    chunk = ceil(chunk / _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE
    if not block_size < chunk <= threshold:
        where = _CHUNK if _CHUNK in environment else "--block-size" if chunk <= block_size else where
        raise _refused(
            where, f"makes slices of {chunk} tokens", f"more than {block_size}, at most {threshold}"
        )
    padding = _given(environment, _QUERY_PAD, ceil(tokens / 4))
    if padding < block_size:
        where = _QUERY_PAD if _QUERY_PAD in environment else "--max-num-batched-tokens"
        raise _refused(where, f"allows a padding of {padding} tokens", f"at least a block, {block_size}")


def _given(environment: Mapping[str, str], name: str, default: int) -> int:
    return python_integer(name, environment[name]) if name in environment else default


def _refused(where: str, problem: str, remedy: str) -> SpecError:
    remedy = f"{remedy}, or {_SLICED}=false"
    return SpecError(where, f"{problem}: the plugin's attention in slices does not start", remedy)
