"""The scheduler decides which requests run in the next step, and in which entry.

* Requests are scheduled first come, first served. The head of the waiting queue gets a seat when fewer than
  `max_num_seqs` requests run and the free blocks, with those that it can share, hold all of its known tokens. Until then,
  no other waiting request gets a seat.
* A step is a prefill step or a decode step. Prefill goes first, so that new requests get their first token soon. While
  there is work of both kinds, the interleaving policy decides (aotgaudi/engine/interleaving.py).
* Prefill is chunked. A chunk takes as many known tokens as `max_num_batched_tokens` and an entry allow. Unless it reaches
  the last known token, it ends at the end of a block. While others decode, it may be shorter, and may end inside a block.
  Partly prefilled requests go before the queue. Up to `max_num_prefill_seqs` chunks share a step if one entry covers them
  all and computes no more padded tokens than separate entries would.
* Decode takes all prefilled requests. If no entry covers them all, it takes as many as one entry covers, and the others go
  first in the next decode step.
* A decode of contiguous attention reads the cache from its first block to the highest block of its requests, including
  blocks of others in between. So its entry depends on block ids, which the pool and the defragmenter keep low.
* If a sequence needs a block and none is free, the scheduler preempts the request that got its seat last. That request
  gives up its blocks, keeps its tokens, returns to the head of the queue, and is prefilled again later. The oldest request
  gets blocks first, so it always advances, and every request ends.
* With prefix caching, a request shares the blocks that hold the beginning of its tokens, and its first chunk starts after
  them. It shares only as many as leave a rest that entries cover, so no request depends on the cache. Full blocks get
  their key when the step that filled them is complete (aotgaudi/engine/blocks.py).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from aotgaudi.engine.blocks import BlockPool, PrefixCache, num_blocks_for
from aotgaudi.engine.chunks import Chunk, Chunker
from aotgaudi.engine.interleaving import Interleaving, StepCosts
from aotgaudi.engine.request import FinishReason, Request, RequestState
from aotgaudi.engine.steps import DecodeRow, DecodeStep, PromptRow, PromptStep, Step, StepTable
from aotgaudi.entries import DecodeEntry, Entry, PromptEntry
from aotgaudi.errors import AotGaudiError, CoverageError
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.policy import Policy


class UncoveredStepError(CoverageError):
    """No entry covers the next step of `request`, even alone. `needed` is the exact shape that it needs."""

    def __init__(self, request: Request, needed: PromptEntry | DecodeEntry) -> None:
        self.request, self.needed = request, needed
        super().__init__(
            f"no entry covers the step {needed} of request {request.request_id!r}: "
            "the manifest's coverage has a hole (`aotgaudi coverage` names it)"
        )


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A step and the requests of its rows, in row order."""

    step: Step
    requests: tuple[Request, ...]


