"""A trace, replayed through the engine's own scheduler: which steps it forms, one after the other, in simulated time.

The scheduler is the one that serves (engine/scheduler.py), with its queue, block pool, turns and chunks. Only the device is
not there: a step takes as long as `seconds_of` says of its entry, and every token that is generated is 0. So requests
generate as many tokens as the trace has, and share no prefixes: a trace does not say what prompts have in common.

`CountingScheduler` is that scheduler, less what decides nothing. That it forms the very same steps is a test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Union

from aotgaudi.engine.blocks import BlockPool, num_blocks_for
from aotgaudi.engine.request import Request
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.engine.scheduler import Scheduled, Scheduler
from aotgaudi.engine.steps import GREEDY_ROW, DecodeStep, PromptStep, SamplingRow, StepTable
from aotgaudi.entries import DecodeEntry, Entry, PromptEntry
from aotgaudi.errors import SpecError
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.policy import Policy
from aotgaudi.traffic.trace import Trace

StepEntry = Union[PromptEntry, DecodeEntry]
SecondsOf = Callable[[StepEntry], float]

_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A step that ran in `entry` and needed no more than `needs`, the smallest shape that covers it.

    `seconds`: when it began, in simulated time.
    """

    needs: StepEntry
    entry: StepEntry
    seconds: float


@dataclass(frozen=True, slots=True)
class Replayed:
    """A whole replay. `steps`: how often each pair of (what a step needed, the entry that it ran in) came.

    `num_refused` requests do not fit the limits, and are left out; the answers of `num_shortened` were longer than fits.
    `seconds` is when the last request had its last token. `num_prompt_tokens` and `num_generated_tokens` are those of
    the requests that were served.
    """

    steps: Counter[tuple[StepEntry, StepEntry]]
    seconds: float
    num_requests: int
    num_refused: int
    num_shortened: int
    num_preemptions: int
    num_prompt_tokens: int
    num_generated_tokens: int

    @property
    def needs(self) -> Counter[StepEntry]:
        """How often steps of each size were needed."""
        needs: Counter[StepEntry] = Counter()
        for (needed, _), count in self.steps.items():
            needs[needed] += count
        return needs

    @property
    def num_steps(self) -> int:
        """How many steps there were."""
        return self.steps.total()


def replay(
    trace: Trace, limits: ServingLimits, table: StepTable, seconds_of: SecondsOf, policy: Policy = "latency"
) -> Replayed:
    """Returns what a server with these limits and entries does with a trace.

    Raises:
        SpecError: None of its requests fits the limits.
        UncoveredStepError: The table has a hole, which a step met.
    """
    clients = Clients.of(trace, limits)
    scheduler = CountingScheduler(limits, table, BlockPool(limits.num_blocks), policy=policy)
    replaying = Replaying(clients, scheduler, seconds_of)
    steps: Counter[tuple[StepEntry, StepEntry]] = Counter()
    for step in replaying.steps():
        steps[step.needs, step.entry] += 1
    return Replayed(
        steps=steps,
        seconds=replaying.now,
        num_requests=len(clients.prompt_tokens),
        num_refused=clients.num_refused,
        num_shortened=clients.num_shortened,
        num_preemptions=scheduler.num_preemptions,
        num_prompt_tokens=sum(clients.prompt_tokens),
        num_generated_tokens=sum(clients.max_tokens),
    )


@dataclass(frozen=True, slots=True)
class Clients:
    """The requests of a trace that a server with some limits admits; the columns have one item a request."""

    arrivals: Sequence[float]
    prompt_tokens: Sequence[int]
    max_tokens: Sequence[int]
    num_refused: int
    num_shortened: int

    @classmethod
    def of(cls, trace: Trace, limits: ServingLimits) -> Clients:
        """Returns those that fit: a prompt with one more token; longer answers end where the limits are reached.

        A request that got no token is one of a single token: the prompt was computed all the same. Raises SpecError where
        none fits.
        """
        longest = min(limits.max_model_len, limits.num_blocks * limits.block_size + 1)
        rows = zip(trace.arrivals, trace.prompt_tokens, trace.generated_tokens, strict=True)
        fitting = [(time, prompt, max(1, asked)) for time, prompt, asked in rows if prompt < longest]
        if not fitting:
            raise SpecError(
                "trace",
                f"has no prompt that fits: the shortest has {min(trace.prompt_tokens):,} tokens",
                f"prompts of less than {longest:,} tokens, or higher limits",
            )
        arrivals, prompts, asked = zip(*fitting, strict=True)
        given = tuple(min(tokens, longest - prompt) for tokens, prompt in zip(asked, prompts, strict=True))
        num_shortened = sum(tokens > less for tokens, less in zip(asked, given, strict=True))
        return cls(arrivals, prompts, given, len(trace) - len(fitting), num_shortened)


