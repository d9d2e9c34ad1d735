"""Compiles the grammars of structured output, and makes masks of allowed tokens, with the `llguidance` library.

The library stops if a grammar becomes too complex. `_LIMITS` are lower than its defaults. A client's grammar is first
checked in a request worker, whose time and memory the kernel limits, and then compiled in the engine process. What becomes
too complex at its first token would take 37 MB of the engine's process each time, so a first token is part of the check.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import llguidance

from aotgaudi.bundle.model_directory import MAX_TOKENIZER_BYTES, TOKENIZER, ModelDirectory
from aotgaudi.engine.sampling_params import StructuredOutputs
from aotgaudi.errors import RequestError, shortened
from aotgaudi.llm.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_LIMITS: Mapping[str, Any] = {
    "initial_lexer_fuel": 100_000,  # At most 18 MB. An enum of 5,000 texts needs half of it.
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 25_000,  # 1 to 2 kB each.
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
MAX_ADDED_TOKENS = 16_384
"""The library's time grows with the square of their number: 1.3 s for 10,000, 14 s for 30,000, and it holds the GIL."""
_NUM_KEPT = 8
"""How many compiled grammars are kept, since many requests have the same schema."""
_MAX_SEARCHED = 200
"""How many parts of a schema are searched for a mistake."""
_MAX_SHOWN_CHARS = 300
_NOTHING_FITS = "NoExtension"
_ANY_OBJECT = '{"type":"object"}'
_NAMED_PARTS = ("properties", "patternProperties", "$defs", "definitions")
_PARTS = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_LISTED_PARTS = ("prefixItems", "anyOf", "oneOf", "allOf")


class GrammarMatcher:
    """A `Matcher` (aotgaudi/engine/constraints.py).

    Matchers of one grammar share their findings about it, and therefore reach its limits together. So a matcher that reaches
    a limit starts again once without sharing.
    """

    def __init__(
        self, matcher: llguidance.LLMatcher, make_another: Callable[[], llguidance.LLMatcher]
    ) -> None:
        self._matcher = matcher
        self._make_another: Callable[[], llguidance.LLMatcher] | None = make_another
        self._taken: list[int] = []

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes tokens that the masks have allowed. Raises RequestError if a limit is reached."""
        self._taken += token_ids
        if not self._matcher.consume_tokens(list(token_ids)):
            self._begin_again()

    def mask(self) -> bytes:
        """Returns a bit for each token. Releases the GIL. Raises RequestError if no token can follow, or at a limit."""
        bits: bytes = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._begin_again()
            bits = self._matcher.compute_bitmask()
            if self._matcher.is_error():
                raise self._failed()
        return bits

    def _begin_again(self) -> None:
        make_another, self._make_another = self._make_another, None
        if make_another is None:
            raise self._failed()
        self._matcher = make_another()
        if not self._matcher.consume_tokens(self._taken):
            raise self._failed()

    def _failed(self) -> RequestError:
        return _refusal(f"cannot go on: {_said(self._matcher)}")


class GrammarCompiler:
    """The `Grammars` of one tokenizer. One thread compiles. Its matchers may be used on another."""

    def __init__(
        self,
        tokenizer: str,
        vocab_size: int | None,
        eos_token_ids: Sequence[int],
        num_added_tokens: int = 0,
    ) -> None:
        """Takes a third of a second for a vocabulary of 49,152 tokens, and holds the GIL for that time.

        Args:
            tokenizer: The text of a ``tokenizer.json``.
            vocab_size: How many tokens the model has. None takes the tokenizer's number.
            eos_token_ids: The tokens that end a sequence.
            num_added_tokens: How many tokens the text adds to its vocabulary. For too many, all grammars are refused.
        """
        self._unusable = ""
        self._limits = llguidance.LLParserLimits(**_LIMITS)
        self._kept: dict[StructuredOutputs, llguidance.LLMatcher] = {}  # The most recently used comes last.
        if not eos_token_ids:
            self._unusable = "the model declares no end-of-sequence token"
            return
        if num_added_tokens > MAX_ADDED_TOKENS:
            found = f"{num_added_tokens:,} added tokens"
            self._unusable = f"its tokenizer has {found}, at most {MAX_ADDED_TOKENS:,} are prepared"
            logger.warning("structured output is refused for this model: %s", self._unusable)
            return
        try:
            self._tokenizer = llguidance.LLTokenizer(tokenizer, vocab_size, list(eos_token_ids))
        except (ValueError, RuntimeError) as error:
            self._unusable = f"llguidance cannot use its tokenizer: {error}"

    @classmethod
    def load(
        cls, model: ModelDirectory, tokenizer: Tokenizer, vocab_size: int | None = None
    ) -> GrammarCompiler:
        """Returns the compiler of a model, whose tokenizer is `tokenizer`."""
        data = model.read(TOKENIZER, MAX_TOKENIZER_BYTES) or b""
        return cls(data.decode(), vocab_size, sorted(tokenizer.eos_token_ids), tokenizer.num_added_tokens)

    def compile(self, outputs: StructuredOutputs) -> GrammarMatcher:
        """Returns a matcher at the beginning of a text, with its first mask made. Releases the GIL.

        Raises:
            RequestError: 400; the grammar is wrong or too complex. Says what is wrong and, for a schema, where.
        """
        if self._unusable:
            raise _refusal(f"is not supported for this model: {self._unusable}")
        pristine = self._kept.pop(outputs, None) or self._compiled(outputs)
        self._kept[outputs] = pristine
        if len(self._kept) > _NUM_KEPT:
            del self._kept[next(iter(self._kept))]
        return GrammarMatcher(pristine.deep_copy(), partial(self._another, outputs))

    def _another(self, outputs: StructuredOutputs) -> llguidance.LLMatcher:
        """Returns a matcher that shares nothing. Later matchers will not share with earlier ones either."""
        self._kept.pop(outputs, None)
        return self._matcher(outputs)

    def _compiled(self, outputs: StructuredOutputs) -> llguidance.LLMatcher:
        matcher = judged = self._matcher(outputs)
        if not matcher.is_error():
            bits = matcher.compute_bitmask()  # This finds grammars that no text satisfies,
            if not matcher.is_error():
                judged = matcher.deep_copy()
                _take_first(judged, bits)  # and this finds those whose states multiply at once.
        if judged.is_error():
            place = _place_of(json.loads(outputs.json or "0"), self._mistake)
            raise _refusal(f"cannot be used{place}: {_said(judged)}")
        return matcher

    def _matcher(self, outputs: StructuredOutputs) -> llguidance.LLMatcher:
        try:
            if outputs.json is not None:
                json.loads(outputs.json)  # Its errors name the line. The library's do not.
            grammar = _grammar_of(outputs)
        except (ValueError, RecursionError) as error:
            raise _refusal(f"cannot be used: {error}") from error
        return llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)

    def _mistake(self, schema: object) -> str:
        """Returns what is wrong with a schema; empty if nothing is found."""
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        return str(
            llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits).get_error()
        )


class LaterGrammars:
    """The `Grammars` of a compiler that another thread creates meanwhile."""

    def __init__(self, model: ModelDirectory, tokenizer: Tokenizer, vocab_size: int) -> None:
        pool = ThreadPoolExecutor(1, "aotgaudi-tokenizer")
        self._compiler: Future[GrammarCompiler] = pool.submit(
            GrammarCompiler.load, model, tokenizer, vocab_size
        )
        pool.shutdown(wait=False)

    def compile(self, outputs: StructuredOutputs) -> GrammarMatcher:
        """Waits for the `GrammarCompiler`, and returns the result of its `compile`."""
        return self._compiler.result().compile(outputs)


def _take_first(matcher: llguidance.LLMatcher, bits: bytes) -> None:
    """Makes the matcher take the first allowed token and compute the next mask."""
    first = next((8 * at + (byte & -byte).bit_length() - 1 for at, byte in enumerate(bits) if byte), None)
    if first is not None and matcher.consume_token(first) and not matcher.is_stopped():
        matcher.compute_bitmask()


def _grammar_of(outputs: StructuredOutputs) -> str:
    """Returns a grammar in the library's form. Raises ValueError."""
    from_schema = llguidance.LLMatcher.grammar_from_json_schema
    if outputs.json is not None:
        return str(from_schema(outputs.json))
    if outputs.regex is not None:
        return str(llguidance.LLMatcher.grammar_from_regex(outputs.regex))
    if outputs.choice is not None:
        return str(llguidance.grammar_from("choice", json.dumps(outputs.choice)))
    if outputs.grammar is not None:
        return str(llguidance.grammar_from("grammar", outputs.grammar))
    return str(from_schema(_ANY_OBJECT))


