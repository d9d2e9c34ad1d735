"""The limits of a server: from its flags, from vLLM's defaults on Gaudi, and from a pinned number of KV blocks.

Upstream computes the number of blocks from the memory that is free when a server starts, so two starts may differ. The
bucket tables, and every recipe that contains the cache, depend on it. We therefore pin it: it is either given, or computed
from given figures by the formula of vllm_gaudi/v1/worker/hpu_worker.py 395-450 (``determine_available_memory``) and
vllm/v1/core/kv_cache_utils.py (``get_num_blocks``), in double precision and in that order. vllm-fork's V0 engine
(vllm/worker/hpu_worker.py 342-390) reserves no dummy block, and gives each stage of a pipeline a scheduler with its share of
the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from aotgaudi.bucketing.versions import BucketingVersion, EnvironmentRules, GaudiVersion, find_version
from aotgaudi.commands.flags import GAUDI_DEFAULTS, UTILIZATION
from aotgaudi.commands.words import parse_fraction, parse_integer, parse_tokens
from aotgaudi.errors import SpecError
from aotgaudi.from_vllm.buckets import BucketingEnvironment
from aotgaudi.from_vllm.command import VllmCommand
from aotgaudi.from_vllm.model import (
    Device,
    ModelFacts,
    ServedLength,
    kv_block_bytes,
    served_length,
    vllm_release,
)
from aotgaudi.from_vllm.serving import (
    DEFAULT_RESERVED,
    LONG_VARIABLE,
    RESERVED_VARIABLE,
    ServingEnvironment,
)
from aotgaudi.manifest.memory import KvCache
from aotgaudi.spec.model import POSITION_KEYS, STATE_KEYS, other_state

_OVERRIDE = "num-gpu-blocks-override"
_UTILIZATION = "gpu-memory-utilization"
_PREFILL_FLAG = "max-num-prefill-seqs"


@dataclass(frozen=True, slots=True)
class Pin:
    """The number of KV blocks, or the free device memory in bytes from which to compute it. Both may be None."""

    num_blocks: int | None = None
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """The unchecked keys of ``spec.limits.ServingLimits``, notes for the user, and the assumed defaults."""

    table: Mapping[str, int]
    notes: tuple[str, ...]
    assumed: tuple[str, ...]


def read_limits(
    command: VllmCommand,
    bucketing: BucketingEnvironment,
    serving: ServingEnvironment,
    facts: ModelFacts,
    device: Device,
    pin: Pin,
) -> Limits:
    """Returns the limits of a server. Raises SpecError, naming the flag or the variable."""
    version, assumed = find_version(bucketing.version), _Assumed()
    rules = version.environment
    length = _Length.of(command, facts, serving, bucketing.version, assumed)
    max_num_seqs, most = _integer(command, "max-num-seqs"), GAUDI_DEFAULTS["max-num-seqs"]
    tokens = _batched_tokens(command, rules, length.value, max_num_seqs or most, assumed)
    if max_num_seqs is None:
        max_num_seqs = assumed.default("max-num-seqs", min(most, tokens))
    _check_seqs(max_num_seqs, tokens)
    block_size = _integer(command, "block-size")
    if block_size is None:
        block_size = assumed.default("block-size", GAUDI_DEFAULTS["block-size"])
    _check_mamba(facts, tokens, version)
    count = _Count(command, rules, serving, facts, block_size, device)
    num_blocks, notes = _pinned_blocks(pin, command, count)
    if not rules.is_extension:
        _check_null_block(num_blocks, length.value, block_size)
    return Limits(
        {
            **({"allow_long_max_model_len": True} if length.is_long else {}),
            "max_num_seqs": max_num_seqs,
            "max_num_prefill_seqs": _prefill_seqs(command, rules, bucketing, max_num_seqs),
            "max_num_batched_tokens": tokens,
            "max_model_len": length.value,
            "block_size": block_size,
            "num_blocks": num_blocks,
        },
        (*notes, *length.notes),
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


@dataclass(frozen=True, slots=True)
class _Length:
    """--max-model-len, or what vLLM derives. `is_long`: it may exceed the positions that the config states."""

    value: int
    is_long: bool
    notes: tuple[str, ...]

    @classmethod
    def of(
        cls,
        command: VllmCommand,
        facts: ModelFacts,
        serving: ServingEnvironment,
        version: str,
        assumed: _Assumed,
    ) -> _Length:
        text = command.values.get("max-model-len")
        served = served_length(facts.length_keys, vllm_release(version))
        if served is None and any(facts.text.get(name) is not None for name in STATE_KEYS):
            why = other_state(str(facts.text.get("model_type")))
            raise SpecError("the model's config.json: model_type", *why)
        if text is not None:
            value = _given_length(text)
            return cls(value, _is_long(value, facts), tuple(_notes_on_length(value, served, facts, serving)))
        if served is None:
            problem = "is missing, and config.json has no max_position_embeddings"
            raise SpecError("--max-model-len", problem, "give it")
        value = assumed.default("max-model-len", served.by_default)
        note = f"max_model_len {value:,}: {served.rule}, as vLLM {served.vllm}"
        return cls(value, _is_long(value, facts), (note,))


def _given_length(text: str) -> int:
    if text.strip().lower() in ("-1", "auto"):
        raise SpecError("--max-model-len", f"is {text!r}: free memory would decide it", "a number of tokens")
    return parse_tokens("--max-model-len", text)


def _is_long(value: int, facts: ModelFacts) -> bool:
    known = [facts.text.get(name) for name in POSITION_KEYS]
    known += [facts.length_keys.get(name) for name in POSITION_KEYS]
    return value > min((count for count in known if type(count) is int and count > 0), default=0)


def _notes_on_length(
    value: int, served: ServedLength | None, facts: ModelFacts, serving: ServingEnvironment
) -> Iterator[str]:
    """Yields what to know about a given --max-model-len. Raises SpecError if this vLLM does not take it."""
    if served is None:
        yield f"config.json tells no length: aotgaudi does not check that the model supports --max-model-len {value}"
    elif value > served.most and not serving.allows_long:
        problem = f"is {value}, more than the model's {served.most:.0f} positions"
        rule = f"{served.rule_of_most}, as vLLM {served.vllm}"
        raise SpecError("--max-model-len", f"{problem} ({rule})", f"at most that, or {LONG_VARIABLE}=1")
    elif value > served.most:
        yield (
            f"{LONG_VARIABLE}: --max-model-len {value} is more than the model's"
            f" {served.most:.0f} positions; aotgaudi does not check that it supports that"
        )
    elif _is_long(value, facts):
        yield f"max_model_len {value:,}: at most {served.rule_of_most}, as vLLM {served.vllm}"


def _check_seqs(max_num_seqs: int, tokens: int) -> None:
    """Raises SpecError like vLLM (``SchedulerConfig`` in vllm/config/scheduler.py, in every release since 0.9)."""
    if max_num_seqs > tokens:
        raise SpecError(
            "--max-num-seqs",
            f"is {max_num_seqs}, more than --max-num-batched-tokens {tokens}",
            "at most as many: vLLM refuses to start otherwise",
        )


def _check_null_block(num_blocks: int, max_model_len: int, block_size: int) -> None:
    """Raises SpecError if the longest sequence never gets its blocks (``null_block`` in vllm/v1/core/block_pool.py)."""
    needed = -(-max_model_len // block_size)
    if needed >= num_blocks:
        raise SpecError(
            "the number of KV blocks",
            f"is {num_blocks}, of which vLLM keeps one as its null block: too few for a sequence of"
            f" {max_model_len} tokens, which would wait for ever",
            f"at least {needed + 1}, or a --max-model-len of at most {(num_blocks - 1) * block_size}",
        )


def is_prefill_chunked(command: VllmCommand, rules: EnvironmentRules) -> bool:
    """Returns whether prompts are computed in chunks. In vllm-fork's engine that must be switched on."""
    return command.switches.get("enable-chunked-prefill", not rules.is_extension)


