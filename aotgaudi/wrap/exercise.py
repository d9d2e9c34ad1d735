"""The exercise: warm-up requests that make a server compile before it serves. Also their gaps and their file.

A level says how much is requested, and contains the levels before it: ``none``, ``smoke`` (a request of each kind that a
server has), ``sampler`` (every feature that the launch switches on), ``shapes`` (what the adapter adds for the shapes of a
manifest). An owner can add requests from a file. No request needs more room than the server has.

The file is JSONL, in the form of OpenAI's batches::

    {"custom_id": "summary", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}

``custom_id`` and ``method`` may be omitted. A body without ``model`` is for the served model.

``exercises.json`` has the requests of each feature, by its name, except the batches that a compiled sampler needs. A text
``{NAME}`` there is a hole for what depends on the server's flags. A completion has the defaults of `completion`. Requests of
``beside`` are like the first one but for these values; null leaves a value out.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import Field, JsonValue, TypeAdapter, ValidationError

from aotgaudi.bundle.capture_receipt import StartCost
from aotgaudi.bundle.launch import WarmUp, WarmUpLevel, WarmUpRequest
from aotgaudi.digest import canonical_json
from aotgaudi.document import ForeignValue, Value, first_problem
from aotgaudi.errors import SpecError
from aotgaudi.files import read_regular

LEVELS: tuple[WarmUpLevel, ...] = ("none", "smoke", "sampler", "shapes")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_COMPARED = frozenset({COMPLETIONS, CHAT})
_MAX_TOKENS = 8
_LONG_TOKENS, _SHORT_TOKENS = 300, 4
_ID_LOW, NUM_TOKEN_IDS = 10, 240
"""Token ids that every vocabulary has, each for at most a character or a word."""
_PLAIN: Mapping[str, JsonValue] = {
    "prompt": "The capital of Italy is",
    "max_tokens": _MAX_TOKENS,
    "temperature": 0,
}
_MAX_FILE_BYTES = 64 << 20
_LINE = 'lines like {"url": "/v1/completions", "body": {"prompt": "..."}}'


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What a server has room for, by its flags. A value is None if the flags leave it to the model or the memory."""

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature of a launch that needs its own requests: the requests, or why there are none.

    Attributes:
        name: For people.
        requests: The requests that reach the feature.
        gap: Why the exercise reaches the feature only in part or not at all; empty if it reaches it.
        is_smoke: Whether the level ``smoke`` contains the requests.
    """

    name: str
    requests: tuple[WarmUpRequest, ...] = ()
    gap: str = ""
    is_smoke: bool = False


def exercise(
    level: WarmUpLevel,
    features: Iterable[Feature],
    *,
    shapes: Iterable[WarmUpRequest] = (),
    own: Iterable[WarmUpRequest] = (),
) -> WarmUp:
    """Returns a level's warm-up requests: of its features, `shapes` at the level ``shapes``, and the owner's `own`."""
    if level == "none":
        asked = []
    elif level == "smoke":
        asked = [one for feature in features if feature.is_smoke for one in feature.requests]
    else:
        asked = [one for feature in features for one in feature.requests]
    more = shapes if level == "shapes" else ()
    return WarmUp(level=level, requests=(*asked, *more, *own))


def not_exercised(features: Iterable[Feature], asked: WarmUp) -> tuple[str, ...]:
    """Returns the features whose first request may compile or trace, one line each."""
    names = {request.name for request in asked.requests}
    rows = []
    for feature in features:
        if any(request.name not in names for request in feature.requests):
            rows.append(f"{feature.name}: --exercise {asked.level} does not ask for it")
        elif feature.gap:
            rows.append(f"{feature.name}: {feature.gap}")
    return tuple(rows)


def completion(name: str, *, copies: int = 1, is_greedy: bool = False, **body: JsonValue) -> WarmUpRequest:
    """Returns a completion request. `body` adds to or replaces the defaults, a short prompt and a few tokens."""
    return WarmUpRequest(
        name=name, path=COMPLETIONS, body={**_PLAIN, **body}, copies=copies, is_greedy=is_greedy
    )


def token_prompt(num_tokens: int, first: int = 0) -> list[JsonValue]:
    """Returns a prompt of exactly `num_tokens` token ids, the same each time. No tokenizer is involved.

    Prompts that differ in `first` (less than `NUM_TOKEN_IDS`) differ in every place, and so share no prefix.
    """
    return [_ID_LOW + (first + index * 7) % NUM_TOKEN_IDS for index in range(num_tokens)]


class _Template(Value):
    """A request of ``exercises.json``. With `if_refused` it stands in for one with that parameter."""

    name: str
    path: str = COMPLETIONS
    body: dict[str, JsonValue] = Field(default_factory=dict)
    copies: JsonValue = 1
    is_greedy: bool = False
    beside: dict[str, JsonValue] | None = None
    if_refused: str = ""

    def filled(self, holes: Mapping[str, JsonValue]) -> WarmUpRequest:
        """Returns the request with every hole filled."""
        body = _merged(_PLAIN if self.path == COMPLETIONS else {}, _filled(self.body, holes))
        beside = () if self.beside is None else (_merged(body, _filled(self.beside, holes)),)
        return WarmUpRequest(
            name=self.name.replace("{adapter}", str(holes.get("adapter"))),
            path=self.path,
            body=body,
            copies=_filled(self.copies, holes),
            is_greedy=self.is_greedy,
            beside=beside,
        )


def _filled(value: Any, holes: Mapping[str, JsonValue]) -> Any:
    if isinstance(value, dict):
        return {name: _filled(inner, holes) for name, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, holes) for inner in value]
    if isinstance(value, str) and value.startswith("{") and value.endswith("}"):
        return holes[value[1:-1]]
    return value


def _merged(old: Mapping[str, JsonValue], new: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    return {name: value for name, value in {**old, **new}.items() if value is not None}


@cache
def _templates() -> Mapping[str, tuple[_Template, ...]]:
    data = Path(__file__).with_name("exercises.json").read_bytes()
    return MappingProxyType(TypeAdapter(dict[str, tuple[_Template, ...]]).validate_json(data))


def requests_of(
    name: str, holes: Mapping[str, JsonValue] = MappingProxyType({}), without: Collection[str] = ()
) -> tuple[WarmUpRequest, ...]:
    """Returns a feature's requests, with their `holes` filled, and none that has a parameter of `without`."""
    rows = (one for one in _templates()[name] if not one.if_refused or one.if_refused in without)
    found = (row.filled(holes) for row in rows)
    return tuple(one for one in found if _parameters(one).isdisjoint(without))


