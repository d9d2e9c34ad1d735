"""What a model's text says does not depend on how it comes; calls are found as each format has them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.server.reply.plan import ReplyPlan, ReplyReader, thinks_after
from aotgaudi.server.reply.text import CallArguments, CallStart, Content, Part, Reasoning

HERMES, LLAMA, MISTRAL = (ReplyPlan(calls=name) for name in ("hermes", "llama3_json", "mistral"))
LIST, ONE = ReplyPlan(calls="list"), ReplyPlan(calls="one", function="f")
PLANS = [HERMES, LLAMA, MISTRAL, LIST, ONE, ReplyPlan()]

Call = tuple[str, dict[str, Any]]
MARKERS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("<think>", "</think>", '{"name": "f", "arguments": ', '"', "\\", "\n", *"{}[],; "),
]
names = st.text(st.sampled_from("abcXYZ019_-."), min_size=1, max_size=12)
strings = st.text(max_size=8) | st.lists(st.sampled_from(MARKERS), max_size=3).map("".join)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | strings,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3),
    max_leaves=6,
)
calls = st.lists(st.tuples(names, st.dictionaries(strings, values, max_size=3)), min_size=1, max_size=3)
prose = st.text(st.sampled_from("abc é.\n"), max_size=20)
rubbish = st.lists(st.sampled_from(MARKERS) | st.text(max_size=4), max_size=12).map("".join)


def read(plan: ReplyPlan, pieces: Iterable[str]) -> list[Part]:
    """The parts of a reply; those of a kind that follow each other are one."""
    reader, found = ReplyReader(plan), []
    for piece in pieces:
        found += reader.parts(piece, is_last=False)
    merged: list[Part] = []
    for part in [*found, *reader.parts("", is_last=True)]:
        if merged and not isinstance(part, CallStart) and type(merged[-1]) is type(part):
            merged[-1] = type(part)(merged[-1].text + part.text)  # type: ignore[union-attr]
        else:
            merged.append(part)
    return merged


def calls_of(parts: Iterable[Part]) -> list[Call]:
    found: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, CallStart):
            found.append((part.name, ""))
        elif isinstance(part, CallArguments):
            found[-1] = (found[-1][0], found[-1][1] + part.text)
    return [(name, json.loads(arguments)) for name, arguments in found]


def content_of(parts: Iterable[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))


@st.composite
def pieces_of(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def written(call: Call, key: str, indent: int | None, *, ascii_only: bool) -> str:
    return json.dumps({"name": call[0], key: call[1]}, indent=indent, ensure_ascii=ascii_only)


indents, keys = st.sampled_from([None, 2]), st.sampled_from(["arguments", "parameters"])


@given(st.data(), calls, prose, indents, keys, st.booleans(), st.sampled_from(["", "\n"]))
def test_calls_of_hermes_are_found_at_any_split(
    data: st.DataObject, made: list[Call], before: str, indent: int | None, key: str, flag: bool, space: str
) -> None:
    texts = [written(call, key, indent, ascii_only=flag) for call in made]
    text = before + "\n".join(f"<tool_call>{space}{each}{space}</tool_call>" for each in texts)

    found = read(HERMES, data.draw(pieces_of(text)))

    assert calls_of(found) == made
    assert content_of(found) == before.rstrip()


@given(st.data(), calls, indents, keys, st.booleans(), st.sampled_from(["", "<|python_tag|>", "\n"]))
def test_calls_of_llama_are_found_at_any_split(
    data: st.DataObject, made: list[Call], indent: int | None, key: str, flag: bool, before: str
) -> None:
    text = before + "; ".join(written(call, key, indent, ascii_only=flag) for call in made)

    found = read(LLAMA, data.draw(pieces_of(text)))

    assert calls_of(found) == made
    assert content_of(found) == ""


@given(st.data(), calls, prose, indents, st.booleans())
def test_calls_of_mistral_are_found_at_any_split(
    data: st.DataObject, made: list[Call], before: str, indent: int | None, flag: bool
) -> None:
    array = json.dumps([{"name": name, "arguments": given} for name, given in made], indent=indent)
    named = "".join(
        f"[TOOL_CALLS]{name}{'[CALL_ID]abc123XYZ[ARGS]' if flag else ''}{json.dumps(given, indent=indent)}"
        for name, given in made
    )

    for text in (f"{before}[TOOL_CALLS]{array}", f"{before}[TOOL_CALLS] {array}\n", before + named):
        found = read(MISTRAL, data.draw(pieces_of(text)))
        assert calls_of(found) == made
        assert content_of(found) == before.rstrip()


@given(st.data(), calls, indents, keys)
def test_constrained_calls_are_found_at_any_split(
    data: st.DataObject, made: list[Call], indent: int | None, key: str
) -> None:
    array = json.dumps([{"name": name, key: given} for name, given in made], indent=indent)

    assert calls_of(read(LIST, data.draw(pieces_of(array)))) == made
    arguments = json.dumps(made[0][1], indent=indent)
    assert calls_of(read(ONE, data.draw(pieces_of(arguments)))) == [("f", made[0][1])]


thoughts = st.sampled_from(["no", "at once", "if it says so"])


@given(st.data(), st.sampled_from(PLANS), thoughts, rubbish, st.booleans())
def test_any_text_reads_alike_at_any_split(
    data: st.DataObject, plan: ReplyPlan, thinks: Any, text: str, parallel: bool
) -> None:
    plan = ReplyPlan(calls=plan.calls, function="f", thinks=thinks, has_parallel_calls=parallel)

    whole = read(plan, [text])

    assert read(plan, data.draw(pieces_of(text))) == whole
    assert read(plan, text) == whole, "character by character"


@given(st.sampled_from([HERMES, MISTRAL]), rubbish)
def test_a_text_without_calls_is_content_word_for_word(plan: ReplyPlan, text: str) -> None:
    found = read(plan, [text])

    if not any(isinstance(part, CallStart) for part in found):
        assert content_of(found) == text


@given(rubbish)
def test_where_a_constraint_makes_calls_the_rest_is_nothing(text: str) -> None:
    assert content_of(read(LIST, [text])) == ""


@given(st.data(), calls, prose.filter(str.strip), prose)
def test_reasoning_comes_before_calls(data: st.DataObject, made: list[Call], thought: str, said: str) -> None:
    text = f"<think>\n{thought}\n</think>\n\n{said}" + "".join(
        f"<tool_call>{written(call, 'arguments', None, ascii_only=False)}</tool_call>" for call in made
    )
    plan = ReplyPlan(calls="hermes", thinks="if it says so")

    found = read(plan, data.draw(pieces_of(text)))

    assert found[0] == Reasoning(thought.strip())
    assert content_of(found) == said.strip()
    assert calls_of(found) == made


CALL = '{"name": "f", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("plan", "text", "expected"),
    [
        (HERMES, "<tool_call>I think</tool_call>", [Content("<tool_call>I think</tool_call>")]),
        (HERMES, "<tool_call>{'name': 'f'}", [Content("<tool_call>{'name': 'f'}")]),
        (HERMES, '<tool_call>{"name": "f", "argum', [Content('<tool_call>{"name": "f", "argum')]),
        (
            HERMES,
            '<tool_call>{"name": 7, "arguments": {}}',
            [Content('<tool_call>{"name": 7, "arguments": {}}')],
        ),
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": 7}',
            [Content('<tool_call>{"name": "f", "arguments": 7}')],
        ),
        (HERMES, "a <tool_cal", [Content("a <tool_cal")]),
        (HERMES, f"<tool_call>{'[' * 99_999}", [Content(f"<tool_call>{'[' * 99_999}")]),
        (HERMES, f'<tool_call>{{"a": {"[" * 9999}{"]" * 9999}}}', None),
        (LLAMA, '{"answer": 42}', [Content('{"answer": 42}')]),
        (LLAMA, "{ braces } for all", [Content("{ braces } for all")]),
        (LLAMA, f"{CALL} and more", [CallStart("f"), CallArguments('{"a": 1}'), Content(" and more")]),
        (MISTRAL, "[TOOL_CALLS] of the wild", [Content("[TOOL_CALLS] of the wild")]),
        (MISTRAL, "[TOOL_CALLS][1, 2]", [Content("[TOOL_CALLS][1, 2]")]),
        (LIST, "[]", []),
        (LIST, '[{"name"', []),
        (ONE, "", []),
    ],
)
def test_what_is_no_call_is_content(plan: ReplyPlan, text: str, expected: list[Part] | None) -> None:
    assert read(plan, [text]) == ([Content(text)] if expected is None else expected)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": "b', '{"a": "b'),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', '{"a": 1}'),
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>', '{"a": 1'),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}, "id": {"}": "}"}}</tool_call>', '{"a": 1}'),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', '{"a": 1}'),
        ('<tool_call>{"name": "\\u0066", "arguments": {"a": 1}}</tool_call>', '{"a": 1}'),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', '{"a": 1}'),
        ('<tool_call>{"name": "f"}</tool_call>', "{}"),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "{}"),
    ],
)
def test_a_call_that_is_cut_off_or_written_otherwise_is_a_call(text: str, arguments: str) -> None:
    assert read(HERMES, [text]) == [CallStart("f"), CallArguments(arguments)]


def test_a_call_follows_one_that_was_not_closed() -> None:
    text = f'<tool_call>{{"name": "g", "arguments": {{"b": 2</tool_call>\n<tool_call>{CALL}</tool_call>'

    assert read(HERMES, [text]) == [
        *(CallStart("g"), CallArguments('{"b": 2')),
        *(CallStart("f"), CallArguments('{"a": 1}')),
    ]


def test_the_name_comes_before_the_arguments_and_these_come_as_they_are_written() -> None:
    reader, found = ReplyReader(HERMES), []

    for character in f"<tool_call>{CALL}</tool_call>":
        found += reader.parts(character, is_last=False)

    assert found[0] == CallStart("f")
    assert [part.text for part in found[1:]] == list('{"a": 1}')  # type: ignore[union-attr]
    assert reader.has_called


def test_only_the_first_call_counts_where_the_client_wants_one() -> None:
    plan = ReplyPlan(calls="llama3_json", has_parallel_calls=False)

    assert read(plan, [f"{CALL}; {CALL}"]) == [CallStart("f"), CallArguments('{"a": 1}')]


@pytest.mark.parametrize(
    ("parser", "prompt", "thinks"),
    [
        ("deepseek_r1", "<|Assistant|>", "at once"),
        ("deepseek_r1", "<|Assistant|><think>\n", "at once"),
        ("deepseek_r1", "<|Assistant|><think>\n\n</think>\n\n", "no"),
        ("qwen3", "assistant\n", "if it says so"),
        ("qwen3", "assistant\n<think>\n", "at once"),
        ("qwen3", "assistant\n<think>\n\n</think>\n\n", "no"),
    ],
)
def test_the_prompt_says_whether_the_model_thinks(parser: Any, prompt: str, thinks: str) -> None:
    assert thinks_after(prompt, parser) == thinks


@pytest.mark.parametrize(
    ("thinks", "text", "expected"),
    [
        ("at once", "well\n</think>\n\nYes", [Reasoning("well"), Content("Yes")]),
        ("at once", "<think>well</think>Yes", [Reasoning("well"), Content("Yes")]),
        ("at once", "well, it is", [Reasoning("well, it is")]),
        ("at once", "</think>Yes", [Content("Yes")]),
        ("if it says so", "<think>\nwell", [Reasoning("well")]),
        ("if it says so", "Yes </think>", [Content("Yes </think>")]),
        ("if it says so", " <thin", [Content(" <thin")]),
        ("no", "<think>a</think>", [Content("<think>a</think>")]),
    ],
)
def test_reasoning_is_told_from_the_answer(thinks: Any, text: str, expected: list[Part]) -> None:
    assert read(ReplyPlan(thinks=thinks), [text]) == expected


def test_reasoning_that_nobody_wants_is_left_out() -> None:
    plan = ReplyPlan(thinks="at once", shows_reasoning=False)

    assert read(plan, ["well</think>Yes"]) == [Content("Yes")]


@pytest.mark.alone
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "unit", ['{"a": [', "\n", "<tool_call>", "<", '{"name": "f", "x": "', "a", "\\", "[TOOL_CALLS]"]
)
def test_no_text_takes_long(plan: ReplyPlan, unit: str) -> None:
    reader = ReplyReader(ReplyPlan(calls=plan.calls, function="f", thinks="if it says so"))

    began = time.process_time()
    for _ in range(16_384):
        reader.parts(unit, is_last=False)
    reader.parts("", is_last=True)

    assert time.process_time() - began < 3.0