def _batched_tokens(
    command: VllmCommand, rules: EnvironmentRules, max_model_len: int, max_num_seqs: int, assumed: _Assumed
) -> int:
    """Returns the most tokens of a step. Without chunked prefill (vllm-fork's default) a whole prompt must fit."""
    text = command.values.get("max-num-batched-tokens")
    if text is not None:
        return parse_tokens("--max-num-batched-tokens", text)
    tokens = GAUDI_DEFAULTS["max-num-batched-tokens"]
    if not is_prefill_chunked(command, rules):
        tokens = max(max_model_len, tokens)
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
        return bucketing.max_num_prefill_seqs or 1
    given = _integer(command, _PREFILL_FLAG)
    return max_num_seqs if given is None else _at_most(f"--{_PREFILL_FLAG}", given, max_num_seqs)


def _at_most(where: str, value: int, max_num_seqs: int) -> int:
    if value > max_num_seqs:
        raise SpecError(where, f"is {value}, more than --max-num-seqs {max_num_seqs}", "at most as many")
    return value


def _check_mamba(facts: ModelFacts, tokens: int, version: BucketingVersion) -> None:
    """Raises SpecError like upstream's own check (extension/bucketing/common.py 98), from v0.17.1 on."""
    chunk = facts.mamba_chunk_size
    is_checked = isinstance(version, GaudiVersion) and version.product.mamba_divides_step
    if chunk and tokens % chunk and is_checked:
        raise SpecError(
            "--max-num-batched-tokens", f"is {tokens}", f"a multiple of the model's mamba chunk size {chunk}"
        )


