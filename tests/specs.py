"""Specs for tests in which most values are incidental: the tables of a tiny model, with what a test changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aotgaudi.entries import Entry, SamplerEntry
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.parse import spec_from_json

CONFIG: Mapping[str, Any] = {"model_type": "llama", "max_position_embeddings": 512}
LIMITS: Mapping[str, Any] = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "max_model_len": 128,
    "block_size": 16,
    "num_blocks": 24,
}
ONE_SEQUENCE: Mapping[str, Any] = {
    **LIMITS,
    "max_num_seqs": 1,
    "max_model_len": 32,
    "num_blocks": 8,
}
"""Two blocks a sequence, one sequence."""
ONE_BLOCK: Mapping[str, Any] = {
    **ONE_SEQUENCE,
    "max_num_batched_tokens": 16,
    "max_model_len": 16,
    "num_blocks": 1,
}
"""The fewest entries that a spec can have."""

SMALL_CONFIG: Mapping[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "intermediate_size": 128, "vocab_size": 1000, "max_position_embeddings": 4096,
}  # fmt: skip
"""A model whose steps differ in what they cost."""


def limits_of(**changes: Any) -> ServingLimits:
    """`LIMITS` with `changes`."""
    return ServingLimits(**{**LIMITS, **changes})


def spec_tables(
    *,
    model: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    limits: Mapping[str, Any] | None = None,
    **tables: Any,
) -> dict[str, Any]:
    """The tables of a spec: `model`, `config` and `limits` change single keys; each of `tables` is a whole one.

    A config that is to hold nothing of `CONFIG` goes into ``model={"config": ...}``.
    """
    whole = {"name": "tiny", "dtype": "float32", "config": {**CONFIG, **(config or {})}, **(model or {})}
    return {
        "schema": "aotgaudi.spec/1",
        "model": whole,
        "limits": {**LIMITS, **(limits or {})},
        **tables,
    }


def spec_of(**changes: Any) -> BuildSpec:
    """The spec of `spec_tables` with these arguments."""
    return spec_from_json(spec_tables(**changes))


def spec_toml(rest: str = "", limits: Mapping[str, Any] = LIMITS) -> str:
    """The same spec as TOML, one limit a line, with `rest` after its last table, ``[limits]``."""
    return "\n".join(
        [
            'schema = "aotgaudi.spec/1"',
            "[model]",
            'name = "tiny"',
            'dtype = "float32"',
            'config = { model_type = "llama", max_position_embeddings = 512 }',
            "[limits]",
            *(f"{name} = {value}" for name, value in limits.items()),
            rest,
        ]
    )


FOUR = ("0.0", "0.1", "0.2", "0.3")
"""What the one call of a program for tests gives; `outputs_for` says which of it an entry's program returns."""


def outputs_for(entry: Entry) -> tuple[str, ...]:
    """The outputs of a program that runs `entry`: four with log-probabilities, else one."""
    return FOUR if isinstance(entry, SamplerEntry) and entry.signature.logprobs else FOUR[:1]
