"""Whether a manifest has an entry for every step that its server can form: prompts, decodes, sampling, exchanges.

`aotgaudi.bucketing.proof` proves prompts and decodes. This module adds the rest:

* **Sampler.** A step samples 1 .. ``min(max_num_seqs, num_blocks)`` rows, under the signature that its mix of requests
  needs: that of one setting, or a join of several. The engine takes the sampler of the step's own batch size if there is
  one, else the smallest that is large enough. So a number of rows is covered under a signature if some size is at least as
  large, and every such size has an entry that serves the signature. ``spec/sampler_signature.py`` shows that every legal
  request has one of these signatures.
* **Hyper-connections.** A step of our own engine calls the unit of its token count's class. So each count from 1 to that of
  the largest step entry is covered if its class has an entry for attention and one for the feed-forward part.
* **Defrag.** Exchanges are cut into runs of at most the largest padded size. A run takes the next padded size of the
  spec, which must have an entry. `most_exchanges` bounds the exchanges of one defragmentation.

A target that runs without graphs (execution mode ``eager``) needs nothing warm. The proof does not cover unified and
vision entries, nor the hyper-connections of other servers. Our scheduler forms no unified steps (a unified table covers none
of its prompts and decodes), and separate rules determine the other two.

The proof is about the scheduler that the spec describes. For vLLM's scheduler there are two statements. `coverage_of` is
about the entries of the manifest. `coverage_of_server` is about the table that the server itself makes and keeps, under its
own look-up. `left_out` names what neither covers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from aotgaudi.bucketing.bucket_file import DYNAMIC_SHAPES_VARIABLE
from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.mhc_splits import StepSplits
from aotgaudi.bucketing.proof import Coverage, Hole, PhaseCoverage, ReachableSteps, prove_steps, uncovered
from aotgaudi.bucketing.reachable import Counterexample, ReachableDecodes
from aotgaudi.bucketing.speculation import is_modelled
from aotgaudi.bucketing.strategy import Bucket, BucketingInputs
from aotgaudi.bucketing.upstream import UpstreamAnswer, cold_decodes, cold_prompts
from aotgaudi.bucketing.versions import (
    VERSIONS,
    GaudiVersion,
    find_strategy,
    find_version,
    open_upstream_lookup,
)
from aotgaudi.entries import DecodeEntry, DefragEntry, MhcEntry, PromptEntry, SamplerEntry
from aotgaudi.errors import counted
from aotgaudi.gaudi.live_graphs import DEFAULT_MAX_LOGPROBS, LiveGraphs, Situation, live_graphs
from aotgaudi.manifest.enumerate import MHC_SUBLAYERS, most_exchanges
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.sampler_signature import SamplerSignature, missing_joins
from aotgaudi.spec.scheduler import SchedulerSpec

_UNPROVED_KINDS = ("unified", "vision", "mhc")
"""Kinds whose entries must all be built. For ``mhc`` something is proved if our own engine runs the steps."""


@dataclass(frozen=True, slots=True)
class ServerCoverage:
    """What the table that a vLLM server makes for itself covers, and what happens at the smallest step that it misses.

    `fallback`: the bucket that upstream adds for that step and compiles while a request waits; None if there is no such
    step, or if the version's fallback is unknown. `cold`: the buckets of the table that upstream's warm-up is known not to
    compile. A step that is looked up to one of them compiles it, too.
    """

    coverage: Coverage
    holes: tuple[Hole, ...]
    fallback: Bucket | None
    cold: tuple[Bucket, ...] = ()


@dataclass(frozen=True, slots=True)
class _Part:
    phase: PhaseCoverage
    holes: tuple[Counterexample, ...]


def reachable_of(spec: BuildSpec, scheduler: SchedulerSpec | None = None) -> ReachableSteps:
    """Returns the steps that a scheduler can form under a spec's limits, by default the spec's own."""
    return ReachableSteps.of(spec.limits, spec.bucketing, scheduler or spec.scheduler, spec.parallel)


def coverage_of(manifest: Manifest, scheduler: SchedulerSpec | None = None) -> Coverage:
    """Returns what the entries of `manifest` cover of the steps that can be formed under its limits.

    `scheduler` replaces the one that the manifest's spec describes. A server passes its own.
    """
    spec = manifest.spec
    splits = StepSplits.of(spec)
    unproved = tuple(
        kind for kind in _UNPROVED_KINDS if manifest.of_kind(kind) and not (splits and kind == MhcEntry.kind)
    )
    if spec.target.execution_mode == "eager":
        return Coverage((), None, unproved)
    scheduler = scheduler or spec.scheduler
    if scheduler.engine == "vllm" and spec.bucketing.strategy == "unified":
        return Coverage((), None, unproved)  # The server forms unified steps only.
    reachable = reachable_of(spec, scheduler)
    steps = prove_steps(reachable, BucketTable.from_entries(manifest.entries))
    parts = [_sampler(manifest), _defrag(manifest)]
    if splits is not None:
        parts.append(_mhc(manifest, splits))
    holes = [*([steps.smallest] if steps.smallest else []), *(hole for part in parts for hole in part.holes)]
    phases = (*steps.phases, *(part.phase for part in parts))
    return Coverage(phases, min(holes, default=None), unproved)


def coverage_of_server(spec: BuildSpec) -> ServerCoverage | None:
    """Returns what the public table covers of the steps of the vLLM server that `spec` describes.

    None if our own scheduler serves (it uses the manifest's entries), if nothing has to be warm, and with unified attention,
    which the proof does not cover.
    """
    bucketing = spec.bucketing
    if (
        spec.scheduler.engine != "vllm"
        or spec.target.execution_mode == "eager"
        or bucketing.strategy == "unified"
    ):
        return None
    strategy = find_strategy(bucketing.version, bucketing.strategy)
    inputs = BucketingInputs.from_spec(spec.limits, bucketing)
    prompts, decodes = strategy.prompt_table(inputs), strategy.decode_table(inputs)
    table = BucketTable(
        tuple(PromptEntry(*bucket) for bucket in prompts), tuple(DecodeEntry(*bucket) for bucket in decodes)
    )
    steps, version = reachable_of(spec), VERSIONS[bucketing.version]
    coverage = prove_steps(steps, table)
    cold: tuple[Bucket, ...] = ()
    if isinstance(version, GaudiVersion):
        cold = (
            *cold_prompts(prompts, version.product, version.lookup, inputs),
            *cold_decodes(decodes, version.lookup, inputs),
        )
    return ServerCoverage(
        coverage, tuple(uncovered(steps, table)), _fallback(spec, inputs, coverage.smallest), cold
    )


def _fallback(spec: BuildSpec, inputs: BucketingInputs, step: Counterexample | None) -> Bucket | None:
    """Returns the bucket that upstream adds for a step that its table does not cover."""
    bucketing = spec.bucketing
    if step is None or VERSIONS[bucketing.version].lookup is None:
        return None
    lookup = open_upstream_lookup(bucketing.version, bucketing.strategy, inputs)
    batch_size, query_len, blocks = step.shape
    if step.kind == "prompt":
        return lookup.find_prompt(batch_size, query_len, blocks).bucket
    if step.kind == "decode":
        return _at_least(blocks, lookup.find_decode(batch_size, blocks))
    return batch_size, query_len, blocks  # A speculative step's shape is that of its graph.


def _at_least(num_blocks: int, answer: UpstreamAnswer) -> Bucket:
    """Returns the bucket with at least the step's own blocks: if the bucket has too few, the step runs unpadded, not cut."""
    batch_size, query_len, padded = answer.bucket
    return batch_size, query_len, max(num_blocks, padded)


def described_scheduler(spec: BuildSpec) -> str:
    """Returns which scheduler a spec describes, and its settings."""
    if spec.scheduler.engine == "aotgaudi":
        return "aotgaudi"
    drafted = spec.bucketing.num_speculative_tokens
    parts = (
        "chunked prefill" if spec.scheduler.chunked_prefill else "whole prompts",
        "prefix caching" if spec.bucketing.prefix_caching else "no prefix caching",
        *([f"{drafted} speculative {'token' if drafted == 1 else 'tokens'}"] if drafted else []),
    )
    return f"vLLM ({', '.join(parts)})"


def live_graphs_of(spec: BuildSpec) -> tuple[LiveGraphs, ...]:
    """Returns, for each kind of traffic, whether a server that `build capture --shapes` captured compiles graphs for it."""
    situation = situation_of(spec)
    return () if situation is None else live_graphs(situation)


def situation_of(spec: BuildSpec, max_logprobs: int | None = None) -> Situation | None:
    """Returns what decides which graphs traffic may compile. `max_logprobs` is the server's flag, by default the spec's.

    None for other servers than vllm-gaudi (from v0.11.2 on) and for servers without graphs.
    """
    scheduler, bucketing = spec.scheduler, spec.bucketing
    is_plugin = scheduler.engine == "vllm" and isinstance(find_version(bucketing.version), GaudiVersion)
    is_compiled = spec.target.execution_mode != "eager" and bucketing.strategy != "unified"
    if not (is_plugin and is_compiled):
        return None
    strategy = find_strategy(bucketing.version, bucketing.strategy)
    table = strategy.decode_table(BucketingInputs.from_spec(spec.limits, bucketing))
    given = scheduler.max_logprobs if max_logprobs is None else max_logprobs
    most = DEFAULT_MAX_LOGPROBS if given is None else given
    return Situation(spec, tuple(sorted({size for size, _, _ in table})), most)


def left_out(spec: BuildSpec, *, is_static: bool = False) -> tuple[str, ...]:
    """Returns, in words, which steps of a vLLM server the proof does not cover; nothing for our own scheduler.

    `is_static`: whether the server traces static shapes even if the spec does not say so.
    """
    is_static = is_static or spec.scheduler.static_shapes
    return tuple(_left_out(spec, is_static=is_static)) if spec.scheduler.engine == "vllm" else ()


def _left_out(spec: BuildSpec, *, is_static: bool) -> Iterator[str]:
    bucketing = spec.bucketing
    num_prompts = min(spec.limits.max_num_prefill_seqs, spec.limits.max_num_seqs)
    if spec.scheduler.kv_transfer:
        yield "copies of KV blocks on their way to or from another server, whose graphs depend on how many there are"
    if spec.parallel.data_parallel_size > 1 and (spec.lora is not None or spec.vision.enabled):
        yield "dummy steps of replicas without requests, which have neither adapters nor images"
    if num_prompts > 1:
        yield f"steps of several prompts, up to {num_prompts}"
    if bucketing.prefix_caching and not bucketing.contiguous_pa:
        yield "decodes that count a shared block for each of its sequences, and so have more blocks than the cache"
    if spec.target.execution_mode == "torch_compile":
        yield from _graphs_beyond_buckets(spec, is_static=is_static)
    if bucketing.num_speculative_tokens and not is_modelled(bucketing):
        yield f"decodes of several tokens a sequence, whose shapes in {bucketing.version} are not known"
    if bucketing.num_speculative_tokens:
        yield "the graphs of the draft model, and of accepting its tokens"
    if bucketing.skip_decode_block_clamp:
        yield "what layers with recurrent states or sliding windows also need"


def _graphs_beyond_buckets(spec: BuildSpec, *, is_static: bool) -> Iterator[str]:
    """Yields, in words, the graphs of vllm-gaudi under torch.compile that depend on more than a bucket.

    Sources, at v0.26.0: vllm_gaudi/utils.py ``HPUCompileConfig`` (dynamic shapes); v1/worker/hpu_model_runner.py, where
    ``self.sampler`` is compiled, `warmup_sampler` has no batch of several settings, and a step has logits only for the
    prompts that it completes.
    """
    if find_version(spec.bucketing.version).environment.is_extension:
        return
    if not is_static:
        yield (
            f"graphs of shapes that are traced as dynamic ones: set {DYNAMIC_SHAPES_VARIABLE}=false, as --bucket-file"
            " and `build capture --shapes` do"
        )
    yield (
        "sampler graphs of batches that mix greedy and random requests, which the server's warm-up does not run;"
        " `build capture --shapes` asks for batches of each kind in each size"
    )
    if spec.scheduler.chunked_prefill:
        yield "logits of no rows, in steps whose chunks end no prompt, which the server's warm-up does not run"


def _sampler(manifest: Manifest) -> _Part:
    most = ReachableDecodes(manifest.spec.limits).max_batch_size
    settings = [setting.signature for setting in manifest.spec.sampler.settings]
    needed = sorted({*settings, *missing_joins(settings)})
    samplers: dict[int, set[SamplerSignature]] = {}
    for entry in manifest.entries:
        if isinstance(entry, SamplerEntry) and entry.batch_size:
            samplers.setdefault(entry.batch_size, set()).add(entry.signature)
    holes, num_uncovered = [], 0
    for signature in needed:
        lacking = [size for size, has in samplers.items() if not any(s.serves(signature) for s in has)]
        in_lacking = min(most, max(lacking, default=0))
        above_all = max(0, most - max(samplers, default=0))
        num_uncovered += in_lacking + above_all
        if in_lacking or above_all:
            num_rows = 1 if in_lacking else most - above_all + 1
            text = f"sampling {counted(num_rows, 'row')} by {signature}"
            holes.append(Counterexample(num_rows, "sampler", (num_rows,), text))
    return _Part(PhaseCoverage("sampler", "steps", most * len(needed), num_uncovered), tuple(holes))


def _mhc(manifest: Manifest, splits: StepSplits) -> _Part:
    steps = (entry.num_tokens for entry in manifest.entries if isinstance(entry, (PromptEntry, DecodeEntry)))
    most = max(steps, default=0)
    warm: dict[str, set[int]] = {sublayer: set() for sublayer in MHC_SUBLAYERS}
    for entry in manifest.entries:
        if isinstance(entry, MhcEntry) and entry.sublayer in warm:
            warm[entry.sublayer].add(entry.n_splits)
    has = set.intersection(*warm.values())
    missing = [bucket for bucket in splits.buckets(most) if bucket.n_splits not in has]
    holes = []
    for bucket in missing:
        first = bucket.first_token
        text = f"hyper-connections of {counted(first, 'token')} in {counted(bucket.n_splits, 'part')}"
        holes.append(Counterexample(first, "mhc", (first,), text))
    num_uncovered = sum(bucket.last_token - bucket.first_token + 1 for bucket in missing)
    return _Part(PhaseCoverage("mhc", "token counts", most, num_uncovered), tuple(holes))


def _defrag(manifest: Manifest) -> _Part:
    limits, defrag = manifest.spec.limits, manifest.spec.defrag
    sizes = defrag.padded_swaps if defrag.enabled else ()
    most = max(0, min(most_exchanges(manifest.spec), max(sizes, default=0)))
    has = {entry.padded_swaps for entry in manifest.entries if isinstance(entry, DefragEntry)}
    runs = [
        (below + 1, min(size, most))
        for below, size in zip((0, *sizes), sizes, strict=False)
        if size not in has
    ]
    missing = [(first, last) for first, last in runs if first <= last]
    holes = []
    for first, _ in missing:
        text = f"exchanging {counted(first, 'pair')} of blocks"
        holes.append(Counterexample(first * limits.block_size, "defrag", (first,), text))
    num_uncovered = sum(last - first + 1 for first, last in missing)
    return _Part(PhaseCoverage("defrag", "steps", most, num_uncovered), tuple(holes))
