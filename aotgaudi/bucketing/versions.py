"""The registry: which versions of the public bucketing rules are known, and the strategies of each.

A version is data: another one is another row of `VERSIONS`, another strategy another item of a row (and
their names join the literals of ``spec.bucketing``, from which editors complete).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from aotgaudi.bucketing.combine import combine_decode, combine_prompt, with_speculation
from aotgaudi.bucketing.exponential import ExponentialStrategy
from aotgaudi.bucketing.inputs import Bucket, BucketingInputs, Ranges
from aotgaudi.errors import SpecError


class Strategy(Protocol):
    """How the values of each dimension are chosen; combining and filtering them is common to all."""

    def prompt_ranges(self, inputs: BucketingInputs) -> Ranges:
        """Returns the ranges of the prompt phase."""
        ...

    def decode_ranges(self, inputs: BucketingInputs) -> Ranges:
        """Returns the ranges of the decode phase."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketingVersion:
    """The rules of one public commit."""

    commit: str
    date: str
    strategies: Mapping[str, Strategy]


VERSIONS: Mapping[str, BucketingVersion] = MappingProxyType(
    {
        "vllm-gaudi@091bbad": BucketingVersion(
            commit="091bbadda10bee4fd3f6d0efc1844d2610dd2707",
            date="2026-08-21",
            strategies=MappingProxyType({"exponential": ExponentialStrategy()}),
        ),
    }
)


def find_strategy(version: str, strategy: str) -> Strategy:
    """Returns a strategy of a version. Raises SpecError, which names the known ones."""
    if version not in VERSIONS:
        raise SpecError("bucketing.version", f"is {version!r}", f"known: {', '.join(VERSIONS)}")
    strategies = VERSIONS[version].strategies
    if strategy not in strategies:
        raise SpecError("bucketing.strategy", f"is {strategy!r}", f"{version} has: {', '.join(strategies)}")
    return strategies[strategy]


def prompt_buckets(inputs: BucketingInputs, strategy: Strategy) -> tuple[Bucket, ...]:
    """Returns the prompt table, ascending. Raises SpecError when the limits leave none."""
    _check_mamba(inputs)
    return combine_prompt(strategy.prompt_ranges(inputs), inputs)


def decode_buckets(inputs: BucketingInputs, strategy: Strategy) -> tuple[Bucket, ...]:
    """Returns the decode table, ascending, with speculation. Raises SpecError when the limits leave none."""
    return with_speculation(decode_seed_buckets(inputs, strategy), inputs)


def decode_seed_buckets(inputs: BucketingInputs, strategy: Strategy) -> tuple[Bucket, ...]:
    """Returns the decode table before speculation, ascending."""
    _check_mamba(inputs)
    return combine_decode(strategy.decode_ranges(inputs), inputs)


def _check_mamba(inputs: BucketingInputs) -> None:
    if inputs.mamba_chunk_size and inputs.max_num_batched_tokens % inputs.mamba_chunk_size:
        raise SpecError(
            "limits.max_num_batched_tokens",
            f"is {inputs.max_num_batched_tokens}",
            f"a multiple of the model's mamba chunk of {inputs.mamba_chunk_size} tokens",
        )
