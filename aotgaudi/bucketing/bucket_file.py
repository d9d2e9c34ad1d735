"""Tables from a bucket file (VLLM_BUCKETING_FROM_FILE): vllm_gaudi/extension/bucketing/file_strategy.py.

Grammar::

    file = { line newline }
    line = [ "(" item "," item "," item ")" ] [ "#" comment ]     batch sizes, query lengths, context blocks
    item = number | "[" number { "," number } "]" | "range(" number "," number [ "," number ] ")"

A line means all products of its items; a query length of 1 makes a decode bucket. Numbers pass through ``int()``,
so ``128.0`` and ``'128'`` are numbers too. There are two generations: from v0.17.1 a line holds literals, and
one that cannot be read fails the public code; here it is an error that names the line. Up to v0.16.0 lines were
evaluated, which allows for ``128 * 2`` and ``range(128)``, and one that cannot be read is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from aotgaudi.bucketing.bucket_line import (
    BadLineError,
    Dialect,
    Item,
    RefusedLineError,
    read_line,
)
from aotgaudi.bucketing.combine import check_mamba, filter_decode, filter_prompt, with_speculation
from aotgaudi.bucketing.filters import ProductRules
from aotgaudi.bucketing.strategy import Bucket, BucketingInputs
from aotgaudi.errors import SpecError
from aotgaudi.spec.limits import LARGEST_LIMIT

MAX_FILE_CHARS = 4 * 2**20
MAX_FILE_LINES = 100_000
MAX_LISTED_BUCKETS = 1_000_000

_FORM = "(batch sizes, query lengths, context blocks), each a number, [a list] or range(start, stop, step)"
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class SkippedLine:
    """A line that the public code leaves out: its number, from 1, and why."""

    number: int
    problem: str


@dataclass(frozen=True, slots=True)
class ListedBuckets:
    """What a file lists, in its order, and the lines that were left out."""

    prompt: tuple[Bucket, ...]
    decode: tuple[Bucket, ...]
    skipped: tuple[SkippedLine, ...] = ()


@dataclass(frozen=True, slots=True)
class FileStrategy:
    """The buckets of a file, filtered and corrected, without the edge rule. See ``strategy.Strategy``."""

    dialect: Dialect
    rules: ProductRules

    def prompt_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the prompt buckets, ascending. Raises SpecError, which names the line."""
        check_mamba(inputs, self.rules)
        return filter_prompt(_listed(self.listed(inputs).prompt, "prompt"), inputs, self.rules)

    def decode_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the decode buckets with those of speculative decoding, ascending. Raises SpecError."""
        return with_speculation(self.decode_seed_table(inputs), inputs, self.rules)

    def decode_seed_table(self, inputs: BucketingInputs) -> tuple[Bucket, ...]:
        """Returns the decode buckets before those of speculative decoding, ascending. Raises SpecError."""
        check_mamba(inputs, self.rules)
        return filter_decode(_listed(self.listed(inputs).decode, "decode"), inputs, self.rules)

    def listed(self, inputs: BucketingInputs) -> ListedBuckets:
        """Returns what the file lists, before any filter. Raises SpecError, which names the line."""
        if inputs.file_text is None:
            raise SpecError("bucketing.file", "is missing", 'file = "PATH" beside strategy = "file"')
        return read_bucket_file(inputs.file_text, self.dialect)


def read_bucket_file(text: str, dialect: Dialect) -> ListedBuckets:
    """Returns what the text of a bucket file lists.

    Raises:
        SpecError: it, or a line of it, cannot be read, or is too large.
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
    """Yields the products of a line's items, which may be none. Raises RefusedLineError for more than `most`."""
    num_buckets = math.prod(map(len, items))
    if num_buckets == 0:
        return
    if num_buckets > most:
        raise RefusedLineError(
            f"gives {num_buckets:,} buckets, with which there are more than {MAX_LISTED_BUCKETS:,}"
        )
    batch_sizes, query_lens, contexts = ([_number(value) for value in item] for item in items)
    yield from product(batch_sizes, query_lens, contexts)


def _number(value: object) -> int:
    """Returns ``int(value)``. Raises RefusedLineError where that fails, as the public code does in all versions."""
    if not isinstance(value, (int, float, str, bytes)):
        raise RefusedLineError(f"has a {type(value).__name__} where a number should be")
    try:
        number = int(value)
    except (ValueError, OverflowError) as error:
        raise RefusedLineError(f"has {_shown(repr(value))} where a number should be") from error
    if not 0 <= number <= LARGEST_LIMIT:
        raise RefusedLineError(f"has the number {number}, not one from 0 to {LARGEST_LIMIT}")
    return number


def _listed(buckets: tuple[Bucket, ...], phase: str) -> tuple[Bucket, ...]:
    if not buckets:
        query = "1" if phase == "decode" else "other than 1"
        raise SpecError("bucketing.file", f"lists no {phase} bucket", f"a line with a query length {query}")
    return buckets


def _unreadable(number: int, line: str, error: Exception) -> SpecError:
    return SpecError(f"bucketing.file, line {number}", f"{error}: {_shown(repr(line))}", _FORM)


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
