"""The hpu dialect on the double: right against transformers, written in place, and nothing falls back."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.engine.blocks import BlockPool
from aotgaudi.engine.core import EngineCore
from aotgaudi.engine.detokenizer import IncrementalDetokenizer
from aotgaudi.engine.output import OutputStream
from aotgaudi.engine.request import Request
from aotgaudi.engine.runner import ProgramRunner
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.engine.scheduler import Scheduler
from aotgaudi.entries import DecodeEntry, Entry, PromptEntry, SamplerEntry
from aotgaudi.graphs.canonical import from_text
from aotgaudi.graphs.dialect import Dialect
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.scheduler import DefragSpec
from tests.hpu.collecting import environment_of
from tests.hpu.conftest import PROFILES, InstalledDouble
from tests.hpu.forks import start_fork
from tests.integration.models import reference, spec_of
from tests.integration.test_right_answers import CHUNK, FRESH, SWAP, TOLERANCE, Conversation
from tests.unit.graphs.test_trace import eager_runner

pytestmark = pytest.mark.hpu_double

DECODE = DecodeEntry(4, 1, 48)
GATHERED, CONTIGUOUS = Dialect("hpu"), Dialect("hpu", is_contiguous=True)
SAMPLER = SamplerEntry(
    2, 0.7, 0.9, 50, True, min_p=0.1, repetition_penalty=1.2, num_logprobs=3, constraints=True
)
CASES = (
    *((name, CONTIGUOUS, profile) for name in ("llama", "qwen3", "gemma3_text") for profile in PROFILES),
    ("llama", GATHERED, PROFILES[0]),
)
SECONDS = 500


class OnCard:
    """A runner whose units run on the card; logits come back to the host."""

    def __init__(self, runner: ProgramRunner) -> None:
        self._runner, self.exchange = runner, runner.exchange

    def logits(self, step: Any) -> torch.Tensor:
        return self._runner.logits(step).cpu()


def converse(architecture: str, dialect: Dialect) -> dict[str, float]:
    """Returns the largest error of each kind of step, beside the bridge."""
    from aotgaudi.backends.hpu.card import acquired, put
    from aotgaudi.backends.hpu.compiler import check_unit
    from aotgaudi.backends.hpu.frontend import compiled
    from aotgaudi.graphs.trace import trace

    card = acquired()

    class Unit:
        def __init__(self, text: str) -> None:
            graph, _ = from_text(text)
            run = compiled(graph)
            self.run = lambda inputs: run([put(tensor) for tensor in inputs])

    model = reference(architecture)
    before = card.counts()
    runner = eager_runner(model, (FRESH, CHUNK, DECODE, SWAP), dialect=dialect, load=Unit, put=put)
    talk = Conversation(model, OnCard(runner), DECODE)  # type: ignore[arg-type]
    errors = {
        "prompt": max(talk.prompt(FRESH, (i, 0, n)) for i, n in ((0, 32), (1, 32), (2, 17))),
        "prompt on context": max(
            talk.prompt(CHUNK, (0, 32, 16), (1, 32, 7)),
            talk.prompt(CHUNK, (2, 17, 15), (3, 0, 16)),
            talk.prompt(CHUNK, (0, 48, 16), (3, 16, 9)),
        ),
        "decode": max(
            talk.decode((1, 39)),
            talk.decode((2, 32), (0, 64)),
            talk.decode((3, 25), (0, 65), (2, 32), (1, 39)),
        ),
    }
    talk.swap(talk.tables[0][1], talk.tables[2][0])
    talk.swap(talk.tables[1][0], 40)
    errors["swap"] = talk.decode((0, 65), (1, 39), (2, 32))
    if architecture == "llama":
        spec = spec_of(model)
        for entry in (FRESH, CHUNK, DECODE, SWAP, SAMPLER):
            for piece in {
                piece.text: piece for piece in trace(entry, spec.model, spec.limits, dialect).pieces
            }.values():
                graph, specs = from_text(piece.text)
                check_unit(graph, specs, compiled(graph), f"{piece.label} {entry}")
    counts = card.counts().since(before)
    return {**errors, "fallbacks": counts.fallbacks}


def _in_fork(
    action: Callable[[], dict[str, Any]], folder: Path, directory: Path
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns what `action` returns beside the double in `folder`, and the double's journal."""
    (directory / "state").mkdir()
    journal, result = directory / "journal", directory / "result"
    settings = {"AOTGAUDI_DOUBLE_STATE": str(directory / "state"), "AOTGAUDI_DOUBLE_JOURNAL": str(journal)}

    def run() -> None:
        result.write_text(json.dumps(action()), encoding="utf-8")

    environment = environment_of(folder, directory / "recipes", **settings)
    fork = start_fork(run, environment, directory / "output")
    deadline = time.monotonic() + SECONDS
    while fork.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    if fork.poll() is None:
        fork.kill()
    assert result.exists(), (directory / "output").read_text(encoding="utf-8", errors="replace")[-3000:]
    return json.loads(result.read_bytes()), [json.loads(line) for line in journal.read_bytes().splitlines()]


