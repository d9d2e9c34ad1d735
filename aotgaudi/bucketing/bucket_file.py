"""Bucket files (VLLM_BUCKETING_FROM_FILE): read as vLLM's Gaudi plugin reads them, and written so that every version can.

Source: vllm_gaudi/extension/bucketing/file_strategy.py. Grammar::

    file = { line newline }
    line = [ "(" item "," item "," item ")" ] [ "#" comment ]     batch sizes, query lengths, context blocks
    item = number | "[" number { "," number } "]" | "range(" number "," number [ "," number ] ")"

A line stands for all products of its items. A query length of 1 makes a decode bucket. Numbers pass through ``int()``,
so ``128.0`` and ``'128'`` are numbers too.

There are two dialects. From v0.17.1 on a line holds literals. The plugin fails on a line that it cannot read, and we raise
an error that names the line. Up to v0.16.0 the plugin evaluated lines, so ``128 * 2`` and ``range(128)`` work, and it skips
a line that it cannot read. We never execute anything: we read lines from Python's syntax tree, and refuse a line that the
plugin would evaluate but that is not in this small language. We never guess.

`bucket_lines` writes the subset that both dialects read: numbers, lists, and ``range(start, stop, step)`` of at most
10,000 values. Neighbouring rows with equal contexts share a line, so a linear table of a million buckets takes a few
lines. Equal buckets give equal text.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from types import MappingProxyType
from typing import TypeVar

from aotgaudi.bucketing.combine import (
    ProductRules,
    check_mamba,
    filter_decode,
    filter_prompt,
    with_speculation,
)
from aotgaudi.bucketing.strategy import MAX_RANGE_VALUES, Bucket, BucketingInputs
from aotgaudi.errors import SpecError, shortened
from aotgaudi.spec.limits import LARGEST_LIMIT

FILE_VARIABLE = "VLLM_BUCKETING_FROM_FILE"
"""The variable that names a bucket file."""

DYNAMIC_SHAPES_VARIABLE = "VLLM_T_COMPILE_DYNAMIC_SHAPES"
"""Under torch.compile a bucket is one graph only if this is false. Otherwise the second shape is traced with dynamic sizes,
and such a trace then also serves the first shape, by another graph (vllm_gaudi/utils.py, ``HPUCompileConfig``)."""

MAX_LINE_CHARS = 16_384
"""The longest line, which bounds the depth of a syntax tree."""

_MAX_NUMBER = 2**64
_MAX_EXPONENT = 64
_LITERAL_RANGE = re.compile(r"range\(\s*(-?\d+)\s*,\s*(-?\d+)\s*(?:,\s*(-?\d+)\s*)?\)")
_LONGEST_RANGE = 10_000
"""vllm_gaudi/extension/bucketing/file_strategy.py ``_MAX_RANGE_ELEMENTS`` at 091bbad."""

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
"""The values of one of a line's three items, before they are checked to be numbers."""


_T = TypeVar("_T")


class BadLineError(Exception):
    """The public code cannot read the line."""


class RefusedLineError(Exception):
    """The public code may read the line; we do not."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a version reads a line.

    `computes`: numbers may be computed, and ranges have one to three arguments and any length; if not, a line holds literals
    only. `skips`: a line that cannot be read is left out; if not, it is an error.
    """

    computes: bool
    skips: bool


LITERAL = Dialect(computes=False, skips=False)
EVALUATED = Dialect(computes=True, skips=True)


