"""Many schemas, and a model that says anything: what is sampled under a schema is valid, in any company.

The model is random logits; the sampler's graph runs in eager. Engine, scheduler, masks and grammars are those of the server.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import jsonschema
import pytest
import torch

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.engine.admission import RequestRules
from aotgaudi.engine.blocks import BlockPool
from aotgaudi.engine.constraints import ConstraintMaker, MaskMaker
from aotgaudi.engine.core import EngineCore
from aotgaudi.engine.detokenizer import IncrementalDetokenizer
from aotgaudi.engine.loop import Engine
from aotgaudi.engine.output import ErrorEvent, Event, TokenEvent
from aotgaudi.engine.request import NewRequest
from aotgaudi.engine.sampler import Sampler
from aotgaudi.engine.sampling_params import SamplingParams, StructuredOutputs
from aotgaudi.engine.scheduler import Scheduler
from aotgaudi.engine.steps import DefragStep, Step, StepResult
from aotgaudi.entries import DecodeEntry, PromptEntry, SamplerEntry
from aotgaudi.graphs.sampler import SamplerGraph
from aotgaudi.graphs.step_inputs import sampler_inputs
from aotgaudi.llm.tokenizer import Tokenizer
from aotgaudi.manifest.enumerate import sampler_entries
from aotgaudi.runtime.executables import ExecutableTable
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.sampler import DEFAULT_SETTINGS, SamplerSpec
from tests.schemas import all_schemas
from tests.unit.llm.conftest import make_backend, make_grammars

VOCAB, EOS, ROWS, MAX_TOKENS = 258, 257, 4, 250
LIMITS = ServingLimits(
    max_num_seqs=ROWS, max_num_batched_tokens=288, max_model_len=288, block_size=16, num_blocks=18
)
TABLE = BucketTable((PromptEntry(1, 288, 18),), (DecodeEntry(ROWS, 1, 18),))
RULES = RequestRules(LIMITS, VOCAB, SamplerSpec(settings=DEFAULT_SETTINGS))
TOKENIZER = Tokenizer(make_backend(), [EOS])
FORMATS = jsonschema.FormatChecker(("date", "email", "ipv4", "ipv6", "uuid"))
"""What `jsonschema` can check by itself; its "time" has no offset."""
PLAIN = SamplingParams(max_tokens=40, seed=1, logprobs=2)


class EagerProgram:
    def __init__(self, entry: SamplerEntry) -> None:
        self.inputs = sampler_inputs(entry.batch_size, entry.signature, VOCAB, "float32")
        self._graph = SamplerGraph(entry.signature, entry.num_logprobs)

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        outputs = self._graph(*inputs)
        return list(outputs) if isinstance(outputs, tuple) else [outputs]


class RandomModel:
    """Logits that depend on nothing but a request's own tokens. What ends a string or an array is likelier than others."""

    def __init__(self) -> None:
        entries = sampler_entries((ROWS,), RULES.sampler)
        table = ExecutableTable()
        table.declare_samplers(entries)
        programs = {entry: EagerProgram(entry) for entry in entries}
        self._sampler = Sampler(table, programs.__getitem__)  # type: ignore[arg-type]
        self._masks = MaskMaker()
        self._closers = torch.zeros(VOCAB)
        self._closers[TOKENIZER.encode('"]},:0', False)] = torch.tensor([6.0, 5, 5, 2, 2, 2])
        self._closers[TOKENIZER.encode(" \t\r\n", False)] = -3.0

    def run(self, step: Step) -> StepResult:
        rows = [row.sampling for row in step.rows]
        self._masks.begin([row.constraint for row in rows if row and row.constraint])
        logits = torch.stack([self._logits(row) for row in step.rows])
        logits = torch.cat([logits, torch.zeros(ROWS - len(rows), VOCAB)])
        self._masks.finish()
        return self._sampler.sample(logits, rows)

    def _logits(self, row: Any) -> torch.Tensor:
        noise = 0 if row.sampling is None else row.sampling.noise
        return self._closers + 2 * torch.randn(
            VOCAB, generator=torch.Generator().manual_seed(int(noise * 2**40))
        )

    def exchange(self, step: DefragStep) -> None:
        raise NotImplementedError

    def clear(self, blocks: Sequence[int]) -> None:
        raise AssertionError("nothing is NaN")


@pytest.fixture(scope="module")
def engine() -> Any:
    scheduler = Scheduler(LIMITS, TABLE, BlockPool(LIMITS.num_blocks), eos_token_ids={EOS})
    made = Engine(
        EngineCore(scheduler, RandomModel()),
        lambda new: IncrementalDetokenizer(TOKENIZER.decode, new.prompt_token_ids),
        constraints=ConstraintMaker(
            VOCAB, {EOS}, lambda text: TOKENIZER.encode(text, add_special_tokens=False), make_grammars()
        ),
    )
    made.start()
    yield made, scheduler
    assert made.shutdown(60)


def generate(engine: Engine, asked: Sequence[SamplingParams]) -> list[TokenEvent]:
    events: dict[str, list[TokenEvent]] = {str(number): [] for number in range(len(asked))}
    done: Future[None] = Future()
    num_open = len(asked)

    def on_event(event: Event) -> None:
        nonlocal num_open
        if isinstance(event, ErrorEvent):
            done.set_exception(event.error)
            return
        events[event.request_id].append(event)
        num_open -= event.finish_reason is not None
        if not num_open:
            done.set_result(None)

    for number, params in enumerate(asked):
        engine.add(RULES.resolve([NewRequest(str(number), [65, 66], params)]), on_event)
    done.result(600)
    return [TokenEvent.joined(each) for each in events.values()]


