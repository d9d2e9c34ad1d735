"""Parsing of JSON bodies, whose errors name the faulty parameter.

A parameter is one of these:

- Supported: it is validated and obeyed.
- Known and not supported (`suffix`, `prediction`, ...): it is accepted if its value asks for nothing. Otherwise it is
  refused with "not supported by this server yet" and the names of the supported ones.
- Unknown: it is ignored and its name is reported, as by vLLM's OpenAIBaseModel (vllm/entrypoints/serve/engine/protocol.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, TypeVar

from pydantic import BeforeValidator, ConfigDict, ValidationError, ValidationInfo, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from aotgaudi.document import Value
from aotgaudi.errors import RequestError

NOT_SUPPORTED = "is not supported by this server yet"
MAX_ECHO_CHARS = 64
"""How much of a client's text a refusal quotes."""
_OTHER_SHAPES = ("int_from_float", "literal_error")
"""Kinds of pydantic's errors that are about a value's type, besides those that are called so."""
MAX_IGNORED = 16
"""How many ignored members of one request are reported."""
_INTEGRAL_BELOW = 2.0**63
_MAX_UNCOUNTED_BYTES = 64 * 1024
_MAX_CONTAINERS, _MAX_STRINGS, _MAX_VALUES = 32_768, 65_536, 524_288
"""Limits of one body: objects and arrays, strings (names included), values. In Python, 4 MiB of ``{},`` takes 100 MB."""

BodyT = TypeVar("BodyT", bound="Body")


def _same(value: object, neutral: object) -> bool:
    """Returns whether the values are equal, and not just because ``0 == False`` in Python."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def neutral_only(*values: object, why: str = "") -> BeforeValidator:
    """Returns a validator that accepts null and `values`, and refuses all else as not supported, for the reason `why`."""

    def check(value: object) -> object:
        if value is None or any(_same(value, neutral) for neutral in values):
            return value
        raise PydanticCustomError("unsupported_value", problem)

    problem = f"{NOT_SUPPORTED}: {why}" if why else NOT_SUPPORTED
    return BeforeValidator(check)


Ignored = object
NoValue = Annotated[object, neutral_only()]
NoList = Annotated[object, neutral_only([])]
OffOnly = Annotated[object, neutral_only(False)]
OnOnly = Annotated[object, neutral_only(True)]
OneOnly = Annotated[object, neutral_only(1)]
NoneOnly = Annotated[object, neutral_only("none", "auto")]
TextOnly = Annotated[object, neutral_only(["text"])]


class BodyError(RequestError):
    """A body is not JSON, or a value is of a type that its path does not take. vLLM tells this apart from a wrong value."""


def invalid(name: str, message: str, **values: object) -> PydanticCustomError:
    """Returns the error of a validator for the parameter `name`. `message` may have ``{name}`` and `values`."""
    return PydanticCustomError("invalid_value", message, {"name": name, **values})


class Body(Value):
    """A frozen model that is strict about values and ignores unknown names.

    `not_yet` has names from the APIs of OpenAI and vLLM that this server does not support. They are refused unless their
    value is null, false or empty, which is accepted because some clients send every default.

    The context of a validation, if there is one, is the list of ignored members, each as ``Class.name``.

    Validators are built on first use, so never in the API server's process, which parses no bodies.
    """

    model_config = ConfigDict(defer_build=True, extra="ignore")
    not_yet: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _examine(cls, value: object, info: ValidationInfo) -> object:
        """Refuses what is not supported, reports what is unknown, and makes integers of numbers like 16.0."""
        if not isinstance(value, Mapping):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name in value.keys() - known:
            if name not in cls.not_yet:
                _report(info.context, f"{cls.__name__.strip('_')}.{name[:MAX_ECHO_CHARS]}")
            elif not _asks_for_nothing(value[name]):
                obeyed = (name for name, field in cls.model_fields.items() if field.annotation is not object)
                raise PydanticCustomError(
                    "unsupported_parameter",
                    "The parameter '{name}' {problem} (supported: {supported})",
                    {"name": name, "problem": NOT_SUPPORTED, "supported": ", ".join(obeyed)},
                )
        return {name: _integral(value[name]) for name in value if name in known}


def _report(ignored: list[str] | None, member: str) -> None:
    if ignored is not None and len(ignored) < MAX_IGNORED and member not in ignored:
        ignored.append(member)


def _integral(value: object) -> object:
    """Returns the integer for a number like 16.0, also in lists, as pydantic does for vLLM; and any other value as it is."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _INTEGRAL_BELOW:
        return int(value)
    if isinstance(value, list) and not {float, list}.isdisjoint(map(type, value)):
        return [_integral(item) for item in value]
    return value


def _asks_for_nothing(value: object) -> bool:
    return value is None or value is False or value in ([], {})


def parse_body(body_class: type[BodyT], raw: bytes, ignored: list[str] | None = None) -> BodyT:
    """Parses `raw` (JSON, UTF-8) and returns it as a `body_class`. Adds the first ignored members to `ignored`.

    Raises:
        RequestError: 400; malformed JSON, more values than any request needs, a wrong type, or an unsupported parameter.
    """
    if len(raw) > _MAX_UNCOUNTED_BYTES:
        _check_counts(raw)
    try:
        return body_class.model_validate_json(raw, context=ignored)
    except ValidationError as error:
        raise _as_request_error(error.errors(include_url=False, include_input=False)[0]) from None


def _check_counts(raw: bytes) -> None:
    """Refuses a body with too many values before it is parsed.

    It counts closing brackets: an opening bracket without one makes the body invalid JSON.
    """
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    _check_count("strings", unescaped.count(b'"') // 2, _MAX_STRINGS)
    between_strings = b"".join(unescaped.split(b'"')[::2])
    _check_count("objects and arrays", sum(map(between_strings.count, (b"}", b"]"))), _MAX_CONTAINERS)
    _check_count("values", between_strings.count(b","), _MAX_VALUES)


def _check_count(noun: str, num: int, most: int) -> None:
    if num > most:
        raise RequestError(f"The body has {num} {noun}; at most {most} are read")


def _as_request_error(details: ErrorDetails) -> RequestError:
    context = details.get("ctx", {})
    kind, message = details["type"], details["msg"]
    param = _path((*details["loc"], context["name"]) if "name" in context else details["loc"])
    if kind == "json_invalid":
        return BodyError(f"The body is not valid JSON: {context.get('error', message)}")
    if kind == "missing":
        return BodyError(f"Missing required parameter: '{param}'", param=param)
    if kind == "unsupported_value":
        return RequestError(f"This value of '{param}' {message}", param=param)
    if kind in ("unsupported_parameter", "invalid_value"):
        return RequestError(message, param=param)
    if not param:
        return BodyError(f"The body must be a JSON object: {message}")
    error = BodyError if kind.endswith("_type") or kind in _OTHER_SHAPES else RequestError
    return error(f"Invalid value for '{param}': {message[:1].lower()}{message[1:]}", param=param)


def _path(location: Sequence[int | str]) -> str:
    """Returns ``messages[0].content`` for ("messages", 0, "content"). Leaves out the tags of unions and of keys."""
    path = ""
    for step in location:
        name = str(step)[:MAX_ECHO_CHARS]
        if isinstance(step, int):
            path += f"[{name}]"
        elif not step.startswith("<") and step != "[key]":
            path += f".{name}" if path else name
    return path


def shape_of_text(value: object) -> str:
    """Tells a text from a list of them, for pydantic's unions."""
    return "<list>" if isinstance(value, list) else "<text>"
