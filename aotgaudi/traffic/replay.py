"""Replays a trace through the engine's own scheduler in simulated time, to find the steps that a server forms.

The scheduler is the one that serves (engine/scheduler.py), with its queue, block pool, turns and chunks. Only the device is
missing. A step takes the time that `seconds_of` returns, and every generated token is 0. Requests generate as many tokens as
in the trace. They share no prefixes, since a trace does not say what prompts have in common.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aotgaudi.engine.blocks import BlockPool, num_blocks_for
from aotgaudi.engine.request import Request
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.engine.scheduler import Scheduled, Scheduler
from aotgaudi.engine.steps import GREEDY_ROW, PromptStep, SamplingRow, StepTable
from aotgaudi.entries import DecodeEntry, Entry, PromptEntry, StepEntry
from aotgaudi.errors import SpecError
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.policy import Policy
from aotgaudi.traffic.trace import Trace

SecondsOf = Callable[[StepEntry], float]

_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Replayed:
    """A whole replay. `steps` counts each pair of (smallest shape, entry) of its steps.

    `num_refused` requests do not fit the limits and are left out. `num_shortened` answers were cut to fit. `seconds` is when
    the last request got its last token.
    """

    steps: Counter[tuple[StepEntry, StepEntry]]
    seconds: float
    num_requests: int
    num_refused: int
    num_shortened: int
    num_preemptions: int

    @property
    def needs(self) -> Counter[StepEntry]:
        """How often each smallest shape was needed."""
        needs: Counter[StepEntry] = Counter()
        for (needed, _), count in self.steps.items():
            needs[needed] += count
        return needs

    @property
    def num_steps(self) -> int:
        """How many steps there were."""
        return self.steps.total()


@dataclass(frozen=True, slots=True)
class Clients:
    """The requests of a trace that a server with some limits admits. Columns have one item per request."""

    arrivals: Sequence[float]
    prompt_tokens: Sequence[int]
    max_tokens: Sequence[int]
    num_refused: int
    num_shortened: int

    @classmethod
    def of(cls, trace: Trace, limits: ServingLimits) -> Clients:
        """Returns the requests whose prompt and one more token fit the limits. Longer answers are cut at the limits.

        A request without generated tokens counts as one with a single token, since its prompt was computed too. Raises
        SpecError if no request fits.
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
        return cls(arrivals, prompts, given, len(trace.arrivals) - len(fitting), num_shortened)


class _InventedRequest(Request):
    """A request whose tokens are all 0, so that it needs no random numbers."""

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


def replay(
    trace: Trace, limits: ServingLimits, table: StepTable, seconds_of: SecondsOf, policy: Policy = "latency"
) -> Replayed:
    """Returns the replay of a trace by a server with these limits and entries.

    Raises:
        SpecError: No request of the trace fits the limits.
        UncoveredStepError: The table has a hole, and a step hit it.
    """
    clients = Clients.of(trace, limits)
    scheduler = Scheduler(limits, table, BlockPool(limits.num_blocks), policy=policy)
    waiting = deque(zip(clients.arrivals, clients.prompt_tokens, clients.max_tokens, strict=True))
    steps: Counter[tuple[StepEntry, StepEntry]] = Counter()
    known: dict[Entry, float] = {}
    now = 0.0  # In simulated seconds.
    while waiting or scheduler.has_work:
        if not scheduler.has_work:  # An idle server skips to the next arrival.
            now = max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now:
            _, num_prompt, most = waiting.popleft()
            scheduler.add(
                _InventedRequest(
                    request_id=str(len(clients.arrivals) - len(waiting) - 1),
                    prompt_token_ids=[0] * num_prompt,
                    params=_GREEDY,
                    max_tokens=most,
                    seed=0,
                )
            )
        scheduled = scheduler.schedule()
        assert scheduled is not None  # There is work.
        entry = scheduled.step.entry
        if entry not in known:
            known[entry] = seconds_of(entry)
        steps[smallest_shape(scheduled, limits.block_size), entry] += 1
        scheduler.complete(scheduled, [0] * len(scheduled.requests))
        scheduler.observe(entry, known[entry])
        now += known[entry]
    return Replayed(
        steps=steps,
        seconds=now,
        num_requests=len(clients.arrivals),
        num_refused=clients.num_refused,
        num_shortened=clients.num_shortened,
        num_preemptions=scheduler.num_preemptions,
    )