@pytest.mark.parametrize(
    ("architecture", "dialect", "profile"), CASES, ids=[f"{n}-{d.is_contiguous}-{p}" for n, d, p in CASES]
)
def test_its_units_compute_what_transformers_computes_in_place_and_without_a_fallback(
    architecture: str, dialect: Dialect, profile: str, double: InstalledDouble, tmp_path: Path
) -> None:
    """Prompts, prompts on context, decodes of several mixes, through a window where the model has one, and exchanges."""
    found, events = _in_fork(lambda: converse(architecture, dialect), double(profile), tmp_path)

    writes = Counter(event["in_place"] for event in events if event.get("event") == "CACHE_WRITE")
    assert found.pop("fallbacks") == 0
    assert set(found) == {"prompt", "prompt on context", "decode", "swap"}
    assert max(found.values()) < TOLERANCE, found
    assert writes[True]
    assert not writes[False]


LONG_DECODES = tuple(DecodeEntry(4, 1, num_blocks) for num_blocks in (8, 16, 40))
PROMPT = PromptEntry(1, 32, 2)
SAMPLERS = tuple(SamplerEntry(size, 0.0, 1.0, 0, True) for size in (1, 4))


def serve(num_requests: int) -> dict[str, Any]:
    """Serves requests of mixed lengths with the defragmenter off and on, beside the bridge."""
    from aotgaudi.backends.hpu.card import acquired, put
    from aotgaudi.backends.hpu.frontend import compiled
    from aotgaudi.backends.hpu.runtime import CardPlacement

    card = acquired()

    class Unit:
        def __init__(self, text: str) -> None:
            run = compiled(from_text(text)[0])
            self.run = lambda inputs: run([put(tensor) for tensor in inputs])

    model, limits = reference("llama"), spec_of(reference("llama")).limits
    entries = (PROMPT, *LONG_DECODES, SWAP, *SAMPLERS)
    runner = eager_runner(model, entries, dialect=CONTIGUOUS, load=Unit, put=put)
    runner._table.placement = CardPlacement(card)
    found: dict[str, Any] = {}
    draws = random.Random(3)
    asked = [
        ([draws.randrange(3, 320) for _ in range(draws.randint(8, 30))], 60 if number % 4 == 3 else 8)
        for number in range(num_requests)
    ]
    for name, defrag in (
        ("off", DefragSpec(enabled=False)),
        ("on", DefragSpec(threshold=2, padded_swaps=(8,))),
    ):
        found[name] = _serve(runner, limits, defrag, asked)
    found["wanted"] = [_greedy(model, prompt, num_tokens) for prompt, num_tokens in asked]
    return found


def _serve(
    runner: ProgramRunner, limits: ServingLimits, defrag: DefragSpec, asked: list[tuple[list[int], int]]
) -> dict[str, Any]:
    pool, read, worst = BlockPool(limits.num_blocks), 0, 0.0
    scheduler = Scheduler(limits, BucketTable((PROMPT,), LONG_DECODES), pool, is_contiguous=True)

    def observe(entry: Entry, _seconds: float, _rows: int) -> None:
        nonlocal read
        read += entry.num_blocks if isinstance(entry, DecodeEntry) else 0

    core = EngineCore(scheduler, runner, defrag=defrag, on_step=observe)
    requests = []
    for number, (prompt, num_tokens) in enumerate(asked):
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        request = Request(
            request_id=str(number),
            prompt_token_ids=tuple(prompt),
            params=params,
            max_tokens=num_tokens,
            seed=0,
        )
        requests.append(request)
        core.add(OutputStream(request, IncrementalDetokenizer(lambda ids: "x" * len(ids)), lambda _: None))
    while core.step():
        scheduler.check_integrity()
        if pool.num_used:
            worst = max(worst, pool.max_used / pool.num_used)
    stats = core.stats()
    return {
        "texts": [request.token_ids[request.num_prompt_tokens :] for request in requests],
        "read": read,
        "worst": worst,
        "swaps": stats.num_defrag_swaps,
        "failed": stats.num_failed_steps,
    }


def _greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_a_scattered_cache_gives_the_same_texts_and_the_defragmenter_smaller_decodes(
    double: InstalledDouble, tmp_path: Path
) -> None:
    found, events = _in_fork(lambda: serve(12), double("1.24.1"), tmp_path)

    off, on = found["off"], found["on"]
    assert off["texts"] == found["wanted"]
    assert on["texts"] == found["wanted"]
    assert (off["failed"], on["failed"], off["swaps"]) == (0, 0, 0)
    assert off["worst"] >= 2
    assert on["swaps"] > 0
    assert on["read"] < off["read"]
    assert not any(event.get("event") == "CPU_FALLBACK" for event in events)