def _parameters(request: WarmUpRequest) -> frozenset[str]:
    return frozenset().union(*request.bodies)


def generation(
    room: ServerLimits, refused: Collection[str] = (), fatal: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Feature]:
    """Yields the features of every server that generates text.

    `refused` are the parameters that this server answers with 400. `fatal` are those that would crash it, each with the
    reason.
    """
    holes: dict[str, JsonValue] = {
        "long_prompt": token_prompt(_long(room)),
        "num_at_once": min(room.max_num_seqs or 8, 8),
        "logprobs_1": _fewer(1, room),
        "logprobs_2": _fewer(2, room),
    }
    names = ["text", "kinds of sampling", "constrained answers", "long prompts"]
    if room.max_num_seqs is None or room.max_num_seqs > 1:
        names += ["several at once", "batches of several kinds of sampling"]
    for name in names:
        asked = requests_of(name, holes, refused)
        safe = tuple(one for one in asked if _parameters(one).isdisjoint(fatal))
        yield Feature(name, safe, "; ".join(fatal.values()) if safe != asked else "", is_smoke=name == "text")
    yield _chunked(room)


def _fewer(logprobs: int, room: ServerLimits) -> int:
    """Returns `logprobs`, or the most that the server allows."""
    return logprobs if room.max_logprobs is None else min(logprobs, room.max_logprobs)


def sampler_batches(
    sizes: Iterable[int], room: ServerLimits, logprobs: Iterable[int] = ()
) -> Iterator[WarmUpRequest]:
    """Yields a batch of each kind of sampling, in each of these sizes: without log-probabilities, and with each number.

    If a sampler is compiled, its graph depends on the size of the batch, on the parameters of all its requests together, and
    on whether all of them are random and have seeds (seen with vllm-gaudi 0.26.0 on the double). Dynamo cuts a graph where
    seeds are used, and from then on takes the pieces for other batches of this size. So batches with seeds come first. Each
    other kind follows, including greedy alone.

    Each request is long enough for all requests of a batch to run at the same time. Answers are streamed, so that
    `wrap/client.py` can see whether they did.
    """
    widths: list[dict[str, JsonValue]] = [{}]
    widths += [{"logprobs": number} for number in logprobs]
    for size in sizes:
        greedy = _greedy(size, room)
        for has_seeds in (True, False):
            for width in widths:
                yield from _random_batches(size, {**greedy, **width}, has_seeds=has_seeds)
        for width in widths:
            yield WarmUpRequest(
                name=f"batch of {size}: greedy{_width_of(width)}",
                path=COMPLETIONS,
                body={**greedy, **width},
                copies=size,
            )


