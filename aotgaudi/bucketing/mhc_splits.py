"""The number of partial sums of a hyper-connection, and the token counts that represent each number.

A server's kernels for ``hc_pre`` are specialised by `n_splits`, the number of partial sums over the width K of the flattened
residual streams. The number of tokens is dynamic in them. So one token count for each n_splits warms everything up to
`max_num_tokens`. The rules are those of public servers (`MHC_RULES`):

``sglang-pr25810``
    SGLang PR #25810 (0.5.12.post1, python/sglang/srt/layers/mhc.py 445-470), the DeepGEMM path:
    ``max(1, min(num_sms // ceil(tokens / 64), ceil(K / 64) // 4))``. Most tokens first.
``sglang-deepgemm-off``
    The same file with DeepGEMM switched off: 32 partial sums up to 2,048 tokens, which exist for K of 16,384
    and 28,672 only; one above. Most tokens first. It does not depend on the device.
``sglang-fma``
    ``mhc_fused_post_pre`` of SGLang 0.5.23 (python/sglang/kernels/ops/layernorm/mhc.py): up to 32 tokens a
    separate kernel, with other tiles below 8 tokens than from 8 on; the formula above that. Fewest tokens first.
``vllm-collapsed``
    vLLM (vllm/model_executor/kernels/mhc/warmup.py): the formula's result rounded to 1, 4 or 16. The order of
    its warm-up keys: ascending n_splits.
``one``
    One sum for any number of tokens, so there is one class. On a CPU more parts save no time.

Our own engine follows the same rules (`StepSplits`): a step's padded token count decides its class, and its program calls
the unit of that class. `max_num_tokens` changes no result, only which buckets exist.

No loop runs over tokens: the formula's steps are the blocks of equal quotients ``num_sms // tiles``, as in divisor sums. The
cost grows with the number of buckets, which is at most ``2 * sqrt(num_sms)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from aotgaudi.entries import StepEntry
from aotgaudi.errors import SpecError
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.hyper_connections import HyperConnections
from aotgaudi.spec.target import LARGEST_NUM_SMS

_TILE = 64
"""Rows of a token tile, and columns of a K block."""

_FEWEST_BLOCKS_A_SPLIT = 4
_DEEPGEMM_OFF_SPLITS, _DEEPGEMM_OFF_TOKENS, _DEEPGEMM_OFF_SIZES = 32, 2048, (16384, 28672)
_FMA_TOKENS, _FMA_SMALL_TOKENS, _FMA_HIDDEN_SIZE = 32, 7, 4096
_COLLAPSED = (1, 4, 16)


@dataclass(frozen=True, slots=True)
class MhcBucket:
    """All token counts from `first_token` to `last_token` run the same kernels, with `n_splits` partial sums.

    `last_token` is the bucket's representative.
    """

    n_splits: int
    first_token: int
    last_token: int


@dataclass(frozen=True, slots=True)
class MhcInputs:
    """The numbers that decide the buckets. `num_sms` is the device's number of streaming multiprocessors; None if unknown.

    Nothing is warm if `max_num_tokens` is 0 or less. Raises SpecError for sizes that are not positive.
    """

    max_num_tokens: int
    hc_mult: int
    hidden_size: int
    num_sms: int | None

    def __post_init__(self) -> None:
        _require_positive("hc_mult", self.hc_mult)
        _require_positive("hidden_size", self.hidden_size)
        if self.num_sms is not None:
            _require_num_sms(self.num_sms)

    @property
    def hc_hidden_size(self) -> int:
        """Width K of the flattened streams."""
        return self.hc_mult * self.hidden_size


def split_buckets(max_num_tokens: int, hc_hidden_size: int, num_sms: int) -> tuple[MhcBucket, ...]:
    """Returns the formula's buckets over 1 to `max_num_tokens`, ascending in tokens; () for 0 or less."""
    _require_positive("hc_hidden_size", hc_hidden_size)
    _require_num_sms(num_sms)
    most_splits = max(1, -(-hc_hidden_size // _TILE) // _FEWEST_BLOCKS_A_SPLIT)
    return tuple(_steps(max_num_tokens, most_splits, num_sms))


def warm_up_buckets(rule: str, inputs: MhcInputs) -> tuple[MhcBucket, ...]:
    """Returns the buckets of a rule in the order in which its server warms them up; () if nothing is warm.

    Raises:
        SpecError: the rule is not one of `MHC_RULES`, needs a device that is not given, or has no kernel for this size.
    """
    if rule not in MHC_RULES:
        raise SpecError("mhc.rule", f"is {rule!r}", f"one of {', '.join(MHC_RULES)}")
    return MHC_RULES[rule](inputs) if inputs.max_num_tokens > 0 else ()


def _formula(inputs: MhcInputs) -> tuple[MhcBucket, ...]:
    """Returns the formula's buckets, fewest tokens first."""
    if inputs.num_sms is None:
        raise SpecError(
            "target.num_sms",
            "is missing, and the hyper-connections' split counts follow from it",
            "the streaming multiprocessors of the device that serves, or a target.profile that has them",
        )
    return split_buckets(inputs.max_num_tokens, inputs.hc_hidden_size, inputs.num_sms)


def _pr25810(inputs: MhcInputs) -> tuple[MhcBucket, ...]:
    return _formula(inputs)[::-1]


def _deepgemm_off(inputs: MhcInputs) -> tuple[MhcBucket, ...]:
    if inputs.hc_hidden_size not in _DEEPGEMM_OFF_SIZES:
        raise SpecError(
            "mhc.rule",
            f"sglang-deepgemm-off has no kernel for hc_mult * hidden_size = {inputs.hc_hidden_size}",
            f"{' or '.join(map(str, _DEEPGEMM_OFF_SIZES))}, or another rule",
        )
    split = MhcBucket(_DEEPGEMM_OFF_SPLITS, 1, min(_DEEPGEMM_OFF_TOKENS, inputs.max_num_tokens))
    if inputs.max_num_tokens <= _DEEPGEMM_OFF_TOKENS:
        return (split,)
    return (MhcBucket(1, _DEEPGEMM_OFF_TOKENS + 1, inputs.max_num_tokens), split)


def _fma(inputs: MhcInputs) -> tuple[MhcBucket, ...]:
    """Returns ``sglang-fma``'s buckets. Tiles have 2 columns below 8 tokens, else 3: two kernels, even of one n_splits."""
    small = 8 if inputs.hidden_size <= _FMA_HIDDEN_SIZE else 4
    most = inputs.max_num_tokens
    buckets = [MhcBucket(small, 1, min(_FMA_SMALL_TOKENS, most))]
    if most > _FMA_SMALL_TOKENS:
        buckets.append(MhcBucket(4, _FMA_SMALL_TOKENS + 1, min(_FMA_TOKENS, most)))
    if most > _FMA_TOKENS:
        first, *rest = _formula(inputs)
        buckets += [MhcBucket(first.n_splits, _FMA_TOKENS + 1, first.last_token), *rest]
    return tuple(buckets)


def _collapsed(inputs: MhcInputs) -> tuple[MhcBucket, ...]:
    joined: dict[int, MhcBucket] = {}
    for bucket in _pr25810(inputs):
        n_splits = next((n for n in _COLLAPSED if bucket.n_splits <= n), _COLLAPSED[-1])
        last = joined[n_splits].last_token if n_splits in joined else bucket.last_token
        joined[n_splits] = MhcBucket(n_splits, bucket.first_token, last)
    return tuple(joined.values())


MHC_RULES: Mapping[str, Callable[[MhcInputs], tuple[MhcBucket, ...]]] = MappingProxyType(
    {
        "sglang-pr25810": _pr25810,
        "sglang-deepgemm-off": _deepgemm_off,
        "sglang-fma": _fma,
        "vllm-collapsed": _collapsed,
        "one": lambda inputs: (MhcBucket(1, 1, inputs.max_num_tokens),),
    }
)
"""The rules that ``spec.mhc.rule`` may name. Each expects a `max_num_tokens` of at least 1."""


@dataclass(frozen=True, slots=True)
class StepSplits:
    """The numbers of partial sums into which the steps of our own engine split a model's hyper-connections."""

    rule: str
    hc_mult: int
    hidden_size: int
    num_sms: int | None

    @classmethod
    def of(cls, spec: BuildSpec) -> StepSplits | None:
        """Returns the splits of a spec; None if our engine runs no steps with hyper-connections under it."""
        streams = HyperConnections.of(spec.model) if spec.has_own_steps else None
        if streams is None:
            return None
        return cls(spec.mhc.rule, streams.hc_mult, streams.hidden_size, spec.target.resolved_num_sms)

    def buckets(self, max_num_tokens: int) -> tuple[MhcBucket, ...]:
        """Returns the buckets over 1 to `max_num_tokens`, in the rule's order. Raises like `warm_up_buckets`."""
        inputs = MhcInputs(max_num_tokens, self.hc_mult, self.hidden_size, self.num_sms)
        return warm_up_buckets(self.rule, inputs)

    def n_splits(self, num_tokens: int) -> int:
        """Returns the class of a step that computes `num_tokens` tokens (at least 1), including padding."""
        return max(self.buckets(num_tokens), key=lambda bucket: bucket.last_token).n_splits

    def of_entry(self, entry: StepEntry) -> int:
        """Returns the class of a step's entry."""
        return self.n_splits(entry.num_tokens)


def _steps(max_num_tokens: int, most_splits: int, num_sms: int) -> Iterator[MhcBucket]:
    """Yields the runs of equal n_splits, run by run. The last tile of a run follows from its n_splits."""
    first = 1
    while first <= max_num_tokens:
        tiles = -(-first // _TILE)
        n_splits = max(1, min(num_sms // tiles, most_splits))
        last = max_num_tokens if n_splits == 1 else min(num_sms // n_splits * _TILE, max_num_tokens)
        yield MhcBucket(n_splits, first, last)
        first = last + 1


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise SpecError(name, f"is {value}", "1 or more")


def _require_num_sms(num_sms: int) -> None:
    if not 1 <= num_sms <= LARGEST_NUM_SMS:
        raise SpecError("num_sms", f"is {num_sms}", f"1 to {LARGEST_NUM_SMS}")
