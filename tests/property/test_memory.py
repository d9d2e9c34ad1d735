"""KV caches take the bytes that are computed, and the blocks that a spec has by default are enough for its sequences."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.engine.blocks import BlockPool
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.engine.scheduler import Scheduler
from aotgaudi.graphs.dialect import dialect_of
from aotgaudi.graphs.forms import form_of
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.memory import KvCache, kv_cache_bytes
from aotgaudi.runtime.load import need_of
from aotgaudi.runtime.memory import cache_memory
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.parse import spec_from_json
from tests.driving import request_of, step_once
from tests.integration.models import ARCHITECTURES, config_of
from tests.specs import LIMITS, spec_of, spec_tables


def spec_without_num_blocks(**limits: int) -> BuildSpec:
    tables = spec_tables(limits=limits)
    del tables["limits"]["num_blocks"]
    return spec_from_json(tables)


class _Kept:
    """What stays of a program: only its caches."""

    def __init__(self, caches: Any) -> None:
        self.weights, self.caches = (), caches


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(ARCHITECTURES)),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.sampled_from([16, 32, 128]),
    st.integers(1, 60),
)
def test_caches_take_what_is_computed(architecture: str, dtype: str, block_size: int, more: int) -> None:
    limits = {"block_size": block_size, "max_num_batched_tokens": 128, "num_blocks": 8 + more}
    spec = spec_of(model={"dtype": dtype, "config": config_of(architecture)}, limits=limits)
    caches = form_of(dialect_of(spec)).caches(spec.model, spec.limits)

    allocated = sum(memory.nbytes for memory in cache_memory(caches, spec.limits.num_blocks).values())

    assert kv_cache_bytes(spec) == allocated
    assert need_of([_Kept(caches)], spec.limits.num_blocks).cache == KvCache.of(spec)


@given(st.integers(8, 200), st.sampled_from(["float32", "bfloat16"]))
def test_caches_of_a_card_take_what_is_computed(num_blocks: int, dtype: str) -> None:
    spec = spec_of(
        model={"dtype": dtype, "config": config_of("llama")},
        limits={"num_blocks": num_blocks},
        target={"backend": "hpu"},
    )
    caches = form_of(dialect_of(spec)).caches(spec.model, spec.limits)

    assert need_of([_Kept(caches)], num_blocks).cache == KvCache.of(spec)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(17, 48), st.integers(1, 17), st.booleans())
def test_the_default_number_of_blocks_is_enough_for_all_sequences_at_their_longest(
    num_seqs: int, length: int, block_size: int, is_short: bool
) -> None:
    sizes = {"max_num_seqs": num_seqs, "max_model_len": length, "block_size": block_size}
    spec = spec_without_num_blocks(**sizes)
    limits, pool = spec.limits, BlockPool(spec.limits.num_blocks)
    scheduler = Scheduler(limits, BucketTable.from_entries(Manifest.of(spec).entries), pool)
    prompt = 1 if is_short else length - 1
    for index in range(num_seqs):
        params = SamplingParams(max_tokens=length - prompt, ignore_eos=True)
        request = request_of((1,) * prompt, length - prompt, params, name=f"r{index}")
        scheduler.add(request)
    while scheduler.has_work:
        step_once(scheduler)

    assert scheduler.num_preemptions == 0
    assert limits.num_blocks == num_seqs * limits.max_blocks_per_seq


def test_vllm_gets_one_more_and_a_number_that_is_given_stays() -> None:
    tables = spec_tables(scheduler={"engine": "vllm"})
    del tables["limits"]["num_blocks"]

    assert spec_from_json(tables).limits.num_blocks == 2 * 8 + 1
    assert spec_of().limits.num_blocks == LIMITS["num_blocks"]
    assert Manifest.of(spec_without_num_blocks()).id == Manifest.of(spec_of(limits={"num_blocks": 16})).id
