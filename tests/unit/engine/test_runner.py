"""The runner turns steps into the tensors of graphs/step_inputs.py, and samples the rows that ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.engine.request import Request, RequestState
from aotgaudi.engine.runner import ProgramRunner
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.engine.steps import DecodeRow, DecodeStep, DefragStep, PromptRow, PromptStep, SamplingRow
from aotgaudi.entries import DecodeEntry, DefragEntry, Entry, PromptEntry, SamplerEntry
from aotgaudi.errors import NotWarmError
from aotgaudi.graphs.dialect import Dialect
from aotgaudi.graphs.program import TensorSpec
from aotgaudi.graphs.sampler import SamplerGraph
from aotgaudi.graphs.step_inputs import decode_inputs, hpu_inputs, prompt_inputs, sampler_inputs
from aotgaudi.runtime.executables import ExecutableTable
from aotgaudi.spec.cache_rows import Compression
from tests.driving import request_of

SIZE = 4
RUNNING = RequestState.RUNNING
GREEDY = SamplingRow()


class Recorder:
    """A program that remembers what it was given."""

    def __init__(self, inputs: Sequence[TensorSpec], output: torch.Tensor) -> None:
        self.inputs, self._output = tuple(inputs), output
        self.seen: dict[str, torch.Tensor] = {}

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for spec, value in zip(self.inputs, inputs, strict=True):
            assert (tuple(value.shape), str(value.dtype)) == (spec.shape, f"torch.{spec.dtype}"), spec.name
        self.seen = {spec.name: value for spec, value in zip(self.inputs, inputs, strict=True)}
        return [self._output]


def runner_of(programs: dict[Entry, Recorder], **options: Any) -> ProgramRunner:
    table = ExecutableTable()
    for entry, program in programs.items():
        table.add(entry, program)  # type: ignore[arg-type]
    table.declare_samplers(programs)
    return ProgramRunner(table, SIZE, **options)


def test_a_prompt_step_is_padded_to_its_entry() -> None:
    entry = PromptEntry(2, 4, 2)
    program = Recorder(prompt_inputs(entry, SIZE, (None, 3)), torch.zeros(2, 8))
    rows = (PromptRow((11, 12, 13), 4, (9, 5), None),)

    runner_of({entry: program}).run(PromptStep(entry, rows))

    seen = {name: value.tolist() for name, value in program.seen.items()}
    assert seen["input_ids"] == [11, 12, 13, 0, 0, 0, 0, 0]
    assert seen["positions"] == [4, 5, 6, 0, 0, 0, 0, 0]
    assert seen["slots"] == [20, 21, 22, 0, 0, 1, 2, 3]
    assert seen["ctx_blocks"] == [[9, 0], [0, 0]]
    assert seen["logits_indices"] == [2, 4]
    # 8 places of context, of which row 0 has 4 cached tokens and row 1 none; then the chunk itself. Padding sees nothing.
    assert [sum(q) for q in seen["mask"][0][0]] == [5, 6, 7, 0]
    assert seen["mask"][0][0][1] == [True] * 4 + [False] * 4 + [True, True, False, False]
    assert [sum(q) for q in seen["mask"][1][0]] == [0, 0, 0, 0]
    assert seen["mask_w3"][0][0][0] == [False, False, True, True] + [False] * 4 + [True, False, False, False]


def test_a_decode_step_is_flat_over_its_blocks() -> None:
    entry = DecodeEntry(3, 1, 6)
    program = Recorder(decode_inputs(entry, SIZE, (None, 3)), torch.zeros(3, 8))
    rows = (DecodeRow(7, 5, (3, 8), GREEDY), DecodeRow(9, 0, (2, 6), GREEDY))
    sampler = SamplerEntry(3, 0.0, 1.0, 0, True)
    samplers = Recorder((TensorSpec(name="logits", shape=(3, 8), dtype="float32"),), torch.tensor([4, 5, 6]))

    tokens = runner_of({entry: program, sampler: samplers}).run(DecodeStep(entry, rows)).token_ids

    seen = {name: value.tolist() for name, value in program.seen.items()}
    assert tokens == [4, 5]
    assert seen["input_ids"] == [7, 9, 0]
    assert seen["positions"] == [5, 0, 0]
    assert seen["slots"] == [33, 8, 0]
    assert seen["block_list"] == [3, 8, 2, 0, 0, 0]
    assert seen["block_rows"] == [0, 0, 1, 0, 0, 0]
    assert [sum(block) for block in seen["mask"]] == [4, 2, 1, 0, 0, 0]
    assert seen["mask_w3"][:2] == [[False, False, False, True], [True, True, False, False]]


def test_steps_of_the_hpu_dialect_take_what_their_masks_follow_from() -> None:
    prompt, decode = PromptEntry(2, 4, 2), DecodeEntry(3, 1, 8)
    programs = {
        (entry, dialect): Recorder(hpu_inputs(entry, dialect), torch.zeros(entry.batch_size, 8))
        for entry in (prompt, decode)
        for dialect in (Dialect("hpu"), Dialect("hpu", is_contiguous=True))
    }
    chunk = PromptStep(prompt, (PromptRow((11, 12, 13), 5, (9, 5), None),))
    rows = (DecodeRow(7, 5, (3, 8), GREEDY), DecodeRow(9, 0, (2, 6), GREEDY))

    for (entry, _), program in programs.items():
        step = chunk if entry == prompt else DecodeStep(decode, rows)
        runner_of({entry: program}).logits(step)

    seen = {
        (entry, dialect.is_contiguous): {name: value.tolist() for name, value in program.seen.items()}
        for (entry, dialect), program in programs.items()
    }
    assert seen[prompt, False] == seen[prompt, True]
    assert (seen[prompt, True]["starts"], seen[prompt, True]["num_padding"]) == ([5, 0], [1, 4])
    gathered, contiguous = seen[decode, False], seen[decode, True]
    assert gathered["block_list"] == [3, 8, 2, 0, 0, 0, 0, 0]
    assert gathered["block_rows"] == [0, 0, 1, 0, 0, 0, 0, 0]
    assert gathered["block_ends"] == [6, 2, 1, 0, 0, 0, 0, 0]
    assert contiguous["pool_rows"] == [0, 1, 0, 0, 0, 0, 0, 0]
    assert contiguous["pool_ends"] == [0, 1, 6, 0, 0, 0, 0, 2]


def test_a_sampler_of_another_size_serves_the_rows_that_sample() -> None:
    entry = PromptEntry(3, 4, 0)
    logits = torch.arange(24.0).view(3, 8)
    program = Recorder(prompt_inputs(entry, SIZE, (None,)), logits)
    sampler = SamplerEntry(1, 0.0, 1.0, 0, True)
    samplers = Recorder((TensorSpec(name="logits", shape=(1, 8), dtype="float32"),), torch.tensor([6]))
    rows = (
        PromptRow((1,), 0, (1,), None),
        PromptRow((2,), 0, (2,), GREEDY),
        PromptRow((3,), 0, (3,), None),
    )

    tokens = runner_of({entry: program, sampler: samplers}).run(PromptStep(entry, rows)).token_ids

    assert tokens == [None, 6, None]
    assert torch.equal(samplers.seen["logits"], logits[1:2])


def test_no_row_samples_where_none_asks() -> None:
    entry = PromptEntry(1, 4, 0)
    program = Recorder(prompt_inputs(entry, SIZE, (None,)), torch.zeros(1, 8))

    result = runner_of({entry: program}).run(PromptStep(entry, (PromptRow((1,), 0, (1,), None),)))

    assert (result.token_ids, result.logprobs) == ([None], {})


def test_an_exchange_is_padded_with_the_padding_block() -> None:
    entry = DefragEntry(4)
    specs = tuple(TensorSpec(name=name, shape=(4,), dtype="int64") for name in ("sources", "destinations"))
    program = Recorder(specs, torch.zeros(4))

    runner_of({entry: program}).exchange(DefragStep(entry, ((9, 1), (8, 2))))

    assert program.seen["sources"].tolist() == [9, 8, 0, 0]
    assert program.seen["destinations"].tolist() == [1, 2, 0, 0]


def test_a_cold_entry_is_refused_unless_something_makes_it_warm() -> None:
    entry = PromptEntry(1, 4, 0)
    step = PromptStep(entry, (PromptRow((1,), 0, (1,), None),))

    with pytest.raises(NotWarmError, match=r"\(prompt, 1, 4, 0\) is not warm"):
        runner_of({}).run(step)


def test_the_thread_that_runs_sets_its_threads() -> None:
    before = torch.get_num_threads()
    entry = PromptEntry(1, 4, 0)
    program = Recorder(prompt_inputs(entry, SIZE, (None,)), torch.zeros(1, 8))
    runner = runner_of({entry: program}, num_threads=before + 1)

    runner.run(PromptStep(entry, (PromptRow((1,), 0, (1,), None),)))

    try:
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


class EagerSampler:
    """A sampler program that runs its graph in eager mode, and remembers its inputs."""

    def __init__(self, entry: SamplerEntry, vocab_size: int) -> None:
        self.inputs = sampler_inputs(entry.batch_size, entry.signature, vocab_size, "float32")
        self._graph = SamplerGraph(entry.signature, entry.num_logprobs)
        self.seen: dict[str, torch.Tensor] = {}
        self.num_runs = 0

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for spec, value in zip(self.inputs, inputs, strict=True):
            assert (tuple(value.shape), str(value.dtype)) == (spec.shape, f"torch.{spec.dtype}"), spec.name
        self.seen = {spec.name: value.clone() for spec, value in zip(self.inputs, inputs, strict=True)}
        self.num_runs += 1
        outputs = self._graph(*inputs)
        return list(outputs) if isinstance(outputs, tuple) else [outputs]


VOCAB = 8
PENALISED = SamplerEntry(2, 0.0, 1.0, 0, True, presence_penalty=1.0)
FULL = SamplerEntry(2, 0.7, 1.0, 0, True, top_n_sigma=1.0, presence_penalty=1.0, num_logprobs=4)


def eager_runner(*entries: SamplerEntry, logits: torch.Tensor) -> tuple[ProgramRunner, list[EagerSampler]]:
    samplers = [EagerSampler(entry, VOCAB) for entry in entries]
    decode = DecodeEntry(len(logits), 1, 8)
    step = Recorder(decode_inputs(decode, SIZE, (None,)), logits)
    programs: dict[Entry, Any] = {decode: step, **dict(zip(entries, samplers, strict=True))}
    return runner_of(programs), samplers


def running_of(prompt: Sequence[int], **params: Any) -> Request:
    asked = SamplingParams(**{"temperature": 0, **params})
    return request_of(tuple(prompt), 20, asked, state=RUNNING)


def decode_step(batch_size: int, *requests: Request) -> DecodeStep:
    rows = [DecodeRow(r.last_token_id, 0, (1,), r.sampling) for r in requests]
    return DecodeStep(DecodeEntry(batch_size, 1, 8), tuple(rows))


def test_penalties_see_the_prompt_and_count_what_was_generated_also_when_rows_move() -> None:
    runner, (sampler,) = eager_runner(PENALISED, logits=torch.zeros(2, VOCAB))
    first = running_of([5, 5, 6], presence_penalty=0.5)
    second = running_of([1], repetition_penalty=1.5)
    third = running_of([2])

    for batch in ([first, second], [first, second], [second, first], [third, first], [second, third]):
        runner.run(decode_step(2, *batch))

        for row, request in enumerate(batch):
            if request.params.signature.penalties:
                counts = torch.bincount(
                    torch.tensor(tuple(request.token_ids[request.num_prompt_tokens :]), dtype=torch.int64),
                    minlength=VOCAB,
                )
                assert torch.equal(sampler.seen["output_counts"][row], counts.float())
                assert sampler.seen["prompt_mask"][row].nonzero().flatten().tolist() == sorted(
                    set(request.token_ids[: request.num_prompt_tokens])
                )
        for request, token in zip(batch, (3, 4), strict=True):
            request.append_token(token)

    assert sampler.seen["presence_penalty"].tolist() == [0.0, 0.0]
    assert sampler.seen["repetition_penalty"].tolist() == [1.5, 1.0]


def test_a_penalty_changes_the_greedy_token() -> None:
    logits = torch.tensor([[0.0, 0.1, 2.0, 1.9, 0, 0, 0, 0]] * 2)
    runner, _ = eager_runner(PENALISED, logits=logits)
    request = running_of([1], frequency_penalty=0.3)
    free = running_of([1])

    tokens = []
    for _ in range(3):
        answer = runner.run(decode_step(2, request, free)).token_ids
        tokens.append(answer)
        request.append_token(answer[0] or 0)

    assert tokens == [[2, 2], [3, 2], [2, 2]]


def test_log_probabilities_are_given_to_the_rows_that_asked_as_many_as_they_asked_for() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    runner, _ = eager_runner(FULL, logits=logits)

    result = runner.run(decode_step(2, running_of([1], logprobs=2), running_of([1])))

    expected = torch.log_softmax(logits[0].double(), -1)
    best = expected.topk(2)
    assert set(result.logprobs) == {0}
    assert result.logprobs[0].logprob == pytest.approx(expected[result.token_ids[0]].item(), abs=1e-5)
    assert [token for token, _ in result.logprobs[0].top] == best.indices.tolist()
    assert [value for _, value in result.logprobs[0].top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_the_cheapest_entry_that_serves_every_row_is_run() -> None:
    greedy = SamplerEntry(2, 0.0, 1.0, 0, True)
    runner, samplers = eager_runner(greedy, PENALISED, FULL, logits=torch.zeros(2, VOCAB))

    runner.run(decode_step(2, running_of([1]), running_of([1], temperature=0, top_k=3)))
    runner.run(decode_step(2, running_of([1]), running_of([1], presence_penalty=1)))
    runner.run(decode_step(2, running_of([1], temperature=0.5), running_of([1], presence_penalty=1)))

    assert [sampler.num_runs for sampler in samplers] == [1, 1, 1]


def test_more_rows_than_the_largest_sampler_takes_are_sampled_in_several_runs() -> None:
    logits = torch.eye(VOCAB)[:5]
    runner, (sampler,) = eager_runner(SamplerEntry(2, 0.0, 1.0, 0, True), logits=logits)

    result = runner.run(decode_step(5, *(running_of([1]) for _ in range(5))))

    assert result.token_ids == [0, 1, 2, 3, 4]
    assert sampler.num_runs == 3


NAN, INF = float("nan"), float("inf")
NOT_SAMPLED = {
    "NaN first": {0: NAN},
    "NaN inside": {3: NAN},
    "NaN last": {VOCAB - 1: NAN},
    "negative NaN": {3: -NAN},
    "all NaN": dict.fromkeys(range(VOCAB), NAN),
    "infinity": {3: INF},
    "all infinite": dict.fromkeys(range(VOCAB), INF),
    "nothing possible": dict.fromkeys(range(VOCAB), -INF),
}
ASKED = {
    "greedy": {},
    "random": {"temperature": 1.0},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 0.5, "top_p": 0.5},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "top_n_sigma": {"temperature": 1.0, "top_n_sigma": 1.0},
    "penalties": {"presence_penalty": 1.0, "repetition_penalty": 2.0},
    "everything": {
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "frequency_penalty": 1,
        "logprobs": 2,
    },
}


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("wrong", NOT_SAMPLED.values(), ids=NOT_SAMPLED)
@pytest.mark.parametrize("num_rows", [2, 3])
def test_a_row_without_a_finite_maximum_is_named(
    asked: dict[str, Any], wrong: dict[int, float], num_rows: int
) -> None:
    logits = torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(0))
    for column, value in wrong.items():
        logits[1, column] = value
    entries = [SamplerEntry(2, 0.0, 1.0, 0, True), SamplerEntry(2, 1.0, 1.0, 0, True), PENALISED, FULL]
    runner, _ = eager_runner(*entries, logits=logits)
    requests = [running_of([1], **asked) for _ in range(num_rows)]

    for _ in range(5):
        result = runner._sampler.sample(logits, [request.sampling for request in requests])

        assert result.invalid_rows == {1}
        for request in requests:
            request.append_token(3)


def test_rows_with_impossible_tokens_are_valid() -> None:
    logits = torch.full((3, VOCAB), -INF)
    for row, column in enumerate((0, 4, VOCAB - 1)):
        logits[row, column] = -1e30
    runner, _ = eager_runner(FULL, logits=logits)

    result = runner.run(decode_step(3, *(running_of([1], temperature=1.0, logprobs=1) for _ in range(3))))

    assert (result.token_ids, result.invalid_rows) == ([0, 4, VOCAB - 1], set())


def test_a_chunk_that_samples_nothing_is_judged_too() -> None:
    entry = PromptEntry(2, 4, 0)
    logits = torch.stack([torch.full((VOCAB,), NAN), torch.zeros(VOCAB)])
    runner = runner_of({entry: Recorder(prompt_inputs(entry, SIZE, (None,)), logits)})

    rows = (PromptRow((1,), 0, (1,), None), PromptRow((2,), 0, (2,), None))

    assert runner.run(PromptStep(entry, rows)).invalid_rows == {0}


class Contagious:
    """A decode step in which a NaN in any block that is read reaches every row, as 0 times NaN does.

    Token `POISON` is a NaN; the answer to another token is the next one. Padding is written to block 0.
    """

    POISON = 5

    def __init__(self, entry: DecodeEntry, cache: torch.Tensor) -> None:
        self.inputs = decode_inputs(entry, SIZE, (None,))
        self._cache = cache

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        x = {spec.name: value for spec, value in zip(self.inputs, inputs, strict=True)}
        values = torch.where(x["input_ids"] == self.POISON, NAN, 1.0)
        self._write(x["slots"], values)
        reached = values + 0 * self._cache.index_select(1, x["block_list"]).sum()
        self._write(x["slots"], reached)
        answers = torch.nn.functional.one_hot((x["input_ids"] + 1) % VOCAB, VOCAB)
        return [answers * reached[:, None]]

    def _write(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        self._cache[:, slots // SIZE, 0, slots % SIZE, 0] = values


def test_a_nan_of_one_row_reaches_neither_the_others_nor_what_comes_later() -> None:
    decode, sampler = DecodeEntry(4, 1, 8), SamplerEntry(4, 0.0, 1.0, 0, True)
    table = ExecutableTable()
    table.caches.append(torch.zeros(2, 9, 1, SIZE, 1))
    table.add(decode, Contagious(decode, table.caches[0]))  # type: ignore[arg-type]
    table.add(sampler, EagerSampler(sampler, VOCAB))  # type: ignore[arg-type]
    table.declare_samplers([sampler])
    runner = ProgramRunner(table, SIZE)

    def step(*rows: tuple[int, int]) -> DecodeStep:
        return DecodeStep(decode, tuple(DecodeRow(token, 1, (block,), GREEDY) for token, block in rows))

    poisoned = runner.run(step((2, 3), (Contagious.POISON, 4), (3, 6)))
    runner.clear([4])  # As the engine does with the blocks of an invalid row that nobody else holds.
    later = runner.run(step((1, 3), (2, 4)))

    assert poisoned.invalid_rows == {1}
    assert (poisoned.token_ids[0], poisoned.token_ids[2]) == (3, 4)
    assert (later.token_ids, later.invalid_rows) == ([2, 3], set())
    assert not table.caches[0].isnan().any()


# The inputs of compressed attention, against a direct reading of what each of them means


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
