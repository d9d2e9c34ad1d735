"""From a spec to everything that must be warm: a pure function, with the same answer on every machine."""

from __future__ import annotations

from collections.abc import Iterator

from aotgaudi.bucketing.inputs import BucketingInputs
from aotgaudi.bucketing.versions import decode_buckets, find_strategy, prompt_buckets
from aotgaudi.manifest.entries import DecodeEntry, DefragEntry, Entry, PromptEntry, SamplerEntry
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.defrag import DefragSpec
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.sampler import SamplerSpec

_FEWEST_BLOCKS_TO_EXCHANGE = 2


def enumerate_entries(spec: BuildSpec) -> tuple[Entry, ...]:
    """Returns every entry of a spec, kind by kind: prompt, decode, sampler, defrag.

    Prompt and decode entries ascend; sampler and defrag entries are in warm-up order.

    Raises:
        SpecError: the limits leave no prompt or no decode entry.
    """
    strategy = find_strategy(spec.bucketing.version, spec.bucketing.strategy)
    inputs = BucketingInputs.from_spec(spec.limits, spec.bucketing)
    prompt = [PromptEntry(*bucket) for bucket in prompt_buckets(inputs, strategy)]
    decode = [DecodeEntry(*bucket) for bucket in decode_buckets(inputs, strategy)]
    sampler = _sampler_entries({entry.batch_size for entry in decode}, spec.sampler)
    return (*prompt, *decode, *sampler, *_defrag_entries(spec.limits, spec.defrag))


def _sampler_entries(decode_batch_sizes: set[int], sampler: SamplerSpec) -> Iterator[SamplerEntry]:
    """Yields all settings for each batch size: after a change of the batch's composition, then without one.

    Batch size 1 is also what a prompt step samples. Order and choice are those of vllm-gaudi's sampler
    warm-up (vllm_gaudi/v1/worker/hpu_model_runner.py 5343-5464).
    """
    for batch_size in sorted({1} | decode_batch_sizes):
        for batch_changed in (True, False):
            for setting in sampler.settings:
                yield SamplerEntry(
                    batch_size, setting.temperature, setting.top_p, setting.top_k, batch_changed
                )


def _defrag_entries(limits: ServingLimits, defrag: DefragSpec) -> Iterator[DefragEntry]:
    if defrag.enabled and limits.num_blocks >= _FEWEST_BLOCKS_TO_EXCHANGE:
        yield from map(DefragEntry, defrag.padded_swaps)