def _place_of(schema: object, mistake_of: Callable[[object], str]) -> str:
    """Returns the place of a schema's mistake, e.g. `` at /properties/a``: the innermost part that has it by itself.

    Empty if that is the whole schema.
    """
    if not isinstance(schema, dict):
        return ""
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    mistake, place, num_left = mistake_of(schema), "", _MAX_SEARCHED
    part: dict[str, Any] = schema
    while True:
        for step, inner in _parts_of(part):
            num_left -= 1
            if num_left < 0:
                return f" at {place}" * bool(place)
            if mistake_of({**shared, **inner}) == mistake:
                part, place = inner, f"{place}/{step}"
                break
        else:
            return f" at {place}" * bool(place)


def _parts_of(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the schemas directly inside a schema, each with its place as a JSON pointer."""
    inner: list[tuple[str, object]] = [(name, schema.get(name)) for name in _PARTS]
    for name in _NAMED_PARTS:
        named = schema.get(name)
        if isinstance(named, dict):
            inner += ((f"{name}/{_escaped(key)}", value) for key, value in named.items())
    for name in _LISTED_PARTS:
        listed = schema.get(name)
        if isinstance(listed, list):
            inner += ((f"{name}/{index}", value) for index, value in enumerate(listed))
    for step, value in inner:
        if isinstance(value, dict):
            yield step, value


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _said(matcher: llguidance.LLMatcher) -> str:
    """Returns the library's error message as one line."""
    words = str(matcher.get_error()).removesuffix("<non-verbose/>").split()
    if not words or words[0].startswith(_NOTHING_FITS):
        return "no text satisfies it"
    return shortened(" ".join(words), _MAX_SHOWN_CHARS)


def _refusal(problem: str) -> RequestError:
    return RequestError(f"structured_outputs {problem}", param="structured_outputs")