def _greedy(num: int, room: ServerLimits) -> dict[str, JsonValue]:
    """Returns a request that is long enough for `num` of them to run at the same time."""
    more = 2 * _MAX_TOKENS
    most = room.max_model_len or num + more + _SHORT_TOKENS
    prompt = token_prompt(min(_SHORT_TOKENS, most - 1))
    return {
        "prompt": prompt,
        "max_tokens": min(num + more, most - len(prompt)),
        "stream": True,
        "ignore_eos": True,
        "temperature": 0,
    }


def _width_of(body: Mapping[str, JsonValue]) -> str:
    return f", logprobs {body['logprobs']}" if "logprobs" in body else ""


def _random_batches(size: int, greedy: dict[str, JsonValue], *, has_seeds: bool) -> Iterator[WarmUpRequest]:
    for kind, truncation in _truncations().items():
        random: dict[str, JsonValue] = {**greedy, "temperature": 0.8, **truncation}
        seeded: dict[str, JsonValue] = {**random, "seed": 1}
        for num_greedy in range(min(size, 2)):
            for num_seeded in sorted({1, size - num_greedy}) if has_seeds else (0,):
                num_plain = size - num_greedy - num_seeded
                mix = f"{num_greedy} greedy, {num_plain} random, {num_seeded} with seeds"
                name = f"batch of {size}: {mix}{kind}{_width_of(greedy)}"
                yield _mixed(name, [random] * num_plain, [seeded] * num_seeded, [greedy] * num_greedy)


_Bodies = list[dict[str, JsonValue]]


def _mixed(name: str, plain: _Bodies, seeded: _Bodies, greedy: _Bodies) -> WarmUpRequest:
    """Returns a batch of equal random requests, of equal ones with seeds, and of greedy ones."""
    body, *others = plain or seeded
    return WarmUpRequest(
        name=name,
        path=COMPLETIONS,
        body=body,
        copies=1 + len(others),
        beside=(*greedy, *(seeded if plain else ())),
    )


_MIXES: tuple[tuple[int, dict[str, JsonValue]], ...] = (
    (0, {}),
    (1, {"min_p": 0.1}),
    (0, {"min_p": 0.1}),
    (1, {}),
)
_CUTS: tuple[dict[str, JsonValue], ...] = ({}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.9})
"""What the functions of vLLM's sampler depend on that Dynamo cuts where a seed is used: `Sampler.sample` on greedy requests
and min-p, `TopKTopPSampler.forward` on top-k and top-p (vllm/v1/sample/sampler.py, ops/topk_topp_sampler.py, 0.26.0)."""


def start_batches(
    sizes: Iterable[int], room: ServerLimits, logprobs: Iterable[int] = ()
) -> Iterator[WarmUpRequest]:
    """Yields the batches by which a start brings a compiled sampler into the state that `sampler_batches` left in the build.

    A function that Dynamo has cut in a size, because of a seed, stays cut: then all batches of this size are computed by the
    same pieces, in whatever order their kinds come. So each variant of each function (`_MIXES`, `_CUTS`, and for
    `Sampler.forward` the numbers of log-probabilities) gets one batch with a seed in each size, and no combination does. A
    size that is padded to is reached by one request more than the size below.
    """
    widths: list[dict[str, JsonValue]] = [{}]
    widths += [{"logprobs": number} for number in logprobs]
    num_below = 0
    for size in sorted(sizes):
        num, num_below = num_below + 1, size
        mixes = [mix for mix in _MIXES if mix[0] < num]
        greedy = _greedy(num, room)
        for index in range(max(len(mixes), len(_CUTS), len(widths))):
            num_greedy, tail = mixes[index % len(mixes)]
            more = {**tail, **_CUTS[index % len(_CUTS)], **widths[index % len(widths)]}
            random: dict[str, JsonValue] = {**greedy, "temperature": 0.8, **more}
            names = ", ".join(["a seed", *["greedy"] * num_greedy, *(f"{key} {more[key]}" for key in more)])
            yield _mixed(
                f"batch that is padded to {size}: {names}",
                [random] * (num - num_greedy - 1),
                [{**random, "seed": 1}],
                [greedy] * num_greedy,
            )


