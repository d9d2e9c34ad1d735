"""What becomes of a prompt before it is tokenized, and after: truncation, the template's variables, an open last message."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bundle.model_directory import ModelDirectory
from aotgaudi.errors import RequestError, SpecError
from aotgaudi.llm.chat import ChatTemplate
from aotgaudi.llm.tokenizer import Tokenizer
from aotgaudi.server.preprocess.prepare import PreparedRequest, Preparer
from tests.unit.llm.conftest import make_backend
from tests.unit.server.conftest import MAX_MODEL_LEN as MAX_LEN
from tests.unit.server.conftest import make_preparer

BOS_ID = 256
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content | trim }}</>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% if enable_thinking %}?{% endif %}{% endif %}"
)
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am"}]


@pytest.fixture(scope="module")
def preparer() -> Preparer:
    return make_preparer(TEMPLATE)


def prepare(preparer: Preparer, **body: object) -> PreparedRequest:
    kind: Any = "completion" if "prompt" in body else "chat"
    return preparer.prepare(kind, json.dumps(body).encode())


def text_of(prepared: PreparedRequest) -> str:
    (prompt,) = prepared.prompts
    return Tokenizer(make_backend()).decode(prompt)


@given(st.text(st.characters(max_codepoint=127), max_size=80), st.integers(1, MAX_LEN), st.booleans())
def test_a_truncated_prompt_is_its_end_after_the_special_tokens(text: str, most: int, with_bos: bool) -> None:
    tokenizer = Tokenizer(make_backend())

    (ids,) = tokenizer.encode_ends([text], with_bos, most)

    whole = tokenizer.encode(text, with_bos)
    assert len(ids) == min(most, len(whole))
    assert ids == whole[-len(ids) :] or (ids[0] == BOS_ID and ids[1:] == whole[len(whole) - len(ids) + 1 :])
    assert (BOS_ID in ids) == with_bos


def test_token_ids_are_truncated_to_their_end(preparer: Preparer) -> None:
    prepared = prepare(preparer, prompt=list(range(50)), truncate_prompt_tokens=3)

    assert prepared.prompts == [[47, 48, 49]]


@pytest.mark.parametrize(("max_tokens", "kept"), [(8, MAX_LEN - 8), (1, MAX_LEN - 1)])
def test_truncation_to_minus_one_leaves_room_for_the_answer(
    preparer: Preparer, max_tokens: int, kept: int
) -> None:
    prepared = prepare(preparer, prompt="x" * 900, truncate_prompt_tokens=-1, max_tokens=max_tokens)

    assert len(prepared.prompts[0]) == kept


def test_a_chat_is_truncated_too(preparer: Preparer) -> None:
    assert text_of(prepare(preparer, messages=TURNS, truncate_prompt_tokens=11)) == "<assistant>"


def test_variables_of_a_request_reach_the_template(preparer: Preparer) -> None:
    prepared = prepare(preparer, messages=TURNS[:1], chat_template_kwargs={"enable_thinking": True})

    assert text_of(prepared) == "<user>hi</><assistant>?"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"reasoning_effort": "low"}, "low?"),
        ({"reasoning_effort": "none"}, "none"),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, "high"),
        ({"reasoning_effort": "max", "chat_template_kwargs": {"reasoning_effort": "low"}}, "max?"),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, "low"),
        ({}, ""),
    ],
)
def test_an_effort_is_a_variable_of_the_template_and_says_whether_to_think(
    preparer: Preparer, asked: Mapping[str, object], expected: str
) -> None:
    template = ChatTemplate("{{ reasoning_effort }}{% if enable_thinking %}?{% endif %}")

    prepared = prepare(replace(preparer, chat_template=template), messages=TURNS[:1], **asked)

    assert text_of(prepared) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "<user>hi</><assistant>I am</><assistant>"),
        ({"add_generation_prompt": False}, "<user>hi</><assistant>I am</>"),
        ({"continue_final_message": True}, "<user>hi</><assistant>I am"),
    ],
)
def test_a_prompt_opens_a_message_or_leaves_the_last_one_open(
    preparer: Preparer, options: Mapping[str, bool], expected: str
) -> None:
    assert text_of(prepare(preparer, messages=TURNS, max_tokens=1, **options)) == expected


def test_a_last_message_that_the_template_changes_cannot_be_left_open() -> None:
    template = ChatTemplate("{% for message in messages %}{{ message.content | upper }}{% endfor %}")

    with pytest.raises(RequestError, match="shows unchanged") as refusal:
        template.render_open(TURNS, {})

    assert refusal.value.param == "continue_final_message"


@pytest.mark.parametrize(("content", "end"), [("a ", "a "), (" a", "a"), ("a", "a")])
def test_space_at_the_end_of_an_open_message_stays_where_the_template_keeps_it(
    content: str, end: str
) -> None:
    template = ChatTemplate("{% for message in messages %}[{{ message.content }}]{% endfor %}")

    assert template.render_open([{"role": "user", "content": content}], {}).endswith(end)


@pytest.mark.parametrize(
    ("messages", "options", "echo"),
    [
        (TURNS, {"echo": True}, ("I am",)),
        (TURNS[:1], {"echo": True}, ()),
        (TURNS[:1], {"echo": True, "add_generation_prompt": False}, ("hi",)),
        (TURNS, {}, ()),
    ],
)
def test_an_echo_is_the_last_message_if_it_has_the_role_of_the_answer(
    preparer: Preparer, messages: list[object], options: Mapping[str, bool], echo: tuple[str, ...]
) -> None:
    assert prepare(preparer, messages=messages, **options).echoes == echo


def test_a_template_from_a_file_wins_over_the_models(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("model's")
    (tmp_path / "mine.jinja").write_text("mine")

    template = ChatTemplate.load(ModelDirectory(tmp_path), tmp_path / "mine.jinja")

    assert template is not None
    assert template.render(TURNS) == "mine"


@pytest.mark.parametrize(
    ("content", "problem"), [(None, "does not exist"), ("{%", "mine.jinja:1.*not a valid")]
)
def test_a_template_file_that_cannot_be_used_is_named(
    tmp_path: Path, content: str | None, problem: str
) -> None:
    if content is not None:
        (tmp_path / "mine.jinja").write_text(content)

    with pytest.raises(SpecError, match=problem):
        ChatTemplate.load(ModelDirectory(tmp_path), tmp_path / "mine.jinja")