class Scheduler:
    """Forms steps from requests. Owns the waiting queue, the running list and the block tables.

    Not thread-safe: the engine's thread owns it. Call `schedule`, run the step, and call `complete`. Requests may be added
    at any time. If a request is finished while its step runs, `complete` skips it. The contents of its blocks are then never
    shared, and their next owner overwrites them in a later step.

    `waiting` is the queue, the next request first. `running` has the requests with a seat, in the order in which they got
    it. `prefixes` is None without prefix caching.

    Args:
        limits: How many requests and tokens a step may have.
        table: Finds the entry that covers a step.
        pool: The KV blocks.
        eos_token_ids: Tokens that end a sequence.
        prefix_caching: Whether requests share cached blocks of their beginnings.
        policy: The interleaving policy.
        is_contiguous: Whether decodes read contiguous blocks. Each block then belongs to one request, so `prefix_caching`
            is impossible (ValueError).
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
        is_contiguous: bool = False,
    ) -> None:
        if is_contiguous and prefix_caching:
            raise ValueError("a block that is read in place belongs to one request: no prefix caching")
        self._is_contiguous = is_contiguous
        self.limits, self.table, self.pool = limits, table, pool
        self.prefixes = PrefixCache(pool, limits.block_size) if prefix_caching else None
        self.num_preemptions = 0
        self._eos_token_ids = frozenset(eos_token_ids)
        self.waiting: OrderedDict[Request, None] = OrderedDict()  # A queue with removal in O(1).
        self.running: list[Request] = []
        self._costs = StepCosts()
        self._interleaving = Interleaving(policy, limits, self._costs)
        self._chunker = Chunker(limits, table, self._costs)
        self._decode_clock = count(1)

    @property
    def oldest_waiting(self) -> Request | None:
        """The head of the queue, which has waited longest; None if the queue is empty."""
        return next(iter(self.waiting), None)

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queues a request that has passed `aotgaudi.engine.admission`."""
        request.queued_at = self._interleaving.now
        self.waiting[request] = None

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a waiting or running request now and frees its blocks."""
        if request.state is RequestState.WAITING:
            del self.waiting[request]
        elif request.state is RequestState.RUNNING:
            self.running.remove(request)
        self.pool.free(request.finish(reason))

    def discard(self, request: Request) -> tuple[int, ...]:
        """Aborts a running request whose blocks hold invalid values, which no other request may see.

        Returns those of its blocks that no other request holds.
        """
        blocks = tuple(request.block_table)
        self.pool.forget(blocks)
        self.finish(request, "abort")
        return tuple(block for block in blocks if not self.pool.num_users[block])

    def schedule(self) -> Scheduled | None:
        """Returns the next step, or None if no request waits or runs.

        Raises:
            UncoveredStepError: No entry covers a request's next step. Finish that request and call `schedule` again.
        """
        forms = (self._form_prompt_step, self._form_decode_step)
        for form in reversed(forms) if self._interleaving.prefers_decodes else forms:
            scheduled = form()
            if scheduled is not None:
                self._interleaving.take(scheduled.step)
                return scheduled
        return None

    def observe(self, entry: Entry, seconds: float, *, is_usual: bool = True) -> None:
        """Records how long a step of `entry` took, for the interleaving policy. Unusual steps do not count for estimates."""
        self._interleaving.observe(seconds)
        if is_usual and isinstance(entry, (PromptEntry, DecodeEntry)):
            self._costs.observe(entry, seconds)

    def complete(self, scheduled: Scheduled, token_ids: Sequence[int | None]) -> tuple[Request, ...]:
        """Applies the result of a step and ends the requests that are done.

        Returns the requests that got a token (their `last_token_id`), in the order of the rows.

        Raises:
            AotGaudiError: The runner's result does not match the rows. Nothing is changed.
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
        """Updates pool and block tables after the moves ``(source, destination)`` of block contents."""
        mapping = dict(moves)
        self.pool.relocate(mapping)
        for request in self.running:
            request.block_table = [mapping.get(block, block) for block in request.block_table]

    def owners(self, blocks: Collection[int]) -> tuple[Request, ...]:
        """Returns the running requests that hold any of these blocks."""
        return tuple(request for request in self.running if not set(blocks).isdisjoint(request.block_table))

    def check_integrity(self) -> None:
        """Raises RuntimeError unless the running requests' block tables and the pool agree."""
        self.pool.check_integrity()
        held = Counter(block for request in self.running for block in request.block_table)
        users = {block: self.pool.num_users[block] for block in self.pool.used_ids()}
        if held != users:
            raise RuntimeError(f"block tables hold {sorted(held.elements())}, the pool says {users}")
        if any(request.block_table for request in self.waiting):
            raise RuntimeError("a waiting request holds blocks")

    # Prefill

    def _form_prompt_step(self) -> Scheduled | None:
        prefilling = [request for request in self.running if not request.is_prefilled]
        if not prefilling and not self.waiting:
            return None
        chunks: list[Chunk] = []
        num_left, most = self.limits.max_num_batched_tokens, self._most_chunks(len(prefilling))
        seconds = self._step_budget(prefilling)
        for request in self._prefill_candidates(prefilling):
            chunk = self._next_chunk(request, num_left, seconds)
            if not chunks and self._chunker.find([chunk]) is None:
                raise UncoveredStepError(request, self._chunker.needed(chunk))
            if chunks and not self._chunker.may_join(chunks, chunk, most):
                break
            if request.state is RequestState.WAITING:
                self._seat(request)
            chunks.append(chunk)
            num_left -= chunk.num_tokens
            if len(chunks) == most:
                break
        packed = self._chunker.packed(chunks, seconds)
        if packed is None:
            return None
        entry, some = packed
        rows = tuple(map(self._prompt_row, some))
        return Scheduled(PromptStep(entry, rows), tuple(chunk.request for chunk in some))

    def _most_chunks(self, num_prefilling: int) -> int:
        """Returns the most chunks that the next step may have."""
        num_seats = self.limits.max_num_seqs - len(self.running)
        return min(self.limits.max_num_prefill_seqs, num_prefilling + min(num_seats, len(self.waiting)))

    def _step_budget(self, prefilling: Sequence[Request]) -> float | None:
        """Returns how many seconds a prefill step may take; None for no limit."""
        num_decoding = len(self.running) - len(prefilling)
        oldest = self.oldest_waiting if len(self.running) < self.limits.max_num_seqs else None
        since = min((one.queued_at for one in (*prefilling, oldest) if one), default=self._interleaving.now)
        return self._interleaving.budget(
            num_decoding, len(prefilling), len(self.waiting), self._interleaving.now - since
        )

    # Seats

    def _prefill_candidates(self, prefilling: Sequence[Request]) -> Iterator[Request]:
        """Yields partly prefilled requests, and then heads of the queue. Seat each head before you ask for the next."""
        yield from prefilling
        while (request := self.oldest_waiting) is not None and self._can_seat(request):
            yield request

    def _can_seat(self, request: Request) -> bool:
        if len(self.running) >= self.limits.max_num_seqs:
            return False
        num_blocks = num_blocks_for(request.num_tokens, self.limits.block_size)
        if num_blocks <= self.pool.num_free:
            return True
        num_shared = sum(self.pool.num_users[block] > 0 for block in self._cached_blocks(request))
        return num_blocks - num_shared <= self.pool.num_free

    def _seat(self, request: Request) -> None:
        del self.waiting[request]
        block_size, cached = self.limits.block_size, self._cached_blocks(request)
        self.pool.share(cached)
        new = self.pool.allocate(num_blocks_for(request.num_tokens, block_size) - len(cached))
        if self.prefixes is not None:
            self.prefixes.count(request, len(cached) * block_size)
        request.admit([*cached, *new], len(cached) * block_size)
        request.num_named_blocks = len(cached)
        self.running.append(request)

    def _cached_blocks(self, request: Request) -> list[int]:
        """Returns the cached blocks that a waiting request would share. Entries cover the rest of its tokens.

        Returns no blocks before its prompt is scored, because the cache has no hidden states.
        """
        if self.prefixes is None or not request.is_scored:
            return []
        blocks = self.prefixes.find(request)
        ends, size = range(len(blocks), 0, -1), self.limits.block_size
        return blocks[: next((end for end in ends if self._chunker.covers_rest(request, end * size)), 0)]

    def _next_chunk(self, request: Request, num_left: int, seconds: float | None) -> Chunk:
        start = request.num_computed_tokens
        if request.state is RequestState.WAITING:
            start = len(self._cached_blocks(request)) * self.limits.block_size
        chunk = self._chunker.longest(request, start, num_left)
        return chunk if seconds is None else self._chunker.cut(chunk, seconds)

    def _prompt_row(self, chunk: Chunk) -> PromptRow:
        request, end = chunk.request, chunk.end
        return PromptRow(
            token_ids=tuple(request.token_ids[chunk.start : end]),
            start=chunk.start,
            block_table=tuple(request.block_table[: num_blocks_for(end, self.limits.block_size)]),
            sampling=request.sampling if end == request.num_tokens else None,
            scoring=request.scoring(chunk.start, end),
        )

    # Decode

    def _form_decode_step(self) -> Scheduled | None:
        ready = [request for request in self.running if request.is_prefilled]
        for request in ready:
            self._grow(request)
        ready = [request for request in ready if request.is_prefilled]
        if not ready:
            return None
        entry, requests = self._covered(sorted(ready, key=lambda request: request.last_decode))
        for request in requests:
            request.last_decode = next(self._decode_clock)
        return Scheduled(DecodeStep(entry, tuple(map(self._decode_row, requests))), tuple(requests))

    def _grow(self, request: Request) -> None:
        """Gives the request the block that its newest token needs. Preempts the newest requests until a block is free."""
        while request.state is RequestState.RUNNING:
            if len(request.block_table) * self.limits.block_size >= request.num_tokens:
                return
            if self.pool.num_free:
                request.block_table += self.pool.allocate(1)
            else:
                self._preempt(self.running[-1])

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.free(request.preempt())
        self.waiting[request] = None
        self.waiting.move_to_end(request, last=False)
        self.num_preemptions += 1

    def _covered(self, requests: list[Request]) -> tuple[DecodeEntry, list[Request]]:
        """Returns the entry for the longest beginning of `requests` that one entry covers, and that beginning."""
        while requests:
            num_blocks = self._num_read(requests)
            entry = self.table.find_decode(len(requests), num_blocks)
            if entry is not None:
                return entry, requests
            if len(requests) == 1:
                break
            requests = requests[:-1]
        raise UncoveredStepError(requests[0], DecodeEntry(1, 1, self._num_read(requests)))

    def _num_read(self, requests: Iterable[Request]) -> int:
        """Returns how many blocks a decode of `requests` reads."""
        tables = [request.block_table for request in requests]
        return max(map(max, tables)) if self._is_contiguous else sum(map(len, tables))

    def _decode_row(self, request: Request) -> DecodeRow:
        return DecodeRow(
            token_id=request.last_token_id,
            position=request.num_computed_tokens,
            block_table=tuple(request.block_table),
            sampling=request.sampling,
        )

    # Ends

    def _finish_reason(self, request: Request) -> FinishReason | None:
        token_id, params = request.last_token_id, request.params
        # A grammar that has ended allows only an end of the sequence, so the request must end even with `ignore_eos`.
        ignores_eos = params.ignore_eos and params.structured_outputs is None
        if token_id in self._eos_token_ids and not ignores_eos:
            return "stop"
        if token_id in params.stop_token_ids:
            request.stop_token_id = token_id
            return "stop"
        if request.num_output_tokens >= request.max_tokens:
            return "length"
        return "length" if request.num_tokens >= self.limits.max_model_len else None


def _check_answer(
    entry: Entry, rows: Sequence[PromptRow | DecodeRow], token_ids: Sequence[int | None]
) -> None:
    if len(token_ids) != len(rows):
        raise AotGaudiError(f"the runner answered {len(token_ids)} tokens for {len(rows)} rows of {entry}")
    for row, token_id in zip(rows, token_ids, strict=True):
        if row.sampling is not None and token_id is None:
            raise AotGaudiError(f"the runner sampled no token for a row of {entry} that asks for one")
