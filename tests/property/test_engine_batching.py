"""Whatever the engine does to share the device, every request gets the tokens that it would get alone.

The runner here has a KV cache of (token, position) pairs. It answers with a hash of what a row's block
table leads to, and of nothing else. So a wrong block table, slot, chunk start, position, noise, exchange or
relocation gives other tokens. Freed blocks keep their contents, as on a device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.engine.admission import resolve_max_tokens
from aotgaudi.engine.blocks import BlockPool
from aotgaudi.engine.core import EngineCore
from aotgaudi.engine.defragmenter import should_defragment
from aotgaudi.engine.detokenizer import IncrementalDetokenizer
from aotgaudi.engine.output import ErrorEvent, Event, OutputStream, ScoredPrompt, TokenEvent
from aotgaudi.engine.request import Request
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.engine.scheduler import Scheduler
from aotgaudi.engine.steps import (
    DecodeRow,
    DecodeStep,
    DefragStep,
    PromptRow,
    PromptStep,
    SamplingRow,
    Scoring,
    Step,
    StepResult,
    TokenLogprobs,
)
from aotgaudi.entries import DecodeEntry, Entry, PromptEntry
from aotgaudi.errors import RequestError
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.policy import Policy
from aotgaudi.spec.scheduler import DefragSpec
from tests.driving import request_of, serving_limits

VOCAB_SIZE = 40
EOS = 3


def next_token(known: Sequence[tuple[int, int]], sampling: SamplingRow) -> int:
    """The "model": a hash of all (token, position) pairs, and of the noise unless it is greedy."""
    params = sampling.params
    noise = sampling.noise if params.temperature > 0 else None
    text = repr((list(known), params.temperature, params.top_p, params.top_k, noise))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % VOCAB_SIZE


def alone(prompt: Sequence[int], params: SamplingParams, max_tokens: int, seed: int) -> tuple[int, ...]:
    """What a request gets on a server without batches, blocks and chunks."""
    draws, tokens = Random(seed), list(prompt)
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    for _ in range(max_tokens):
        sampling = SamplingRow(params, draws.random())
        tokens.append(next_token([(token, i) for i, token in enumerate(tokens)], sampling))
        if tokens[-1] in ends:
            break
    return tuple(tokens[len(prompt) :])


def seconds_of(entry: Entry) -> float:
    """What a step takes: all weights are read, then tokens are computed."""
    if isinstance(entry, PromptEntry):
        return 4.0 + entry.batch_size * entry.query_len
    assert isinstance(entry, DecodeEntry)
    return 4.0 + entry.batch_size + entry.num_blocks / 4


class CacheRunner:
    """A device. It checks that every step fits its entry. `now` is its time, which steps take."""

    def __init__(self, limits: ServingLimits, *, is_contiguous: bool = False) -> None:
        self._is_contiguous = is_contiguous
        self.decodes: list[DecodeStep] = []
        self.on_run: Callable[[], None] = lambda: None
        self.now = 0.0
        self._limits = limits
        self._cache: list[list[tuple[int, int]]] = [
            [(-1, -1)] * limits.block_size for _ in range(limits.num_blocks + 1)
        ]
        self.kinds: list[str] = []

    def run(self, step: Step) -> StepResult:
        self.kinds.append(step.entry.kind)
        self.on_run()
        self.now += seconds_of(step.entry)
        if isinstance(step, PromptStep):
            self._check_prompt(step)
            return self._answer([(row.start, row.token_ids, row) for row in step.rows])
        self._check_decode(step)
        return self._answer([(row.position, (row.token_id,), row) for row in step.rows])

    def exchange(self, step: DefragStep) -> None:
        assert 0 < len(step.moves) <= step.entry.padded_swaps
        named = [block for move in step.moves for block in move]
        assert len(set(named)) == len(named)
        assert 0 not in named
        for a, b in step.moves:
            self._cache[a], self._cache[b] = self._cache[b], self._cache[a]

    def clear(self, blocks: Sequence[int]) -> None:
        raise AssertionError("nothing was invalid")

    def _answer(self, rows: Sequence[tuple[int, Sequence[int], PromptRow | DecodeRow]]) -> StepResult:
        for start, token_ids, row in rows:
            for position, token_id in enumerate(token_ids, start):
                block, offset = self._slot(row, position)
                self._cache[block][offset] = (token_id, position)
        sampled = [self._sample(row, start + len(token_ids)) for start, token_ids, row in rows]
        scored = {
            number: tuple(self._score(row, row.scoring))
            for number, (_, _, row) in enumerate(rows)
            if isinstance(row, PromptRow) and row.scoring is not None
        }
        return StepResult(sampled, prompt_logprobs=scored)

    def _score(self, row: PromptRow, scoring: Scoring) -> Iterator[TokenLogprobs]:
        """A log-probability that says which token it is of, and after how many."""
        assert scoring.first >= 0
        assert scoring.first + len(scoring.targets) <= len(row.token_ids)
        for position, target in enumerate(scoring.targets, row.start + scoring.first + 1):
            yield TokenLogprobs(-float(position), ((target, 0.0),) * scoring.num_top)

    def _sample(self, row: PromptRow | DecodeRow, length: int) -> int | None:
        if row.sampling is None:
            return None
        slots = [self._slot(row, position) for position in range(length)]
        return next_token([self._cache[block][offset] for block, offset in slots], row.sampling)

    def _slot(self, row: PromptRow | DecodeRow, position: int) -> tuple[int, int]:
        block = row.block_table[position // self._limits.block_size]
        assert 1 <= block <= self._limits.num_blocks
        return block, position % self._limits.block_size

    def _check_prompt(self, step: PromptStep) -> None:
        entry, size = step.entry, self._limits.block_size
        assert 1 <= len(step.rows) <= min(entry.batch_size, self._limits.max_num_prefill_seqs)
        assert sum(len(row.token_ids) for row in step.rows) <= self._limits.max_num_batched_tokens
        for row in step.rows:
            assert -(-row.start // size) <= entry.num_ctx_blocks
            assert 1 <= len(row.token_ids) <= entry.query_len
            assert len(row.block_table) == -(-(row.start + len(row.token_ids)) // size)

    def _check_decode(self, step: DecodeStep) -> None:
        assert 1 <= len(step.rows) <= min(step.entry.batch_size, self._limits.max_num_seqs)
        self.decodes.append(step)
        blocks = [block for row in step.rows for block in row.block_table]
        assert (max(blocks) if self._is_contiguous else len(blocks)) <= step.entry.num_blocks
        assert not self._is_contiguous or len(set(blocks)) == len(blocks)
        for row in step.rows:
            assert len(row.block_table) == row.position // self._limits.block_size + 1


@dataclass
class Client:
    """Who sent a request, and what came back."""

    request: Request
    expected: tuple[int, ...]
    events: list[Event] = field(default_factory=list)
    stream: OutputStream = field(init=False)

    def __post_init__(self) -> None:
        detokenizer = IncrementalDetokenizer(lambda ids: "".join(chr(ord("0") + i) for i in ids))
        self.stream = OutputStream(self.request, detokenizer, self.events.append)

    def check(self) -> None:
        """Exactly one last event; and the expected tokens, or, when aborted, the first of them."""
        events = [event for event in self.events if isinstance(event, TokenEvent)]
        assert len(events) == len(self.events), [e for e in self.events if isinstance(e, ErrorEvent)]
        assert [event.finish_reason is not None for event in events] == [False] * (len(events) - 1) + [True]
        tokens = tuple(token for event in events for token in event.token_ids)
        self._check_prompt([event.prompt for event in events])
        assert events[-1].usage is not None
        assert events[-1].usage.num_output_tokens == len(tokens)
        if events[-1].finish_reason == "abort":
            assert tokens == self.expected[: len(tokens)]
            return
        assert tokens == self.expected
        is_stop = events[-1].finish_reason == "stop"
        shown = tokens[:-1] if is_stop else tokens
        assert is_stop or len(tokens) == self.request.max_tokens
        assert "".join(event.text for event in events) == "".join(chr(ord("0") + i) for i in shown)

    def _check_prompt(self, prompts: Sequence[ScoredPrompt | None]) -> None:
        """The first token comes with each log-probability of the prompt, once, if they were asked for."""
        num_top = self.request.params.prompt_logprobs
        assert not any(prompts[1:])
        if num_top is None or not self.request.num_output_tokens:
            assert prompts[0] is None
            return
        assert prompts[0] is not None
        token_ids = prompts[0].token_ids
        assert token_ids == tuple(self.request.token_ids[: self.request.num_prompt_tokens])
        assert prompts[0].logprobs == tuple(
            TokenLogprobs(-float(position), ((token_id, 0.0),) * num_top)
            for position, token_id in enumerate(token_ids[1:], 1)
        )


def make_client(
    name: str,
    prompt: tuple[int, ...],
    params: SamplingParams,
    seed: int,
    limits: ServingLimits,
    cache_salt: str = "",
) -> Client:
    max_tokens = resolve_max_tokens(len(prompt), params, limits)
    request = request_of(prompt, max_tokens, params, name=name, seed=seed, cache_salt=cache_salt)
    return Client(request, alone(prompt, params, max_tokens, seed))


@st.composite
def closed_tables(draw: st.DrawFn, limits: ServingLimits, is_contiguous: bool = False) -> BucketTable:
    """A table that covers every single row; what else it covers is left to chance."""
    blocks = limits.max_blocks_per_seq
    most = limits.num_blocks if is_contiguous else blocks
    prompts = st.builds(PromptEntry, st.integers(1, 4), st.integers(1, 20), st.integers(0, blocks))
    decodes = st.builds(DecodeEntry, st.integers(1, 6), st.just(1), st.integers(1, limits.num_blocks))
    return BucketTable(
        (PromptEntry(1, limits.block_size, blocks), *draw(st.lists(prompts, max_size=4))),
        (DecodeEntry(1, 1, most), *draw(st.lists(decodes, max_size=4))),
    )


def sampling_params() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.7]),
        top_k=st.sampled_from([0, 5]),
        max_tokens=st.one_of(st.none(), st.integers(1, 12)),
        stop_token_ids=st.sampled_from([(), (7, 8)]),
        ignore_eos=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, 0, 1]),
    )


alike = st.builds(
    lambda length, end: (*range(10, 10 + length), *end),
    st.integers(1, 16),
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4),
)
"""Prompts that begin alike."""
prompts = st.one_of(
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20).map(tuple),
    alike,
)
defrag_specs = st.builds(
    DefragSpec, threshold=st.integers(1, 3), padded_swaps=st.sampled_from([(1,), (2, 4)])
)


class SharedEngine(RuleBasedStateMachine):
    """Clients come and go while the engine steps."""

    @initialize(
        data=st.data(),
        limits=serving_limits(most_seqs=6),
        defrag=defrag_specs,
        prefix_caching=st.booleans(),
        policy=st.sampled_from(["latency", "throughput"]),
        is_contiguous=st.booleans(),
    )
    def start(
        self,
        data: st.DataObject,
        limits: ServingLimits,
        defrag: DefragSpec,
        prefix_caching: bool,
        policy: Policy,
        is_contiguous: bool,
    ) -> None:
        self.limits = limits
        self.runner = CacheRunner(limits, is_contiguous=is_contiguous)
        table = data.draw(closed_tables(limits, is_contiguous))
        pool = BlockPool(limits.num_blocks)
        scheduler = Scheduler(
            limits,
            table,
            pool,
            eos_token_ids=(EOS,),
            prefix_caching=prefix_caching and not is_contiguous,
            policy=policy,
            is_contiguous=is_contiguous,
        )
        self.core = EngineCore(scheduler, self.runner, defrag=defrag, clock=lambda: self.runner.now)
        self.clients: list[Client] = []

    @rule(
        prompt=prompts,
        params=sampling_params(),
        seed=st.integers(0, 5),
        cache_salt=st.sampled_from(["", "", "other"]),
    )
    def arrive(self, prompt: tuple[int, ...], params: SamplingParams, seed: int, cache_salt: str) -> None:
        asked = len(prompt) + (params.max_tokens or 1)
        fits_cache = asked - 1 <= self.limits.num_blocks * self.limits.block_size
        try:
            client = make_client(f"r{len(self.clients)}", prompt, params, seed, self.limits, cache_salt)
        except RequestError:
            assert asked > self.limits.max_model_len or not fits_cache
            return
        assert asked <= self.limits.max_model_len
        assert fits_cache
        self.clients.append(client)
        self.core.add(client.stream)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.core.abort(data.draw(st.sampled_from(self.clients)).stream)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def leave_while_a_step_runs(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(self.clients)).stream
        self.runner.on_run = lambda: self.core.abort(stream)
        self.core.step()
        self.runner.on_run = lambda: None
        self.core.scheduler.check_integrity()

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.core.step()
            self.core.scheduler.check_integrity()

    @invariant()
    def seats_are_respected(self) -> None:
        assert len(self.core.scheduler.running) <= self.limits.max_num_seqs

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        bound = 50 * (1 + sum(c.request.num_prompt_tokens + c.request.max_tokens for c in self.clients))
        for _ in range(bound):
            if not self.core.step():
                break
        assert not self.core.scheduler.has_work, f"somebody starves: {bound} steps were not enough"
        for client in self.clients:
            client.check()
        assert self.core.scheduler.pool.num_free == self.limits.num_blocks
        assert len(self.core.take_ended()) == len(self.clients)


SharedEngine.TestCase.settings = settings(deadline=None, stateful_step_count=25)
TestSharedEngine = SharedEngine.TestCase


@settings(deadline=None)
@given(
    limits=serving_limits(most_seqs=6),
    data=st.data(),
    asked=st.lists(st.tuples(prompts, sampling_params()), min_size=2, max_size=6),
)
def test_together_gives_what_one_at_a_time_gives(
    limits: ServingLimits, data: st.DataObject, asked: list[tuple[tuple[int, ...], SamplingParams]]
) -> None:
    """The same engine code on both sides: all at once in little memory, or each alone in plenty."""
    table = data.draw(closed_tables(limits))
    prefix_caching = data.draw(st.booleans())
    plenty = limits.model_copy(update={"num_blocks": 64, "max_num_seqs": 1})

    together = _serve(asked, limits, table, at_once=True, prefix_caching=prefix_caching)

    assert together == _serve(asked, plenty, table, at_once=False, admitted_by=limits)


def _serve(
    asked: list[tuple[tuple[int, ...], SamplingParams]],
    limits: ServingLimits,
    table: BucketTable,
    *,
    at_once: bool,
    admitted_by: ServingLimits | None = None,
    prefix_caching: bool = False,
) -> dict[str, tuple[int, ...]]:
    pool = BlockPool(limits.num_blocks)
    scheduler = Scheduler(limits, table, pool, eos_token_ids=(EOS,), prefix_caching=prefix_caching)
    runner = CacheRunner(limits)
    core = EngineCore(scheduler, runner, clock=lambda: runner.now)
    clients: list[Client] = []
    for index, (prompt, params) in enumerate(asked):
        try:
            clients.append(make_client(f"r{index}", prompt, params, index, admitted_by or limits))
        except RequestError:
            continue
        core.add(clients[-1].stream)
        while not at_once and core.step():
            pass
    while core.step():
        pass
    return {
        client.request.request_id: tuple(client.request.token_ids[client.request.num_prompt_tokens :])
        for client in clients
    }


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_the_machine_reaches_preemption_defragmentation_and_chunks(prefix_caching: bool) -> None:
    """A fixed crowd in which all that could go wrong happens: else the properties above would be empty."""
    limits = ServingLimits(
        max_num_seqs=4,
        max_num_prefill_seqs=2,
        max_num_batched_tokens=6,
        max_model_len=24,
        block_size=2,
        num_blocks=14,
    )
    table = BucketTable((PromptEntry(2, 6, 12),), (DecodeEntry(3, 1, 14),))
    scheduler = Scheduler(limits, table, BlockPool(14), eos_token_ids=(EOS,), prefix_caching=prefix_caching)
    runner = CacheRunner(limits)
    core = EngineCore(
        scheduler, runner, defrag=DefragSpec(threshold=1, padded_swaps=(1, 2)), clock=lambda: runner.now
    )
    lengths = [(3, 3), (9, 14), (10, 2), (4, 12), (1, 9), (7, 16)]
    clients = [
        make_client(
            f"r{i}",
            tuple((i // 2 * 7 + j) % VOCAB_SIZE for j in range(num_prompt)),
            SamplingParams(temperature=0.5, max_tokens=num_output, ignore_eos=True),
            i,
            limits,
        )
        for i, (num_prompt, num_output) in enumerate(lengths)
    ]
    for client in clients:
        core.add(client.stream)

    while core.step():
        scheduler.check_integrity()

    stats = core.stats()
    for client in clients:
        client.check()
    assert stats.num_preemptions > 0
    assert stats.num_defrag_swaps > 0
    assert stats.num_prefill_tokens > sum(num_prompt for num_prompt, _ in lengths) - stats.num_prefix_hits
    if prefix_caching:
        assert stats.num_prefix_queries == sum(num_prompt for num_prompt, _ in lengths)
        assert 0 < stats.num_prefix_hits == sum(client.request.num_cached_tokens for client in clients)
        assert stats.num_blocks_evicted > 0
    assert stats.num_output_tokens == sum(num_output for _, num_output in lengths)
    assert stats.num_finished == {"length": len(lengths)}
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)


@dataclass(frozen=True)
class Run:
    """What a long run of contiguous attention did."""

    decodes: list[DecodeStep]
    """With the defragmenter's moves between them."""
    texts: list[tuple[int, ...]]
    num_swaps: int
    worst_spread: float
    """The highest block in use over the number of blocks in use, before a decode; the largest."""

    @property
    def num_blocks_read(self) -> int:
        return sum(step.entry.num_blocks for step in self.decodes)

    @property
    def num_padded(self) -> int:
        return self.num_blocks_read - sum(len(row.block_table) for step in self.decodes for row in step.rows)


