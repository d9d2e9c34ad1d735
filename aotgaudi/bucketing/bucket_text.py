"""Buckets as the lines of a bucket file: the inverse of ``bucketing.bucket_file``, in the part that all versions read.

A line has no more than numbers, lists of them, and ``range(start, stop, step)`` of at most 10,000 values, which the public
code has both evaluated (up to v0.16.0) and read as literals (from v0.17.1 on). Equal pieces of neighbouring rows share
a line: a linear table of a million buckets is a few lines. The same buckets give the same text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from aotgaudi.bucketing.strategy import Bucket

_LONGEST_LIST = 1_000
"""Numbers of one list; a line stays well below ``bucket_line.MAX_LINE_CHARS``."""

_SHORTEST_RANGE = 4
_LONGEST_RANGE = 10_000
"""vllm_gaudi/extension/bucketing/file_strategy.py ``_MAX_RANGE_ELEMENTS`` at 091bbad."""


def bucket_lines(buckets: Iterable[Bucket]) -> Iterator[str]:
    """Yields the lines that list `buckets`, each once, in ascending order of what a line starts with."""
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
    """Yields ascending numbers as items of lines; one item, but where there are too many."""
    step = numbers[1] - numbers[0] if len(numbers) >= _SHORTEST_RANGE else 0
    if step and len(numbers) <= _LONGEST_RANGE:
        stop = numbers[-1] + 1
        if list(range(numbers[0], stop, step)) == list(numbers):
            yield f"range({numbers[0]}, {stop}" + (f", {step})" if step != 1 else ")")
            return
    for first in range(0, len(numbers), _LONGEST_LIST):
        piece = numbers[first : first + _LONGEST_LIST]
        yield str(piece[0]) if len(piece) == 1 else f"[{', '.join(map(str, piece))}]"
