"""Chat templates: Hugging Face's environment, and nothing beyond it."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.bundle.model_directory import ModelDirectory
from aotgaudi.errors import RequestError, SpecError
from aotgaudi.llm.chat import ChatTemplate

HI = [{"role": "user", "content": "hi"}]


def test_messages_special_tokens_and_generation_prompt_are_variables() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}{% if tools %}tools{% endif %}",
        {"bos_token": "<s>"},
    )

    assert template.render([{"role": "system", "content": "be kind"}, *HI]) == "<s>[system]be kind[user]hi>"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].content | tojson }}", '"<é>"'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}", '{"a": 2, "b": 1}'),
        ("{{ strftime_now('%d %b %Y') }}", "05 Mar 2024"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% set ns = namespace(a=1) %}{% set ns.a = 2 %}{{ ns.a }}", "2"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
    ],
)
def test_environment_is_hugging_faces(source: str, expected: str) -> None:
    template = ChatTemplate(source, now=lambda: datetime(2024, 3, 5))

    assert template.render([{"role": "user", "content": "<é>"}]) == expected


def test_developer_is_system_for_templates_that_do_not_know_it() -> None:
    message = {"role": "developer", "content": "x"}

    assert ChatTemplate("{{ messages[0].role }}").render([message]) == "system"
    assert ChatTemplate("{{ messages[0].role }}{# developer #}").render([message]) == "developer"


def test_refusal_of_the_template_is_a_request_error() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")

    with pytest.raises(RequestError, match="roles must alternate") as caught:
        template.render(HI)
    assert (caught.value.http_status, caught.value.param) == (400, "messages")


def test_template_that_trips_over_a_message_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="refuses"):
        ChatTemplate("{{ messages[0].content + 1 }}").render(HI)


_OBJECTS = ["''", "[]", "{}", "1", "messages", "messages[0]", "raise_exception", "range"]
_PRIVATE = ["__class__", "__init__", "__reduce__", "__doc__", "__dir__", "__getattribute__"]
_FORMS = ["{{ %s.%s }}", "{%% set x = %s.%s %%}", "{{ %s | attr('%s') }}"]


@given(st.sampled_from(_OBJECTS), st.sampled_from(_PRIVATE), st.sampled_from(_FORMS))
def test_template_cannot_reach_python(obj: str, attribute: str, form: str) -> None:
    with pytest.raises(RequestError):
        ChatTemplate(form % (obj, attribute)).render(HI)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ namespace(__class__=1) }}",
        "{{ namespace().__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ raise_exception.__globals__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ 1 / 0 }}",
        "{{ ''.format_map({}).__class__ }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ range(10000000) }}",
    ],
)
def test_template_cannot_change_or_exhaust_what_it_gets(source: str) -> None:
    with pytest.raises(RequestError):
        ChatTemplate(source).render(HI)


def test_syntax_error_is_a_spec_error_with_its_line() -> None:
    with pytest.raises(SpecError, match=r"my\.jinja:2"):
        ChatTemplate("ok\n{% if %}", where="my.jinja")


def _write(directory: Path, name: str, value: object) -> None:
    directory.joinpath(name).write_text(value if isinstance(value, str) else json.dumps(value))


BOMBS = [
    "{{ 9 ** 9999999 }}",
    "{{ 'a' | center(3000000000) }}",
    "{% set x = 'a' * 3000000000 %}",
    "{% set x = [1] * 10 ** 10 %}",
    "{% if 9 ** 9999999 %}{% endif %}",
    "{% for x in [9 ** 9999999] %}{% endfor %}",
    "{{ f(x=9 ** 9999999) }}",
]


@pytest.mark.parametrize("source", BOMBS)
def test_compiling_a_template_computes_nothing(source: str) -> None:
    began = time.process_time()

    ChatTemplate(source)

    assert time.process_time() - began < 0.2


@pytest.mark.parametrize(
    "source",
    [
        "{% autoescape 9 ** 9999999 %}{% endautoescape %}",
        "{{ " + "9" * 5000 + " }}",
        "{{ " + "(" * 20_000 + ")" * 20_000 + " }}",
        "{% if x %}" * 150 + "{% endif %}" * 150,
    ],
)
def test_template_that_python_cannot_compile_is_a_spec_error(source: str) -> None:
    with pytest.raises(SpecError, match="is not a valid chat template"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 30 }}",
        "{{ messages | tojson(indent=10 ** 30) }}",
        "{{ 'a' * 2 ** 62 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ raise_exception('x' * 100000) }}",
    ],
)
def test_template_that_asks_for_too_much_is_one_request_error(source: str) -> None:
    with pytest.raises(RequestError, match="refuses these messages") as caught:
        ChatTemplate(source).render(HI)

    assert len(str(caught.value)) < 600


def test_load_from_a_file_of_its_own(tmp_path: Path) -> None:
    _write(tmp_path, "chat_template.jinja", "A{{ eos_token }}")
    _write(tmp_path, "tokenizer_config.json", {"chat_template": "B", "eos_token": {"content": "</s>"}})

    template = ChatTemplate.load(ModelDirectory(tmp_path))

    assert template is not None
    assert template.render(HI) == "A</s>"


_NAMED = [{"name": "rag", "template": "R"}, {"name": "default", "template": "B"}]


@pytest.mark.parametrize("value", ["B", _NAMED])
def test_load_from_the_tokenizers_configuration(tmp_path: Path, value: object) -> None:
    _write(tmp_path, "tokenizer_config.json", {"chat_template": value})

    template = ChatTemplate.load(ModelDirectory(tmp_path))

    assert template is not None
    assert template.render(HI) == "B"


def test_model_without_template(tmp_path: Path) -> None:
    assert ChatTemplate.load(ModelDirectory(tmp_path)) is None


def test_broken_files_are_spec_errors(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(SpecError, match=r"chat_template\.jinja: cannot be read"):
        ChatTemplate.load(ModelDirectory(tmp_path))
    (tmp_path / "chat_template.jinja").unlink()
    _write(tmp_path, "tokenizer_config.json", {"chat_template": [{"name": "rag", "template": "R"}]})
    with pytest.raises(SpecError, match="no template named 'default'"):
        ChatTemplate.load(ModelDirectory(tmp_path))
    _write(tmp_path, "tokenizer_config.json", "{")
    with pytest.raises(SpecError, match="cannot be read as JSON"):
        ChatTemplate.load(ModelDirectory(tmp_path))
    _write(tmp_path, "tokenizer_config.json", [])
    with pytest.raises(SpecError, match="a JSON object is expected"):
        ChatTemplate.load(ModelDirectory(tmp_path))


TOOL = {"type": "function", "function": {"name": "f"}}


def test_tools_are_variables() -> None:
    template = ChatTemplate(
        "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ messages[0].content }}"
    )

    assert template.render(HI, [TOOL, TOOL]) == "f f hi"
    assert template.render(HI) == "hi"


@pytest.mark.parametrize(
    "source", ["{{ messages[0].content }}", "tools {{ messages[0].tools }} {{ 'tools' }}"]
)
def test_a_template_that_takes_no_tools_is_rendered_and_says_so(source: str) -> None:
    template = ChatTemplate(source)

    assert template.render(HI, [TOOL]) == template.render(HI)
    assert not template.takes_tools


@pytest.mark.parametrize("place", ["list", "files", "file beside a configuration"])
def test_a_template_for_tools_is_used_with_tools(tmp_path: Path, place: str) -> None:
    plain, for_tools = "plain", "{{ tools | length }}"
    named = [{"name": "default", "template": plain}, {"name": "tool_use", "template": for_tools}]
    _write(tmp_path, "tokenizer_config.json", {"chat_template": named if place == "list" else plain})
    if place == "files":
        _write(tmp_path, "chat_template.jinja", plain)
    if place != "list":
        (tmp_path / "additional_chat_templates").mkdir()
        _write(tmp_path, "additional_chat_templates/tool_use.jinja", for_tools)

    template = ChatTemplate.load(ModelDirectory(tmp_path))

    assert template is not None
    assert (template.render(HI), template.render(HI, [TOOL])) == ("plain", "1")
    assert template.takes_tools
