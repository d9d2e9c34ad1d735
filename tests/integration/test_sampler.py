"""The largest sampler graph, compiled: filters, penalties and log-probabilities agree with eager, row by row."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from aotgaudi.backends.online import make_runtime
from aotgaudi.engine.constraints import Constraint
from aotgaudi.engine.request import Request, RequestState
from aotgaudi.engine.sampler import Sampler
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.engine.steps import StepResult
from aotgaudi.entries import SamplerEntry
from aotgaudi.graphs.sampler import SamplerGraph
from aotgaudi.graphs.step_inputs import sampler_inputs
from aotgaudi.runtime.executables import ExecutableTable
from aotgaudi.runtime.load import Loader
from aotgaudi.store.store import Store
from tests.integration.models import build, reference, spec_of

VOCAB, ROWS, NUM_LOGPROBS = 320, 4, 5
FULL = SamplerEntry(
    ROWS,
    0.8,
    0.9,
    40,
    True,
    min_p=0.05,
    presence_penalty=0.5,
    repetition_penalty=1.2,
    num_logprobs=NUM_LOGPROBS,
    constraints=True,
    top_n_sigma=1.5,
)
REQUESTS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, repetition_penalty=1.5, logprobs=0),
    SamplingParams(temperature=0.8, top_p=0.8, top_k=30, min_p=0.02, top_n_sigma=2.0, logprobs=NUM_LOGPROBS),
    SamplingParams(
        temperature=1.2,
        presence_penalty=0.7,
        frequency_penalty=-0.4,
        allowed_token_ids=tuple(range(0, VOCAB, 3)),
        logit_bias=((0, 2.0), (VOCAB - 2, 3.0), (31, -100.0), (1, 100.0)),
    ),
)


class EagerProgram:
    """What the compiled program is measured by."""

    inputs = sampler_inputs(ROWS, FULL.signature, VOCAB, "float32")

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        outputs = SamplerGraph(FULL.signature, NUM_LOGPROBS)(*inputs)
        assert isinstance(outputs, tuple)
        return list(outputs)


def requests() -> list[Request]:
    made = [
        Request(
            request_id=str(number),
            prompt_token_ids=tuple(random.Random(number).choices(range(VOCAB), k=9)),
            params=params,
            max_tokens=99,
            seed=number,
            state=RequestState.RUNNING,
        )
        for number, params in enumerate(REQUESTS)
    ]
    made[3].constraint = Constraint(made[3].params, made[3].token_ids, VOCAB)
    return made


def generate(sampler: Sampler, num_steps: int) -> list[StepResult]:
    """Samples the same few logits again and again, so that penalties have something to do."""
    generator, batch, results = torch.Generator().manual_seed(0), requests(), []
    logits = [2 * torch.randn(ROWS, VOCAB, generator=generator) for _ in range(3)]
    for step in range(num_steps):
        results.append(sampler.sample(logits[step % 3], [request.sampling for request in batch]))
        for request, token in zip(batch, results[-1].token_ids, strict=True):
            request.append_token(token or 0)
    return results


def test_a_compiled_sampler_answers_as_eager_does(store: Store, tmp_path: Path) -> None:
    built = build(spec_of(reference("llama")), (FULL,), store)
    table = ExecutableTable()
    table.declare_samplers((FULL,))
    Loader(make_runtime(built.artifacts.receipt.target), tmp_path, num_blocks=1).load(
        (FULL,), built.artifacts, table
    )
    compiled, eager = (
        Sampler(table, table.get),
        Sampler(table, lambda entry: EagerProgram()),
    )  # type: ignore[arg-type, return-value]

    results = generate(compiled, 24)

    for got, want in zip(results, generate(eager, 24), strict=True):
        assert got.token_ids == want.token_ids
        assert got.logprobs.keys() == want.logprobs.keys() == {1, 2}
        for row, values in want.logprobs.items():
            assert got.logprobs[row].logprob == pytest.approx(values.logprob, abs=1e-4)
            assert [token for token, _ in got.logprobs[row].top] == [token for token, _ in values.top]
        assert len(got.logprobs[2].top) == NUM_LOGPROBS
    drawn = {result.token_ids[3] for result in results}
    assert len(drawn) > 5
    assert all(token_id % 3 == 0 for token_id in drawn if token_id is not None)
