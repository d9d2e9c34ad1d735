"""Tail pages, by traced programs: units are the same, texts are the same, and memory is less."""

from __future__ import annotations

import functools
from random import Random
from typing import Any

import pytest

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bundle.programs import ProgramChecks
from aotgaudi.engine.blocks import BlockPool
from aotgaudi.engine.core import EngineCore
from aotgaudi.engine.detokenizer import IncrementalDetokenizer
from aotgaudi.engine.output import OutputStream
from aotgaudi.engine.request import Request
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.engine.scheduler import Scheduler
from aotgaudi.engine.stats import EngineStats
from aotgaudi.entries import DecodeEntry, DefragEntry, PromptEntry, SamplerEntry
from aotgaudi.errors import SpecError
from aotgaudi.graphs.program import Call, Program
from aotgaudi.graphs.trace import trace
from aotgaudi.spec.cache_rows import fewest_tail_pages, tail_reach
from aotgaudi.spec.defrag import DefragSpec
from aotgaudi.spec.limits import ServingLimits
from tests.golden.test_unit_texts import V4_LAYERS
from tests.integration.models import BLOCK_SIZE, reference, spec_of
from tests.unit.graphs.test_trace import eager_runner

pytestmark = pytest.mark.slow

CHUNK, DECODE, SWAP = PromptEntry(1, 32, 9), DecodeEntry(3, 1, 28), DefragEntry(2)
SAMPLERS = tuple(SamplerEntry(size, 0.0, 1.0, 0, True) for size in (1, 3))
PAGES = 17
LIMITS = ServingLimits(
    max_num_seqs=3,
    max_num_prefill_seqs=1,
    max_num_batched_tokens=32,
    max_model_len=144,
    block_size=BLOCK_SIZE,
    num_blocks=16,
)


def prompts() -> list[list[int]]:
    """Prompts of 17 to 108 tokens; all but the last begin with the same 37."""
    random = Random(5)
    common = random.choices(range(3, 320), k=37)
    return [*([*common, *random.choices(range(3, 320), k=n)] for n in (42, 71, 50, 4, 60, 1)), common[20:]]


@functools.lru_cache(maxsize=4)
def runner_of(architecture: str, num_tail_pages: int | None) -> Any:
    return eager_runner(
        reference(architecture), (CHUNK, DECODE, SWAP, *SAMPLERS), num_tail_pages=num_tail_pages
    )


def served(
    architecture: str, tail_reach: int | None, prefix_caching: bool = True
) -> tuple[list[tuple[int, ...]], EngineStats]:
    """The greedy texts of all prompts, served together in little memory."""
    limits = LIMITS
    if tail_reach is not None:
        num = fewest_tail_pages(LIMITS, tail_reach)
        assert num < LIMITS.num_blocks
        limits = LIMITS.model_copy(update={"num_tail_pages": num})
    scheduler = Scheduler(
        limits,
        BucketTable((CHUNK,), (DECODE,)),
        BlockPool(limits.num_blocks),
        prefix_caching=prefix_caching,
        tail_reach=tail_reach,
    )
    runner = runner_of(architecture, None if tail_reach is None else PAGES)
    core = EngineCore(scheduler, runner, defrag=DefragSpec(threshold=1, padded_swaps=(2,)))
    requests = [
        Request(
            request_id=f"r{i}",
            prompt_token_ids=prompt,
            params=SamplingParams(temperature=0.0, ignore_eos=True),
            max_tokens=32,
            seed=0,
        )
        for i, prompt in enumerate(prompts())
    ]
    for request in requests:
        core.add(OutputStream(request, IncrementalDetokenizer(str), lambda _: None))
    while core.step():
        scheduler.check_integrity()
    return [tuple(request.token_ids) for request in requests], core.stats()


@pytest.mark.parametrize(
    "architecture", ["gemma3_text", pytest.param("deepseek_v4", marks=pytest.mark.nightly)]
)
def test_texts_are_the_same_under_preemption_prefix_hits_and_exchanges(architecture: str) -> None:
    texts, _ = served(architecture, None)

    with_tails, stats = served(architecture, tail_reach(spec_of(reference(architecture)).model))

    assert with_tails == texts
    assert stats.num_preemptions > 0
    assert stats.num_defrag_swaps > 0
    assert stats.num_prefix_hits > 0


@pytest.mark.parametrize(
    ("architecture", "tails"),
    [("gemma3_text", {"0", "2"}), ("gpt_oss", {"0", "2"}), ("mistral", {"0", "1", "2"})],
)
def test_units_are_the_same_with_tail_pages(architecture: str, tails: set[str]) -> None:
    model = reference(architecture)
    without, with_tails = spec_of(model), spec_of(model, num_tail_pages=PAGES)

    plain = trace(DECODE, without.model, without.limits)
    paged = trace(DECODE, with_tails.model, with_tails.limits)

    assert [piece.text for piece in paged.pieces] == [piece.text for piece in plain.pieces]
    assert {cache.name for cache in paged.caches if cache.has_pages} == tails
    in_pages = {piece.inputs for piece in paged.pieces if "step:tail_slots" in piece.inputs}
    assert {name for inputs in in_pages for name in inputs if name.startswith("kv:")} == {
        f"kv:{n}" for n in tails
    }
    assert not any({"step:slots", "step:block_list"} & set(inputs) for inputs in in_pages)


def test_layers_with_entries_have_tokens_and_what_entries_are_made_of_in_pages() -> None:
    """The texts, and that those of all other pieces are the same, are in tests/golden/test_unit_texts.py."""
    with_tails = spec_of(reference("deepseek_v4", **V4_LAYERS), num_tail_pages=PAGES)

    paged = trace(DECODE, with_tails.model, with_tails.limits)

    assert {cache.name: cache.has_pages for cache in paged.caches} == {
        **dict.fromkeys(("0", "1", "1.raw", "2", "2.raw"), True),
        **dict.fromkeys(("1.entries", "1.index", "2.entries"), False),
    }
    in_two = [piece for piece in paged.pieces if piece.text.startswith('"aotgaudi.graph/3"\n')]
    assert len({piece.text for piece in in_two}) == 2, "the two kinds of layer with entries"
    for piece in in_two:
        bound = {name for name in piece.inputs if name.startswith("step:")}
        assert "step:slots" not in bound
        assert not any(name.startswith("step:windows_r") for name in bound)
        assert "step:tail_slots" in bound
    calls = tuple(
        Call(unit=f"{n:064x}", inputs=p.inputs, outputs=p.outputs) for n, p in enumerate(paged.pieces)
    )
    program = Program(
        inputs=paged.inputs,
        weights=paged.weights,
        caches=paged.caches,
        calls=calls,
        outputs=paged.outputs,
        constants="sha256:" + 64 * "0",
    )
    checks = ProgramChecks(with_tails)
    assert (checks.problem(program), checks.entry_problem(program, DECODE)) == (None, None)
    exchanged = trace(SWAP, with_tails.model, with_tails.limits).pieces
    assert [piece.inputs[0] for piece in exchanged] == [
        f"kv:{cache.name}" for cache in paged.caches if not cache.has_pages
    ]


def test_a_model_that_always_reads_all_has_no_tail_pages() -> None:
    spec = spec_of(reference("qwen2", sliding_window=20, use_sliding_window=True), num_tail_pages=PAGES)

    with pytest.raises(SpecError, match=r"every layer of 'qwen2' keeps what is always read"):
        trace(DECODE, spec.model, spec.limits)
