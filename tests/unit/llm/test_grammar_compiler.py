"""Grammars of structured output over a tokenizer of one token a byte."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.bundle.model_directory import ModelDirectory
from aotgaudi.engine.sampling_params import StructuredOutputs
from aotgaudi.errors import RequestError
from aotgaudi.llm.grammar_compiler import MAX_ADDED_TOKENS, GrammarCompiler, GrammarMatcher, LaterGrammars
from aotgaudi.llm.tokenizer import Tokenizer
from tests.unit.llm.conftest import make_backend, make_grammars

EOS = 257
TOKENIZER = Tokenizer(make_backend(), [EOS])


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def allowed(matcher: GrammarMatcher) -> set[int]:
    bits = int.from_bytes(matcher.mask(), "little")
    return {token_id for token_id in range(EOS + 1) if bits >> token_id & 1}


def ends_of(outputs: StructuredOutputs, text: str) -> bool:
    """Returns whether `text` may end here; every token of it must be allowed."""
    matcher = make_grammars().compile(outputs)
    for token_id in ids(text):
        assert token_id in allowed(matcher), text
        matcher.advance([token_id])
    return EOS in allowed(matcher)


@pytest.mark.parametrize(
    ("outputs", "whole", "part"),
    [
        (StructuredOutputs(json_object=True), '{"a": [1, {"b": null}]}', '{"a": [1'),
        (StructuredOutputs(json='{"type": "integer", "minimum": 10, "maximum": 19}'), "17", "1"),
        (StructuredOutputs(regex=r"(ab)+c?"), "ababc", "aba"),
        (StructuredOutputs(choice=("yes", "no", "né😀")), "né😀", "né"),
        (StructuredOutputs(grammar='start: "a" start "b" | "x"'), "aaxbb", "aaxb"),
        (StructuredOutputs(grammar='root ::= "a" root "b" | "x"'), "axb", "ax"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_text_ends_where_its_grammar_does(outputs: StructuredOutputs, whole: str, part: str) -> None:
    assert ends_of(outputs, whole)
    assert not ends_of(outputs, part)


def test_nothing_but_an_end_follows_a_grammar_that_has_ended() -> None:
    matcher = make_grammars().compile(StructuredOutputs(choice=("yes",)))

    matcher.advance(ids("yes"))

    assert allowed(matcher) == {EOS}


def test_a_tokenizer_with_more_added_tokens_than_the_library_can_take_is_not_given_to_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = make_backend()
    backend.add_special_tokens([f"<{number}>" for number in range(MAX_ADDED_TOKENS + 1)])
    backend.save(str(tmp_path / "tokenizer.json"))
    began = time.process_time()

    grammars = LaterGrammars(ModelDirectory(tmp_path), Tokenizer(backend, [EOS]), 40_000)

    with pytest.raises(RequestError, match=r"its tokenizer has 16,38\d added tokens, at most 16,384"):
        grammars.compile(StructuredOutputs(regex="a"))
    assert time.process_time() - began < 2.0
    assert "structured output is refused for this model" in caplog.text


def test_every_end_of_the_sequence_may_end_a_text() -> None:
    matcher = GrammarCompiler(make_backend().to_str(), 300, [256, EOS]).compile(StructuredOutputs(regex=""))

    assert allowed(matcher) == {256, EOS}


def test_matchers_of_one_grammar_go_their_own_ways() -> None:
    outputs = StructuredOutputs(choice=("ab", "cd"))
    one, other = make_grammars().compile(outputs), make_grammars().compile(outputs)

    one.advance(ids("a"))

    assert (allowed(one), allowed(other)) == ({*ids("b")}, {*ids("ac")})


def test_a_matcher_that_reaches_a_limit_goes_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = make_grammars().compile(StructuredOutputs(choice=("abc",)))
    matcher.advance(ids("a"))
    worn_out = make_grammars().compile(StructuredOutputs(choice=("x",)))._matcher
    assert not worn_out.consume_token(ids("y")[0])
    monkeypatch.setattr(matcher, "_matcher", worn_out)

    assert allowed(matcher) == {*ids("b")}
    matcher.advance(ids("b"))
    assert allowed(matcher) == {*ids("c")}


def test_a_token_that_no_mask_allowed_is_refused() -> None:
    matcher = make_grammars().compile(StructuredOutputs(choice=("abc",)))

    with pytest.raises(RequestError, match="structured_outputs cannot go on"):
        matcher.advance(ids("x"))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"json": {"properties": {"a": {"type": "strin"}}}}, "at /properties/a: Invalid type: strin"),
    ({"json": {"anyOf": [{}, {"items": {"not": {}}}]}}, 'at /anyOf/1/items: Unimplemented keys: ["not"]'),
    ({"json": {"$defs": {"x": {"pattern": "("}}, "items": {"$ref": "#/$defs/x"}}}, "#/$defs/x"),
    (
        {"json": {"properties": {"a/b": {"$ref": "#/no"}}}},
        "at /properties/a~1b: Pointer '/no' does not exist",
    ),
    ({"json": "{"}, "line 1 column 2"),
    ({"json": "[1]"}, "schema must be an object or boolean"),
    ({"json": "[" * 100_000}, "recursion"),
    ({"json": {"$ref": "#"}}, "no text satisfies it"),
    ({"json": {"oneOf": [{"type": "string"}, {"pattern": "^a"}]}}, "oneOf constraints are not supported"),
    ({"regex": "("}, "unclosed group"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"grammar": "start: x"}, 'unknown name: "x"'),
    ({"grammar": "start: start"}, "no text satisfies it"),
]


@pytest.mark.parametrize(("given", "said"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_grammar_is_refused_with_the_place(given: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=r"^structured_outputs cannot be used") as refused:
        make_grammars().compile(StructuredOutputs(**given))

    assert said in str(refused.value)
    assert refused.value.param == "structured_outputs"
    assert len(str(refused.value)) < 500
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("regex", ["((a{1000}){1000}){1000}", "(a?){500}a{500}"])
def test_what_would_fail_at_its_first_token_is_refused_at_once(regex: str) -> None:
    with pytest.raises(RequestError, match="too many expressions"):
        make_grammars().compile(StructuredOutputs(regex=regex))


def _chain(kind: str, num: int) -> dict[str, Any]:
    """A schema that doubles at each step."""
    steps = {f"d{i}": {kind: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(num)}
    return {"$defs": {**steps, f"d{num}": {"type": "string"}}, "$ref": "#/$defs/d0"}


HOSTILE: dict[str, dict[str, Any]] = {
    "nested repetitions": {"regex": "((a{1000}){1000}){1000}"},
    "many alternatives": {"regex": "|".join(f"x{i}y*" for i in range(12_000))},
    "wide classes": {"regex": r"(\w{1,200}|\d{3,90}){1,500}"},
    "parentheses": {"regex": "(" * 60_000 + ")" * 60_000},
    "deep grammar": {"grammar": "start: " + "(" * 60_000 + '"a"' + ")" * 60_000},
    "ambiguous grammar": {"grammar": 'start: s\ns: s s s | s s | "a" | '},
    "many rules": {
        "grammar": "start: "
        + " | ".join(f"r{i}" for i in range(3000))
        + "".join(f'\nr{i}: "a{i}" r{i * 7 % 3000}?' for i in range(3000))
    },
    "doubled anyOf": {"json": _chain("anyOf", 60)},
    "doubled allOf": {"json": _chain("allOf", 30)},
    "product of anyOf": {
        "json": {
            "allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(6)]} for i in range(12)]
        }
    },
    "many properties": {"json": {"properties": {f"p{i}": {"pattern": "^[a-z]{1,50}$"} for i in range(2000)}}},
    "a long string": {"json": {"type": "string", "minLength": 10**9}},
    "long arrays": {"json": {"items": {"items": {"minItems": 5000}, "minItems": 5000}, "minItems": 5000}},
    "a large range": {"json": {"type": "integer", "minimum": -(10**300), "maximum": 10**300}},
    "a large enum": {"json": {"enum": [f"value number {i}" for i in range(4000)]}},
    "a long constant": {"json": {"const": "a" * 100_000}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_takes_little_time(name: str) -> None:
    began, outputs = time.process_time(), StructuredOutputs(**HOSTILE[name])

    try:
        matcher = make_grammars().compile(outputs)
        for _ in range(20):
            matcher.advance([min(allowed(matcher) - {EOS})])
    except (RequestError, ValueError):
        pass  # It was refused, or has come to its end.

    assert time.process_time() - began < 4


def test_compiling_lets_other_threads_run() -> None:
    ticks, is_done = 0, threading.Event()

    def compile_all() -> None:
        for number in range(5):
            properties = {f"p{number}{i}": {"pattern": "^[a-z]{1,50}$"} for i in range(400)}
            make_grammars().compile(StructuredOutputs(json=json.dumps({"properties": properties})))
        is_done.set()

    thread = threading.Thread(target=compile_all)
    thread.start()
    while not is_done.wait(0.001):
        ticks += 1
    thread.join()

    assert ticks > 5


def test_a_model_without_an_end_is_refused() -> None:
    compiler = GrammarCompiler(make_backend().to_str(), None, [])

    with pytest.raises(RequestError, match="declares no end-of-sequence token"):
        compiler.compile(StructuredOutputs(json_object=True))


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    compiler = GrammarCompiler("{}", None, [1])

    with pytest.raises(RequestError, match="is not supported for this model: llguidance cannot use"):
        compiler.compile(StructuredOutputs(json_object=True))
