"""Requests for embeddings: prompts in chunks, and what the runner makes of their hidden states."""

from __future__ import annotations

import math
from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.engine.admission import EmbeddingRules, RequestRules
from aotgaudi.engine.blocks import BlockPool
from aotgaudi.engine.core import EngineCore
from aotgaudi.engine.detokenizer import IncrementalDetokenizer
from aotgaudi.engine.output import ErrorEvent, Event, OutputStream, TokenEvent
from aotgaudi.engine.pooling import Pooler
from aotgaudi.engine.request import NewRequest, Request
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.engine.scheduler import Scheduler
from aotgaudi.engine.steps import DefragStep, PoolingParams, PromptStep, Step, StepResult
from aotgaudi.entries import PromptEntry
from aotgaudi.errors import RequestError
from aotgaudi.graphs.pooler import pooled
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.pooler import PoolerSpec, PoolingType

LIMITS = ServingLimits(
    max_num_seqs=4,
    max_num_prefill_seqs=2,
    max_num_batched_tokens=16,
    max_model_len=32,
    block_size=4,
    num_blocks=16,
)
TABLE = BucketTable((PromptEntry(2, 16, 8),), ())
WIDTH = 3
RULES = RequestRules(LIMITS, vocab_size=100, embeddings=EmbeddingRules(WIDTH, (2,)))


def _state(token_id: int, position: int) -> list[float]:
    """What the model makes of a token."""
    return [float(token_id), math.sin(position + token_id), 1.0 + position]


class PoolingRunner:
    """Pools `_state` of each token as the graph and the engine do. Tokens in `nans` give NaN."""

    def __init__(self, spec: PoolerSpec) -> None:
        self._kind, self._pooler = spec.pooling_type, Pooler(spec)
        self.nans: set[int] = set()
        self.num_steps = 0

    def run(self, step: Step) -> StepResult:
        assert isinstance(step, PromptStep), "nothing decodes"
        self.num_steps += 1
        b, q = step.entry.batch_size, step.entry.query_len
        hidden, slots, positions, last = (
            torch.full((b * q, WIDTH), torch.nan),
            [0] * b * q,
            [0] * b * q,
            [0] * b,
        )
        for r, row in enumerate(step.rows):
            for i, token_id in enumerate(row.token_ids):
                state = _state(token_id, row.start + i)
                hidden[r * q + i] = torch.tensor([math.nan] * WIDTH if token_id in self.nans else state)
                slots[r * q + i], positions[r * q + i], last[r] = 99, row.start + i, r * q + i
        inputs = {
            "slots": torch.tensor(slots),
            "positions": torch.tensor(positions),
            "logits_indices": torch.tensor(last),
        }
        return self._pooler.pool(pooled(hidden, inputs, self._kind, LIMITS.block_size), step.rows)

    def exchange(self, step: DefragStep) -> None:
        raise AssertionError(step)

    def clear(self, blocks: object, pages: object = ()) -> None:
        pass


def _expected(spec: PoolerSpec, prompt: list[int], dimensions: int | None = None) -> list[float]:
    states = torch.tensor([_state(token_id, i) for i, token_id in enumerate(prompt)], dtype=torch.float64)
    vector = {"LAST": states[-1], "CLS": states[0], "MEAN": states.mean(0)}[spec.pooling_type][:dimensions]
    return (torch.nn.functional.normalize(vector, dim=0) if spec.normalize else vector).tolist()


class Owners:
    """An engine without threads, and the events of each request."""

    def __init__(self, spec: PoolerSpec, *, prefix_caching: bool = False) -> None:
        self.runner, self.events = PoolingRunner(spec), dict[str, list[Event]]()
        scheduler = Scheduler(LIMITS, TABLE, BlockPool(LIMITS.num_blocks), prefix_caching=prefix_caching)
        self.core = EngineCore(scheduler, self.runner)

    def add(self, name: str, prompt: list[int], dimensions: int | None = None) -> OutputStream:
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            params=SamplingParams(),
            max_tokens=0,
            seed=0,
            pooling=PoolingParams(dimensions),
        )
        self.events[name] = []
        detokenizer = IncrementalDetokenizer(lambda ids: "", prompt)
        stream = OutputStream(request, detokenizer, self.events[name].append)
        self.core.add(stream)
        return stream

    def run(self) -> None:
        while self.core.step():
            self.core.scheduler.check_integrity()

    def embedding(self, name: str) -> list[float]:
        (event,) = self.events[name]
        assert isinstance(event, TokenEvent)
        assert (event.finish_reason, event.token_ids, event.text) == ("stop", (), "")
        return list(array("f", event.embedding))


kinds = st.sampled_from(["LAST", "CLS", "MEAN"])
prompts = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=32), min_size=1, max_size=6)


