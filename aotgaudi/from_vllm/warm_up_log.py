"""The lines that vllm-gaudi logs when it warms up sampler and defragmenter, for comparison with a server's log.

The lines are those of the public pages (docs/configuration/warm-up/sampler_warm-up.md and defragmenter_warm-up.md), without
time and place. A version without the warm-up logs nothing (``aotgaudi.bucketing.versions``), and neither does a server under
--enforce-eager (vllm_gaudi/v1/worker/hpu_model_runner.py, warmup_model).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from aotgaudi.bucketing.versions import find_version
from aotgaudi.entries import SamplerEntry
from aotgaudi.manifest.manifest import Manifest

_FEWEST_BLOCKS = 2
"""A defragmentation swaps two blocks."""

_MODES_WITHOUT_WARM_UP = ("lazy", "eager")
_OWN_COLUMNS = tuple(SamplerEntry.columns()[5:])


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a log, without time and place."""

    level: Literal["INFO", "WARNING"]
    text: str


def warm_up_log(manifest: Manifest) -> tuple[LogLine, ...]:
    """Returns the lines of the sampler's warm-up, followed by those of the defragmenter's."""
    spec = manifest.spec
    rules = find_version(spec.bucketing.version).environment
    if rules.sampler is None or spec.target.execution_mode in _MODES_WITHOUT_WARM_UP:
        return ()
    sampler = [entry for entry in manifest.entries if isinstance(entry, SamplerEntry)]
    lines = [*_sampler_lines(sampler)]
    if spec.defrag.enabled:
        announces_first = rules.defrag == "unified"
        lines += _defrag_lines(
            spec.defrag.padded_swaps, spec.limits.num_blocks, announces_first=announces_first
        )
    return tuple(lines)


def _sampler_lines(entries: Sequence[SamplerEntry]) -> Iterator[LogLine]:
    sizes = list(dict.fromkeys(entry.batch_size for entry in entries))
    yield LogLine("INFO", f"Warming up sampler with batch sizes: {sizes} and following configs:")
    for entry in entries:
        if entry.batch_size == sizes[0]:
            yield LogLine("INFO", _setting(entry))
    yield LogLine("INFO", "Starting sampler warmup...")
    yield LogLine("INFO", "Sampler warmup completed successfully")


def _setting(entry: SamplerEntry) -> str:
    """Returns upstream's four columns, and those of ours that are on."""
    neutral = SamplerEntry(entry.batch_size, 0.0, 1.0, 0, True)
    names = [name for name in _OWN_COLUMNS if getattr(entry, name) != getattr(neutral, name)]
    columns = "".join(f", {name}={getattr(entry, name)}" for name in names)
    return (
        f"temp={entry.temperature}, top_p={entry.top_p}, top_k={entry.top_k}, "
        f"batch_changed={entry.batch_changed}{columns}"
    )


def _defrag_lines(
    padded_swaps: Sequence[int], num_blocks: int, *, announces_first: bool
) -> Iterator[LogLine]:
    """Yields the defragmenter's lines. With unified attention (up to v0.17.1) the thresholds precede the count of blocks."""
    announcement = LogLine("INFO", f"Warming up defragmenter with thresholds: {list(padded_swaps)}")
    is_skipped = num_blocks < _FEWEST_BLOCKS
    if announces_first or not is_skipped:
        yield announcement
    if is_skipped:
        yield LogLine("WARNING", f"Skipping defragmenter warmup, insufficient blocks ({num_blocks})")
    else:
        yield LogLine("INFO", "Defragmenter warmup completed successfully")
