"""Which traffic compiles graphs on a captured vllm-gaudi server: the conditions of each kind."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.gaudi.live_graphs import LiveGraphs, Situation, live_graphs, not_closed, unrequested
from aotgaudi.manifest.coverage import live_graphs_of, situation_of
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.parse import spec_from_json
from tests.specs import spec_tables

ALWAYS_OPEN = {"prompt_logprobs", "penalties", "allowed_token_ids", "bad_words"}


def spec_of(num_seqs: int = 4, num_blocks: int = 17, **changes: dict[str, Any]) -> BuildSpec:
    limits = {"max_num_seqs": num_seqs, "max_model_len": 512, "block_size": 128, "num_blocks": num_blocks}
    tables = {
        "limits": {**limits, "max_num_batched_tokens": 256, **changes.pop("limits", {})},
        "scheduler": {"engine": "vllm", **changes.pop("scheduler", {})},
        "target": {"backend": "hpu", "execution_mode": "torch_compile", **changes.pop("target", {})},
    }
    return spec_from_json(spec_tables(**tables, **changes))


def rows_of(spec: BuildSpec, max_logprobs: int | None = None) -> dict[str, LiveGraphs]:
    situation = situation_of(spec, max_logprobs)
    assert situation is not None
    return {row.kind: row for row in live_graphs(situation)}


@given(st.integers(1, 16), st.integers(2, 512), st.sampled_from([64, 128]), st.integers(0, 150))
def test_nothing_is_preempted_if_the_blocks_hold_all_sequences_and_the_null_block(
    num_seqs: int, longest: int, block_size: int, spare: int
) -> None:
    limits = {"max_num_seqs": num_seqs, "max_model_len": longest, "block_size": block_size}
    num_blocks = len(range(0, longest, block_size)) + spare
    spec = spec_of(limits={**limits, "num_blocks": num_blocks, "max_num_batched_tokens": 4096})
    (row,) = [row for row in live_graphs(Situation(spec, (), 20)) if row.kind == "preemption"]

    taken = sum(len(range(0, longest, block_size)) for _ in range(num_seqs))
    assert row.state == ("bounded" if taken <= num_blocks - 1 else "open")
    assert str(taken + 1) in row.text


def test_blocks_of_several_kinds_of_layers_bound_no_preemption() -> None:
    row = rows_of(spec_of(num_blocks=10_000, bucketing={"skip_decode_block_clamp": True}))["preemption"]

    assert row.state == "open"
    assert "layers of several kinds" in row.text


@pytest.mark.parametrize(
    ("num_seqs", "max_logprobs", "widths", "says"),
    [
        (2, 1, 2, "each number up to --max-logprobs 1"),
        (2, 2, 0, "closes it for --max-logprobs 1 or less"),
        (2, None, 0, "up to 20"),
        (2, -1, 0, "up to the vocabulary"),
        (1, 5, 6, "up to --max-logprobs 5"),
        (4, 0, 0, "--max-logprobs N refuses more than N"),
    ],
)
def test_each_number_of_logprobs_is_requested_while_there_are_few(
    num_seqs: int, max_logprobs: int | None, widths: int, says: str
) -> None:
    spec = spec_of(num_seqs)
    situation = situation_of(spec, max_logprobs)

    assert situation is not None
    assert len(situation.logprob_widths) == widths
    row = rows_of(spec, max_logprobs)["logprobs"]
    assert row.state == ("closed" if widths else "open")
    assert says in row.text
    assert ("closes it" in row.text) == (not widths and num_seqs < 4)


def test_the_server_s_own_number_of_logprobs_is_that_of_the_spec_unless_it_is_given() -> None:
    spec = spec_of(2, scheduler={"max_logprobs": 1})

    assert rows_of(spec)["logprobs"].state == "closed"
    assert rows_of(spec, 20)["logprobs"].state == "open"


def test_steps_with_constrained_requests_are_closed_if_each_number_of_rows_is_a_batch_size() -> None:
    assert rows_of(spec_of(2))["structured outputs"].state == "closed"
    row = rows_of(spec_of(4))["structured outputs"]
    assert row.state == "open"
    assert "(3)" in row.text


def test_what_is_open_for_every_server_and_what_some_add() -> None:
    always = rows_of(spec_of(2), 0)
    more = rows_of(spec_of(4, limits={"max_num_prefill_seqs": 2}, bucketing={"num_speculative_tokens": 1}), 0)

    assert {kind for kind, row in always.items() if row.state == "open"} == ALWAYS_OPEN
    assert set(more) - set(always) == {"several prompts", "speculative decoding"}
    assert not_closed(always.values()) == tuple(str(always[kind]) for kind in always if kind in ALWAYS_OPEN)


def test_without_the_exercise_of_shapes_what_it_would_close_is_open() -> None:
    rows = unrequested(rows_of(spec_of(2), 0).values(), "--exercise smoke")

    changed = {row.kind: row for row in rows if row.text.endswith("(--exercise smoke requests none)")}
    assert set(changed) == {"sampling", "logprobs", "n", "structured outputs", "unfinished prompts"}
    assert {row.state for row in changed.values()} == {"open"}


@pytest.mark.parametrize(
    "spec",
    [
        spec_of(target={"execution_mode": "eager"}),
        spec_from_json(spec_tables()),
        spec_of(bucketing={"version": "vllm-hpu-extension@8211e0b"}),
    ],
)
def test_other_servers_have_no_rows(spec: BuildSpec) -> None:
    assert live_graphs_of(spec) == ()