def read_line(line: str, dialect: Dialect) -> tuple[Item, Item, Item]:
    """Returns the three items of a line.

    Raises:
        BadLineError: the line is not three items.
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
    """Evaluates a syntax tree."""

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
        if len(values) > _LONGEST_RANGE:
            raise BadLineError(f"has a range of {len(values):,} values, more than {_LONGEST_RANGE:,}")
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
    """Returns why we do not read a piece of Python: it names something undefined, or is of an unsupported kind."""
    parts = list(ast.walk(node))
    names = [part.id for part in parts if isinstance(part, ast.Name) and part.id != "range"]
    if names and not any(isinstance(part, ast.comprehension) for part in parts):
        return BadLineError(f"uses the name {names[0]!r}")
    return RefusedLineError(f"is made of more than numbers, lists and ranges ({type(node).__name__})")


MAX_FILE_CHARS = 4 * 2**20
MAX_FILE_LINES = 100_000
MAX_LISTED_BUCKETS = 1_000_000

_FORM = "(batch sizes, query lengths, context blocks), each a number, [a list] or range(start, stop, step)"


@dataclass(frozen=True, slots=True)
class SkippedLine:
    """A line that the public code skips: its number, from 1, and the reason."""

    number: int
    problem: str


@dataclass(frozen=True, slots=True)
class ListedBuckets:
    """The buckets that a file lists, in the file's order, and the skipped lines."""

    prompt: tuple[Bucket, ...]
    decode: tuple[Bucket, ...]
    skipped: tuple[SkippedLine, ...] = ()


@dataclass(frozen=True, slots=True)
class FileStrategy:
    """The buckets of a file, filtered and corrected, without the edge rule. See ``strategy.Strategy``."""

    dialect: Dialect
    rules: ProductRules

    def prompt_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the prompt buckets, ascending. Raises SpecError, naming the line."""
        check_mamba(inputs, self.rules)
        return filter_prompt(_listed(self.listed(inputs).prompt, "prompt"), inputs, self.rules)

    def decode_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the decode buckets, including those of speculative decoding, ascending. Raises SpecError."""
        return with_speculation(self.decode_seed_table(inputs), inputs, self.rules)

    def decode_seed_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the decode buckets before those of speculative decoding, ascending. Raises SpecError."""
        check_mamba(inputs, self.rules)
        return filter_decode(_listed(self.listed(inputs).decode, "decode"), inputs, self.rules)

    def listed(self, inputs: BucketingInputs) -> ListedBuckets:
        """Returns what the file lists, before any filter. Raises SpecError, naming the line."""
        if inputs.file_text is None:
            raise SpecError("bucketing.file", "is missing", 'file = "PATH" beside strategy = "file"')
        return read_bucket_file(inputs.file_text, self.dialect)


def read_bucket_file(text: str, dialect: Dialect) -> ListedBuckets:
    """Returns what the text of a bucket file lists.

    Raises:
        SpecError: the text, or a line of it, cannot be read, or is too large.
    """
    if len(text) > MAX_FILE_CHARS:
        raise SpecError("bucketing.file", f"has {len(text):,} characters", f"at most {MAX_FILE_CHARS:,}")
    lines = list(_lines(text))
    if len(lines) > MAX_FILE_LINES:
        raise SpecError("bucketing.file", f"has {len(lines):,} lines", f"at most {MAX_FILE_LINES:,}")
    buckets: list[Bucket] = []
    skipped: list[SkippedLine] = []
    for number, line in lines:
        try:
            buckets.extend(_buckets_of(read_line(line, dialect), MAX_LISTED_BUCKETS - len(buckets)))
        except BadLineError as error:
            if not dialect.skips:
                raise _unreadable(number, line, error) from error
            skipped.append(SkippedLine(number, str(error)))
        except RefusedLineError as error:
            raise _unreadable(number, line, error) from error
    return ListedBuckets(
        prompt=tuple(bucket for bucket in buckets if bucket[1] != 1),
        decode=tuple(bucket for bucket in buckets if bucket[1] == 1),
        skipped=tuple(skipped),
    )


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields the number and the text of each line that is neither blank nor a comment."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for number, line in enumerate(map(str.strip, lines), start=1):
        if line and not line.startswith("#"):
            yield number, line


def _buckets_of(items: tuple[Item, Item, Item], most: int) -> Iterator[Bucket]:
    """Yields the products of a line's items, possibly none. Raises RefusedLineError if there are more than `most`."""
    num_buckets = math.prod(map(len, items))
    if num_buckets == 0:
        return
    if num_buckets > most:
        raise RefusedLineError(
            f"gives {num_buckets:,} buckets, with which there are more than {MAX_LISTED_BUCKETS:,}"
        )
    batch_sizes, query_lens, contexts = ([_whole_number(value) for value in item] for item in items)
    yield from product(batch_sizes, query_lens, contexts)