def in_order_of_proof(requests: Sequence[WarmUpRequest]) -> list[int]:
    """Returns the order in which a proof sends these requests: as a start does, then what only the build sends.

    The latter are sent in reverse, because clients keep to no order: what a start is asked must suffice for any.
    """
    first = [index for index, request in enumerate(requests) if request.at_start]
    return [*first, *reversed([index for index, request in enumerate(requests) if not request.at_start])]


LONG_START_SECONDS = 60.0
_NUM_SLOWEST = 3


def start_cost(
    requests: Sequence[WarmUpRequest], seconds: Sequence[float], *, asks_all: bool, ranks: int = 1
) -> StartCost:
    """Returns what a start is asked that sends these requests to `ranks`, each of which took `seconds` in the proof."""
    sent = [
        (took, request)
        for took, request in zip(seconds, requests, strict=True)
        if asks_all or request.at_start
    ]
    total = math.ceil(sum(took for took, _ in sent))
    slowest = sorted(sent, key=lambda row: -row[0])[:_NUM_SLOWEST]
    why = ", ".join(f"{request.name}: {took:.0f} s" for took, request in slowest)
    needed = "a start that sent fewer failed its proof, so each start sends all; " if asks_all else ""
    return StartCost(
        requests=ranks * sum(len(request.bodies) for _, request in sent),
        tokens=ranks * sum(_num_tokens(body) for _, request in sent for body in request.bodies),
        seconds=total,
        asks_all=asks_all,
        why=f"{needed}the slowest: {why}" if total > LONG_START_SECONDS else "",
    )


def _num_tokens(body: Mapping[str, JsonValue]) -> int:
    """Returns about how many tokens a request's prompt and its answers have. A text has one for about four characters."""
    prompt = next((body[name] for name in ("prompt", "input", "messages") if name in body), "")
    is_ids = isinstance(prompt, list) and all(isinstance(one, int) for one in prompt)
    num_asked = len(prompt) if is_ids and isinstance(prompt, list) else len(json.dumps(prompt)) // 4
    most, copies = body.get("max_tokens", 0), body.get("n", 1)
    return num_asked + (most * copies if isinstance(most, int) and isinstance(copies, int) else 0)


def _truncations() -> dict[str, dict[str, JsonValue]]:
    """Returns by name every combination of parameters with which requests shorten the tail of a distribution."""
    one_by_one: Mapping[str, JsonValue] = {"top_k": 5, "top_p": 0.9, "min_p": 0.1}
    found: dict[str, dict[str, JsonValue]] = {}
    for num in range(len(one_by_one) + 1):
        for names in itertools.combinations(one_by_one, num):
            found["".join(f", {name}" for name in names)] = {name: one_by_one[name] for name in names}
    return found


