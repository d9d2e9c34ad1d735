"""Requests that ask for one thing beyond sampling each, at random, with what must be true of their answers.

Values differ from request to request, so what a server keeps of each would show.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from tokenizers import Tokenizer

from tests.e2e.harness import VOCAB_SIZE
from tests.e2e.traffic import Order, Outcome
from tests.hostile.attackers import CHAT, COMPLETIONS

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
TEMPLATE = (
    "{% for tool in tools or [] %}~{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""For `serve --chat-template`: it takes tools."""
WORDS = ("fox", "dog", "jar", "wizard", "potion", "lazy", "quick", "Zürich", "狐")
WHITE = [" ", "\n", "\t", "\r"]
"""JSON may have any amount of white space, and random weights like it."""
END_ID = 0
MAX_ANSWER_LEN = 24
MAX_WORD_LEN, MAX_CALL_LEN = 32, 44
"""Of an answer that should come to its end. What a call takes is nearly all that `MAX_MODEL_LEN` leaves."""
Asked = tuple[dict[str, Any], Callable[[str], bool]]
"""A parameter that says what the answer must be, and whether a complete text is that."""


@dataclass(frozen=True)
class Mix:
    """Makes the requests. `tokenizer` is the served model's."""

    random: Random
    tokenizer: Tokenizer

    def order(self) -> Order:
        """One request."""
        kinds = (
            *(self.structured, self.structured, self.tools, self.tools, self.several, self.limited),
            *(self.scored, self.tokens, self.counted),
        )
        order = self.random.choice(kinds)()
        if order.body.get("stream") and self.random.random() < 0.15:
            return replace(order, leave_after=self.random.randint(0, 10), is_right=None)
        return order

    def structured(self) -> Order:
        """Text of a schema, an expression, a choice or a grammar; for each of up to three answers."""
        asked, is_right = self.random.choice((self._json, self._regex, self._choice, self._grammar))()
        body = {**self._sampling(MAX_WORD_LEN), **asked, "n": self.random.choice((1, 1, 1, 2, 3))}
        body["bad_words"] = WHITE
        return self._to_either(body, lambda outcome: _all_right(outcome, is_right))

    def _json(self) -> Asked:
        words = self.random.sample(WORDS, 3)
        schema = {"type": "array", "items": {"enum": words}, "minItems": 1, "maxItems": 2}

        def is_right(text: str) -> bool:
            found = json.loads(text)
            return 1 <= len(found) <= 2 and set(found) <= set(words)

        ways: tuple[dict[str, Any], ...] = (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "words", "schema": schema}}},
            {"structured_outputs": {"json": schema}},
            {"guided_json": json.dumps(schema)},
        )
        return self.random.choice(ways), is_right

    def _regex(self) -> Asked:
        regex = f"{self.random.choice(WORDS)}-[0-9]{{{self.random.randint(1, 9)}}}"
        ways = {"structured_outputs": {"regex": regex}}, {"guided_regex": regex}
        return self.random.choice(ways), lambda text: re.fullmatch(regex, text) is not None

    def _choice(self) -> Asked:
        texts = [f"{word}{self.random.randint(0, 999)}" for word in WORDS[:4]]
        ways = {"structured_outputs": {"choice": texts}}, {"guided_choice": texts}
        return self.random.choice(ways), texts.__contains__

    def _grammar(self) -> Asked:
        first, second = self.random.sample(WORDS, 2)
        grammar = f'root ::= "<" ("{first}" | "{second}") ">"'
        ways = {"structured_outputs": {"grammar": grammar}}, {"guided_grammar": grammar}
        return self.random.choice(ways), {f"<{first}>", f"<{second}>"}.__contains__

    def tools(self) -> Order:
        """A chat with tools: the model may, must, or must not call one, or must call a certain one."""
        cities = self.random.sample(WORDS[:3], 2)
        schema = {
            "type": "object",
            "properties": {"at": {"enum": cities}},
            "required": ["at"],
            "additionalProperties": False,
        }
        names = [f"f{self.random.randint(0, 9)}", "g"]
        tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in names]
        named = {"type": "function", "function": {"name": names[0]}}
        choice: Any = self.random.choice(("auto", "none", "required", named))
        is_free = choice in ("auto", "none")
        body = {
            **self._sampling(8 if is_free else MAX_CALL_LEN),
            "messages": self._messages(),
            "tools": tools,
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "bad_words": WHITE,
        }

        def is_right(outcome: Outcome) -> bool:
            called = _calls(outcome)
            if is_free:
                return choice == "auto" or not called
            if outcome.finish_reasons == ("length",):
                return True
            ((name, arguments),) = called
            expected = names if choice == "required" else names[:1]
            reason = "tool_calls" if choice == "required" else "stop"
            is_called = name in expected and json.loads(arguments)["at"] in cities
            return is_called and outcome.finish_reasons == (reason,)

        return Order(CHAT, body, is_right=is_right)

    def several(self) -> Order:
        """Several answers to each of several prompts."""
        num_prompts, n = self.random.choice((1, 2)), self.random.randint(2, 4)
        body = {**self._sampling(6), "n": n, "prompt": self.random.sample(WORDS, num_prompts)}
        return Order(COMPLETIONS, body, is_right=lambda outcome: len(outcome.texts) == n * num_prompts)

    def limited(self) -> Order:
        """Tokens that are preferred, allowed, forbidden, or come before the end."""
        ids = self.random.sample(range(4, VOCAB_SIZE), 3)
        kind = self.random.choice(("logit_bias", "allowed_token_ids", "bad_words", "min_tokens"))
        value: Any = {
            "logit_bias": {str(ids[0]): 100},
            "allowed_token_ids": ids,
            "bad_words": [self.random.choice("aeiou")],
            "min_tokens": self.random.randint(1, 8),
        }[kind]
        body = {**self._sampling(12), kind: value, "prompt": [self.random.randrange(4, VOCAB_SIZE)]}
        body |= {"stream": False, "logprobs": 0, "temperature": 0}
        if kind == "min_tokens":
            body["logit_bias"] = {str(END_ID): 100}

        def is_right(outcome: Outcome) -> bool:
            (choice,) = outcome.events[0]["choices"]
            tokens = choice["logprobs"]["tokens"]
            if kind == "min_tokens":
                return outcome.events[0]["usage"]["completion_tokens"] == value + 1
            if kind == "bad_words":
                return value[0] not in tokens
            allowed = ids[:1] if kind == "logit_bias" else ids
            return set(tokens) <= {self.tokenizer.decode([i]) for i in allowed}

        return Order(COMPLETIONS, body, is_right=is_right)

    def scored(self) -> Order:
        """A prompt with its log-probabilities, as an echo or in vLLM's form."""
        text = " ".join(self.random.choices(WORDS[:7], k=self.random.randint(1, 4)))
        num_tokens = len(self.tokenizer.encode(text).ids)
        body = {"prompt": text, "max_tokens": self.random.choice((1, 4)), "temperature": 0}
        is_echo = self.random.random() < 0.5
        body |= {"echo": True, "logprobs": 2} if is_echo else {"prompt_logprobs": 2}

        def is_right(outcome: Outcome) -> bool:
            (choice,) = outcome.events[0]["choices"]
            if not is_echo:
                return len(choice["prompt_logprobs"]) == num_tokens
            values = choice["logprobs"]["token_logprobs"]
            scores = [value for value in values[1:num_tokens] if value <= 0]
            return outcome.texts[0].startswith(text) and values[0] is None and len(scores) == num_tokens - 1

        return Order(COMPLETIONS, body, is_right=is_right)

    def tokens(self) -> Order:
        """The tokens of a text, or the text of tokens."""
        text = " ".join(self.random.choices(WORDS, k=self.random.randint(1, 200)))
        ids = self.tokenizer.encode(text).ids
        if self.random.random() < 0.5:
            return Order(TOKENIZE, {"prompt": text}, is_right=lambda seen: seen.events[0]["tokens"] == ids)
        return Order(DETOKENIZE, {"tokens": ids}, is_right=lambda seen: seen.events[0]["prompt"] == text)

    def counted(self) -> Order:
        """A stream whose chunks have the usage so far."""
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {**self._sampling(MAX_ANSWER_LEN), "stream": True, "stream_options": options}

        def is_right(outcome: Outcome) -> bool:
            *counts, last = [event["usage"]["completion_tokens"] for event in outcome.events]
            return counts == sorted(counts) and counts[-1] == last <= MAX_ANSWER_LEN

        return self._to_either(body, is_right)

    def _sampling(self, max_tokens: int) -> dict[str, Any]:
        chosen = {"temperature": self.random.choice((0, 0.7, 1)), "seed": self.random.randint(0, 2**40)}
        return {**chosen, "max_tokens": max_tokens, "stream": self.random.random() < 0.5}

    def _to_either(self, body: dict[str, Any], is_right: Callable[[Outcome], bool]) -> Order:
        if self.random.random() < 0.5:
            return Order(CHAT, {**body, "messages": self._messages()}, is_right=is_right)
        return Order(COMPLETIONS, {**body, "prompt": self.random.choice(WORDS)}, is_right=is_right)

    def _messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.random.choice(WORDS)}]


def _all_right(outcome: Outcome, is_right: Callable[[str], bool]) -> bool:
    """Whether each text that came to its end is right; one that was cut off may be anything."""
    ended = zip(outcome.texts, outcome.finish_reasons, strict=True)
    return all(reason == "length" or is_right(text) for text, reason in ended)


def _calls(outcome: Outcome) -> list[tuple[str, str]]:
    """The name and the arguments of each call of the first choice, whole or streamed."""
    names, arguments = dict[int, str](), dict[int, str]()
    for place, call in _call_pieces(outcome):
        function = call["function"]
        names[place] = function.get("name") or names.get(place, "")
        arguments[place] = arguments.get(place, "") + (function.get("arguments") or "")
    return [(name, arguments[place]) for place, name in sorted(names.items())]


def _call_pieces(outcome: Outcome) -> Iterator[tuple[int, dict[str, Any]]]:
    for event in outcome.events:
        for choice in event["choices"]:
            message = choice.get("message") or choice["delta"]
            for place, call in enumerate(message.get("tool_calls") or ()):
                yield call.get("index", place), call
