"""Speculative decoding, as the command line says it."""

from __future__ import annotations

from collections.abc import Mapping

from aotgaudi.errors import SpecError
from aotgaudi.vllm.command import parse_table
from aotgaudi.vllm.values import parse_integer

_MOST = 1024


def num_speculative_tokens(values: Mapping[str, str]) -> int:
    """Returns the tokens that are guessed a step: of --speculative-config, else --num-speculative-tokens, else 0."""
    text = values.get("speculative-config")
    if text is None:
        older = values.get("num-speculative-tokens")
        return 0 if older is None else parse_integer("--num-speculative-tokens", older, maximum=_MOST)
    count = parse_table("speculative-config", text).get("num_speculative_tokens")
    where = "--speculative-config num_speculative_tokens"
    if count is None:
        raise SpecError(where, "is missing", "give it: otherwise the draft model's own config decides")
    if isinstance(count, bool) or not isinstance(count, int):
        raise SpecError(where, f"is {count!r}", f"an integer from 1 to {_MOST}")
    return parse_integer(where, str(count), minimum=1, maximum=_MOST)
