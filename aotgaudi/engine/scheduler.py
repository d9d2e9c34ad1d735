"""The scheduler: which requests run in the next step, and in which entry.

Policy, in one place:

* First come, first served. The head of the waiting queue is admitted when fewer than `max_num_seqs` requests
  run and the free blocks, with those that it can share, hold all of its known tokens. Nobody overtakes it, except that
  requests which came alone over their connection go before those that came in a crowd, while one of a crowd runs; where
  they have no room, the newest requests of crowds are preempted, but never the last one (aotgaudi/engine/queue.py).
* A step is a prefill step or a decode step. Prefill goes first, so that new requests get their first token soon; while
  there is work of both kinds they take turns, so that neither a stream of prompts nor a long generation starves the
  other. The policy says how (aotgaudi/engine/turns.py).
* Prefill is chunked. A chunk has as many tokens as are known, as `max_num_batched_tokens` leaves, and as an entry
  covers; unless it reaches the last known token it ends with a block. Beside decodes it may be cut to less, also inside a
  block. Partly prefilled requests go before the queue. Up to `max_num_prefill_seqs` chunks share a step if an entry
  covers them together that computes no more padded tokens than one for each would.
* Decode takes all requests that are prefilled. If no entry covers them all, it takes as many as one covers; those
  that were left out go first the next time.
* When a sequence needs a block and none is free, the most recently admitted request is preempted: it gives up
  its blocks, keeps its tokens, returns to the front of the queue, and is prefilled again later. Blocks are
  given to the oldest request first, so the oldest always advances, and everybody ends.
* With prefix caching an admitted request shares the blocks that hold the beginning of its tokens, and its first chunk
  starts after them: as many as leave a rest that entries cover, so that no request depends on what is cached. Full
  blocks are named when a step that filled them is complete (aotgaudi/engine/prefix_cache.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from aotgaudi.engine.blocks import BlockPool, num_blocks_for
from aotgaudi.engine.chunks import Chunk, Chunker
from aotgaudi.engine.costs import StepCosts
from aotgaudi.engine.prefix_cache import PrefixCache
from aotgaudi.engine.queue import WaitingQueue
from aotgaudi.engine.request import FinishReason, Request, RequestState
from aotgaudi.engine.steps import DecodeRow, DecodeStep, PromptRow, PromptStep, Step, StepTable
from aotgaudi.engine.turns import Turns
from aotgaudi.entries import DecodeEntry, Entry, PromptEntry
from aotgaudi.errors import AotGaudiError, CoverageError
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.policy import Policy


class UncoveredStepError(CoverageError):
    """No entry covers the next step of `request`, even alone; `needed` is the exact shape it takes."""

    def __init__(self, request: Request, needed: PromptEntry | DecodeEntry) -> None:
        self.request, self.needed = request, needed
        super().__init__(
            f"no entry covers the step {needed} of request {request.request_id!r}: "
            "the manifest's coverage has a hole (`aotgaudi coverage` names it)"
        )


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A step and the requests of its rows, in the order of the rows."""

    step: Step
    requests: tuple[Request, ...]


