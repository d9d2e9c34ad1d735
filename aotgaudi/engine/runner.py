"""Runs steps: makes tensors, runs compiled programs, and returns token ids. Uses torch, as `sampler` does.

Padding rows and tokens have token 0, write to block 0 and are never read back. Padding blocks belong to no row and show no
token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from aotgaudi.engine.blocks import PADDING_BLOCK
from aotgaudi.engine.constraints import MaskMaker
from aotgaudi.engine.sampler import Sampler, Scorer, to_ids
from aotgaudi.engine.steps import DecodeStep, DefragStep, PromptRow, PromptStep, Step, StepResult
from aotgaudi.entries import Entry
from aotgaudi.errors import NotWarmError
from aotgaudi.graphs.masks import decode_mask, prompt_mask, with_new_entries
from aotgaudi.graphs.program import TensorSpec
from aotgaudi.graphs.step_inputs import MaskKind, entries_input, num_completed
from aotgaudi.runtime.executables import BoundProgram, ExecutableTable


class ProgramRunner:
    """Runs steps through the bound programs of an `ExecutableTable`. Use it on one thread only."""

    def __init__(
        self,
        table: ExecutableTable,
        block_size: int,
        num_threads: int | None = None,
    ) -> None:
        """`num_threads` is how many threads matrix products use. The thread that runs the first step sets it.

        OpenMP keeps a pool for each thread that ever computed in parallel. Once all pools together outnumber the cores,
        every parallel region pays for sleeping and waking. With pools of both the loading thread and the engine's thread, a
        decode step took 28 ms instead of 18 (docs/benchmarks.md). So the loading thread uses one thread, and only the
        engine's thread has a pool.
        """
        self._num_threads = num_threads
        self._table = table
        self._block_size = block_size
        self._sampler, self._scorer = Sampler(table, self._program), Scorer(table, self._program)
        self._masks = MaskMaker()

    def run(self, step: Step) -> StepResult:
        """Runs a step and samples the rows that ask for it. NaN in one row does not spoil the results of other rows."""
        result = self._run(step)
        return self._isolated(step, result) if result.invalid_rows else result

    def _run(self, step: Step) -> StepResult:
        rows = [row.sampling for row in step.rows]
        self._masks.begin([row.constraint for row in rows if row and row.constraint])
        if isinstance(step, DecodeStep) or not step.scores:
            logits = self.logits(step)
            self._masks.finish()
            return self._sampler.sample(logits, rows)
        program, inputs = self._prepared(step)
        hidden = program.run_trunk(inputs)
        logits = program.run_head(hidden, inputs)
        self._masks.finish()
        result = self._sampler.sample(logits, rows)
        self._scorer.score(step, hidden, result)
        return result

    def _isolated(self, step: Step, joint: StepResult) -> StepResult:
        """Returns the result without contagion between rows, by running each row that seemed invalid again, alone.

        Masked values are multiplied by 0, and 0 times NaN is NaN. So one row's NaNs reach rows that share the padding block,
        or a sum over blocks, with it. A row that runs alone first overwrites its own part of the cache. The engine must
        `clear` the blocks of an invalid row before another request gets them.
        """
        invalid_rows: set[int] = set()
        for r in sorted(joint.invalid_rows):
            self.clear([PADDING_BLOCK])
            alone = joint if len(step.rows) == 1 else self._run(_with_one_row(step, r))
            if alone.invalid_rows:
                invalid_rows.add(r)
                continue
            joint.token_ids[r] = alone.token_ids[0]
            if 0 in alone.logprobs:
                joint.logprobs[r] = alone.logprobs[0]
            if 0 in alone.prompt_logprobs:
                joint.prompt_logprobs[r] = alone.prompt_logprobs[0]
            if 0 in alone.refused_rows:
                joint.refused_rows[r] = alone.refused_rows[0]
        self.clear([PADDING_BLOCK])
        return replace(joint, invalid_rows=invalid_rows)

    def clear(self, blocks: Sequence[int]) -> None:
        """Fills blocks with zeros in every layer."""
        for cache in self._table.caches:
            self._table.placement.clear(cache, blocks, self._block_size)

    def logits(self, step: Step) -> Tensor:
        """Runs a step without sampling. Returns logits [entry.batch_size, vocab]."""
        program, inputs = self._prepared(step)
        return program.run(inputs)[0]

    def _prepared(self, step: Step) -> tuple[BoundProgram, list[Tensor]]:
        """Returns the program of a step and its input tensors."""
        if isinstance(step, PromptStep):
            inputs: _Inputs = _PromptInputs(step, self._block_size)
        else:
            inputs = _DecodeInputs(step, self._block_size)
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
            self._num_threads = None
        program = self._program(step.entry)
        return program, [inputs.tensor(spec) for spec in program.inputs]

    def exchange(self, step: DefragStep) -> None:
        """Exchanges block contents in every layer. Padding pairs exchange block 0 with itself."""
        pad = [0] * (step.entry.padded_swaps - len(step.moves))
        sources = [source for source, _ in step.moves] + pad
        destinations = [destination for _, destination in step.moves] + pad
        inputs = {"sources": to_ids(sources), "destinations": to_ids(destinations)}
        program = self._program(step.entry)
        program.run([inputs[spec.name] for spec in program.inputs])

    def _program(self, entry: Entry) -> BoundProgram:
        program = self._table.get(entry)
        if program is None:
            raise NotWarmError(f"entry {entry} is not warm")
        return program


def _with_one_row(step: Step, r: int) -> Step:
    """Returns a step with only row `r`, which the same entry covers."""
    if isinstance(step, PromptStep):
        return PromptStep(step.entry, step.rows[r : r + 1])
    return DecodeStep(step.entry, step.rows[r : r + 1])


class _Inputs(Protocol):
    def tensor(self, spec: TensorSpec) -> Tensor: ...


class _PromptInputs:
    """The input tensors of a prefill step, each made when a program asks for it (graphs/step_inputs.py)."""

    def __init__(self, step: PromptStep, block_size: int) -> None:
        self._block_size, self._entry = block_size, step.entry
        empty = PromptRow(token_ids=(), start=0, block_table=(), sampling=None)
        self._rows = [*step.rows, *[empty] * (step.entry.batch_size - len(step.rows))]

    def tensor(self, spec: TensorSpec) -> Tensor:
        """Returns one input."""
        if kind := MaskKind.of(spec.name):
            return self._mask(kind)
        if found := entries_input(spec.name):
            name, every = found
            chunks = [(row.start, len(row.token_ids), row.block_table) for row in self._rows]
            num = num_completed(self._entry.query_len, every)
            return _CompletedWindows(chunks, num, every, self._block_size).tensor(name, spec)
        made = to_ids(self._MAKERS[spec.name](self)).view(spec.shape)
        return made.to(torch.int32) if spec.dtype == "int32" else made

    def _mask(self, kind: MaskKind) -> Tensor:
        spans = [(row.start, len(row.token_ids)) for row in self._rows]
        size, c = self._block_size, self._entry.num_ctx_blocks
        mask = prompt_mask(spans, self._entry.query_len, c * size, kind.window)
        if kind.every is None:
            return mask
        return with_new_entries(mask, spans, c, size // kind.every, kind.every)

    def _input_ids(self) -> Iterable[int]:
        return chain.from_iterable(_padded(row.token_ids, self._entry.query_len) for row in self._rows)

    def _positions(self) -> Iterable[int]:
        spans = (range(row.start, row.start + len(row.token_ids)) for row in self._rows)
        return chain.from_iterable(_padded(span, self._entry.query_len) for span in spans)

    def _slots(self) -> Iterable[int]:
        size = self._block_size
        for row in self._rows:
            for position in range(row.start, row.start + len(row.token_ids)):
                yield row.block_table[position // size] * size + position % size
            yield from (i % size for i in range(self._entry.query_len - len(row.token_ids)))

    def _ctx_blocks(self) -> Iterable[int]:
        used = (row.block_table[: -(-row.start // self._block_size)] for row in self._rows)
        return chain.from_iterable(_padded(blocks, self._entry.num_ctx_blocks) for blocks in used)

    def _logits_indices(self) -> Iterable[int]:
        q = self._entry.query_len
        return (r * q + max(len(row.token_ids) - 1, 0) for r, row in enumerate(self._rows))

    def _starts(self) -> Iterable[int]:
        return (row.start for row in self._rows)

    def _num_padding(self) -> Iterable[int]:
        return (self._entry.query_len - len(row.token_ids) for row in self._rows)

    _MAKERS: ClassVar[Mapping[str, Callable[[_PromptInputs], Iterable[int]]]] = {
        "input_ids": _input_ids,
        "positions": _positions,
        "slots": _slots,
        "ctx_blocks": _ctx_blocks,
        "logits_indices": _logits_indices,
        "starts": _starts,
        "num_padding": _num_padding,
    }


class _DecodeInputs:
    """The input tensors of a decode step, each made when a program asks for it (graphs/step_inputs.py)."""

    def __init__(self, step: DecodeStep, block_size: int) -> None:
        self._block_size, self._entry, self._rows = block_size, step.entry, step.rows
        self._num_blocks = [row.position // block_size + 1 for row in step.rows]

    def tensor(self, spec: TensorSpec) -> Tensor:
        """Returns one input."""
        if kind := MaskKind.of(spec.name):
            return self._mask(kind)
        if found := entries_input(spec.name):
            name, every = found
            chunks = [(row.position, 1, row.block_table) for row in self._rows]
            chunks += [(0, 0, ())] * (self._entry.batch_size - len(chunks))
            return _CompletedWindows(chunks, 1, every, self._block_size).tensor(name, spec)
        return to_ids(self._MAKERS[spec.name](self))

    def _mask(self, kind: MaskKind) -> Tensor:
        size, n, ends = self._block_size, self._entry.num_blocks, self._ends()
        hidden = None if kind.window is None else _padded([end - kind.window for end in ends], n)
        tokens = decode_mask(_padded(ends, n), size, hidden)
        if kind.every is None:
            return tokens
        num_entries = _padded([end // kind.every for end in ends], n)
        return torch.cat([tokens, decode_mask(num_entries, size // kind.every)], dim=1)

    def _ends(self) -> list[int]:
        """Returns for each block how many tokens its row has from the block's start on."""
        return list(chain.from_iterable(range(row.position + 1, 0, -self._block_size) for row in self._rows))

    def _owners(self) -> list[int]:
        """Returns the row of each block."""
        return list(chain.from_iterable(repeat(r, num) for r, num in enumerate(self._num_blocks)))

    def _input_ids(self) -> Iterable[int]:
        return _padded([row.token_id for row in self._rows], self._entry.batch_size)

    def _positions(self) -> Iterable[int]:
        return _padded([row.position for row in self._rows], self._entry.batch_size)

    def _slots(self) -> Iterable[int]:
        size = self._block_size
        for row in self._rows:
            yield row.block_table[row.position // size] * size + row.position % size
        yield from (i % size for i in range(self._entry.batch_size - len(self._rows)))

    def _blocks(self) -> list[int]:
        used = (row.block_table[:num] for row, num in zip(self._rows, self._num_blocks, strict=True))
        return list(chain.from_iterable(used))

    def _block_list(self) -> Iterable[int]:
        return _padded(self._blocks(), self._entry.num_blocks)

    def _block_rows(self) -> Iterable[int]:
        return _padded(self._owners(), self._entry.num_blocks)

    def _block_ends(self) -> Iterable[int]:
        return _padded(self._ends(), self._entry.num_blocks)

    def _pool_rows(self) -> Iterable[int]:
        return self._by_place(self._owners())

    def _pool_ends(self) -> Iterable[int]:
        return self._by_place(self._ends())

    def _by_place(self, values: Sequence[int]) -> list[int]:
        """Returns the values of blocks, ordered by the blocks' places in the cache. Leaves out the padding block."""
        placed = [0] * self._entry.num_blocks
        for block, value in zip(self._blocks(), values, strict=True):
            placed[block - 1] = value
        return placed

    _MAKERS: ClassVar[Mapping[str, Callable[[_DecodeInputs], Iterable[int]]]] = {
        "input_ids": _input_ids,
        "positions": _positions,
        "slots": _slots,
        "block_list": _block_list,
        "block_rows": _block_rows,
        "block_ends": _block_ends,
        "pool_rows": _pool_rows,
        "pool_ends": _pool_ends,
    }


def _padded(values: Sequence[int], size: int) -> list[int]:
    return [*values, *[0] * (size - len(values))]


_Chunk = tuple[int, int, Sequence[int]]
"""A row's new tokens: the position of the first, their number, and the block table."""


class _CompletedWindows:
    """The inputs by which a step of compressed attention makes cache entries for windows of tokens (graphs/step_inputs.py).

    A window of `every` tokens, aligned to the beginning of the sequence, is completed by the step that computes its last
    token. Each of b rows has w candidates, the first it may complete.
    """

    def __init__(self, chunks: Sequence[_Chunk], num_candidates: int, every: int, block_size: int) -> None:
        self._chunks, self._every, self._block_size = chunks, every, block_size
        starts = to_ids([start for start, _, _ in chunks])[:, None]
        ends = to_ids([start + number for start, number, _ in chunks])[:, None]
        self._numbers = starts // every + torch.arange(num_candidates)
        self._is_completed = self._numbers < ends // every

    def tensor(self, kind: str, spec: TensorSpec) -> Tensor:
        """Returns the input of this kind."""
        if kind == "windows_seen":
            return self._read(spec.shape[2])[1]
        if kind == "windows":
            positions, is_seen = self._read(spec.shape[2])
            return torch.where(is_seen, self._slots(positions, 1), 0)
        positions = torch.where(self._is_completed, self._numbers * self._every, 0)
        if kind == "entry_positions":
            return positions.flatten()
        padding = torch.arange(positions.shape[1]) % (self._block_size // self._every)
        return torch.where(self._is_completed, self._slots(positions, self._every), padding).flatten()

    def _read(self, size: int) -> tuple[Tensor, Tensor]:
        """Returns the positions that each window reads, and which of them exist in a completed window, both [b, w, S]."""
        ends = ((self._numbers + 1) * self._every)[..., None]
        positions = ends - size + torch.arange(size)
        return positions, self._is_completed[..., None] & (positions >= 0)

    def _slots(self, positions: Tensor, every: int) -> Tensor:
        """Returns ``block * (B / every) + offset`` for positions in each row. Values for positions outside are arbitrary."""
        slots, size = torch.zeros_like(positions), self._block_size
        for row, (_, _, table) in enumerate(self._chunks):
            if not self._is_completed[row, 0]:
                continue
            mine = positions[row].clamp_min(0)
            first = int(mine.min()) // size
            blocks = to_ids(table[first : int(mine.max()) // size + 1])
            numbers = (mine // size - first).clamp_max(len(blocks) - 1)
            slots[row] = blocks[numbers] * (size // every) + mine % size // every
        return slots
