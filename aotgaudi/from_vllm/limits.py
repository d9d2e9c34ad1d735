"""The limits of a server: from its flags, from vLLM's defaults on Gaudi, and from a pinned number of KV blocks.

Upstream computes the number of blocks from the memory that is free when a server starts, so two starts may differ. The
bucket tables, and every recipe that contains the cache, depend on it. We therefore pin it: it is either given, or computed
from given figures by the formula of vllm_gaudi/v1/worker/hpu_worker.py 395-450 (``determine_available_memory``) and
vllm/v1/core/kv_cache_utils.py (``get_num_blocks``), in double precision and in that order. vllm-fork's V0 engine
(vllm/worker/hpu_worker.py 342-390) reserves no dummy block, and gives each stage of a pipeline a scheduler with its share of
the blocks.

The sizes of a step are those of `StepRules`, by release of vLLM. ``tests/golden/vllm_steps.py`` asks vLLM itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from aotgaudi.bucketing.versions import BucketingVersion, EnvironmentRules, GaudiVersion, find_version
from aotgaudi.commands.flags import GAUDI_DEFAULTS, UTILIZATION
from aotgaudi.commands.words import parse_fraction, parse_integer, parse_table, parse_tokens
from aotgaudi.errors import SpecError, shown
from aotgaudi.from_vllm.buckets import BucketingEnvironment
from aotgaudi.from_vllm.command import VllmCommand
from aotgaudi.from_vllm.model import (
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
_NOT_AHEAD = frozenset({"ngram", "[ngram]", "medusa", "mlp_speculator", "suffix"})
"""Methods of speculation with which vLLM refuses --async-scheduling. Gaudi has the first and ``medusa``."""
_CACHES_STATES = frozenset(
    {"bamba", "falcon_h1", "granitemoehybrid", "jamba", "mamba", "mamba2", "nemotron_h", "zamba2"}
)
"""Models that vLLM 0.11 to 0.14 caches states of (``SupportsMambaPrefixCaching`` in vllm/model_executor/models)."""
_VIDEO = (32, 70 + 2 + 6)
"""The most frames of a video, and the tokens of each, of Gemma 4 (vllm/model_executor/models/gemma4_mm.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRules:
    """What differs between releases in how an API server on Gaudi sizes its steps. The defaults are those of 0.32.

    2,048 tokens and 256 sequences are the same everywhere: ``get_batch_defaults`` takes them for a device of unknown memory,
    as Gaudi's is, and V0 has them too. A is vllm/engine/arg_utils.py, S vllm/config/scheduler.py (the fork: vllm/config.py).

    Attributes:
        since: the first release with these rules.
        chunking: when prompts are computed in chunks. ``default``: unless --no-enable-chunked-prefill. ``always``: even then
            (A ``_set_default_args_v1``). ``asked``: with the flag (A ``_set_default_args_v0``).
        caching: for which models prefix caching is the default: ``all``, those that keep no states (A ``get_chunked_prefill_
            prefix_caching_defaults``, later ``_set_default_chunked_prefill_and_prefix_caching_args``), or ``none``.
        drops_states: other models with states than `_CACHES_STATES` never have it (vllm/model_executor/models/config.py
            ``MambaModelConfig``).
        bounds_tokens: the default is at most what `max_num_seqs` whole sequences have (A; the fork: S ``__post_init__``).
        image_tokens: the least default of tokens for models with images (S ``MULTIMODAL_MODEL_MAX_NUM_BATCHED_TOKENS``).
            They have no prefix caching then (A ``_set_default_args_v0``).
        latent_is_whole: multi-head latent attention computes whole prompts, in as many tokens as the longest takes, whatever
            the flags say (vllm/platforms/hpu.py ``check_and_update_config``).
        fits_items: an image or video that is attended to in both directions fits a step (A ``_get_min_mm_batched_tokens``).
        has_modes: --performance-mode exists, and ``throughput`` doubles the defaults (A).
        block_sizes: those that --block-size takes (``BlockSize`` in vllm/config/cache.py); none means all.
        has_partial_prefills: several prompts may be in chunks at once; other releases refuse the flag, or do not know it
            (A ``_check_feature_supported``, ``_is_v1_supported_oracle``).
        bounds_threshold: --long-prefill-token-threshold is at most `max_model_len` (S ``verify_max_model_len``).
        checks_drafts: with adapters, a step has room for all drafts (A ``create_engine_config``).
        drafts_ahead: --async-scheduling goes with some methods of speculation (vllm/config/vllm.py ``__post_init__``).
        pipelines_ahead: it goes with several stages of a pipeline (likewise).
    """

    since: tuple[int, ...]
    chunking: Literal["default", "always", "asked"] = "default"
    caching: Literal["all", "stateless", "none"] = "all"
    drops_states: bool = False
    bounds_tokens: bool = True
    image_tokens: int = 0
    latent_is_whole: bool = False
    fits_items: bool = True
    has_modes: bool = True
    block_sizes: tuple[int, ...] = ()
    has_partial_prefills: bool = False
    bounds_threshold: bool = True
    checks_drafts: bool = True
    drafts_ahead: bool = True
    pipelines_ahead: bool = False

    @classmethod
    def of(cls, release: str) -> StepRules:
        """Returns the rules of a release."""
        return next(one for one in _STEP_RULES if one.since <= release_numbers(release))

    def is_chunked(self, command: VllmCommand, facts: ModelFacts) -> bool:
        """Returns whether prompts are computed in chunks."""
        if self.chunking == "always":
            return True
        if facts.is_encoder_decoder or (self.latent_is_whole and facts.has_latent_attention):
            return False
        return command.switches.get("enable-chunked-prefill", self.chunking == "default")

    def is_caching(self, command: VllmCommand, facts: ModelFacts) -> bool:
        """Returns whether the engine caches prefixes, which the plugin may still switch off."""
        is_dropped = self.drops_states and facts.keeps_states
        if self.image_tokens and facts.has_vision:
            return False
        if is_dropped and facts.text.get("model_type") not in _CACHES_STATES:
            return False
        by_default = self.caching == "all" or (self.caching == "stateless" and not facts.keeps_states)
        return command.switches.get("enable-prefix-caching", by_default and not facts.is_encoder_decoder)

    def least_tokens(self, command: VllmCommand, facts: ModelFacts) -> int:
        """Returns the least default of tokens for what else than text a prompt may have; 0 for none."""
        if not facts.has_vision:
            return 0
        if not (self.fits_items and facts.sees_both_ways):
            return self.image_tokens
        frames, tokens = _VIDEO
        given = command.values.get("limit-mm-per-prompt", "")
        video = parse_table("limit-mm-per-prompt", given).get("video") if given.startswith("{") else None
        asked = video.get("num_frames") if isinstance(video, dict) else None
        return (min(frames, asked) if type(asked) is int and asked > 0 else frames) * tokens


_0_31 = StepRules(since=(0, 31))
_0_28 = replace(_0_31, since=(0, 28), pipelines_ahead=True)
_0_27 = replace(_0_28, since=(0, 27), caching="stateless")
_0_22 = replace(_0_27, since=(0, 22), bounds_threshold=False)
_0_18 = replace(_0_22, since=(0, 18), fits_items=False)
_0_17 = replace(_0_18, since=(0, 17), block_sizes=_BLOCK_SIZES)
_0_15 = replace(_0_17, since=(0, 15), has_modes=False)
_0_11 = replace(_0_15, since=(0, 11), drops_states=True, pipelines_ahead=False)
_0_10 = replace(
    _0_11,
    since=(0, 10),
    chunking="always",
    caching="all",
    drops_states=False,
    bounds_tokens=False,
    checks_drafts=False,
    drafts_ahead=False,
    block_sizes=_BLOCK_SIZES[:-1],
)
_FORK_0_9 = replace(
    _0_10,
    since=(0, 9),
    chunking="asked",
    caching="none",
    bounds_tokens=True,
    image_tokens=5120,
    latent_is_whole=True,
    has_partial_prefills=True,
    block_sizes=_BLOCK_SIZES,
)
_FORK_0_7 = replace(_FORK_0_9, since=(0,), bounds_tokens=False, latent_is_whole=False)
_STEP_RULES = (_0_31, _0_28, _0_27, _0_22, _0_18, _0_17, _0_15, _0_11, _0_10, _FORK_0_9, _FORK_0_7)


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
    version, assumed = find_version(bucketing.version), _Assumed()
    rules, release = version.environment, vllm_release(bucketing.version)
    steps = StepRules.of(release)
    length = _Length.of(command, facts, serving, release, assumed)
    step = _Step.of(command, steps, facts, length.value, assumed)
    for is_refused, flag, problem, remedy in _refusals(command, steps, release, step, length.value):
        if is_refused:
            raise SpecError(f"--{flag}", problem, remedy)
    tokens, max_num_seqs = step.tokens, step.max_num_seqs
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
        (*notes, *length.notes, *step.notes),
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
        release: str,
        assumed: _Assumed,
    ) -> _Length:
        text = command.values.get("max-model-len")
        served = served_length(facts.length_keys, release)
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


