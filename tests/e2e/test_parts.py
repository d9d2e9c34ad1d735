"""A tier is built, sealed as a part, and served: the same texts within its limits, a clear refusal beyond them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.engine.sampling_params import SamplingParams
from aotgaudi.errors import NotWarmError
from aotgaudi.llm.api import LLM
from tests.e2e.harness import MAX_MODEL_LEN, Server, Workplace
from tests.parallel import once, run_folder

pytestmark = pytest.mark.slow

LEAST_LEN = 32
PROMPTS = ([17] * 3, [5, 9, 11] * 4, list(range(20, 36)), "the quick brown fox")
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "logprobs": 2}


def part_of(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory, *options: str) -> Path:
    bundle = run_folder(tmp_path_factory) / f"part{'-'.join(options)}.bundle"

    def build() -> None:
        done = workplace.run("build", workplace.spec, "-o", bundle, "--store", workplace.store, *options)
        assert done.returncode == 0, done.stderr
        assert "part: " in done.stdout

    once(tmp_path_factory, bundle.name, build)
    return bundle


@pytest.fixture(scope="session")
def least(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One sequence of 32 tokens."""
    return part_of(workplace, tmp_path_factory, "--tier", "least")


@pytest.fixture(scope="session")
def covering(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything, in half of the entries."""
    return part_of(workplace, tmp_path_factory, "--tier", "covering")


def texts(server: Server, max_tokens: int) -> list[Any]:
    """What it answers one by one, greedy and drawn."""
    asked = [{}, SAMPLED]
    return [
        server.complete(prompt, max_tokens=max_tokens, ignore_eos=True, **params)["choices"][0]["text"]
        for prompt in PROMPTS
        for params in asked
    ]


def together(server: Server, num_prompts: int, max_tokens: int) -> list[str]:
    """What it answers to several prompts at once."""
    body = {"prompt": [[prompt + 1] * 9 for prompt in range(num_prompts)], "max_tokens": max_tokens}
    answer = server.post("/v1/completions", {**body, "temperature": 0, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def test_a_part_answers_what_the_whole_answers_and_says_what_it_is(
    workplace: Workplace, server: Server, least: Path
) -> None:
    with workplace.serve(bundle=least) as part:
        assert texts(part, 12) == texts(server, 12)
        assert together(part, 4, 12) == together(server, 4, 12)

        ready = part.client.get("/ready").json()
        card = part.client.get("/v1/models").json()["data"][0]
        assert ready["limits"] == {
            "max_model_len": LEAST_LEN,
            "max_num_batched_tokens": 16,
            "max_num_seqs": 1,
            "num_blocks": 6,
        }
        assert f"closed under max_model_len {LEAST_LEN}" in ready["outside"]
        assert ready["entries_warm"] == ready["entries_total"] == part.metric("aotgaudi_entries")
        assert card["max_model_len"] == LEAST_LEN
        assert "this is a part of its manifest: " in part.log
        assert "--outside refuse" in part.log
        assert part.metric("aotgaudi_compilations_total") == 0


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1] * LEAST_LEN, "max_tokens": 1},
        {"prompt": [1] * (LEAST_LEN + 1), "max_tokens": 1},
        {"prompt": [1] * 10, "max_tokens": LEAST_LEN},
        {"prompt": "quick " * 2000},
    ],
)
def test_beyond_the_limits_of_a_part_a_request_is_refused_with_the_limit_and_why_it_is_so_low(
    workplace: Workplace, least: Path, body: dict[str, Any]
) -> None:
    with workplace.serve(bundle=least) as part:
        answer = part.post("/v1/completions", body)

        assert answer.status_code == 400
        assert f"max_model_len = {LEAST_LEN}" in answer.json()["error"]["message"]
        assert "entries, closed under" in answer.json()["error"]["message"]
        assert part.is_idle()


def test_larger_warm_entries_serve_all_that_the_whole_serves(
    workplace: Workplace, server: Server, covering: Path
) -> None:
    receipt = open_bundle(covering).receipt

    with workplace.serve("--outside", "pad-up", bundle=covering) as part:
        long = {"prompt": [3] * (MAX_MODEL_LEN - 14), "max_tokens": 14, "ignore_eos": True}
        assert texts(part, 12) == texts(server, 12)
        assert together(part, 6, 20) == together(server, 6, 20)
        assert part.complete(**long)["choices"] == server.complete(**long)["choices"]
        assert part.metric("aotgaudi_compilations_total") == 0
        assert part.metric("aotgaudi_entries") == len(receipt.programs) < server.metric("aotgaudi_entries")


def test_pad_up_refuses_to_start_where_something_is_not_covered(workplace: Workplace, least: Path) -> None:
    refusal = workplace.refusal("--outside", "pad-up", bundle=least)

    assert refusal.exit_code == 3
    assert "larger warm entries do not cover that" in refusal.output
    assert not refusal.has_listened


def test_from_python_a_part_is_served_by_the_same_policies(
    workplace: Workplace, server: Server, least: Path, covering: Path
) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    wanted = [
        server.complete(prompt, max_tokens=12, ignore_eos=True)["choices"][0]["text"] for prompt in PROMPTS
    ]

    for bundle, outside, length in (
        (least, None, LEAST_LEN),
        (least, "chunk", open_bundle(least).receipt.part.chunked.max_model_len),
        (covering, "pad-up", MAX_MODEL_LEN),
    ):
        with LLM(bundle, workplace.model, threads=1, outside=outside) as llm:
            assert llm.max_model_len == length
            assert [llm.generate(prompt, greedy)[0].text for prompt in PROMPTS] == wanted
    with pytest.raises(NotWarmError, match="larger warm entries do not cover that"):
        LLM(least, workplace.model, threads=1, outside="pad-up")


def test_verify_proves_the_part_and_a_whole_build_adds_the_rest(
    workplace: Workplace, least: Path, tmp_path: Path
) -> None:
    verified = workplace.run("verify", least, "--json")
    again = workplace.run("build", workplace.spec, "-o", tmp_path / "b", "--store", workplace.store, "--json")

    assert verified.returncode == again.returncode == 0, verified.stderr
    assert json.loads(verified.stdout)["part"]["limits"]["max_model_len"] == LEAST_LEN
    assert json.loads(again.stdout)["bundle"]["part"] is None
    assert open_bundle(tmp_path / "b").receipt.part is None