class Scheduler:
    """Forms steps from requests; owns the waiting queue, the running list and the block tables.

    Not thread-safe: the engine's thread owns it. Use: `schedule`, run the step, `complete`; requests may be
    added at any time. One that is finished while its step runs is left out when that is complete; what its blocks hold
    is never shared, and whoever gets them writes to them in a later step.

    Args:
        limits: What a step may have.
        table: The entries.
        pool: The blocks.
        eos_token_ids: Tokens that end a sequence.
        prefix_caching: Whether requests share what is cached of their beginnings.
        policy: How prompts and decodes take turns.
        whole_blocks: Every chunk but a prompt's last ends with a block, as graphs in batch-invariant form need it.
    """

    def __init__(
        self,
        limits: ServingLimits,
        table: StepTable,
        pool: BlockPool,
        *,
        eos_token_ids: Collection[int] = (),
        prefix_caching: bool = False,
        policy: Policy = "latency",
        whole_blocks: bool = False,
    ) -> None:
        self.limits, self.table, self.pool = limits, table, pool
        self.prefixes = PrefixCache(pool, limits.block_size) if prefix_caching else None
        self.num_preemptions = 0
        self._eos_token_ids = frozenset(eos_token_ids)
        self._waiting = WaitingQueue()
        self._running: list[Request] = []  # In the order of admission.
        self._costs = StepCosts()
        self._turns = Turns(policy, limits, self._costs)
        self._chunker = Chunker(limits, table, self._costs, whole_blocks)
        self._decode_clock = count(1)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """The queue, in the order of arrival."""
        return tuple(self._waiting)

    @property
    def oldest_waiting(self) -> Request | None:
        """The request that has waited longest; None when nobody waits."""
        return self._waiting.oldest

    @property
    def running(self) -> tuple[Request, ...]:
        """The admitted requests, the oldest admission first."""
        return tuple(self._running)

    @property
    def num_waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """How many requests are admitted."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Queues a request that admission has let in (see `aotgaudi.engine.admission`)."""
        request.queued_at = self._turns.now
        self._waiting.add(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a waiting or running request now and frees its blocks."""
        if request.state is RequestState.WAITING:
            self._waiting.remove(request)
        elif request.state is RequestState.RUNNING:
            self._running.remove(request)
        self.pool.free(request.finish(reason))

    def discard(self, request: Request) -> tuple[int, ...]:
        """Aborts a running request whose blocks hold nonsense: nobody is given their contents.

        Returns those of its blocks that nobody holds any more.
        """
        blocks = tuple(request.block_table)
        self.pool.forget(blocks)
        self.finish(request, "abort")
        return tuple(block for block in blocks if not self.pool.num_users(block))

    def schedule(self) -> Scheduled | None:
        """Returns the next step, or None when no request waits or runs.

        Raises:
            UncoveredStepError: No entry covers a request's next step. Finish that request and call again.
        """
        self._displace_crowds()
        forms = (self._form_prompt_step, self._form_decode_step)
        for form in reversed(forms) if self._turns.is_decodes else forms:
            scheduled = form()
            if scheduled is not None:
                self._turns.take(scheduled.step)
                return scheduled
        return None

    def observe(self, entry: Entry, seconds: float) -> None:
        """Takes in how long a step of `entry` took; the policy `latency` goes by that."""
        self._turns.observe(seconds)
        if isinstance(entry, (PromptEntry, DecodeEntry)):
            self._costs.observe(entry, seconds)

    def complete(self, scheduled: Scheduled, token_ids: Sequence[int | None]) -> tuple[Request, ...]:
        """Takes in the result of a step and ends the requests that are done.

        Returns the requests that got a token (their `last_token_id`), in the order of the rows.

        Raises:
            AotGaudiError: The runner's answer does not match the rows; nothing is changed.
        """
        rows: tuple[PromptRow | DecodeRow, ...] = scheduled.step.rows
        _check_answer(scheduled.step.entry, rows, token_ids)
        sampled: list[Request] = []
        for request, row, token_id in zip(scheduled.requests, rows, token_ids, strict=True):
            if request.is_finished:
                continue
            request.num_computed_tokens += len(row.token_ids) if isinstance(row, PromptRow) else 1
            if self.prefixes is not None:
                self.prefixes.keep(request)
            if row.sampling is None or token_id is None:
                continue
            request.append_token(token_id)
            sampled.append(request)
            reason = self._finish_reason(request)
            if reason is not None:
                self.finish(request, reason)
        return tuple(sampled)

    def relocate(self, moves: Iterable[tuple[int, int]]) -> None:
        """Follows an exchange of blocks ``(source, destination)`` in the pool and the block tables."""
        mapping = dict(moves)
        self.pool.relocate(mapping)
        for request in self._running:
            request.block_table = _renamed(request.block_table, mapping)

    def owners(self, blocks: Collection[int]) -> tuple[Request, ...]:
        """Returns the running requests that hold any of these blocks."""
        return tuple(request for request in self._running if not set(blocks).isdisjoint(request.block_table))

    def check_integrity(self) -> None:
        """Raises RuntimeError unless the running requests' block tables and the pool agree."""
        self.pool.check_integrity()
        held = Counter(block for request in self._running for block in request.block_table)
        users = {block: self.pool.num_users(block) for block in self.pool.used_ids()}
        if held != users:
            raise RuntimeError(f"block tables hold {sorted(held.elements())}, the pool says {users}")
        if any(request.block_table for request in self._waiting):
            raise RuntimeError("a waiting request holds blocks")

    # Prefill

    def _form_prompt_step(self) -> Scheduled | None:
        prefilling = [request for request in self._running if not request.is_prefilled]
        if not prefilling and not self._waiting:
            return None
        chunks: list[Chunk] = []
        budget, most = self.limits.max_num_batched_tokens, self._most_chunks(len(prefilling))
        allowance = self._allowance(prefilling)
        for request in self._prefill_candidates(prefilling):
            chunk = self._next_chunk(request, budget, allowance)
            if not chunks and self._chunker.find([chunk]) is None:
                raise UncoveredStepError(request, self._chunker.needed(chunk))
            if chunks and not self._chunker.may_join(chunks, chunk, most):
                break
            if request.state is RequestState.WAITING:
                self._admit(request)
            chunks.append(chunk)
            budget -= chunk.num_tokens
            if len(chunks) == most:
                break
        packed = self._chunker.packed(chunks, allowance)
        if packed is None:
            return None
        rows = tuple(map(self._prompt_row, packed.chunks))
        return Scheduled(PromptStep(packed.entry, rows), tuple(chunk.request for chunk in packed.chunks))

    def _most_chunks(self, num_prefilling: int) -> int:
        """Returns the most chunks that there may be for a step."""
        num_seats = self.limits.max_num_seqs - len(self._running)
        return min(self.limits.max_num_prefill_seqs, num_prefilling + min(num_seats, len(self._waiting)))

    def _allowance(self, prefilling: Sequence[Request]) -> float | None:
        """Returns how many seconds a prefill step may take; None: any number."""
        num_decoding = len(self._running) - len(prefilling)
        oldest = self._waiting.oldest if len(self._running) < self.limits.max_num_seqs else None
        since = min((one.queued_at for one in (*prefilling, oldest) if one), default=self._turns.now)
        return self._turns.allowance(
            num_decoding, len(prefilling), len(self._waiting), self._turns.now - since
        )

    # Admission

    def _prefill_candidates(self, prefilling: Sequence[Request]) -> Iterator[Request]:
        """Yields partly prefilled requests, then heads of the queue: admit one before you ask for the next."""
        yield from prefilling
        while (request := self._next_waiting()) is not None and self._can_admit(request):
            yield request

    def _next_waiting(self) -> Request | None:
        """Returns who is to be admitted next; see aotgaudi/engine/queue.py."""
        return self._waiting.next(runs_crowd=any(request.is_in_crowd for request in self._running))

    def _displace_crowds(self) -> None:
        """Preempts the newest requests of crowds, but for the last, where one that came alone has no room otherwise."""
        request = self._waiting.first_alone
        if request is None or self._can_admit(request):
            return
        crowds = [one for one in self._running if one.is_in_crowd][1:]
        others = set(self._running).difference(crowds)
        held = {block for one in others for block in one.block_table}
        held.difference_update(self._cached_blocks(request))
        if self.pool.num_blocks - len(held) < num_blocks_for(request.num_tokens, self.limits.block_size):
            return
        while crowds and not self._can_admit(request):
            self._preempt(crowds.pop())

    def _can_admit(self, request: Request) -> bool:
        if len(self._running) >= self.limits.max_num_seqs:
            return False
        num_blocks = num_blocks_for(request.num_tokens, self.limits.block_size)
        if self.pool.can_allocate(num_blocks):
            return True
        num_shared = sum(self.pool.num_users(block) > 0 for block in self._cached_blocks(request))
        return self.pool.can_allocate(num_blocks - num_shared)

    def _admit(self, request: Request) -> None:
        self._waiting.take(request)
        block_size, cached = self.limits.block_size, self._cached_blocks(request)
        self.pool.share(cached)
        new = self.pool.allocate(num_blocks_for(request.num_tokens, block_size) - len(cached))
        if self.prefixes is not None:
            self.prefixes.count(request, len(cached) * block_size)
        request.admit([*cached, *new], len(cached) * block_size)
        request.num_named_blocks = len(cached)
        self._running.append(request)

    def _cached_blocks(self, request: Request) -> list[int]:
        """Returns the cached blocks that a waiting request would share: as many as leave a rest that entries cover."""
        if self.prefixes is None:
            return []
        blocks = self.prefixes.find(request)
        while blocks and not self._chunker.covers_rest(request, len(blocks) * self.limits.block_size):
            blocks.pop()
        return blocks

    def _next_chunk(self, request: Request, budget: int, allowance: float | None) -> Chunk:
        start = request.num_computed_tokens
        if request.state is RequestState.WAITING:
            start = len(self._cached_blocks(request)) * self.limits.block_size
        chunk = self._chunker.longest(request, start, budget)
        return chunk if allowance is None else self._chunker.cut(chunk, allowance)

    def _prompt_row(self, chunk: Chunk) -> PromptRow:
        request, end = chunk.request, chunk.end
        return PromptRow(
            token_ids=tuple(request.token_ids[chunk.start : end]),
            start=chunk.start,
            block_table=tuple(request.block_table[: num_blocks_for(end, self.limits.block_size)]),
            sampling=request.sampling if end == request.num_tokens else None,
        )

    # Decode

    def _form_decode_step(self) -> Scheduled | None:
        ready = [request for request in self._running if request.is_prefilled]
        for request in ready:
            self._grow(request)
        ready = [request for request in ready if request.is_prefilled]
        if not ready:
            return None
        entry, requests = self._covered(sorted(ready, key=lambda request: request.last_decode))
        for request in requests:
            request.last_decode = next(self._decode_clock)
        return Scheduled(DecodeStep(entry, tuple(map(_decode_row, requests))), tuple(requests))

    def _grow(self, request: Request) -> None:
        """Gives the request the block that its newest token needs; preempts the newest requests until one is free."""
        while request.state is RequestState.RUNNING:
            if len(request.block_table) * self.limits.block_size >= request.num_tokens:
                return
            if self.pool.can_allocate(1):
                request.block_table += self.pool.allocate(1)
            else:
                self._preempt(self._running[-1])

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self.pool.free(request.preempt())
        self._waiting.put_back(request)
        self.num_preemptions += 1

    def _covered(self, requests: list[Request]) -> tuple[DecodeEntry, list[Request]]:
        """Returns as many of the requests, from the front, as one entry covers."""
        while requests:
            num_blocks = sum(len(request.block_table) for request in requests)
            entry = self.table.find_decode(len(requests), num_blocks)
            if entry is not None:
                return entry, requests
            if len(requests) == 1:
                break
            requests = requests[:-1]
        raise UncoveredStepError(requests[0], DecodeEntry(1, 1, len(requests[0].block_table)))

    # Ends

    def _finish_reason(self, request: Request) -> FinishReason | None:
        token_id, params = request.last_token_id, request.params
        is_eos = token_id in self._eos_token_ids and not params.ignore_eos
        if is_eos or token_id in params.stop_token_ids:
            return "stop"
        if request.num_output_tokens >= request.max_tokens:
            return "length"
        return "length" if request.num_tokens >= self.limits.max_model_len else None


def _decode_row(request: Request) -> DecodeRow:
    return DecodeRow(
        token_id=request.last_token_id,
        position=request.num_computed_tokens,
        block_table=tuple(request.block_table),
        sampling=request.sampling,
    )


def _renamed(block_table: list[int], mapping: Mapping[int, int]) -> list[int]:
    return [mapping.get(block, block) for block in block_table]


def _check_answer(
    entry: Entry, rows: Sequence[PromptRow | DecodeRow], token_ids: Sequence[int | None]
) -> None:
    if len(token_ids) != len(rows):
        raise AotGaudiError(f"the runner answered {len(token_ids)} tokens for {len(rows)} rows of {entry}")
    for row, token_id in zip(rows, token_ids, strict=True):
        if row.sampling is not None and token_id is None:
            raise AotGaudiError(f"the runner sampled no token for a row of {entry} that asks for one")
