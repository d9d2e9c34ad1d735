"""Parses the values of flags and variables, strictly. Every error names the flag or the variable."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from aotgaudi.errors import SpecError, shown
from aotgaudi.spec.limits import LARGEST_LIMIT

TRUE_WORDS = frozenset({"true", "t", "1", "yes", "y", "on"})
"""Words that upstream reads as true, in any case (vllm_gaudi/extension/config.py, ``boolean``). All others are false."""

FALSE_WORDS = frozenset({"false", "f", "0", "no", "n", "off", ""})
"""Words that users write for false. Other texts are false too, but probably by mistake, so they are noted."""

_DIGITS_AT_MOST = 18
_LONGEST_NUMBER = 60
_SUFFIXED = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class Remark:
    """A flag or a variable of the user, and what to know about it."""

    name: str
    text: str


def is_true(text: str) -> bool:
    """Returns the boolean that upstream reads from a variable's text."""
    return text.lower() in TRUE_WORDS


def parse_integer(where: str, text: str, *, minimum: int = 0, maximum: int = LARGEST_LIMIT) -> int:
    """Returns a plain decimal integer. Raises SpecError, naming `where`."""
    stripped = text.strip()
    digits = stripped.lstrip("0") or stripped[-1:]
    if not (stripped.isascii() and stripped.isdigit()) or len(digits) > _DIGITS_AT_MOST:
        _refuse_integer(where, text, minimum, maximum)
    value = int(digits)
    if not minimum <= value <= maximum:
        _refuse_integer(where, text, minimum, maximum)
    return value


def python_integer(where: str, text: str) -> int:
    """Returns what Python's ``int`` reads: ``+5``, ``1_000``, negative and huge numbers too. Raises SpecError."""
    try:
        return int(text)
    except ValueError:
        raise SpecError(where, f"is {shown(text)}", "an integer, as Python reads it") from None


def parse_tokens(where: str, text: str) -> int:
    """Returns a number of tokens, also from ``8k`` (8,000), ``8K`` (8,192), ``25.6k``, ``1M``.

    The forms are vLLM's (vllm/engine/arg_utils.py, ``human_readable_int``). A lower-case suffix is decimal and may follow a
    fraction. A capital one is binary and may not. Raises SpecError.
    """
    match = _SUFFIXED.fullmatch(text.strip()) if len(text) <= _LONGEST_NUMBER else None
    if match is None:
        return parse_integer(where, text, minimum=1)
    number, suffix = match.groups()
    if suffix in _BINARY and "." in number:
        raise SpecError(
            where, f"is {text!r}", f"a fraction goes with a decimal suffix: {number}{suffix.lower()}"
        )
    value = int(number) * _BINARY[suffix] if suffix in _BINARY else int(float(number) * _DECIMAL[suffix])
    if not 1 <= value <= LARGEST_LIMIT:
        _refuse_integer(where, text, 1, LARGEST_LIMIT)
    return value


def parse_fraction(where: str, text: str, *, includes_zero: bool, includes_one: bool) -> float:
    """Returns a share between 0 and 1. Raises SpecError."""
    try:
        value = float(text) if len(text) <= _LONGEST_NUMBER and "_" not in text else -1.0
    except ValueError:
        value = -1.0
    is_inside = 0 < value < 1 or (includes_zero and value == 0) or (includes_one and value == 1)
    if not is_inside:
        low, high = (
            ("0 or more" if includes_zero else "above 0"),
            ("at most 1" if includes_one else "below 1"),
        )
        raise SpecError(where, f"is {shown(text)}", f"a number {low} and {high}")
    return value


def parse_table(name: str, text: str) -> dict[str, Any]:
    """Returns the object in a flag's JSON text. Raises SpecError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"--{name}", f"is {shown(text)}", "an object in JSON") from error
    if not isinstance(value, dict):
        raise SpecError(f"--{name}", f"is {shown(text)}", "an object in JSON")
    return value


def _refuse_integer(where: str, text: str, minimum: int, maximum: int) -> NoReturn:
    raise SpecError(where, f"is {shown(text)}", f"an integer from {minimum} to {maximum}")
