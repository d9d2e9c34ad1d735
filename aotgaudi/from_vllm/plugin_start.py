"""What vllm-gaudi refuses when it starts, whatever the bucketing strategy makes of it.

A server reads all of the plugin's variables at once (``finalize_config`` in vllm_gaudi/extension/runtime.py). A number that
is none therefore ends it although nothing uses it. Sources: vllm_gaudi/extension/features.py, environment.py and config.py;
the assertions of ``SlicedFusedSDPABase`` in extension/utils.py; v1/worker/hpu_model_runner.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import ceil

from aotgaudi.bucketing.versions import BucketingVersion, find_version
from aotgaudi.commands.values import is_true, python_integer
from aotgaudi.errors import SpecError, shown
from aotgaudi.spec.bucketing import SlidingSpec

_AXES = ("PROMPT_BS", "PROMPT_QUERY", "PROMPT_SEQ", "PROMPT_CTX", "DECODE_BS", "DECODE_BLOCK")
_STRATEGY, _FLAG = "VLLM_BUCKETING_STRATEGY", "VLLM_EXPONENTIAL_BUCKETING"
_STRATEGIES = ("exp", "lin", "pad")
_OLD_STRATEGIES = ("exponential_bucketing", "linear_bucketing")
"""The names up to v0.19.1, without an effect: VLLM_EXPONENTIAL_BUCKETING alone decides there."""

_SLICED, _THRESHOLD = "VLLM_HPU_FSDPA_SLICE_ENABLED", "VLLM_HPU_FSDPA_SLICE_SEQ_LEN_THLD"
_CHUNK, _QUERY_PAD = "VLLM_HPU_FSDPA_SLICE_CHUNK_SIZE", "VLLM_PROMPT_QUERY_BUCKET_PAD_MAX"
_SLICE = "PT_HPU_SDPA_BC_FACTOR"
_V0_13_0, _V0_17_1, _V0_21_0 = "2026-01-09", "2026-03-31", "2026-06-01"
_CHUNK_MULTIPLE = 1024
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "VLLM_HW": ("cpu", "gaudi", "gaudi2", "gaudi3"),
    "VLLM_BRIDGE_MODE": ("eager", "lazy"),
    "VLLM_PROMPT_ATTN_IMPL": ("flex_impl", "fsdpa_impl", "naive_impl"),
}


def check_variables(environment: Mapping[str, str], version: str) -> None:
    """Raises SpecError, naming the variable, if the plugin of `version` cannot read one. The extension reads few."""
    row = find_version(version)
    if row.environment.is_extension or not row.environment.has_file:
        return
    for name, read in _readers(row):
        if name in environment:
            read(name, environment[name])


def _readers(row: BucketingVersion) -> Iterator[tuple[str, Callable[[str, str], object]]]:
    parameters = ["MIN", "STEP", "MAX"]
    if "padding_aware" in row.strategies:
        parameters += ["PAD_MAX", "PAD_PERCENT"]
    integers = [f"VLLM_{axis}_BUCKET_{parameter}" for axis in _AXES for parameter in parameters]
    integers += [_SLICE, "VLLM_FUSEDSDPA_SLIDE_THLD", "VLLM_DEFRAG_THRESHOLD"]
    if row.environment.strategy == "flag":
        integers.append("VLLM_DECODE_BLOCK_BUCKET_LIMIT")
    if row.date >= _V0_17_1:
        integers += ["VLLM_ROW_PARALLEL_CHUNKS", "VLLM_ROW_PARALLEL_CHUNK_THRESHOLD"]
    if _slices(row):
        integers += [_THRESHOLD, _CHUNK]
    yield from ((name, python_integer) for name in integers)
    lists = [
        "VLLM_PROFILE_STEPS",
        *(["VLLM_MOE_CHUNK", "VLLM_MOE_TOKEN_BOUNDARY"] if row.date >= _V0_13_0 else []),
    ]
    yield from ((name, _integers) for name in lists)
    names = _STRATEGIES if row.environment.strategy == "named" else _OLD_STRATEGIES
    for name, choices in {_STRATEGY: names, **_CHOICES}.items():
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
    is_off = (
        merged_prefill or environment.get(_STRATEGY) != "pad" or (sliced is not None and not is_true(sliced))
    )
    if is_off or row.environment.is_extension or not _slices(row):
        return
    if _FLAG in environment:
        raise _refused(_FLAG, f"is set beside {_STRATEGY}=pad", "leave one of them out")
    usual = min(tokens, 8192)
    threshold = _given(environment, _THRESHOLD, usual)
    where = _THRESHOLD if _THRESHOLD in environment else "--max-num-batched-tokens"
    if threshold < _CHUNK_MULTIPLE or threshold <= block_size:
        least = max(_CHUNK_MULTIPLE, block_size + 1)
        raise _refused(where, f"is {threshold}, too few for {_STRATEGY}=pad", f"at least {least}")
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