def _chunked(room: ServerLimits) -> Feature:
    name, tokens, longest = "prompts in chunks", room.max_num_batched_tokens, room.max_model_len
    if longest is None or tokens is None:
        missing = "--max-num-batched-tokens" if tokens is None else "--max-model-len"
        return Feature(name, gap=f"{missing} is not given, so it is not known which prompts are cut")
    num_tokens = min(tokens + tokens // 2 + 1, longest - 2 * _MAX_TOKENS)
    fits = num_tokens > tokens
    return Feature(name, requests_of(name, {"chunked_prompt": token_prompt(num_tokens)}) if fits else ())


def _long(room: ServerLimits) -> int:
    """Returns the length of a prompt that needs a larger step and still fits together with its answer."""
    return max(1, min(_LONG_TOKENS, (room.max_model_len or _LONG_TOKENS * 2) - 2 * _MAX_TOKENS))


def pooling(kind: str, room: ServerLimits) -> Iterator[Feature]:
    """Yields the features of a server that generates no text.

    `kind` is ``embed``, ``classify``, ``score`` (of pairs), or another kind, whose requests we do not know.
    """
    name = {"embed": "embeddings", "classify": "classes", "score": "scores"}.get(kind)
    if name is None:
        yield Feature(f"answers of the kind {kind}", gap="what to ask is not known here: --exercise FILE")
        return
    # Many models that embed take 128 or 256 tokens, as a file other than their configuration says.
    truncation = -1 if room.max_model_len is None else None
    holes: dict[str, JsonValue] = {"long_prompt": token_prompt(_long(room)), "truncation": truncation}
    yield Feature(name, requests_of(name, holes), is_smoke=True)


def adapters(names: Sequence[str]) -> Feature:
    """Returns the feature of a server with these LoRA adapters."""
    each = [one for name in names for one in requests_of("each LoRA adapter", {"adapter": name})]
    beside = [one for name in names[:1] for one in requests_of("a LoRA adapter", {"adapter": name})]
    gap = "" if names else "no adapter is named by --lora-modules"
    return Feature("LoRA adapters", (*each, *beside), gap)


class _Line(ForeignValue):
    """A line of the file."""

    custom_id: str = ""
    method: str = "POST"
    url: str = Field(pattern=r"^/[!-~]*$")
    body: dict[str, JsonValue]


def read_requests(path: Path) -> tuple[WarmUpRequest, ...]:
    """Returns the requests of an owner's file. Raises SpecError, which names the line."""
    try:
        data = read_regular(path, _MAX_FILE_BYTES)
    except OSError as error:
        remedy = f"a level ({', '.join(LEVELS)}), or a file of requests"
        raise SpecError("--exercise", f"{path} cannot be read: {error.strerror}", remedy) from error
    found = []
    for number, line in enumerate(data.splitlines(), 1):
        if line.strip():
            found.append(_request(f"{path}:{number}", f"{path.name}:{number}", line))
    if not found:
        raise SpecError(str(path), "has no request", _LINE)
    return tuple(found)


def _request(where: str, name: str, line: bytes) -> WarmUpRequest:
    try:
        read = _Line.model_validate_json(line)
        is_greedy = read.body.get("temperature") == 0 and not read.body.get("stream")
        request = WarmUpRequest(
            name=f"{name} {read.custom_id}".strip(),
            path=read.url,
            body=read.body,
            is_greedy=is_greedy and read.url in _COMPARED,
        )
        canonical_json(request.body)  # Raises what sealing it would raise later.
    except ValidationError as error:
        raise SpecError(where, f"is no request: {first_problem(error)}", _LINE) from error
    except ValueError as error:
        raise SpecError(where, f"cannot be sealed: {error}", "integers below 2 ** 53") from error
    if read.method != "POST":
        raise SpecError(where, f"asks by {read.method!r:.50}", "POST")
    return request


def line_of(path: str, body: Mapping[str, Any]) -> str:
    """Returns the line of an exercise's file for this request."""
    return json.dumps({"method": "POST", "url": path, "body": body}, ensure_ascii=False)


_KINDS = (
    (r"ForCausalLM|ForConditionalGeneration|ChatModel|LMHeadModel", ""),
    (r"For\w*Classification|ClassificationModel", "classify"),
    (r"ForTextEncoding|EmbeddingModel", "embed"),
    (r"ForRewardModeling|RewardModel", "reward"),
    (r"Model", "embed"),
)
"""Endings of architectures -> the kind of requests for such a model; "" for text (vllm/config/model.py)."""


def pooling_kind(flags: Mapping[str, JsonValue], config: Mapping[str, Any]) -> str:
    """Returns how a vLLM server pools; empty if it generates text. By default vLLM derives that from the model."""
    for name in ("task", "convert"):
        said = str(flags.get(name, "auto"))
        if said not in ("auto", "generate", "none"):
            return {"embedding": "embed"}.get(said, said)
    named = config.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    kind = next((kind for ending, kind in _KINDS if re.search(f"({ending})$", architecture)), "")
    labels = config.get("id2label")
    if kind == "classify" and isinstance(labels, dict) and len(labels) == 1:
        kind = "score"
    is_asked = flags.get("runner") == "pooling"
    return kind or ("embed" if is_asked else "")


def with_adapters(
    requests: Sequence[WarmUpRequest], sealed: Sequence[str], here: Sequence[str]
) -> dict[int, WarmUpRequest]:
    """Returns the requests to send here, by position. Those for `sealed` adapters are redirected to the adapters `here`.

    The choice of adapters for the slots changes no code, so a launch may have other adapters, or fewer. Requests without an
    adapter here are not sent.
    """
    names = dict(zip(sealed, here, strict=False))
    asked = {}
    for index, request in enumerate(requests):
        model = request.body.get("model")
        if model not in sealed or model in here:
            asked[index] = request
        elif model in names:
            asked[index] = request.model_copy(update={"body": {**request.body, "model": names[str(model)]}})
    return asked


def adapter_names(given: JsonValue) -> list[str]:
    """Returns the names that ``--lora-modules`` gives: ``NAME=PATH``, or a table with ``name``."""
    rows = given if isinstance(given, list) else [given]
    names = [
        str(row.get("name", "")) if isinstance(row, dict) else str(row).partition("=")[0] for row in rows
    ]
    return [name for name in names if name]
