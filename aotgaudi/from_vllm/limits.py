"""The limits of a server: from its flags, from vLLM's defaults on Gaudi, and from a pinned number of KV blocks.

Upstream computes the number of blocks from the memory that is free when a server starts, so two starts may differ. The
bucket tables, and every recipe that contains the cache, depend on it. We therefore pin it: it is either given, or computed
from given figures by the formula of vllm_gaudi/v1/worker/hpu_worker.py 395-450 (``determine_available_memory``) and
vllm/v1/core/kv_cache_utils.py (``get_num_blocks``), in double precision and in that order. vllm-fork's V0 engine
(vllm/worker/hpu_worker.py 342-390) reserves no dummy block, and gives each stage of a pipeline a scheduler with its share of
the blocks.

The sizes of a step are those of `StepRules`, by release of vLLM. ``tests/golden/vllm_answers.py`` asks vLLM itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf

from aotgaudi.bucketing.versions import EnvironmentRules, GaudiVersion, find_version
from aotgaudi.commands.flags import GAUDI_DEFAULTS, UTILIZATION
from aotgaudi.commands.words import parse_fraction, parse_integer, parse_table, parse_tokens
from aotgaudi.errors import SpecError, shown
from aotgaudi.from_vllm.buckets import BucketingEnvironment
from aotgaudi.from_vllm.command import VllmCommand
from aotgaudi.from_vllm.model import (
    CONFIG,
    Device,
    ModelFacts,
    ServedLength,
    kv_block_bytes,
    release_numbers,
    served_length,
    vllm_release,
)
from aotgaudi.from_vllm.serving import (
    DEFAULT_RESERVED,
    LONG_VARIABLE,
    RESERVED_VARIABLE,
    ServingEnvironment,
    num_speculative_tokens,
)
from aotgaudi.manifest.memory import KvCache
from aotgaudi.spec.model import POSITION_KEYS, STATE_KEYS, other_state

# The sizes of a step, by release

_BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256)
_MODES = ("balanced", "interactivity", "throughput")
_NOT_AHEAD = ("ngram", "[ngram]", "medusa", "mlp_speculator", "suffix")
"""Methods of speculation with which vLLM refuses --async-scheduling. Gaudi has the first and ``medusa``."""
_CACHES_STATES = frozenset(
    {"bamba", "falcon_h1", "granitemoehybrid", "jamba", "mamba", "mamba2", "nemotron_h", "zamba2"}
)
"""Models whose states vLLM 0.11 to 0.14 caches (``SupportsMambaPrefixCaching`` in vllm/model_executor/models)."""
_VIDEO = (32, 70 + 2 + 6)
"""The most frames of a video, and the tokens of each, of Gemma 4 (vllm/model_executor/models/gemma4_mm.py)."""
_THRESHOLD = "long-prefill-token-threshold"
_Refusal = tuple[bool, str, str, str]
"""Whether vLLM does not start with a flag, the flag, the problem, and the remedy."""


@dataclass(frozen=True, slots=True)
class StepRules:
    """How an API server on Gaudi sizes its steps in a `release` of vLLM.

    2,048 tokens and 256 sequences are the same everywhere: ``get_batch_defaults`` takes them for a device of unknown memory,
    as Gaudi's is, and V0 has them too. A is vllm/engine/arg_utils.py, S vllm/config/scheduler.py (the fork: vllm/config.py).
    """

    release: str

    def is_in(self, first: float, end: float = inf) -> bool:
        """Returns whether the release is at least 0.`first` and below 0.`end`."""
        return first <= release_numbers(self.release)[1] < end

    @property
    def is_fork(self) -> bool:
        """Whether this is vllm-fork with its V0 engine."""
        return self.is_in(0, 10)

    def is_whole(self, facts: ModelFacts) -> bool:
        """Returns whether prompts are computed whole, in as many tokens as the longest takes, whatever the flags say."""
        # Multi-head latent attention: vllm/platforms/hpu.py ``check_and_update_config``.
        return self.is_in(9, 10) and facts.text.get("kv_lora_rank") is not None

    def is_chunked(self, command: VllmCommand, facts: ModelFacts) -> bool:
        """Returns whether prompts are computed in chunks (A ``_set_default_args_v0``, ``_set_default_args_v1``)."""
        if self.is_in(10, 11):
            return True
        if facts.is_encoder_decoder or self.is_whole(facts):
            return False
        return command.switches.get("enable-chunked-prefill", not self.is_fork)

    def is_caching(self, command: VllmCommand, facts: ModelFacts) -> bool:
        """Returns whether the engine caches prefixes, which the plugin may still switch off.

        Sources: A ``_set_default_args_v0``, ``get_chunked_prefill_prefix_caching_defaults``, later
        ``_set_default_chunked_prefill_and_prefix_caching_args``.
        """
        # vllm/model_executor/models/config.py ``MambaModelConfig``.
        drops_states = self.is_in(11, 15) and facts.text.get("model_type") not in _CACHES_STATES
        if (self.is_fork and facts.has_vision) or (drops_states and facts.keeps_states):
            return False
        is_off = self.is_fork or facts.is_encoder_decoder or (self.is_in(11, 28) and facts.keeps_states)
        return command.switches.get("enable-prefix-caching", not is_off)

    def least_tokens(self, command: VllmCommand, facts: ModelFacts) -> int:
        """Returns the least default of tokens for what else than text a prompt may have; 0 for none.

        S ``MULTIMODAL_MODEL_MAX_NUM_BATCHED_TOKENS``; A ``_get_min_mm_batched_tokens``: an image or a video fits a step.
        """
        if self.is_fork:
            return 5120 if facts.has_vision else 0
        # vllm/transformers_utils/model_arch_config_convertor.py ``Gemma4ModelArchConfigConvertor``
        sees_both_ways = facts.text.get("use_bidirectional_attention") == "vision"
        is_gemma = str(facts.text.get("model_type")).startswith("gemma4")
        if not (self.is_in(22) and facts.has_vision and is_gemma and sees_both_ways):
            return 0
        frames, tokens = _VIDEO
        given = command.values.get("limit-mm-per-prompt", "").strip()
        video = parse_table("limit-mm-per-prompt", given).get("video") if given.startswith("{") else None
        asked = video.get("num_frames") if isinstance(video, dict) else None
        return (min(frames, asked) if type(asked) is int and asked > 0 else frames) * tokens

    def refusals(
        self, command: VllmCommand, tokens: int, seqs: int, max_model_len: int
    ) -> Iterator[_Refusal]:
        """Yields what this release may not start with."""
        remedy = "at most as many: vLLM refuses to start otherwise"
        yield seqs > tokens, "max-num-seqs", f"is {seqs}, more than --max-num-batched-tokens {tokens}", remedy
        count = parse_integer(f"--{_THRESHOLD}", command.values.get(_THRESHOLD, "0"))
        problem = f"is {count}, more than --max-model-len {max_model_len}"
        # S ``verify_max_model_len``.
        yield self.is_in(27) and count > max_model_len, _THRESHOLD, problem, remedy
        name = f"vLLM {self.release}"
        # A ``_check_feature_supported``, ``_is_v1_supported_oracle``.
        for flag in ("max-num-partial-prefills", "max-long-partial-prefills"):
            is_wrong = not self.is_fork and _integer(command, flag) not in (None, 1)
            yield is_wrong, flag, f"is not 1: {name} does not start with that", "leave it out"
        # A ``performance_mode``; ``BlockSize`` in vllm/config/cache.py.
        mode, modes = command.values.get("performance-mode"), _MODES if self.is_in(17) else ()
        size, sizes = _integer(command, "block-size"), _BLOCK_SIZES[: 6 if self.is_in(10, 11) else None]
        for flag, given, known in (
            ("performance-mode", mode, modes),
            ("block-size", size, sizes if self.is_in(0, 18) else (size,)),
        ):
            remedy = f"one of {', '.join(map(str, known))}" if known else "leave it out"
            problem = f"is {shown(str(given))}, which {name} does not take"
            yield given is not None and given not in known, flag, problem, remedy
        yield from self._refused_drafts(command, tokens, seqs)

    def _refused_drafts(self, command: VllmCommand, tokens: int, seqs: int) -> Iterator[_Refusal]:
        """Yields what goes with no drafts (A ``create_engine_config``, ``__post_init__`` in vllm/config/vllm.py)."""
        drafts = num_speculative_tokens(command.values)
        is_short = drafts and tokens < seqs * (drafts + 1) and command.switches.get("enable-lora", False)
        problem = f"is {tokens}: with adapters, {drafts} drafts of each of {seqs} sequences must fit"
        yield (
            self.is_in(11) and bool(is_short),
            "max-num-batched-tokens",
            problem,
            f"at least {seqs * (drafts + 1)}",
        )
        table = parse_table("speculative-config", command.values.get("speculative-config", "{}"))
        method = table.get("method") or table.get("model")
        is_staged = _integer(command, "pipeline-parallel-size") not in (None, 1) and not self.is_in(15, 31)
        what = "several stages of a pipeline" if is_staged else f"speculation by {shown(str(method))}"
        is_behind = bool(table) and (method in _NOT_AHEAD or not self.is_in(11))
        is_wrong = command.switches.get("async-scheduling", False) and (is_staged or is_behind)
        problem = f"does not go with {what} in vLLM {self.release}"
        yield is_wrong, "async-scheduling", problem, "leave it out: vLLM then leaves it off"


# The limits

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
    version, release = find_version(bucketing.version), vllm_release(bucketing.version)
    rules, steps = version.environment, StepRules(release)
    max_model_len, length_notes = _length(command, facts, serving, release)
    tokens, max_num_seqs, step_notes = _step(command, steps, facts, max_model_len)
    for is_refused, flag, problem, remedy in steps.refusals(command, tokens, max_num_seqs, max_model_len):
        if is_refused:
            raise SpecError(f"--{flag}", problem, remedy)
    block_size = _integer(command, "block-size") or GAUDI_DEFAULTS["block-size"]
    chunk = facts.mamba_chunk_size
    if chunk and tokens % chunk and isinstance(version, GaudiVersion) and version.product.mamba_divides_step:
        remedy = f"a multiple of the model's mamba chunk size {chunk}"  # extension/bucketing/common.py 98
        raise SpecError("--max-num-batched-tokens", f"is {tokens}", remedy)
    num_blocks, notes = _pinned_blocks(pin, command, rules, serving, facts, block_size, device)
    if not rules.is_extension:
        _check_null_block(num_blocks, max_model_len, block_size)
    sizes = {"max_model_len": max_model_len, "max_num_batched_tokens": tokens}
    sizes |= {"max_num_seqs": max_num_seqs, "block_size": block_size}
    flags = {name.replace("_", "-"): size for name, size in sizes.items()}
    return Limits(
        {
            **sizes,
            **({"allow_long_max_model_len": True} if _is_long(max_model_len, facts) else {}),
            "max_num_prefill_seqs": _prefill_seqs(command, rules, bucketing, max_num_seqs),
            "num_blocks": num_blocks,
        },
        (*notes, *length_notes, *step_notes),
        tuple(f"--{flag} {size}" for flag, size in flags.items() if flag not in command.values),
    )


def _integer(command: VllmCommand, flag: str) -> int | None:
    text = command.values.get(flag)
    return None if text is None else parse_integer(f"--{flag}", text, minimum=1)


def _length(
    command: VllmCommand, facts: ModelFacts, serving: ServingEnvironment, release: str
) -> tuple[int, tuple[str, ...]]:
    """Returns --max-model-len, or what vLLM derives, and notes."""
    text = command.values.get("max-model-len")
    served = served_length(facts.length_keys, release)
    if served is None and any(facts.text.get(name) is not None for name in STATE_KEYS):
        raise SpecError(f"{CONFIG}: model_type", *other_state(str(facts.text.get("model_type"))))
    if text is not None:
        if text.strip().lower() in ("-1", "auto"):
            problem = f"is {text!r}: free memory would decide it"
            raise SpecError("--max-model-len", problem, "a number of tokens")
        value = parse_tokens("--max-model-len", text)
        return value, tuple(_notes_on_length(value, served, facts, serving))
    if served is None:
        problem = "is missing, and config.json has no max_position_embeddings"
        raise SpecError("--max-model-len", problem, "give it")
    note = f"max_model_len {served.by_default:,}: {served.rule}, as vLLM {served.vllm}"
    return served.by_default, (note,)


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
    elif value > served.most:
        more = f"more than the model's {served.most:.0f} positions"
        if not serving.allows_long:
            problem = f"is {value}, {more} ({served.rule_of_most}, as vLLM {served.vllm})"
            raise SpecError("--max-model-len", problem, f"at most that, or {LONG_VARIABLE}=1")
        yield f"{LONG_VARIABLE}: --max-model-len {value} is {more}; aotgaudi does not check that it supports that"
    elif _is_long(value, facts):
        yield f"max_model_len {value:,}: at most {served.rule_of_most}, as vLLM {served.vllm}"


def _step(
    command: VllmCommand, steps: StepRules, facts: ModelFacts, max_model_len: int
) -> tuple[int, int, tuple[str, ...]]:
    """Returns the most tokens and sequences of a step, given or as vLLM fills them in, and notes."""
    factor = 2 if command.values.get("performance-mode") == "throughput" else 1
    usual, least = GAUDI_DEFAULTS["max-num-batched-tokens"], steps.least_tokens(command, facts)
    given, text = _integer(command, "max-num-seqs"), command.values.get("max-num-batched-tokens")
    seqs = given or GAUDI_DEFAULTS["max-num-seqs"] * factor
    whole, why = 0 if steps.is_chunked(command, facts) else max_model_len, ""
    if text is not None:
        tokens = parse_tokens("--max-num-batched-tokens", text)
    else:
        tokens = max(usual * factor, whole, least)
        if steps.is_in(9, 10) or steps.is_in(11):  # A; the fork: S ``__post_init__``.
            tokens = min(tokens, seqs * max_model_len)
        why = "an image or a video takes as many" if tokens == least else ""
    if steps.is_whole(facts) and whole <= tokens != max(whole, usual):
        tokens, why = max(whole, usual), "what the longest prompt takes with multi-head latent attention"
    return tokens, given or min(seqs, tokens), (f"max_num_batched_tokens {tokens:,}: {why}",) if why else ()


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
    given = _integer(command, _PREFILL_FLAG) or max_num_seqs
    if given > max_num_seqs:
        problem = f"is {given}, more than --max-num-seqs {max_num_seqs}"
        raise SpecError(f"--{_PREFILL_FLAG}", problem, "at most as many")
    return given


def _blocks_in(
    free_bytes: int,
    command: VllmCommand,
    rules: EnvironmentRules,
    serving: ServingEnvironment,
    block_bytes: int,
    world_size: int,
) -> tuple[int, str]:
    """Returns how many KV blocks fit, as upstream counts, and the figures as text. Raises SpecError if none fits."""
    share = _utilization(command) or UTILIZATION
    reserved = DEFAULT_RESERVED if serving.reserved is None else serving.reserved
    reserved = 0.0 if command.switches.get("enforce-eager", False) else reserved
    num_dummies = int(rules.has_dummy_block)
    cache = KvCache(block_bytes, fixed_bytes=num_dummies * block_bytes)
    blocks = cache.blocks_in(free_bytes * share * (1 - reserved))
    rank = f" on each of {world_size} devices" if world_size > 1 else ""
    figures = (
        f"{free_bytes} bytes free{rank} * {share} usable * {1 - reserved:g} not for graphs"
        f" / {block_bytes} a block{', less one for padding' if num_dummies else ''}"
    )
    if blocks < 1:
        remedy = "more, or --num-blocks N"
        raise SpecError("--free-memory", f"leaves room for no KV block: {figures}", remedy)
    return blocks, f": {figures}"


def _pinned_blocks(
    pin: Pin,
    command: VllmCommand,
    rules: EnvironmentRules,
    serving: ServingEnvironment,
    facts: ModelFacts,
    block_size: int,
    device: Device,
) -> tuple[int, tuple[str, ...]]:
    """Returns the number of KV blocks, and notes on its origin.

    A number in `pin` takes precedence over --num-gpu-blocks-override, and that over free memory.

    Raises:
        SpecError: the number is not pinned (the error names the ways to pin it), or no block fits.
    """
    override = _integer(command, _OVERRIDE)
    # vllm-fork's V0 engine has a scheduler for each stage of a pipeline. They share the blocks.
    shares = device.parallel.pipeline_parallel_size if rules.is_extension else 1
    if pin.num_blocks is not None:
        total, source = pin.num_blocks * shares, ", from --num-blocks"
    elif override is not None:
        total, source = override, f", from --{_OVERRIDE}"
    elif pin.free_bytes is not None:
        block_bytes, world_size = kv_block_bytes(facts, block_size, device), device.parallel.world_size
        total, source = _blocks_in(pin.free_bytes, command, rules, serving, block_bytes, world_size)
    else:
        raise SpecError(
            "the number of KV blocks",
            "is not pinned: upstream takes it from the memory that is free, so that two starts may differ",
            f"--{_OVERRIDE} N in the vLLM command, --num-blocks N, or --free-memory 92GiB as upstream's log shows",
        )
    notes = [f"{total} KV blocks{source}"]
    if shares > 1:
        notes.append(f"{shares} schedulers, one for each stage, have {total // shares} of them each")
    if total != override:
        notes.append(f"add --{_OVERRIDE} {total} to the vLLM command: otherwise it counts its own")
    unused = [f"--{_UTILIZATION}"] if _utilization(command) is not None else []
    unused += [RESERVED_VARIABLE] if serving.reserved is not None else []
    if unused and not source.startswith(":"):
        notes.append(f"{' and '.join(unused)}: no effect, as the number of KV blocks is given")
    return total // shares, tuple(notes)


def _utilization(command: VllmCommand) -> float | None:
    text = command.values.get(_UTILIZATION)
    if text is None:
        return None
    return parse_fraction(f"--{_UTILIZATION}", text, includes_zero=False, includes_one=True)
