"""Constraints on the text of an answer: a JSON Schema, a regular expression, a choice, or a grammar."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from aotgaudi.errors import RequestError

MAX_GRAMMAR_CHARS = 128 * 1024
MAX_CHOICES = 2048


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


def _as_text(schema: object) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _refusal(f"takes a JSON Schema as json, and this is not JSON: {error}") from error


def _refusal(problem: str) -> RequestError:
    return RequestError(f"structured_outputs {problem}", param="structured_outputs")
