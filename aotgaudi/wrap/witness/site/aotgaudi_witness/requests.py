"""Which requests a server was computing when it compiled: found in the frames, by vLLM's names; nothing of their texts.

vLLM's model runner has the requests of a step in a local variable ``scheduler_output`` (``num_scheduled_tokens``, by
request; ``scheduled_new_reqs``), or those that it computes in ``self.requests`` and ``self.input_batch.req_ids``. Each has
sampling parameters, and the ids of its prompt's tokens (vllm/v1/core/sched/output.py, vllm/v1/worker/gpu_input_batch.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

_DEEPEST, _MOST = 400, 2
_NUMBERS = (
    *("temperature", "top_p", "top_k", "min_p", "n", "seed", "logprobs", "prompt_logprobs", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos"),
)
_STANDINS: Mapping[str, object] = {
    "stop": ["\n"],
    "bad_words": ["Paris"],
    "logit_bias": {"5": 2},
    "structured_outputs": {"json": {"type": "object"}},
}
"""Parameters that hold a client's texts -> what asks for the same code."""


def requests_of(frame: FrameType | None) -> list[dict[str, Any]]:
    """Returns at most two requests of different kinds that are being computed.

    Each has an ``id``, ``num_prompt_tokens``, and a ``body`` without prompt that asks for the same. Reads attributes of the
    server's objects; whoever calls this catches what they may raise.
    """
    for _ in range(_DEEPEST):
        if frame is None:
            break
        found = _of_locals(frame.f_locals)
        if found:
            return found
        frame = frame.f_back
    return []


def requests_of_threads(frames: Iterable[FrameType]) -> list[dict[str, Any]]:
    """Returns those of the first frame that computes any: for a compile that another thread notices afterwards."""
    return next(filter(None, map(requests_of, frames)), [])


def _of_locals(names: Mapping[str, Any]) -> list[dict[str, Any]]:
    output, runner = names.get("scheduler_output"), names.get("self")
    known = getattr(runner, "requests", None)
    by_id = dict(known) if isinstance(known, Mapping) else {}
    by_id.update((one.req_id, one) for one in getattr(output, "scheduled_new_reqs", None) or ())
    scheduled = getattr(output, "num_scheduled_tokens", None)
    if output is None:
        scheduled = getattr(getattr(runner, "input_batch", None), "req_ids", None) if by_id else None
    ids: Iterable[Any] = by_id if scheduled is None and output is not None else scheduled or ()
    told: dict[str, dict[str, Any]] = {}
    for one in ids:
        body = _body(by_id.get(one))
        if body is not None and len(told) < _MOST:
            row = {"id": str(one)[:200], "num_prompt_tokens": _num_tokens(by_id[one]), "body": body}
            told.setdefault(repr(body), row)
    return list(told.values())


def _body(request: Any) -> dict[str, Any] | None:
    asked = getattr(request, "sampling_params", None)
    if asked is None:
        return None
    body: dict[str, Any] = {"max_tokens": min(getattr(asked, "max_tokens", None) or 8, 32)}
    plain = type(asked)()
    for name in _NUMBERS:
        value = getattr(asked, name, None)
        if isinstance(value, (bool, int, float)) and value != getattr(plain, name, None):
            body[name] = value
    body.update((name, value) for name, value in _STANDINS.items() if getattr(asked, name, None))
    return body


def _num_tokens(request: Any) -> int:
    ids = getattr(request, "prompt_token_ids", None)
    return 0 if ids is None else len(ids)
