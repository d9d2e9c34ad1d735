"""Turns messages into a prompt with the model's chat template, in a sandbox.

The template is a Jinja program that comes with the model. It gets everything that Hugging Face's ``apply_chat_template``
promises (`raise_exception`, `strftime_now`, `tojson`, loop controls, ``{% generation %}``). It cannot reach Python. An
unsafe access is an error, not an empty string.

Compiling a template does not evaluate its expressions. By default, Jinja would fold constants, and ``{{ 9 ** 9999999 }}``
would keep a process busy before it serves. Rendering has no time limit here. The server renders in a process that may be
killed (`aotgaudi.server.preprocess.worker`), and `LLM` in its caller's process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Const, EvalContextModifier, Impossible, Name, Node, TemplateData
from jinja2.parser import Parser
from jinja2.runtime import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from aotgaudi.bundle.model_directory import (
    CHAT_TEMPLATE,
    MAX_TEXT_BYTES,
    TOKENIZER_CONFIG,
    TOOL_USE_TEMPLATE,
    ModelDirectory,
)
from aotgaudi.errors import RequestError, SpecError
from aotgaudi.files import read_regular
from aotgaudi.llm.model_files import special_tokens

Message = Mapping[str, Any]
"""``role`` and ``content``, and optionally ``name``. Calls are in ``tool_calls``; their results have ``tool_call_id``."""

_MAX_QUOTED_CHARS = 500

_REFUSALS = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError),
    *(AttributeError, RuntimeError, MemoryError),  # RecursionError is a RuntimeError.
)
"""Errors of a template that does not suit the messages, needs too much, or is wrong."""


class _Generation(Extension):
    """Renders the body of ``{% generation %}``, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012  Jinja declares it so.

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Generator(CodeGenerator):
    """Generates code that evaluates all expressions when it renders. Jinja would evaluate constants when it compiles."""

    def _output_child_to_const(self, node: Any, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, (Const, TemplateData)):
            raise Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def visit_EvalContextModifier(self, node: EvalContextModifier, frame: Frame) -> None:  # noqa: N802
        if not all(isinstance(option.value, Const) for option in node.options):
            self.fail("autoescape is either true or false", node.lineno)
        super().visit_EvalContextModifier(node, frame)