@dataclass(frozen=True, slots=True)
class _Count:
    """Computes how many KV blocks fit, as upstream does."""

    command: VllmCommand
    rules: EnvironmentRules
    serving: ServingEnvironment
    facts: ModelFacts
    block_size: int
    device: Device

    @property
    def num_schedulers(self) -> int:
        """The number of schedulers that share the blocks. vllm-fork's V0 engine has one for each stage of a pipeline."""
        return self.device.parallel.pipeline_parallel_size if self.rules.is_extension else 1

    def of(self, free_bytes: int) -> tuple[int, str]:
        """Returns the number of blocks, and the figures as text. Raises SpecError if no block fits."""
        share = _utilization(self.command)
        share = UTILIZATION if share is None else share
        reserved = DEFAULT_RESERVED if self.serving.reserved is None else self.serving.reserved
        reserved = 0.0 if self.command.switches.get("enforce-eager", False) else reserved
        parallel = self.device.parallel
        block_bytes = kv_block_bytes(self.facts, self.block_size, self.device)
        num_dummies = int(self.rules.has_dummy_block)
        cache = KvCache(block_bytes, fixed_bytes=num_dummies * block_bytes)
        blocks = cache.blocks_in(free_bytes * share * (1 - reserved))
        rank = f" on each of {parallel.world_size} devices" if parallel.world_size > 1 else ""
        figures = (
            f"{free_bytes} bytes free{rank} * {share} usable * {1 - reserved:g} not for graphs"
            f" / {block_bytes} a block{', less one for padding' if num_dummies else ''}"
        )
        if blocks < 1:
            remedy = "more, or --num-blocks N"
            raise SpecError("--free-memory", f"leaves room for no KV block: {figures}", remedy)
        return blocks, f": {figures}"


def _pinned_blocks(pin: Pin, command: VllmCommand, count: _Count) -> tuple[int, tuple[str, ...]]:
    """Returns the number of KV blocks, and notes on its origin.

    A number in `pin` takes precedence over --num-gpu-blocks-override, and that over free memory.

    Raises:
        SpecError: the number is not pinned (the error names the ways to pin it), or no block fits.
    """
    text = command.values.get(_OVERRIDE)
    override = None if text is None else parse_integer(f"--{_OVERRIDE}", text, minimum=1)
    shares = count.num_schedulers
    if pin.num_blocks is not None:
        total, source = pin.num_blocks * shares, ", from --num-blocks"
    elif override is not None:
        total, source = override, f", from --{_OVERRIDE}"
    elif pin.free_bytes is not None:
        total, source = count.of(pin.free_bytes)
    else:
        raise SpecError(
            "the number of KV blocks",
            "is not pinned: upstream takes it from the memory that is free, so that two starts may differ",
            f"--{_OVERRIDE} N in the vLLM command, --num-blocks N, or --free-memory 92GiB as upstream's log shows",
        )
    divided = f"{shares} schedulers, one for each stage, have {total // shares} of them each"
    unused = () if source.startswith(":") else _without_effect(command, count.serving)
    notes = (
        f"{total} KV blocks{source}",
        *([divided] if shares > 1 else []),
        *_serve_with(total, override),
        *unused,
    )
    return total // shares, notes


def _utilization(command: VllmCommand) -> float | None:
    text = command.values.get(_UTILIZATION)
    if text is None:
        return None
    return parse_fraction(f"--{_UTILIZATION}", text, includes_zero=False, includes_one=True)


def _serve_with(num_blocks: int, override: int | None) -> Iterator[str]:
    if num_blocks != override:
        yield f"add --{_OVERRIDE} {num_blocks} to the vLLM command: otherwise it counts its own"


def _without_effect(command: VllmCommand, serving: ServingEnvironment) -> Iterator[str]:
    given = [f"--{_UTILIZATION}"] if _utilization(command) is not None else []
    given += [RESERVED_VARIABLE] if serving.reserved is not None else []
    if given:
        yield f"{' and '.join(given)}: no effect, as the number of KV blocks is given"
