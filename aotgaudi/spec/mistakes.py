"""Turns pydantic's findings into one sentence that says where the user's mistake is, and a remedy."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from aotgaudi.errors import shortened


@dataclass(frozen=True, slots=True)
class Mistake:
    """`where`: a dotted path (empty: the whole); `problem`: what is wrong; `remedy`: what would be right.

    As text it is always one line of printable characters.
    """

    where: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        text = f"{place}{self.problem}" + (f" ({self.remedy})" if self.remedy else "")
        return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def first_mistake(error: ValidationError, model: type[BaseModel]) -> Mistake:
    """Returns the likely cause: a wrong schema, else an unknown key, else the first finding."""
    details = min(error.errors(include_url=False), key=_rank)
    where = ".".join(part for part in map(str, details["loc"]) if not part.startswith("<"))  # Tags of unions.
    if details["type"] == "extra_forbidden":
        return Mistake(
            where, "unknown key", _nearest(str(details["loc"][-1]), _keys_at(model, details["loc"]))
        )
    if details["type"] == "json_invalid":
        return Mistake(where, "is not JSON", details["msg"].removeprefix("Invalid JSON: "))
    if details["type"] == "missing":
        return Mistake(where, "is missing", "it has no default")
    return Mistake(where, f"is {shortened(repr(details['input']))}", _expected(details))


def _rank(details: ErrorDetails) -> int:
    if details["loc"] == ("schema",):
        return 0
    return 1 if details["type"] == "extra_forbidden" else 2


def _expected(details: ErrorDetails) -> str:
    message = details["msg"]
    return message.replace("Input should be", "should be", 1)


def _nearest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(names)}"


def _keys_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Returns the keys of the table that holds the last part of `location`."""
    for part in location[:-1]:
        inner = [_model_in(f.annotation) for n, f in model.model_fields.items() if part in (n, f.alias)]
        model = next((found for found in inner if found is not None), model)
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Returns the model that an annotation names, also inside ``tuple[...]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(argument) for argument in typing.get_args(annotation))
    return next((model for model in found if model is not None), None)