def params_of(schema: dict[str, Any], number: int) -> SamplingParams:
    """Of all kinds: greedy, sampled, filtered, penalised, with log-probabilities."""
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 0.0},
        {"top_p": 0.95, "top_k": 100},
        {"frequency_penalty": 0.1, "min_p": 0.001},
        {"logprobs": 1},
    )
    outputs = StructuredOutputs(json=json.dumps(schema))
    return SamplingParams(
        max_tokens=MAX_TOKENS, seed=number, structured_outputs=outputs, **kinds[number % len(kinds)]
    )


def is_beginning(schema: dict[str, Any], token_ids: Sequence[int]) -> bool:
    """Whether each token is one that the grammar allows after those before."""
    matcher = make_grammars().compile(StructuredOutputs(json=json.dumps(schema)))
    for token_id in token_ids:
        mask = matcher.mask()
        if not mask[token_id // 8] >> token_id % 8 & 1:
            return False
        matcher.advance([token_id])
    return True


def test_what_is_sampled_under_a_schema_is_valid(engine: tuple[Engine, Scheduler]) -> None:
    schemas = all_schemas()
    asked = [params_of(schema, number) for number, schema in enumerate(schemas)]
    mixed = [params for each in asked for params in (each, PLAIN)]

    found = generate(engine[0], mixed)

    assert engine[1].num_preemptions > 0
    assert (
        len({event.text for event in found[1::2]}) == 1
    )  # Who asks for nothing gets the same in any company.
    num_whole = 0
    for schema, params, event in zip(schemas, asked, found[::2], strict=True):
        if event.finish_reason == "stop":
            num_whole += 1
            jsonschema.validate(
                json.loads(event.text),
                schema,
                jsonschema.Draft202012Validator,
                format_checker=FORMATS,
            )
        else:
            assert (event.finish_reason, len(event.token_ids)) == ("length", MAX_TOKENS)
            assert is_beginning(schema, event.token_ids)
        assert len(event.logprobs) == (0 if params.logprobs is None else len(event.token_ids))
    assert num_whole > 0.75 * len(schemas)


def test_the_same_seed_gives_the_same_answer_alone(engine: tuple[Engine, Scheduler]) -> None:
    asked = [params_of(schema, number) for number, schema in enumerate(all_schemas()[60:72])]

    together = generate(engine[0], asked)

    alone = [generate(engine[0], [params])[0] for params in asked]
    assert [event.token_ids for event in together] == [event.token_ids for event in alone]


@pytest.mark.parametrize(
    ("outputs", "is_right"),
    [
        (StructuredOutputs(choice=("yes", "no", "perhaps")), {"yes", "no", "perhaps"}.__contains__),
        (StructuredOutputs(regex="[0-9]{2}(a|b)"), lambda text: len(text) == 3 and text[:2].isdigit()),
        (StructuredOutputs(grammar='start: "<" start ">" | "x"'), lambda text: text.strip("<>") == "x"),
    ],
)
def test_an_answer_is_of_its_grammar_even_if_ends_are_ignored(
    engine: tuple[Engine, Scheduler], outputs: StructuredOutputs, is_right: Any
) -> None:
    asked = [
        SamplingParams(structured_outputs=outputs, seed=n, max_tokens=200, ignore_eos=n % 2 == 0)
        for n in range(8)
    ]

    found = generate(engine[0], asked)

    assert {event.finish_reason for event in found} == {"stop"}
    assert all(is_right(event.text) for event in found), [event.text for event in found]


def test_other_constraints_hold_next_to_each_other(engine: tuple[Engine, Scheduler]) -> None:
    letters = tuple(TOKENIZER.encode("abcdef", add_special_tokens=False))
    b = letters[1]
    asked = [
        SamplingParams(allowed_token_ids=(*letters, EOS), min_tokens=20, max_tokens=60, seed=1),
        SamplingParams(allowed_token_ids=letters, bad_words=("ab", "c"), max_tokens=60, seed=2),
        SamplingParams(logit_bias=((b, 100.0),), max_tokens=5, seed=3),
        SamplingParams(
            temperature=0, logit_bias=tuple((token_id, -100.0) for token_id in range(200)), max_tokens=9
        ),
        SamplingParams(allowed_token_ids=(b,), stop=("bbb",), min_tokens=4, max_tokens=20, seed=4),
    ]

    found = generate(engine[0], asked)

    texts = [event.text for event in found]
    assert set(texts[0]) <= set("abcdef")
    assert len(found[0].token_ids) > 20 or found[0].finish_reason == "length"
    assert "ab" not in texts[1]
    assert "c" not in texts[1]
    assert texts[2] == "bbbbb"
    assert min(found[3].token_ids) >= 200
    assert (texts[4], found[4].finish_reason) == ("bbbb", "stop")


def test_what_no_token_satisfies_ends_its_request_alone(engine: tuple[Engine, Scheduler]) -> None:
    outputs = StructuredOutputs(regex="a(b|c)")
    a, d = TOKENIZER.encode("ad", add_special_tokens=False)
    impossible = SamplingParams(structured_outputs=outputs, allowed_token_ids=(a, d))

    with pytest.raises(Exception, match="No token of allowed_token_ids"):
        generate(engine[0], [impossible])

    assert generate(engine[0], [PLAIN])[0].finish_reason == "length"
