"""One line of a bucket file: a small language of numbers, lists and ranges, read from Python's syntax tree.

Nothing is executed. A `Dialect` says what the public code of a version makes of a line; where that code would
evaluate more than the language has, the line is refused, never guessed at.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from aotgaudi.bucketing.strategy import MAX_RANGE_VALUES

FILE_VARIABLE = "VLLM_BUCKETING_FROM_FILE"
"""The variable that names a bucket file."""

MAX_LINE_CHARS = 16_384
"""Longest line; it bounds how deep a syntax tree can be."""

_MAX_NUMBER = 2**64
_MAX_EXPONENT = 64
_LITERAL_RANGE = re.compile(r"range\(\s*(-?\d+)\s*,\s*(-?\d+)\s*(?:,\s*(-?\d+)\s*)?\)")
_LITERAL_RANGE_VALUES = 10_000

_OPERATIONS: Mapping[type[ast.operator], Callable[[float, float], float]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
        ast.Pow: operator.pow,
        ast.LShift: operator.lshift,
    }
)

Item = Sequence[object]
"""The values of one of a line's three items, not yet known to be numbers."""


_T = TypeVar("_T")


class BadLineError(Exception):
    """The public code cannot read the line."""


class RefusedLineError(Exception):
    """The public code may read the line; this one does not."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a version reads a line.

    `computes`: numbers may be computed, and ranges have one to three arguments and any length; else a line holds
    literals only. `skips`: a line that cannot be read is left out; else it is an error.
    """

    computes: bool
    skips: bool


LITERAL = Dialect(computes=False, skips=False)
EVALUATED = Dialect(computes=True, skips=True)


def read_line(line: str, dialect: Dialect) -> tuple[Item, Item, Item]:
    """Returns the three items of a line.

    Raises:
        BadLineError: it is not three items.
        RefusedLineError: it is too long, a number or a range of it is too large, or it uses more of Python.
    """
    if len(line) > MAX_LINE_CHARS:
        raise RefusedLineError(f"has {len(line):,} characters, more than {MAX_LINE_CHARS:,}")
    try:
        tree = ast.parse(line, mode="eval").body
        if isinstance(tree, (ast.List, ast.Set, ast.Dict, ast.Constant)):
            raise BadLineError("is no tuple")
        value = _Reader(line, dialect).value(tree)
    except (SyntaxError, ValueError) as error:
        raise BadLineError(f"is not Python: {error.args[0]}") from error
    except (RecursionError, MemoryError) as error:
        raise RefusedLineError("is nested too deeply") from error
    if not isinstance(value, tuple) or len(value) != 3:
        raise BadLineError("is not three items in parentheses")
    first, second, third = (item if isinstance(item, (list, range)) else [item] for item in value)
    return first, second, third


@dataclass(frozen=True, slots=True)
class _Reader:
    """Finds the value of a syntax tree."""

    line: str
    dialect: Dialect

    def value(self, node: ast.expr) -> object:
        if isinstance(node, ast.Constant):
            return _bounded(node.value)
        if isinstance(node, ast.List):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Tuple):
            return tuple(self.value(item) for item in node.elts)
        if isinstance(node, ast.UnaryOp):
            return self._signed(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
            return self._computed_range(node) if self.dialect.computes else self._literal_range(node)
        if isinstance(node, ast.BinOp) and self.dialect.computes:
            return self._computed(node)
        raise _unknown(node)

    def _signed(self, node: ast.UnaryOp) -> object:
        if not (self.dialect.computes or isinstance(node.operand, ast.Constant)):
            raise _unknown(node)
        number = _number(self.value(node.operand), node)
        if isinstance(node.op, ast.USub):
            return -number
        if isinstance(node.op, ast.UAdd):
            return number
        raise _unknown(node)

    def _computed(self, node: ast.BinOp) -> object:
        left, right = (_number(self.value(side), node) for side in (node.left, node.right))
        operation = _OPERATIONS.get(type(node.op))
        if operation is None:
            raise _unknown(node)
        if isinstance(node.op, (ast.Pow, ast.LShift)) and right > _MAX_EXPONENT:
            raise RefusedLineError(f"has a number with exponent {right}, more than {_MAX_EXPONENT}")
        try:
            return _bounded(operation(left, right))
        except (ArithmeticError, TypeError, ValueError) as error:
            raise BadLineError(f"cannot be computed: {error}") from error

    def _literal_range(self, node: ast.Call) -> range:
        found = _LITERAL_RANGE.fullmatch(ast.get_source_segment(self.line, node) or "")
        if found is None:
            raise BadLineError("has a range that is not range(start, stop) or range(start, stop, step)")
        start, stop, step = (_bounded(int(digits)) for digits in (found[1], found[2], found[3] or "1"))
        values = _range(start, stop, step)
        if len(values) > _LITERAL_RANGE_VALUES:
            raise BadLineError(f"has a range of {len(values):,} values, more than {_LITERAL_RANGE_VALUES:,}")
        return values

    def _computed_range(self, node: ast.Call) -> range:
        values = [self.value(argument) for argument in node.args]
        numbers = [value for value in values if isinstance(value, int)]
        if node.keywords or not 1 <= len(numbers) == len(values) <= 3:
            raise BadLineError("has a range that is not of one to three whole numbers")
        start, stop, step = (0, *numbers, 1) if len(numbers) == 1 else (*numbers, 1)[:3]
        return _range(start, stop, step)


def _range(start: int, stop: int, step: int) -> range:
    if step == 0:
        raise BadLineError("has a range with step 0")
    num_values = max(0, -(-(stop - start) // step))
    if num_values > MAX_RANGE_VALUES:
        raise RefusedLineError(f"has a range of {num_values:,} values, more than {MAX_RANGE_VALUES:,}")
    return range(start, stop, step)


def _number(value: object, node: ast.expr) -> float:
    if isinstance(value, (int, float)):
        return value
    raise _unknown(node)


def _bounded(value: _T) -> _T:
    if isinstance(value, int) and abs(value) > _MAX_NUMBER:
        raise RefusedLineError(f"has a number of more than {_MAX_NUMBER.bit_length() - 1} bits")
    return value


def _unknown(node: ast.expr) -> Exception:
    """Returns what is wrong with a piece of Python: it names what is not defined, or is of a kind not read here."""
    parts = list(ast.walk(node))
    names = [part.id for part in parts if isinstance(part, ast.Name) and part.id != "range"]
    if names and not any(isinstance(part, ast.comprehension) for part in parts):
        return BadLineError(f"uses the name {names[0]!r}")
    return RefusedLineError(f"is made of more than numbers, lists and ranges ({type(node).__name__})")