_LONG = ServingLimits(
    max_num_seqs=16, max_num_batched_tokens=64, max_model_len=128, block_size=4, num_blocks=256
)
_BUCKETS = tuple(DecodeEntry(16, 1, num_blocks) for num_blocks in (8, 16, 32, 48, 64, 96, 128, 192, 256))
_SWAPS = (8, 16, 32, 64, 128)


def _long_run(defrag: DefragSpec, num_requests: int = 150) -> Run:
    """Requests of mixed lengths come and go: crowds, of which some long ones stay on."""
    draws = Random(7)
    runner = CacheRunner(_LONG, is_contiguous=True)
    table = BucketTable((PromptEntry(1, 64, 32),), _BUCKETS)
    pool = BlockPool(_LONG.num_blocks)
    scheduler = Scheduler(_LONG, table, pool, eos_token_ids=(EOS,), is_contiguous=True)
    core = EngineCore(scheduler, runner, defrag=defrag, clock=lambda: runner.now)
    clients: list[Client] = []
    worst, peak = 0.0, 0

    def note_peak() -> None:
        nonlocal peak
        peak = max(peak, pool.num_used)

    def step() -> bool:
        nonlocal worst
        if pool.num_used:
            worst = max(worst, pool.max_used / pool.num_used)
        before = len(runner.decodes)
        went_on = core.step()
        scheduler.check_integrity()
        assert pool.max_used <= peak, "a block beyond the most that were ever in use"
        assert not (defrag.enabled and should_defragment(pool.max_used, pool.num_used, defrag.threshold))
        for decode in runner.decodes[before:]:
            highest = max(block for row in decode.rows for block in row.block_table)
            assert decode.entry == table.find_decode(len(decode.rows), highest)
        return went_on

    runner.on_run = note_peak
    for number in range(num_requests):
        is_long = draws.random() < 0.15
        params = SamplingParams(
            temperature=0.5, max_tokens=100 if is_long else draws.randint(1, 8), ignore_eos=True
        )
        prompt = tuple(draws.randrange(VOCAB_SIZE) for _ in range(draws.randint(4, 24)))
        clients.append(make_client(f"r{number}", prompt, params, number, _LONG))
        core.add(clients[-1].stream)
        for _ in range(draws.choice([0, 0, 1, 4, 60])):
            step()
    while step():
        pass

    for client in clients:
        client.check()
    assert pool.num_free == _LONG.num_blocks
    tokens = [tuple(client.request.token_ids) for client in clients]
    return Run(runner.decodes, tokens, core.stats().num_defrag_swaps, worst)


def test_with_contiguous_attention_the_defragmenter_makes_decodes_read_fewer_blocks() -> None:
    """And texts, which are checked against each request alone, are the same. No exchange has a size that is not warm."""
    scattered = _long_run(DefragSpec(enabled=False))
    packed = _long_run(DefragSpec(threshold=8, padded_swaps=_SWAPS))

    assert scattered.texts == packed.texts
    assert scattered.num_swaps == 0 < packed.num_swaps
    assert scattered.worst_spread >= 2
    assert packed.num_blocks_read < scattered.num_blocks_read
    assert packed.num_padded < 0.7 * scattered.num_padded