@given(kind=kinds, normalize=st.booleans(), asked=prompts, dimensions=st.sampled_from([None, 2]))
def test_each_prompt_is_pooled_whole_however_it_was_cut_and_whoever_ran_beside_it(
    kind: PoolingType, normalize: bool, asked: list[list[int]], dimensions: int | None
) -> None:
    spec = PoolerSpec(pooling_type=kind, normalize=normalize)
    owners = Owners(spec, prefix_caching=kind == "LAST")
    for i, prompt in enumerate(asked):
        owners.add(str(i), prompt, dimensions)

    owners.run()

    for i, prompt in enumerate(asked):
        assert owners.embedding(str(i)) == pytest.approx(_expected(spec, prompt, dimensions), abs=1e-5)
    assert owners.core.status().num_blocks_used == 0
    assert owners.core.status().num_output_tokens == 0


def test_a_long_prompt_takes_several_steps() -> None:
    owners = Owners(PoolerSpec(pooling_type="MEAN"))
    owners.add("long", list(range(32)))

    owners.run()

    assert owners.runner.num_steps == 2
    assert owners.embedding("long") == pytest.approx(
        _expected(PoolerSpec(pooling_type="MEAN"), list(range(32)))
    )


def test_a_prompt_that_gives_nan_fails_alone() -> None:
    owners = Owners(PoolerSpec())
    owners.runner.nans = {7}
    owners.add("bad", [1, 7])
    owners.add("good", [1, 2])

    owners.run()

    (event,) = owners.events["bad"]
    assert isinstance(event, ErrorEvent)
    assert "NaN or infinite numbers for this request's embedding" in str(event.error)
    assert owners.embedding("good") == pytest.approx(_expected(PoolerSpec(), [1, 2]))


def test_an_aborted_request_gets_no_embedding() -> None:
    owners = Owners(PoolerSpec())
    stream = owners.add("gone", list(range(32)))
    owners.core.step()

    owners.core.abort(stream)
    owners.run()

    (event,) = owners.events["gone"]
    assert isinstance(event, TokenEvent)
    assert (event.finish_reason, event.embedding) == ("abort", b"")


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), kind=kinds)
def test_padding_counts_for_nothing(sizes: list[int], kind: PoolingType) -> None:
    b, q = len(sizes), 5
    hidden = torch.full((b * q, WIDTH), torch.nan)
    slots, positions = torch.zeros(b * q, dtype=torch.int64), torch.zeros(b * q, dtype=torch.int64)
    for r, size in enumerate(sizes):
        hidden[r * q : r * q + size] = torch.arange(1.0, size + 1)[:, None]
        slots[r * q : r * q + size], positions[r * q : r * q + size] = 4, torch.arange(size)
    last = torch.tensor([r * q + size - 1 for r, size in enumerate(sizes)])

    found = pooled(hidden, {"slots": slots, "positions": positions, "logits_indices": last}, kind, 4)

    expected = {"LAST": sizes, "CLS": [1] * b, "MEAN": [n * (n + 1) // 2 for n in sizes]}[kind]
    assert found.tolist() == [[float(value)] * WIDTH for value in expected]


@pytest.mark.parametrize(
    ("prompt", "dimensions", "param", "words"),
    [
        ([], None, "prompt", "is empty"),
        ([100], None, "prompt", "vocabulary"),
        ([1] * 33, None, "prompt", "max_model_len = 32"),
        ([1], 1, "dimensions", "one of 2, not 1"),
        ([1], 4, "dimensions", "one of 2, not 4"),
    ],
)
def test_what_cannot_be_embedded_is_refused(
    prompt: list[int], dimensions: int | None, param: str, words: str
) -> None:
    request = NewRequest("r", prompt, SamplingParams(), pooling=PoolingParams(dimensions))

    with pytest.raises(RequestError, match=words) as refused:
        RULES.resolve([request])

    assert refused.value.param == param


def test_as_many_tokens_as_the_model_has_are_admitted_and_none_is_generated() -> None:
    request = NewRequest("r", [1] * 32, SamplingParams(), pooling=PoolingParams(2))

    (resolved,) = RULES.resolve([request])

    assert resolved.max_tokens == 0


@pytest.mark.parametrize(
    ("sizes", "asked", "is_good"),
    [
        ((), 3, True),
        ((), 2, False),
        (None, 1, True),
        (None, 2, True),
        (None, 4, False),
        ((2,), 2, True),
        ((2,), 3, True),
        ((2,), 1, False),
    ],
)
def test_dimensions_are_those_that_the_config_states(
    sizes: tuple[int, ...] | None, asked: int, is_good: bool
) -> None:
    rules = EmbeddingRules(3, sizes)

    if is_good:
        rules.check(PoolingParams(asked))
    else:
        with pytest.raises(RequestError, match="dimensions must be"):
            rules.check(PoolingParams(asked))


def test_a_model_does_what_its_spec_says() -> None:
    generating = RequestRules(LIMITS)

    with pytest.raises(RequestError, match=r'gives no embeddings.*runner = "pooling"'):
        generating.resolve([NewRequest("r", [1], SamplingParams(), pooling=PoolingParams())])
    with pytest.raises(RequestError, match=r'generates no text.*runner = "pooling"'):
        RULES.resolve([NewRequest("r", [1], SamplingParams())])