@dataclass(frozen=True, slots=True)
class _Step:
    """The most tokens and sequences of a step, and what a user may not expect of them."""

    tokens: int
    max_num_seqs: int
    notes: tuple[str, ...]

    @classmethod
    def of(
        cls,
        command: VllmCommand,
        steps: StepRules,
        facts: ModelFacts,
        max_model_len: int,
        assumed: _Assumed,
    ) -> _Step:
        """Returns what the command says, or what vLLM fills in."""
        factor = 2 if command.values.get("performance-mode") == "throughput" else 1
        usual, least = GAUDI_DEFAULTS["max-num-batched-tokens"], steps.least_tokens(command, facts)
        given, text = _integer(command, "max-num-seqs"), command.values.get("max-num-batched-tokens")
        seqs = GAUDI_DEFAULTS["max-num-seqs"] * factor if given is None else given
        whole = 0 if steps.is_chunked(command, facts) else max_model_len
        if text is None:
            tokens = max(usual * factor, whole, least)
            tokens = min(tokens, seqs * max_model_len) if steps.bounds_tokens else tokens
            why = "an image or a video takes as many" if tokens == least else ""
        else:
            tokens, why = parse_tokens("--max-num-batched-tokens", text), ""
        if steps.latent_is_whole and facts.has_latent_attention and whole <= tokens != max(whole, usual):
            tokens, why = max(whole, usual), "what the longest prompt takes with multi-head latent attention"
        if text is None:
            assumed.default("max-num-batched-tokens", tokens)
        seqs = assumed.default("max-num-seqs", min(seqs, tokens)) if given is None else seqs
        return cls(tokens, seqs, (f"max_num_batched_tokens {tokens:,}: {why}",) if why else ())