class Replaying:
    """One replay under way. `now` is simulated seconds. One thread only."""

    def __init__(self, clients: Clients, scheduler: CountingScheduler, seconds_of: SecondsOf) -> None:
        self.now = 0.0
        self._clients, self._scheduler, self._seconds_of = clients, scheduler, seconds_of
        self._num_arrived = 0
        self._known: dict[Entry, float] = {}

    def steps(self) -> Iterator[ReplayedStep]:
        """Yields the steps until every request has ended."""
        scheduler = self._scheduler
        while self._admit() or scheduler.has_work:
            scheduled = scheduler.schedule()
            assert scheduled is not None  # There is work.
            entry = scheduled.step.entry
            seconds = self._known.get(entry)
            if seconds is None:
                seconds = self._known[entry] = self._seconds_of(entry)
            yield ReplayedStep(scheduler.needed(scheduled), entry, self.now)
            scheduler.complete(scheduled, [0] * len(scheduled.requests))
            scheduler.observe(entry, seconds)
            self.now += seconds

    def _admit(self) -> bool:
        """Queues who has arrived; where nobody waits or runs, time passes until somebody does. False: nobody is left."""
        arrivals, scheduler = self._clients.arrivals, self._scheduler
        if self._num_arrived == len(arrivals):
            return False
        if not scheduler.has_work:
            self.now = max(self.now, arrivals[self._num_arrived])
        while self._num_arrived < len(arrivals) and arrivals[self._num_arrived] <= self.now:
            scheduler.add(self._request(self._num_arrived))
            self._num_arrived += 1
        return True

    def _request(self, index: int) -> Request:
        return _InventedRequest(
            request_id=str(index),
            prompt_token_ids=[0] * self._clients.prompt_tokens[index],
            params=_GREEDY,
            max_tokens=self._clients.max_tokens[index],
            seed=0,
        )


class _InventedRequest(Request):
    """A request whose tokens are all 0: nothing is drawn."""

    __slots__ = ()

    @property
    def sampling(self) -> SamplingRow:
        return GREEDY_ROW

    def append_token(self, token_id: int) -> None:
        self.token_ids.append(token_id)


def smallest_shape(scheduled: Scheduled, block_size: int) -> StepEntry:
    """Returns the smallest shape that covers a step."""
    step = scheduled.step
    if isinstance(step, PromptStep):
        longest = max(len(row.token_ids) for row in step.rows)
        num_ctx_blocks = max(num_blocks_for(row.start, block_size) for row in step.rows)
        return PromptEntry(len(step.rows), longest, num_ctx_blocks)
    return DecodeEntry(len(step.rows), 1, sum(len(row.block_table) for row in step.rows))


class CountingScheduler(Scheduler):
    """Forms the steps that `Scheduler` forms, in a tenth of the time where many decode.

    Where the same requests decode once more, that adds a token to each, and now and then a block. It is counted here, and
    told to the requests when one of them would end, another joins them, or a block is not free; nothing else of a request
    that decodes decides anything. Steps that are counted have no rows.
    """

    _batch: tuple[Request, ...] = ()
    """Who decodes, all of them in each step; empty where the next step has to be formed."""
    _num_counted = 0
    """Steps that the requests have not been told of."""
    _most_counted = 0
    _room: Sequence[int] = ()
    """After how many counted steps each of the batch needs another block."""
    _num_blocks = 0

    def needed(self, scheduled: Scheduled) -> StepEntry:
        """Returns the smallest shape that covers a step that was just formed."""
        if isinstance(scheduled.step, DecodeStep) and not scheduled.requests:
            return DecodeEntry(len(self._batch), 1, self._num_blocks)
        return smallest_shape(scheduled, self.limits.block_size)

    def complete(self, scheduled: Scheduled, token_ids: Sequence[int | None]) -> tuple[Request, ...]:
        """Takes in the result of a step, as `Scheduler` does; of one that is counted, nothing."""
        is_decode = isinstance(scheduled.step, DecodeStep)
        if is_decode and not scheduled.requests:
            self._num_counted += 1
            return ()
        sampled = super().complete(scheduled, token_ids)
        if is_decode:
            self._begin(scheduled.requests)
        elif sampled:
            self._settle()
        return sampled

    def _form_decode_step(self) -> Scheduled | None:
        if self._batch and self._num_counted < self._most_counted and self._has_room():
            entry = self.table.find_decode(len(self._batch), self._num_blocks)
            if entry is not None:
                return Scheduled(DecodeStep(entry, ()), ())
        self._settle()
        return super()._form_decode_step()

    def _begin(self, requests: Sequence[Request]) -> None:
        """Counts from here on, if all who decode were in the step that just ended."""
        batch = tuple(request for request in requests if not request.is_finished)
        if len(batch) != sum(request.is_prefilled for request in self.running):
            return
        self._batch, self._room = batch, [self._num_free(request) + 1 for request in batch]
        self._most_counted = min((self._num_left(request) for request in batch), default=0) - 1
        self._num_blocks = sum(len(request.block_table) for request in batch)

    def _has_room(self) -> bool:
        """Gives a block to each that needs one, if all of these can have one."""
        if min(self._room) > self._num_counted:
            return True
        lacking = [index for index, room in enumerate(self._room) if room == self._num_counted]
        if not self.pool.can_allocate(len(lacking)):
            return False
        for index in lacking:
            self._batch[index].block_table += self.pool.allocate(1)
        size = self.limits.block_size
        self._room = [room + size if room == self._num_counted else room for room in self._room]
        self._num_blocks += len(lacking)
        return True

    def _settle(self) -> None:
        """Tells the requests what was counted; the next decode step is formed."""
        for request in self._batch:
            request.token_ids += [0] * self._num_counted
            request.num_computed_tokens += self._num_counted
        self._batch, self._num_counted = (), 0

    def _num_free(self, request: Request) -> int:
        return len(request.block_table) * self.limits.block_size - request.num_tokens

    def _num_left(self, request: Request) -> int:
        most = self.limits.max_model_len - request.num_tokens
        return min(request.max_tokens - request.num_output_tokens, most)
