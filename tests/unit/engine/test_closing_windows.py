"""The inputs of compressed attention, against a direct reading of what each of them means."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.engine.runner import ProgramRunner
from aotgaudi.engine.steps import DecodeRow, DecodeStep, PromptRow, PromptStep, SamplingRow
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.graphs.step_inputs import decode_inputs, prompt_inputs
from aotgaudi.runtime.executables import ExecutableTable
from aotgaudi.spec.cache_rows import Compression
from tests.unit.engine.test_runner import Recorder

BLOCK_SIZES = st.sampled_from([4, 8, 16, 24])


@st.composite
def compressions(draw: st.DrawFn, block_size: int) -> Compression:
    every = draw(st.sampled_from([r for r in range(1, block_size + 1) if block_size % r == 0]))
    is_indexed = draw(st.booleans())
    return Compression(every, 2 * every if is_indexed else every, is_indexed, draw(st.integers(1, 40)))


def table_of(draw: st.DrawFn, num_tokens: int, block_size: int, used: list[int]) -> tuple[int, ...]:
    """Blocks of a row, in any order, that no other row has; maybe more than it needs."""
    num = -(-num_tokens // block_size) + draw(st.integers(0, 1))
    blocks = draw(st.permutations([block for block in range(1, len(used) + num + 4) if block not in used]))
    used += blocks[:num]
    return tuple(blocks[:num])


class Reading:
    """What the definitions say of one row: its new tokens are those from `start` up to `end`."""

    def __init__(
        self, start: int, end: int, table: tuple[int, ...], block_size: int, kind: Compression
    ) -> None:
        self.start, self.end, self.table, self.size, self.kind = start, end, table, block_size, kind

    def closing(self) -> list[int]:
        """The windows whose last token is new."""
        every = self.kind.every
        return [p // every for p in range(self.start, self.end) if (p + 1) % every == 0]

    def slot(self, position: int) -> int:
        return self.table[position // self.size] * self.size + position % self.size

    def entry_slot(self, number: int) -> int:
        block, offset = divmod(number * self.kind.every, self.size)
        return self.table[block] * (self.size // self.kind.every) + offset // self.kind.every

    def sees_token(self, query: int, token: int) -> bool:
        return self.start <= query < self.end and query - self.kind.window < token <= query

    def sees_entry(self, query: int, number: int) -> bool:
        """An entry is complete with the last token of its window."""
        is_complete = (number + 1) * self.kind.every - 1 <= query
        return self.start <= query < self.end and is_complete


def check_windows(seen: dict[str, torch.Tensor], rows: list[Reading], num_rows: int, w: int) -> None:
    kind = rows[0].kind
    every, width = kind.every, kind.num_read
    windows, is_seen, slots, positions = (
        seen[f"{name}_r{every}"].tolist()
        for name in ("windows", "windows_seen", "entry_slots", "entry_positions")
    )
    per_block = rows[0].size // every
    for r in range(num_rows):
        closing = rows[r].closing() if r < len(rows) else []
        assert len(closing) <= w
        for i in range(w):
            at = r * w + i
            if i >= len(closing):
                assert not any(is_seen[r][i])
                assert slots[at] < per_block, "padding goes to block 0"
                assert positions[at] == 0
                continue
            last = (closing[i] + 1) * every
            read = range(last - width, last)
            assert is_seen[r][i] == [position >= 0 for position in read]
            assert windows[r][i] == [rows[r].slot(p) if p >= 0 else 0 for p in read]
            assert slots[at] == rows[r].entry_slot(closing[i])
            assert positions[at] == closing[i] * every


def record(entry: Any, step: Any, block_size: int, specs: Any) -> dict[str, torch.Tensor]:
    program, table = Recorder(specs, torch.zeros(entry.batch_size, 8)), ExecutableTable()
    table.add(entry, program)  # type: ignore[arg-type]
    ProgramRunner(table, block_size).logits(step)
    return program.seen


@given(st.data())
def test_a_prompts_inputs_are_what_they_are_defined_to_be(data: st.DataObject) -> None:
    """Property: for any lengths, ratio, block size and window, of chunks that start and end anywhere."""
    size = data.draw(BLOCK_SIZES)
    kind = data.draw(compressions(size))
    batch_size, query_len = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40))
    used: list[int] = []
    rows, steps = [], []
    for _ in range(data.draw(st.integers(1, batch_size))):
        start, num = data.draw(st.integers(0, 70)), data.draw(st.integers(1, query_len))
        table = table_of(data.draw, start + num, size, used)
        rows.append(Reading(start, start + num, table, size, kind))
        steps.append(PromptRow(tuple(range(num)), start, table, None))
    c = max(-(-row.start // size) for row in rows)
    entry = PromptEntry(batch_size, query_len, c + data.draw(st.integers(0, 1)))

    specs = prompt_inputs(entry, size, (None, kind.window), (kind,))
    seen = record(entry, PromptStep(entry, tuple(steps)), size, specs)

    w, per_block = -(-query_len // kind.every), size // kind.every
    check_windows(seen, rows, batch_size, w)
    mask = seen[f"mask_w{kind.window}_r{kind.every}"][:, 0].tolist()
    for r in range(batch_size):
        for q in range(query_len):
            if r >= len(rows) or rows[r].start + q >= rows[r].end:
                assert not any(mask[r][q])
                continue
            row, query, keys = rows[r], rows[r].start + q, iter(mask[r][q])
            for block in range(entry.num_ctx_blocks):
                for offset in range(size):
                    token = block * size + offset
                    assert next(keys) == (token < row.start and row.sees_token(query, token))
                for number in range(block * per_block, (block + 1) * per_block):
                    is_cached = (number + 1) * kind.every <= row.start
                    assert next(keys) == (is_cached and row.sees_entry(query, number))
            for i in range(query_len):
                assert next(keys) == row.sees_token(query, row.start + i)
            for i in range(w):
                assert next(keys) == row.sees_entry(query, row.start // kind.every + i)
            assert not list(keys)


@given(st.data())
def test_a_decode_steps_inputs_are_what_they_are_defined_to_be(data: st.DataObject) -> None:
    """Property: the same for one new token a row, flat over blocks."""
    size = data.draw(BLOCK_SIZES)
    kind = data.draw(compressions(size))
    batch_size = data.draw(st.integers(1, 4))
    used: list[int] = []
    rows, steps = [], []
    for _ in range(data.draw(st.integers(1, batch_size))):
        position = data.draw(st.integers(0, 90))
        table = table_of(data.draw, position + 1, size, used)
        rows.append(Reading(position, position + 1, table, size, kind))
        steps.append(DecodeRow(5, position, table, SamplingRow()))
    blocks = [(row, number) for row in rows for number in range(row.start // size + 1)]
    entry = DecodeEntry(batch_size, 1, len(blocks) + data.draw(st.integers(0, 2)))

    specs = decode_inputs(entry, size, (None, kind.window), (kind,))
    seen = record(entry, DecodeStep(entry, tuple(steps)), size, specs)

    check_windows(seen, rows, batch_size, 1)
    per_block = size // kind.every
    assert seen["block_list"].tolist()[: len(blocks)] == [row.table[number] for row, number in blocks]
    for n, block in enumerate(seen[f"mask_w{kind.window}_r{kind.every}"].tolist()):
        if n >= len(blocks):
            assert not any(block)
            continue
        row, number = blocks[n]
        tokens = range(number * size, (number + 1) * size)
        entries = range(number * per_block, (number + 1) * per_block)
        assert block == [
            *(row.sees_token(row.start, token) for token in tokens),
            *(row.sees_entry(row.start, entry) for entry in entries),
        ]