class _Namespace(jinja2.utils.Namespace):
    """A namespace without underscored names, so that a template cannot plant a dunder on it."""

    def __init__(*args: object, **kwargs: object) -> None:  # `self` may be a keyword.
        self, *positional = args
        attributes = dict(*positional, **kwargs)
        for name in attributes:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: object) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Raises for an unsafe attribute, for which Jinja would return an undefined value that prints as nothing."""

    code_generator_class = _Generator

    def unsafe_undefined(self, obj: object, attribute: str) -> Undefined:
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} is unsafe")


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns plain JSON. Jinja's filter would escape HTML, which is wrong in a prompt."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _environment(now: Callable[[], datetime]) -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    environment.globals["namespace"] = _Namespace
    return environment


class ChatTemplate:
    """A compiled chat template with the model's special tokens. Thread-safe."""

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str] | None = None,
        *,
        where: str = "chat_template",
        now: Callable[[], datetime] = datetime.now,
        tool_source: str | None = None,
    ) -> None:
        """Compiles `source`. `tokens` (``bos_token``, ...) become its variables. Errors name `where`.

        `tool_source` is the template for requests with tools, if it differs. `takes_tools` says whether prompts show tools.

        Raises:
            SpecError: a template does not compile.
        """
        environment = _environment(now)
        self._template, self.takes_tools = _compiled(environment, source, where)
        self._tool_template = self._template
        if tool_source is not None:
            self._tool_template, self.takes_tools = _compiled(environment, tool_source, where)
        self._tokens = dict(tokens or {})
        self._knows_developer = "developer" in source

    @classmethod
    def load(cls, model: ModelDirectory, file: Path | None = None) -> ChatTemplate | None:
        """Returns the template in `file`, or else in ``chat_template.jinja`` or ``tokenizer_config.json``, or None.

        Its own ``additional_chat_templates/tool_use.jinja``, if a model has one, is for requests with tools.
        Source: ``_from_pretrained`` and ``get_chat_template`` in transformers/tokenization_utils_base.py.

        Raises:
            SpecError: a file cannot be read, or the template does not compile.
        """
        found = _find_source(model) if file is None else (file, {"default": _read_template(file)})
        if found is None:
            return None
        where, sources = found
        tokens, tool_source = special_tokens(model), sources.get("tool_use")
        return cls(sources["default"], tokens, where=str(where), tool_source=tool_source)

    def render(
        self,
        messages: Iterable[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Returns the prompt that asks for the assistant's next message. Encode it without adding special tokens.

        Args:
            messages: The conversation.
            tools: Functions that the model may call, in the form of OpenAI's API. The template may not use them.
            add_generation_prompt: Whether the prompt opens a message of the assistant.
            variables: Further variables of the template (``enable_thinking``), except those that `render` sets.

        Raises:
            RequestError: 400; the template refuses these messages (the error quotes it), or needs more than Python allows.
                Or a variable has a name that `render` sets.
        """
        template = self._tool_template if tools else self._template
        own = {
            "messages": [self._known_role(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": tools or None,
            "documents": None,
            **self._tokens,
        }
        taken = sorted(own.keys() & variables)
        if taken:
            raise RequestError(
                f"chat_template_kwargs must not set {taken[0]!r}, which the server sets",
                param="chat_template_kwargs",
            )
        try:
            return template.render({**variables, **own})
        except _REFUSALS as error:
            raise RequestError(
                f"The model's chat template refuses these messages: {_words_of(error)}", param="messages"
            ) from error

    def render_open(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Returns the prompt that ends inside the last message, as with ``continue_final_message`` of transformers.

        Raises:
            RequestError: 400, as `render`, or because the template changes the last message's content.
        """
        text = self.render(messages, tools, add_generation_prompt=False, variables=variables)
        content: str = messages[-1]["content"]
        start = text.rfind(content.strip())
        if start < 0 or not content.strip():
            raise RequestError(
                "continue_final_message needs a last message whose content the model's chat template shows unchanged",
                param="continue_final_message",
            )
        kept = content.lstrip()  # Trailing space stays, unless the template strips it.
        return text[:start] + (kept if text.startswith(kept, start) else content.strip())

    def _known_role(self, message: Message) -> Message:
        """Returns the message, with "system" in place of "developer" if the template does not know that role."""
        if message["role"] == "developer" and not self._knows_developer:
            return {**message, "role": "system"}
        return message


def _compiled(environment: _Sandbox, source: str, where: str) -> tuple[jinja2.Template, bool]:
    """Returns the compiled template, and whether it uses `tools`."""
    try:
        tree = environment.parse(source)
        knows_tools = any(name.name == "tools" for name in tree.find_all(Name))
        return environment.from_string(tree), knows_tools
    except jinja2.TemplateSyntaxError as error:
        raise SpecError(
            f"{where}:{error.lineno}", f"is not a valid chat template: {error.message}"
        ) from error
    except (*_REFUSALS, SyntaxError) as error:  # Also literals, nesting or code too large for Python.
        raise SpecError(where, f"is not a valid chat template: {_words_of(error)}") from error


def _words_of(error: BaseException) -> str:
    return f"{str(error) or type(error).__name__:.{_MAX_QUOTED_CHARS}}"


def _find_source(model: ModelDirectory) -> tuple[Path, Mapping[str, str]] | None:
    """Returns the templates' file, and the sources of "default" and, if it differs, of "tool_use"."""
    path, data = model.path / CHAT_TEMPLATE, model.read(CHAT_TEMPLATE)
    if data is None:
        path = model.path / TOKENIZER_CONFIG
        sources = _named_templates(path, model.read_object(TOKENIZER_CONFIG).get("chat_template"))
    else:
        sources = {"default": _decoded(data, path)}
    tool_use = model.read(TOOL_USE_TEMPLATE) if sources and model.may_read(TOOL_USE_TEMPLATE) else None
    if tool_use is not None:
        sources = {**sources, "tool_use": _decoded(tool_use, model.path / TOOL_USE_TEMPLATE)}
    return (path, sources) if sources else None


def _read_template(path: Path) -> str:
    try:
        return _decoded(read_regular(path, MAX_TEXT_BYTES), path)
    except FileNotFoundError as error:
        raise SpecError(str(path), "does not exist", "a file with a chat template") from error


def _decoded(data: bytes, path: Path) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise SpecError(str(path), f"cannot be read: {error}") from error


def _named_templates(path: Path, value: object) -> Mapping[str, str]:
    """Returns the templates in `value`, which is a string or a list of ``{"name", "template"}`` with one named "default"."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    items = [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
    named = {
        str(item.get("name")): item["template"] for item in items if isinstance(item.get("template"), str)
    }
    if "default" not in named:
        raise SpecError(f"{path}: chat_template", "holds no template named 'default'")
    return named
