"""The exercise: what a guest is asked once it answers, so that what it compiles on a first request is compiled before ready.

A pure list of requests. The same list is asked in the build, in the proof and before a restored server is ready, so it is
part of a launch's key. It names neither the model nor a place: who sends it fills in the model's served name.

A server compiles for *kinds* of request (measured on vLLM 0.32: the first one with ``logprobs`` compiles a graph after
the server is ready), so a level is a list of kinds:

* ``none``: nothing is asked;
* ``smoke``: one greedy request and one sampled one;
* ``sampler``: every kind that reaches other code of the sampler, a long prompt, and as many at once as there are slots;
* ``shapes``: ``sampler``, and what the guest adds for each shape of a manifest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from aotgaudi.document import Value

ExerciseLevel = Literal["none", "smoke", "sampler", "shapes"]
EXERCISE_LEVELS: tuple[ExerciseLevel, ...] = ("none", "smoke", "sampler", "shapes")

COMPLETIONS = "/v1/completions"

_PROMPT = "The capital of Italy is"
_MAX_TOKENS = 8
_LONG_TOKENS = 300
_ID_LOW, _ID_HIGH = 10, 250
"""Token ids that every vocabulary has, and that no tokenizer uses for more than a character or a word."""


class ExerciseRequest(Value):
    """One kind of request.

    Attributes:
        name: of the kind; unique in its exercise.
        path: of the HTTP request, which is a POST.
        body: its JSON, but for ``model``, which the sender adds.
        copies: how many of it are sent at once; all are answered before the next kind is sent.
        is_greedy: its text is the same in every run, and is compared.
    """

    name: str
    path: str
    body: dict[str, JsonValue]
    copies: Annotated[int, Field(ge=1, le=4096)] = 1
    is_greedy: bool = False


class Exercise(Value):
    """What is asked, in this order."""

    level: ExerciseLevel
    requests: tuple[ExerciseRequest, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a server has room for, as far as its flags say: None where they leave it to the model or the memory."""

    max_model_len: int | None = None
    max_num_seqs: int | None = None


def exercise(level: ExerciseLevel, room: Room, more: Iterable[ExerciseRequest] = ()) -> Exercise:
    """Returns the exercise of a level, for a server with an OpenAI-compatible API.

    Args:
        level: how much is asked.
        room: nothing is asked that has no room.
        more: what a guest adds to ``shapes``; other levels leave it out.
    """
    requests: tuple[ExerciseRequest, ...] = ()
    if level == "smoke":
        requests = tuple(_smoke())
    elif level == "sampler":
        requests = (*_smoke(), *_sampler(room))
    elif level == "shapes":
        requests = (*_smoke(), *_sampler(room), *more)
    return Exercise(level=level, requests=requests)


def completion(name: str, *, copies: int = 1, is_greedy: bool = False, **body: JsonValue) -> ExerciseRequest:
    """Returns a request for a completion; `body` adds to, or replaces, a short prompt and a few tokens."""
    whole: dict[str, JsonValue] = {"prompt": _PROMPT, "max_tokens": _MAX_TOKENS, "temperature": 0, **body}
    return ExerciseRequest(name=name, path=COMPLETIONS, body=whole, copies=copies, is_greedy=is_greedy)


def token_prompt(num_tokens: int) -> list[JsonValue]:
    """Returns a prompt of so many token ids, the same each time: no tokenizer decides its length."""
    return [_ID_LOW + index * 7 % (_ID_HIGH - _ID_LOW) for index in range(num_tokens)]


def _smoke() -> Iterable[ExerciseRequest]:
    yield completion("greedy", is_greedy=True)
    yield completion("sampled", temperature=0.8, seed=1)


def _sampler(room: Room) -> Iterable[ExerciseRequest]:
    yield completion("top-p", temperature=0.8, top_p=0.9, seed=1)
    yield completion("top-k", temperature=0.8, top_k=5)
    yield completion("top-k, top-p, min-p", temperature=0.8, top_k=5, top_p=0.9, min_p=0.1)
    yield completion("penalties", temperature=0.5, repetition_penalty=1.1, presence_penalty=0.2)
    yield completion("frequency penalty", frequency_penalty=0.2)
    yield completion("logprobs", logprobs=2, is_greedy=True)
    yield completion("several with logprobs", temperature=0.9, n=3, logprobs=1)
    yield completion("prompt logprobs", prompt_logprobs=1)
    yield completion("logit bias", logit_bias={"5": 2})
    yield completion("bad words", bad_words=["Paris"])
    yield completion("at least so many", min_tokens=4)
    yield completion("a stop", stop=["\n"])
    yield completion("JSON", response_format={"type": "json_object"}, max_tokens=12)
    yield completion("long prompt", prompt=token_prompt(_long(room)))
    if room.max_num_seqs is None or room.max_num_seqs > 1:
        yield completion("as many as at once", copies=min(room.max_num_seqs or 8, 8))


def _long(room: Room) -> int:
    """A prompt that is computed in a step of its own size, and that has room with what is asked of it."""
    return max(1, min(_LONG_TOKENS, (room.max_model_len or _LONG_TOKENS * 2) - 2 * _MAX_TOKENS))
