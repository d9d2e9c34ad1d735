"""Replicas in lockstep, simulated from the plugin's rules: every shape that any of them runs is an entry.

The simulation follows vllm_gaudi/v1/worker/hpu_model_runner.py at v0.26.0, and shares no code with the enumeration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.manifest.enumerate import enumerate_entries
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.parse import spec_from_json

BLOCK = 64
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Step:
    """What one replica has to do: (query, computed tokens) of each prompt, and the tokens of each decode's sequence.

    `unused`: free blocks below the highest one, which contiguous paged attention reads too.
    """

    prompts: tuple[tuple[int, int], ...]
    decodes: tuple[int, ...]
    unused: int = 0


IDLE = Step((), (BLOCK - 1,))
"""``_dummy_run``: without any request a replica decodes one sequence in one block."""


class Replicas:
    """Replicas with one table each. They agree on every number by taking the largest (``get_dp_padding``)."""

    def __init__(self, prompts: Sequence[Shape], decodes: Sequence[Shape]) -> None:
        self._prompts, self._decodes = sorted(prompts), sorted(decodes)

    def run(self, steps: Sequence[Step]) -> Iterator[tuple[str, Shape]]:
        for index in range(max(len(step.prompts) for step in steps)):
            given = [step.prompts[index] if index < len(step.prompts) else (128, 0) for step in steps]
            found = [self._find(self._prompts, (1, query, -(-context // BLOCK))) for query, context in given]
            yield "prompt", (max(f[0] for f in found), max(f[1] for f in found), max(f[2] for f in found))
        if any(step.decodes for step in steps):
            blocks = [[-(-(tokens + 1) // BLOCK) for tokens in step.decodes or (128,)] for step in steps]
            size = max(self._find(self._decodes, (len(own), 1, sum(own)))[0] for own in blocks)
            read = [sum(own) + step.unused for own, step in zip(blocks, steps, strict=True)]
            num_blocks = max(self._find(self._decodes, (size, 1, count))[2] for count in read)
            yield "decode", (size, 1, num_blocks)

    @staticmethod
    def _find(buckets: Sequence[Shape], wanted: Shape) -> Shape:
        return next(bucket for bucket in buckets if all(a >= b for a, b in zip(bucket, wanted, strict=True)))


def spec(size: int, **limits: Any) -> BuildSpec:
    config = {"model_type": "mixtral", "num_local_experts": 8, "num_hidden_layers": 2, "hidden_size": 64}
    config |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 4096,
    }
    version, strategy = limits.pop("rules", ("v0.26.0", "exponential"))
    bucketing: dict[str, Any] = {"version": f"vllm-gaudi@{version}", "strategy": strategy}
    bucketing["contiguous_pa"] = limits.pop("contiguous_pa", False)
    return spec_from_json(
        {
            "schema": "aotgaudi.spec/1",
            "model": {"name": "m", "dtype": "bfloat16", "config": config},
            "limits": {"block_size": BLOCK, **limits},
            "scheduler": {"engine": "vllm"},
            "parallel": {"data_parallel_size": size},
            "bucketing": bucketing,
            "target": {"backend": "hpu", "execution_mode": "hpu_graphs"},
        }
    )


def shapes(found: BuildSpec) -> tuple[set[Shape], set[Shape]]:
    entries = enumerate_entries(found)
    prompts = {(e.batch_size, e.query_len, e.num_ctx_blocks) for e in entries if isinstance(e, PromptEntry)}
    return prompts, {(e.batch_size, 1, e.num_blocks) for e in entries if isinstance(e, DecodeEntry)}


LIMITS = st.fixed_dictionaries(
    {
        "max_num_seqs": st.sampled_from([1, 3, 8, 20]),
        "max_num_batched_tokens": st.sampled_from([128, 192, 320, 1024]),
        "max_model_len": st.sampled_from([129, 512, 700, 2048]),
        "num_blocks": st.sampled_from([33, 40, 200]),
        "contiguous_pa": st.booleans(),
        "rules": st.sampled_from(
            [
                ("v0.26.0", "exponential"),
                ("v0.26.0", "linear"),
                ("v0.26.0", "padding_aware"),
                ("091bbad", "exponential"),
                ("v0.19.1", "exponential"),
                ("v0.16.0", "linear"),
                ("v0.13.0", "exponential"),
                ("v0.11.2", "exponential"),
            ]
        ),
    }
)


@st.composite
def _step(draw: Callable[..., Any], limits: dict[str, Any]) -> Step:
    most, length = limits["max_num_batched_tokens"], limits["max_model_len"]

    def prompt() -> tuple[int, int]:
        context = draw(st.one_of(st.just(0), st.integers(0, length - 1)))
        return draw(st.integers(1, min(most, length - context))), context

    if draw(st.integers(0, 4)) == 0:
        return IDLE
    decodes = draw(st.lists(st.integers(1, length - 1), max_size=limits["max_num_seqs"]))
    while sum(-(-(tokens + 1) // BLOCK) for tokens in decodes) > limits["num_blocks"]:
        decodes.pop()
    free = limits["num_blocks"] - sum(-(-(tokens + 1) // BLOCK) for tokens in decodes)
    unused = draw(st.integers(0, free)) if limits["contiguous_pa"] and decodes else 0
    return Step(tuple(prompt() for _ in range(draw(st.integers(0, 2)))), tuple(decodes), unused)


@settings(max_examples=200, deadline=None)
@given(limits=LIMITS, size=st.integers(2, 4), own_table=st.booleans(), data=st.data())
def test_every_shape_that_replicas_run_is_an_entry(
    limits: dict[str, Any], size: int, own_table: bool, data: st.DataObject
) -> None:
    prompts, decodes = shapes(spec(size, **limits))
    table = shapes(spec(1, **limits)) if own_table else (prompts, decodes)
    replicas = Replicas(*map(tuple, table))
    for _ in range(5):
        steps = [data.draw(_step(limits)) for _ in range(size)]
        if not any(step.prompts or step.decodes for step in steps):
            continue
        for kind, shape in replicas.run(steps):
            assert shape in (prompts if kind == "prompt" else decodes), (kind, shape, steps)


def test_two_replicas_reach_every_added_entry() -> None:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 512, "max_model_len": 1024, "num_blocks": 70}
    alone, added = shapes(spec(1, **limits))[0], shapes(spec(2, **limits))[0]
    replicas = Replicas(tuple(alone), ((1, 1, 99),))
    every = [(q, c) for q in range(1, 513, 7) for c in range(0, 1024, 31) if q + c <= 1024]
    used = {next(replicas.run([Step((one,), ())])): one for one in every}

    pairs = product(used.values(), repeat=2)
    reached = {shape for pair in pairs for _, shape in replicas.run([Step((one,), ()) for one in pair])}

    assert added - alone
    assert added - alone - reached == set()