_AT_MOST = "at most as many: vLLM refuses to start otherwise"
_Refusal = tuple[bool, str, str, str]


def _refusals(
    command: VllmCommand, steps: StepRules, release: str, step: _Step, max_model_len: int
) -> Iterator[_Refusal]:
    """Yields what a release may not start with: whether it does not, the flag, the problem, and the remedy."""
    tokens, seqs = step.tokens, step.max_num_seqs
    problem = f"is {seqs}, more than --max-num-batched-tokens {tokens}"
    # SchedulerConfig in vllm/config/scheduler.py, in every release since 0.7.
    yield seqs > tokens, "max-num-seqs", problem, _AT_MOST
    if steps.checks_drafts and command.switches.get("enable-lora", False):
        drafts = num_speculative_tokens(command.values)
        needed = seqs * (drafts + 1) if drafts else 0
        problem = f"is {tokens}: with adapters, {drafts} drafts of each of {seqs} sequences must fit"
        yield tokens < needed, "max-num-batched-tokens", problem, f"at least {needed}"
    if command.switches.get("async-scheduling", False):
        table = parse_table("speculative-config", command.values.get("speculative-config", "{}"))
        method = str(table.get("method") or table.get("model"))
        stages = _integer(command, "pipeline-parallel-size") or 1
        for is_wrong, other in (
            (
                bool(table) and (method in _NOT_AHEAD or not steps.drafts_ahead),
                f"speculation by {shown(method)}",
            ),
            (not steps.pipelines_ahead and stages > 1, f"{stages} stages of a pipeline"),
        ):
            problem = f"does not go with {other} in vLLM {release}"
            yield is_wrong, "async-scheduling", problem, "leave it out: vLLM then leaves it off"
    for name in ("max-num-partial-prefills", "max-long-partial-prefills"):
        count = _integer(command, name)
        is_wrong = not steps.has_partial_prefills and count not in (None, 1)
        yield is_wrong, name, f"is {count}: vLLM {release} does not start with that", "leave it out"
    text = command.values.get("long-prefill-token-threshold", "0")
    is_wrong = parse_integer("--long-prefill-token-threshold", text) > max_model_len
    problem = f"is {text}, more than --max-model-len {max_model_len}"
    yield steps.bounds_threshold and is_wrong, "long-prefill-token-threshold", problem, _AT_MOST
    mode, modes = command.values.get("performance-mode"), _MODES if steps.has_modes else ()
    remedy = f"one of {', '.join(modes)}" if modes else f"leave it out: vLLM {release} does not know it"
    yield mode is not None and mode not in modes, "performance-mode", f"is {shown(mode or '')}", remedy
    size, sizes = _integer(command, "block-size"), steps.block_sizes
    is_wrong, remedy = size not in (None, *sizes), f"one of {', '.join(map(str, sizes))}"
    yield bool(sizes) and is_wrong, "block-size", f"is {size}, which vLLM {release} does not take", remedy


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
