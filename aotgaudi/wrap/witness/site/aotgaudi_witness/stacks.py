"""Where something came from, in few words: frames, and requests; and words that must not be written down.

Which requests a server was computing is found in the frames, by vLLM's names; nothing of their texts. vLLM's model runner
has the requests of a step in a local variable ``scheduler_output`` (``num_scheduled_tokens``, by request;
``scheduled_new_reqs``), or those that it computes in ``self.requests`` and ``self.input_batch.req_ids``. Each has sampling
parameters, and the ids of its prompt's tokens (vllm/v1/core/sched/output.py, vllm/v1/worker/gpu_input_batch.py).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

_PACKAGE = __name__.partition(".")[0]
_INTERMEDIARIES = frozenset(
    {_PACKAGE, "subprocess", "multiprocessing", "contextlib", "functools", "importlib", "os", "threading"}
)
_INNERMOST, _OTHERS, _DEEPEST = 6, 6, 400
_COMPILERS = frozenset({"torch", "triton", "numba", "sympy", "tilelang", "deep_gemm"})

_SECRET = re.compile(
    r"(^|_)(API_?KEYS?|ACCESS_?KEY(_ID)?|PRIVATE_?KEY|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|CREDENTIALS?|AUTHORIZATION|BEARER)(_|$)"
    r"|(^|_)(TOKEN|KEY)$"
)
_ARGUMENT_CHARACTERS = 160


def stack_of(frame: FrameType | None = None) -> list[str]:
    """Returns ``module:line function`` for the frames that say most, the innermost first.

    These are the innermost ones, and of those further out the ones that are not a compiler's own: the server's.
    """
    if frame is None:
        frame = sys._getframe(1)
    told: list[str] = []
    num_others = 0
    for _ in range(_DEEPEST):
        if frame is None or num_others == _OTHERS:
            break
        module = str(frame.f_globals.get("__name__") or frame.f_code.co_filename)
        top = module.partition(".")[0]
        if top not in _INTERMEDIARIES:
            if len(told) - num_others < _INNERMOST:
                told.append(_told(module, frame))
            elif top not in _COMPILERS:
                told.append(_told(module, frame))
                num_others += 1
        frame = frame.f_back
    return told


def _told(module: str, frame: FrameType) -> str:
    return f"{module}:{frame.f_lineno} {frame.f_code.co_name}"


def is_secret(name: str) -> bool:
    """Whether a variable or flag of this name holds something that must not be written down.

    The rule is that of a launch's key (`aotgaudi.commands.variables.is_secret`); a test compares the two.
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return bool(_SECRET.search(words.replace("-", "_").replace(".", "_").upper()))


def _short(text: str) -> str:
    """Cuts a long word in its middle: of a path the end says most."""
    if len(text) <= _ARGUMENT_CHARACTERS:
        return text
    return f"{text[:40]}...{text[43 - _ARGUMENT_CHARACTERS :]}"


def told_arguments(argv: Sequence[object]) -> list[str]:
    """Returns a command line as it may be written down: secrets left out, long words cut."""
    told: list[str] = []
    is_value_secret = False
    for word in argv:
        text = word.decode("utf-8", "replace") if isinstance(word, bytes) else str(word)
        name, separator, _ = text.partition("=")
        is_flag = text.startswith("-")
        if is_value_secret and not is_flag:
            text = "***"
        elif separator and (is_flag or name.isidentifier()) and is_secret(name):
            text = f"{name}=***"
        if is_flag:  # Some flags take several values.
            is_value_secret = not separator and is_secret(text)
        told.append(_short(text))
    return told


_MOST_REQUESTS = 2
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
        if body is not None and len(told) < _MOST_REQUESTS:
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
