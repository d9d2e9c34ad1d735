"""Sampling parameters: how a request is sampled, what constrains its text, and when its output ends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from aotgaudi.errors import RequestError, shortened
from aotgaudi.spec.sampler_signature import (
    NUM_BIASED_TOKENS,
    PARAMETERS,
    SamplerSignature,
    SamplingValues,
    signature_of,
)

MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 128, 256
MAX_GRAMMAR_CHARS = 128 * 1024
MAX_CHOICES = 2048
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1
_MAX_INT = 2**63 - 1
_MAX_SHOWN_CHARS = 100
_MIN_TEMPERATURE = 1e-5
"""Smaller temperatures would make logits overflow 32-bit floats. Sampling is greedy long before that."""
_MIN_TOP_P = 1e-30
"""Keeps only the likeliest token. A smaller value should do the same, but may be 0 in 32-bit floats and keep none."""
_MAX_TOP_K = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """Exactly one of vLLM's kinds of structured output. Immutable; equal values stand for equal grammars.

    Attributes:
        json: A JSON Schema as text. A mapping is converted to text.
        regex: A regular expression that the whole output must match.
        choice: Texts (at least one), of which the output must be one.
        grammar: A context-free grammar, in Lark's or llama.cpp's (GBNF) syntax.
        json_object: Whether the output must be a JSON object, of any form.

    Raises:
        RequestError: 400; none or several are given, or one has the wrong type or is too long.
    """

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        schema: object = self.json
        choice: object = self.choice
        if isinstance(schema, (dict, bool)):
            object.__setattr__(self, "json", _as_text(schema))
        if isinstance(choice, list):
            object.__setattr__(self, "choice", tuple(choice))
        given = [each.name for each in fields(self) if getattr(self, each.name) not in (None, False)]
        if len(given) != 1:
            names = ", ".join(each.name for each in fields(self))
            raise _refusal(f"needs exactly one of {names}, and has {' and '.join(given) or 'none'}")
        self._check(given[0], getattr(self, given[0]))

    def _check(self, name: str, value: object) -> None:
        texts = value if name == "choice" else () if name == "json_object" else (value,)
        if not isinstance(texts, tuple) or not all(isinstance(text, str) for text in texts):
            wanted = "a list of strings" if name == "choice" else "a string"
            raise _refusal(f"takes {wanted} as {name}, not {type(value).__name__}")
        if name == "choice" and not 0 < len(texts) <= MAX_CHOICES:
            raise _refusal(f"takes 1 to {MAX_CHOICES} texts as choice, not {len(texts)}")
        num_chars = sum(map(len, texts))
        if num_chars > MAX_GRAMMAR_CHARS:
            raise _refusal(f"takes at most {MAX_GRAMMAR_CHARS} characters as {name}, not {num_chars}")

    def as_json(self) -> dict[str, Any]:
        """Returns the field that is set, as an argument of this class."""
        values = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {name: value for name, value in values if value not in (None, False)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(SamplingValues):
    """How one request is sampled and when it ends. Immutable, safe to share between threads.

    `SamplingValues` declares the parameters of the sampler. A `temperature` of less than 1e-5 counts as 0, a `top_k` of -1,
    too. Penalties are vLLM's: presence and frequency over generated tokens, repetition over prompt and generated tokens.

    `logprobs` is None, or the number (0 to 20) of likeliest tokens whose log-probabilities are returned with the chosen
    token's. `prompt_logprobs` is the same for the prompt's tokens. `seed` makes the result repeatable.

    `max_tokens` is None for "as many as fit". Output ends before the first of `stop` (at most 16 strings), after one of
    `stop_token_ids`, and after an end-of-sequence token unless `ignore_eos`. `include_stop_str_in_output` keeps the text
    that ended it. `skip_special_tokens` leaves special tokens out of the text.

    The rest are constraints, under vLLM's names. `structured_outputs` is a grammar for the whole output. At least
    `min_tokens` tokens come before the output may end. `bad_words` (at most 128) are never completed. Only
    `allowed_token_ids` are sampled, if given. `logit_bias` is added to the logits of at most 300 tokens, each from -100 to
    100. It may be given as a mapping.

    `signature` says which sampler graph serves the request.

    Raises:
        RequestError: HTTP 400. Names the parameter and what is allowed.
    """

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    structured_outputs: StructuredOutputs | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    signature: SamplerSignature = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for param, declared in PARAMETERS.items():
            self._require(param, declared.accepts(getattr(self, param)), declared.allowed)
        for param in ("logprobs", "prompt_logprobs"):
            value = getattr(self, param)
            is_count = value is None or (_is_int(value) and 0 <= value <= MAX_LOGPROBS)
            self._require(param, is_count, f"an integer from 0 to {MAX_LOGPROBS}, or none")
        self._bring_into_range()
        is_seed = self.seed is None or (_is_int(self.seed) and MIN_SEED <= self.seed <= MAX_SEED)
        self._require("seed", is_seed, "a 64-bit signed integer, or none")
        is_count = self.max_tokens is None or (_is_int(self.max_tokens) and 1 <= self.max_tokens <= _MAX_INT)
        self._require("max_tokens", is_count, "a 64-bit integer of at least 1, or none")
        for param in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            self._require(param, isinstance(getattr(self, param), bool), "true or false")
        self._check_stops()
        self._check_min_tokens()
        self._check_tokens()
        signature = signature_of(self, logprobs=self.logprobs is not None, constraints=self.is_constrained)
        object.__setattr__(self, "signature", signature)

    @property
    def is_constrained(self) -> bool:
        """Whether any parameter restricts the tokens that may be sampled, or biases them."""
        stops = self.min_tokens > 0 and (not self.ignore_eos or bool(self.stop_token_ids))
        tokens = bool(self.bad_words or self.logit_bias) or self.allowed_token_ids is not None
        return stops or tokens or self.structured_outputs is not None

    def _bring_into_range(self) -> None:
        """Replaces extreme values by values of the same effect that the sampler's tensors can hold."""
        if self.temperature < _MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        object.__setattr__(self, "top_p", max(self.top_p, _MIN_TOP_P))
        object.__setattr__(self, "top_k", min(max(self.top_k, 0), _MAX_TOP_K))

    def _check_stops(self) -> None:
        are_strings = _is_tuple_of(str, self.stop) and "" not in self.stop
        allowed = f"at most {MAX_STOP_STRINGS} non-empty strings"
        self._require("stop", are_strings and len(self.stop) <= MAX_STOP_STRINGS, allowed)
        are_ids = _is_tuple_of(int, self.stop_token_ids) and min(self.stop_token_ids, default=0) >= 0
        self._require("stop_token_ids", are_ids, "non-negative integers")

    def _check_min_tokens(self) -> None:
        is_count = _is_int(self.min_tokens) and 0 <= self.min_tokens <= _MAX_INT
        self._require("min_tokens", is_count, "a 64-bit integer of at least 0")
        most = _MAX_INT if self.max_tokens is None else self.max_tokens
        self._require("min_tokens", self.min_tokens <= most, f"at most max_tokens = {most}")

    def _check_tokens(self) -> None:
        """Checks the parameters about single tokens and words. Admission checks whether ids are in the vocabulary."""
        are_words = _is_tuple_of(str, self.bad_words) and len(self.bad_words) <= MAX_BAD_WORDS
        allowed = f"at most {MAX_BAD_WORDS} non-empty strings of up to {MAX_BAD_WORD_CHARS} characters"
        are_short = are_words and all(0 < len(word) <= MAX_BAD_WORD_CHARS for word in self.bad_words)
        self._require("bad_words", are_short, allowed)
        ids = self.allowed_token_ids
        are_ids = ids is None or (_is_tuple_of(int, ids) and len(ids) > 0 and min(ids) >= 0)
        self._require("allowed_token_ids", are_ids, "token ids, at least one, or none")
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", tuple(self.logit_bias.items()))
        are_pairs = _is_tuple_of(tuple, self.logit_bias) and all(map(_is_bias, self.logit_bias))
        allowed = f"at most {NUM_BIASED_TOKENS} token ids, each with a number from -100 to 100"
        is_few = are_pairs and len(dict(self.logit_bias)) == len(self.logit_bias) <= NUM_BIASED_TOKENS
        self._require("logit_bias", is_few, allowed)
        given = self.structured_outputs
        is_value = given is None or isinstance(given, StructuredOutputs)
        self._require("structured_outputs", is_value, "StructuredOutputs, or none")

    def _require(self, param: str, is_allowed: bool, allowed: str) -> None:
        if not is_allowed:
            raise RequestError(f"{param} must be {allowed}, not {shown(getattr(self, param))}", param=param)


def shown(value: object) -> str:
    """Returns a wrong value as a message shows it: shortened, or a placeholder if Python refuses to print it."""
    try:
        text = repr(value)
    except ValueError:  # An integer of more than 4,300 digits.
        return "a number that is too long to be written"
    return shortened(text, _MAX_SHOWN_CHARS)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_bias(pair: object) -> bool:
    if not isinstance(pair, tuple) or len(pair) != 2:
        return False
    token_id, bias = pair
    is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
    return _is_int(token_id) and token_id >= 0 and is_number and abs(bias) <= MAX_LOGIT_BIAS


def _is_tuple_of(kind: type, values: object) -> bool:
    return isinstance(values, tuple) and all(type(value) is kind for value in values)


def _as_text(schema: object) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _refusal(f"takes a JSON Schema as json, and this is not JSON: {error}") from error


def _refusal(problem: str) -> RequestError:
    return RequestError(f"structured_outputs {problem}", param="structured_outputs")
