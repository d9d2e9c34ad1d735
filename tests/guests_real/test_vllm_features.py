"""What a vLLM switches on is captured, proved, and asked for 200 times without a compilation; of a real vLLM on CPU."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.guests_real.conftest import RealGuest, guest_python
from tests.guests_real.tiny_models import BERT, LLAMA, add_weights, written_adapter, written_model

pytestmark = [pytest.mark.guests, pytest.mark.timeout(5400)]

NUM_REQUESTS = 200
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}}
# No seeds: one whose prompt is cut into chunks ends vLLM 0.32 on a CPU ("CPU Generator does not use offset").
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 7},
    {"temperature": 0.8},
    {"temperature": 0.5, "repetition_penalty": 1.1, "n": 2},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0.9, "logprobs": 1, "n": 3},
    {"temperature": 0, "logit_bias": {"5": 2}},
)
CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    {"structured_outputs": {"choice": ["Rome", "Milan", "Naples"]}},
    {"structured_outputs": {"regex": "[0-9]{3}-[a-f]+"}},
    {"structured_outputs": {"grammar": 'root ::= "SELECT " ("a" | "b") " FROM t"'}},
    {},
)


def text(number: int) -> tuple[str, dict[str, Any]]:
    prompt = [10 + (number * 13 + index * 7) % 240 for index in range(1 + number * 37 % 300)]
    body = {"prompt": prompt, "max_tokens": 1 + number % 12, "ignore_eos": True}
    return "/v1/completions", {**body, **SAMPLING[number % len(SAMPLING)]}


def constrained(number: int) -> tuple[str, dict[str, Any]]:
    path, body = text(number)
    del body["ignore_eos"]
    return path, {**body, **CONSTRAINTS[number % len(CONSTRAINTS)]}


def repeating(number: int) -> tuple[str, dict[str, Any]]:
    path, body = text(number)
    for name in ("logit_bias", "top_k"):  # The first is refused beside drafts, the second ends the engine.
        body.pop(name, None)
    body["prompt"] = body["prompt"][: 2 + number % 9] * (1 + number % 20)
    return path, {**body, "max_tokens": 8 + number % 40}


def adapted(number: int) -> tuple[str, dict[str, Any]]:
    path, body = text(number)
    return path, {**body, "model": ("sql", "chat", "m")[number % 3]}


def embedded(number: int) -> tuple[str, dict[str, Any]]:
    prompts = [text(number + other)[1]["prompt"] for other in range(1 + number % 6)]
    return "/v1/embeddings", {"input": prompts if number % 2 else "Rome " * (1 + number % 80)}


@dataclass(frozen=True)
class Case:
    """A launch, its kind of requests, what `verify` says where it was asked nothing, and what a request then compiles."""

    kind: Callable[[int], tuple[str, dict[str, Any]]]
    not_asked: str
    live: str = ""
    config: Mapping[str, Any] = field(default_factory=lambda: LLAMA)
    flags: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
CASES = {
    "structured-output": Case(constrained, "constrained answers"),
    "ngram": Case(
        repeating, "speculative decoding", "numba", flags=("--speculative-config", json.dumps(NGRAM))
    ),
    "lora": Case(
        adapted,
        "LoRA adapters",
        flags=("--enable-lora", "--max-lora-rank", "8", "--lora-modules", "sql={sql}", "chat={chat}"),
    ),
    "pooling": Case(embedded, "embeddings", config=BERT),
    "tp-2": Case(
        text,
        "kinds of sampling",
        flags=("--tensor-parallel-size", "2"),
        variables={"VLLM_CPU_OMP_THREADS_BIND": "0|1", "OMP_NUM_THREADS": "1"},
    ),
}


def guest_for(case: Case, work: Path) -> RealGuest:
    work.mkdir(parents=True, exist_ok=True)
    model = work / "model"
    if not model.exists():
        add_weights(written_model(model, case.config))
    adapters = {name: work / name for name in ("sql", "chat")}
    for seed, folder in enumerate(adapters.values()):
        if "lora" in " ".join(case.flags) and not folder.exists():
            written_adapter(folder, seed)
    flags = tuple(word if word.startswith("{") else word.format_map(adapters) for word in case.flags)
    return RealGuest(guest_python(), model, work, flags, case.variables)


def ask(port: int, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        json.dumps({"model": "m", **body}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        return dict(json.load(response))


@pytest.mark.parametrize("name", CASES)
def test_what_is_switched_on_is_captured_with_its_exercise_and_told_apart_without(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    kept = os.environ.get("AOTGAUDI_GUEST_WORK")
    guest = guest_for(case, (Path(kept) if kept else tmp_path).resolve() / name)

    built = guest.build()

    assert built.returncode == 0, built.stdout
    (guest.work / "build.log").write_text(built.stdout)
    counts = json.loads((guest.bundle / "receipt.json").read_bytes())["proof"]["counts"]
    assert (counts["compile"], counts["generate"], counts["new_files"]) == (0, 0, 0)
    verified = guest.aotgaudi("verify", str(guest.bundle), "--json", timeout=60)
    assert not [line for line in json.loads(verified.stdout)["not_exercised"] if case.not_asked in line]

    with guest.running(guest.work / "home", guest.words(18910)) as running:
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda number: ask(18910, *case.kind(number)), range(NUM_REQUESTS)))
        assert len(answers) == NUM_REQUESTS
        assert running.metric("aotgaudi_compilations_total") == {}
        assert running.metric("aotgaudi_cache_files_added_total") == {}
        assert running.metric("aotgaudi_guest_warm") == {"": 1}
        assert running.get("/ready").startswith("ready")

    without = guest.work / "without.bundle"
    built = guest.build("--exercise", "none", bundle=without)
    assert built.returncode == 0, built.stdout
    (guest.work / "without.log").write_text(built.stdout)
    verified = guest.aotgaudi("verify", str(without), timeout=60)
    assert f"{case.not_asked}: --exercise none does not ask for it" in " ".join(verified.stdout.split())

    if case.live:
        with guest.running(guest.work / "home", guest.words(18911), bundle=without) as running:
            assert case.not_asked in running.get("/ready")
            ask(18911, *case.kind(119))  # Greedy, and repeats itself.
            counted = running.metric("aotgaudi_compilations_total")
            assert counted[f'{{phase="live",what="{case.live}"}}'] == 1
            assert running.metric("aotgaudi_guest_warm") == {}