def _whole_number(value: object) -> int:
    """Returns ``int(value)``. If that fails, raises RefusedLineError, like the public code in all versions."""
    if not isinstance(value, (int, float, str, bytes)):
        raise RefusedLineError(f"has a {type(value).__name__} where a number should be")
    try:
        number = int(value)
    except (ValueError, OverflowError) as error:
        raise RefusedLineError(f"has {shortened(repr(value))} where a number should be") from error
    if not 0 <= number <= LARGEST_LIMIT:
        raise RefusedLineError(f"has the number {number}, not one from 0 to {LARGEST_LIMIT}")
    return number


def _listed(buckets: tuple[Bucket, ...], phase: str) -> tuple[Bucket, ...]:
    if not buckets:
        query = "1" if phase == "decode" else "other than 1"
        raise SpecError("bucketing.file", f"lists no {phase} bucket", f"a line with a query length {query}")
    return buckets


def _unreadable(number: int, line: str, error: Exception) -> SpecError:
    return SpecError(f"bucketing.file, line {number}", f"{error}: {shortened(repr(line))}", _FORM)


def cut_bucket_file(text: str, num: int) -> tuple[str, ...]:
    """Returns `num` files that together list what the file `text` lists, for servers that warm it up at the same time.

    Compiling a graph takes about the same time for any size, but running it does not. So all files get equally many buckets,
    dealt from the largest to the smallest, back and forth. Every file has buckets of both phases, because the plugin fails
    without; a phase may therefore repeat a bucket of another file.

    Raises:
        SpecError: there are fewer buckets than files.
    """
    listed = read_bucket_file(text, LITERAL)
    phases = [
        sorted(set(rows), key=lambda row: (row[0] * row[1], row[2]))
        for rows in (listed.prompt, listed.decode)
    ]
    dealt = [row for rows in phases for row in reversed(rows)]
    if num > len(dealt):
        raise SpecError("--shards", f"is {num}, and there are {len(dealt)} buckets", f"at most {len(dealt)}")
    turns = [*range(num), *reversed(range(num))]
    files: list[set[Bucket]] = [set() for _ in range(num)]
    for position, row in enumerate(dealt):
        files[turns[position % len(turns)]].add(row)
    for rows in phases:
        for file in files:
            if file.isdisjoint(rows):
                file.update(rows[:1])
    comments = [line for line in text.splitlines() if line.startswith("#")]
    return tuple("".join(f"{line}\n" for line in (*comments, *bucket_lines(file))) for file in files)


_LONGEST_LIST = 1_000
"""The most numbers in a list, which keeps a line well below `MAX_LINE_CHARS`."""

_SHORTEST_RANGE = 4


def bucket_lines(buckets: Iterable[Bucket]) -> Iterator[str]:
    """Yields the lines that list each of `buckets` once, ordered by their first values."""
    blocks: list[tuple[int, list[int], list[int]]] = []
    for batch_size, rows in groupby(sorted(set(buckets)), key=lambda bucket: bucket[0]):
        for query_len, row in groupby(rows, key=lambda bucket: bucket[1]):
            contexts = [context for _, _, context in row]
            if blocks and blocks[-1][0] == batch_size and blocks[-1][2] == contexts:
                blocks[-1][1].append(query_len)
            else:
                blocks.append((batch_size, [query_len], contexts))
    for batch_size, query_lens, contexts in blocks:
        for queries in _pieces(query_lens):
            for piece in _pieces(contexts):
                yield f"({batch_size}, {queries}, {piece})"


def _pieces(numbers: Sequence[int]) -> Iterator[str]:
    """Yields ascending numbers as items of lines: one item, or several if there are too many numbers."""
    step = numbers[1] - numbers[0] if len(numbers) >= _SHORTEST_RANGE else 0
    if step and len(numbers) <= _LONGEST_RANGE:
        stop = numbers[-1] + 1
        if list(range(numbers[0], stop, step)) == list(numbers):
            yield f"range({numbers[0]}, {stop}" + (f", {step})" if step != 1 else ")")
            return
    for first in range(0, len(numbers), _LONGEST_LIST):
        piece = numbers[first : first + _LONGEST_LIST]
        yield str(piece[0]) if len(piece) == 1 else f"[{', '.join(map(str, piece))}]"
