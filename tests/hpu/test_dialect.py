"""The hpu dialect on the double: right against transformers, written in place, and nothing falls back."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from aotgaudi.engine.runner import ProgramRunner
from aotgaudi.entries import DecodeEntry, SamplerEntry
from aotgaudi.graphs.canonical import from_text
from aotgaudi.graphs.dialect import Dialect
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
CASES = (("llama", GATHERED), ("llama", CONTIGUOUS), ("qwen3", CONTIGUOUS), ("gemma3_text", CONTIGUOUS))
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
    from aotgaudi.backends.hpu.compiler import FromCpu
    from aotgaudi.backends.hpu.frontend import compiled, find_key_mode
    from aotgaudi.backends.inductor.check import check
    from aotgaudi.graphs.trace import trace

    card = acquired()
    key_mode = find_key_mode(card)

    class Unit:
        def __init__(self, text: str) -> None:
            graph, _ = from_text(text)
            run = compiled(graph, text, key_mode)
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
                check(graph, specs, FromCpu(compiled(graph, piece.text, key_mode)), f"{piece.label} {entry}")
    counts = card.counts().since(before)
    return {**errors, "fallbacks": counts.fallbacks}


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(
    ("architecture", "dialect"), CASES, ids=[f"{name}-{d.is_contiguous}" for name, d in CASES]
)
def test_its_units_compute_what_transformers_computes_in_place_and_without_a_fallback(
    architecture: str, dialect: Dialect, profile: str, double: InstalledDouble, tmp_path: Path
) -> None:
    """Prompts, prompts on context, decodes of several mixes, through a window where the model has one, and exchanges."""
    (tmp_path / "state").mkdir()
    journal, result = tmp_path / "journal", tmp_path / "result"
    settings = {"AOTGAUDI_DOUBLE_STATE": str(tmp_path / "state"), "AOTGAUDI_DOUBLE_JOURNAL": str(journal)}

    def run() -> None:
        result.write_text(json.dumps(converse(architecture, dialect)), encoding="utf-8")

    environment = environment_of(double(profile), tmp_path / "recipes", **settings)
    fork = start_fork(run, environment, tmp_path / "output")
    deadline = time.monotonic() + SECONDS
    while fork.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    if fork.poll() is None:
        fork.kill()

    assert result.exists(), (tmp_path / "output").read_text(encoding="utf-8", errors="replace")[-3000:]
    found = json.loads(result.read_bytes())
    events = [json.loads(line) for line in journal.read_bytes().splitlines()]
    writes = Counter(event["in_place"] for event in events if event.get("event") == "CACHE_WRITE")
    assert found.pop("fallbacks") == 0
    assert set(found) == {"prompt", "prompt on context", "decode", "swap"}
    assert max(found.values()) < TOLERANCE, found
    assert writes[True]
    assert not writes[False]
