"""Prewarms hyper-connections, and counts the steps of each class.

A step's token count decides its class (`aotgaudi.bucketing.mhc_splits`), and its program calls the unit of that class.
Before the server is ready, the program of every ``mhc`` entry runs once on zeros, so that the first step of a class finds
the unit's pages and code in memory, as later steps do. SGLang's log has the same lines.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter

from aotgaudi.bucketing.mhc_splits import StepSplits
from aotgaudi.entries import DecodeEntry, Entry, MhcEntry, PromptEntry
from aotgaudi.llm.running import SplitCounts
from aotgaudi.manifest.enumerate import MHC_SUBLAYERS
from aotgaudi.runtime.executables import BoundProgram

logger = logging.getLogger(__name__)


def prewarm(entries: Iterable[Entry], program: Callable[[Entry], BoundProgram | None]) -> frozenset[int]:
    """Runs the program of each ``mhc`` entry once, largest first, and returns the classes that are warm for all sublayers.

    `program` returns None for an entry that is not warm.
    """
    found = sorted(
        (entry for entry in entries if isinstance(entry, MhcEntry)), key=lambda entry: -entry.num_tokens
    )
    if not found:
        return frozenset()
    sizes = tuple(dict.fromkeys(entry.num_tokens for entry in found))
    logger.info("MHC prewarm max_num_tokens=%d representative token counts: %s", sizes[0], sizes)
    warm: dict[str, set[int]] = {sublayer: set() for sublayer in MHC_SUBLAYERS}
    for entry in found:
        bound = program(entry)
        if bound is None:
            continue
        begin = perf_counter()
        bound.run_on_zeros()
        seconds = perf_counter() - begin
        logger.info(
            "MHC prewarm path=%s num_tokens=%d completed in %.3fs", entry.sublayer, entry.num_tokens, seconds
        )
        warm[entry.sublayer].add(entry.n_splits)
    return frozenset(set.intersection(*warm.values()))


class SplitCounter:
    """Counts steps and tokens by class, from how often each entry ran. Any thread may use it."""

    def __init__(self, splits: StepSplits | None, entries: Iterable[Entry], warm: frozenset[int]) -> None:
        """`entries` are the entries that may run, `warm` the classes that were prewarmed."""
        self._warm = warm
        self._classes: dict[Entry, int] = {}
        self._tokens: dict[Entry, int] = {}
        for entry in entries:
            if splits is not None and isinstance(entry, (PromptEntry, DecodeEntry)):
                self._classes[entry] = splits.of_entry(entry)
                self._tokens[entry] = entry.num_tokens

    def counts(self, num_steps: Mapping[Entry, int]) -> tuple[SplitCounts, ...]:
        """Returns the counts of each class, in ascending order, if each entry ran `num_steps` times."""
        steps, tokens = (dict.fromkeys(sorted(set(self._classes.values())), 0) for _ in range(2))
        for entry, n_splits in self._classes.items():
            steps[n_splits] += num_steps.get(entry, 0)
            tokens[n_splits] += num_steps.get(entry, 0) * self._tokens[entry]
        return tuple(SplitCounts(n, steps[n], tokens[n], n in self._warm) for n in steps)
