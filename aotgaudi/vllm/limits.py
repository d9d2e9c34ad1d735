"""The limits of a server: from flags, from defaults of vLLM on Gaudi, and a number of KV blocks that is pinned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aotgaudi.bucketing.rules import EnvironmentRules
from aotgaudi.bucketing.versions import find_version
from aotgaudi.errors import SpecError
from aotgaudi.vllm.blocks import Pin, pinned_blocks
from aotgaudi.vllm.command import VllmCommand
from aotgaudi.vllm.environment import BucketingEnvironment
from aotgaudi.vllm.memory import kv_block_bytes
from aotgaudi.vllm.model_facts import ModelFacts
from aotgaudi.vllm.serving import ServingEnvironment
from aotgaudi.vllm.values import parse_integer, parse_tokens

DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
"""vLLM's for a server on a device whose memory it does not know (vllm/engine/arg_utils.py ``get_batch_defaults``).

Gaudi's platform reports 0 bytes in order to have these (vllm_gaudi/platform.py ``get_device_total_memory``).
"""

DEFAULT_BLOCK_SIZE = 128
"""vllm_gaudi/platform.py 152-156."""

_PREFILL_VARIABLE = "VLLM_PROMPT_BS_BUCKET_MAX"
_PREFILL_FLAG = "max-num-prefill-seqs"


@dataclass(frozen=True, slots=True)
class Limits:
    """The keys of ``spec.limits.ServingLimits``, unchecked; what a person should know of them; and the defaults."""

    table: Mapping[str, int]
    notes: tuple[str, ...]
    assumed: tuple[str, ...]


def read_limits(
    command: VllmCommand,
    bucketing: BucketingEnvironment,
    serving: ServingEnvironment,
    facts: ModelFacts,
    dtype: str,
    pin: Pin,
) -> Limits:
    """Returns the limits of a server. Raises SpecError, with the flag or variable at fault named."""
    rules, assumed = find_version(bucketing.version).environment, _Assumed()
    max_model_len = _max_model_len(command, facts, assumed)
    max_num_seqs = _integer(command, "max-num-seqs")
    tokens = _batched_tokens(command, rules, max_model_len, max_num_seqs or DEFAULT_MAX_NUM_SEQS, assumed)
    if max_num_seqs is None:
        max_num_seqs = assumed.default("max-num-seqs", min(DEFAULT_MAX_NUM_SEQS, tokens))
    block_size = _integer(command, "block-size")
    if block_size is None:
        block_size = assumed.default("block-size", DEFAULT_BLOCK_SIZE)
    _check_mamba(facts, tokens)
    num_blocks, notes = pinned_blocks(
        pin, command, rules, serving, lambda: kv_block_bytes(facts, block_size, dtype)
    )
    return Limits(
        {
            "max_num_seqs": max_num_seqs,
            "max_num_prefill_seqs": _prefill_seqs(command, rules, bucketing, max_num_seqs),
            "max_num_batched_tokens": tokens,
            "max_model_len": max_model_len,
            "block_size": block_size,
            "num_blocks": num_blocks,
        },
        notes,
        tuple(assumed.texts),
    )


class _Assumed:
    """Collects the defaults that are filled in."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def default(self, flag: str, value: int) -> int:
        self.texts.append(f"--{flag} {value}")
        return value


def _integer(command: VllmCommand, flag: str) -> int | None:
    text = command.values.get(flag)
    return None if text is None else parse_integer(f"--{flag}", text, minimum=1)


def _max_model_len(command: VllmCommand, facts: ModelFacts, assumed: _Assumed) -> int:
    text = command.values.get("max-model-len")
    if text is not None and text.strip().lower() in ("-1", "auto"):
        raise SpecError("--max-model-len", f"is {text!r}: free memory would decide it", "a number of tokens")
    if text is not None:
        return parse_tokens("--max-model-len", text)
    positions = facts.text.get("max_position_embeddings")
    if type(positions) is not int or positions < 1:
        raise SpecError(
            "--max-model-len", "is missing, and config.json has no max_position_embeddings", "give it"
        )
    return assumed.default("max-model-len", positions)


def _batched_tokens(
    command: VllmCommand, rules: EnvironmentRules, max_model_len: int, max_num_seqs: int, assumed: _Assumed
) -> int:
    """Returns the tokens of a step. Without chunked prefill (vllm-fork's default) a whole prompt must fit."""
    text = command.values.get("max-num-batched-tokens")
    if text is not None:
        return parse_tokens("--max-num-batched-tokens", text)
    is_chunked = command.switches.get("enable-chunked-prefill", not rules.is_extension)
    tokens = (
        DEFAULT_MAX_NUM_BATCHED_TOKENS if is_chunked else max(max_model_len, DEFAULT_MAX_NUM_BATCHED_TOKENS)
    )
    return assumed.default("max-num-batched-tokens", min(tokens, max_num_seqs * max_model_len))


def _prefill_seqs(
    command: VllmCommand, rules: EnvironmentRules, bucketing: BucketingEnvironment, max_num_seqs: int
) -> int:
    """Returns the most prompts of a step (v1/worker/hpu_model_runner.py 1513-1522)."""
    if rules.prefill == "one":
        return 1
    if bucketing.merged_prefill:
        return max_num_seqs
    if rules.prefill == "environment":
        return _at_most(_PREFILL_VARIABLE, bucketing.max_num_prefill_seqs or 1, max_num_seqs)
    given = _integer(command, _PREFILL_FLAG)
    return max_num_seqs if given is None else _at_most(f"--{_PREFILL_FLAG}", given, max_num_seqs)


def _at_most(where: str, value: int, max_num_seqs: int) -> int:
    if value > max_num_seqs:
        raise SpecError(where, f"is {value}, more than --max-num-seqs {max_num_seqs}", "at most as many")
    return value


def _check_mamba(facts: ModelFacts, tokens: int) -> None:
    """Upstream's own check (extension/bucketing/common.py 98)."""
    chunk = facts.mamba_chunk_size
    if chunk and tokens % chunk:
        raise SpecError(
            "--max-num-batched-tokens", f"is {tokens}", f"a multiple of the model's mamba chunk size {chunk}"
        )
