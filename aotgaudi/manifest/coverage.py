"""Whether a manifest has an entry for every step that its server can form: prompts, decodes, sampling, exchanges.

Prompts and decodes are the subject of `aotgaudi.bucketing.coverage`. Besides them:

* **Sampler.** A step samples 1 .. ``min(max_num_seqs, num_blocks)`` rows, under the signature that its mix of
  requests needs: one of the settings', or a join of them. The engine takes the sampler of the step's own batch
  size where there is one, else the smallest that is large enough. So rows are covered under a signature when there
  is a size of at least as many, and every such size has an entry that serves the signature. That every legal
  request has one of these signatures is shown where they are defined (``spec/sampler_signature.py``).
* **Defrag.** Exchanges are cut into runs of at most the largest padded size; a run takes the next padded size of the
  spec, which must have its entry. There are at most ``num_blocks // 2`` at a time: each is of a used and a free
  block.

A target that runs without graphs (execution mode ``eager``) needs nothing warm. Unified, vision and hyper-connection
entries are not proved: the scheduler forms no unified steps (a unified table covers none of its prompts and
decodes), and the other two follow from rules of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from aotgaudi.bucketing.coverage import Counterexample, Coverage, PhaseCoverage, counted, prove_steps
from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.bucketing.reachable import ReachableDecodes
from aotgaudi.entries import DefragEntry, SamplerEntry
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.sampler_signature import SamplerSignature, missing_joins

UNPROVED_KINDS = ("unified", "vision", "mhc")


@dataclass(frozen=True, slots=True)
class _Part:
    phase: PhaseCoverage
    holes: tuple[Counterexample, ...]


def coverage_of(manifest: Manifest) -> Coverage:
    """Returns what the entries of `manifest` cover of the steps that can be formed under its limits."""
    unproved = tuple(kind for kind in UNPROVED_KINDS if manifest.of_kind(kind))
    spec = manifest.spec
    if spec.target.execution_mode == "eager":
        return Coverage((), None, unproved)
    table = BucketTable.from_entries(manifest.entries)
    steps = prove_steps(spec.limits, table, contiguous_pa=spec.bucketing.contiguous_pa)
    parts = (_sampler(manifest), _defrag(manifest))
    holes = [*([steps.smallest] if steps.smallest else []), *(hole for part in parts for hole in part.holes)]
    phases = (*steps.phases, *(part.phase for part in parts))
    return Coverage(phases, min(holes, default=None), unproved)


def _sampler(manifest: Manifest) -> _Part:
    most = ReachableDecodes(manifest.spec.limits).max_batch_size
    settings = [setting.signature for setting in manifest.spec.sampler.settings]
    needed = sorted({*settings, *missing_joins(settings)})
    samplers: dict[int, set[SamplerSignature]] = {}
    for entry in manifest.entries:
        if isinstance(entry, SamplerEntry) and entry.batch_size:
            samplers.setdefault(entry.batch_size, set()).add(entry.signature)
    holes, num_uncovered = [], 0
    for signature in needed:
        lacking = [size for size, has in samplers.items() if not any(s.serves(signature) for s in has)]
        in_lacking = min(most, max(lacking, default=0))
        above_all = max(0, most - max(samplers, default=0))
        num_uncovered += in_lacking + above_all
        if in_lacking or above_all:
            num_rows = 1 if in_lacking else most - above_all + 1
            text = f"sampling {counted(num_rows, 'row')} by {signature}"
            holes.append(Counterexample(num_rows, "sampler", (num_rows,), text))
    return _Part(PhaseCoverage("sampler", "steps", most * len(needed), num_uncovered), tuple(holes))


def _defrag(manifest: Manifest) -> _Part:
    limits, defrag = manifest.spec.limits, manifest.spec.defrag
    sizes = defrag.padded_swaps if defrag.enabled else ()
    most = min(limits.num_blocks // 2, max(sizes, default=0))
    has = {entry.padded_swaps for entry in manifest.entries if isinstance(entry, DefragEntry)}
    runs = [
        (below + 1, min(size, most))
        for below, size in zip((0, *sizes), sizes, strict=False)
        if size not in has
    ]
    missing = [(first, last) for first, last in runs if first <= last]
    phase = PhaseCoverage("defrag", "steps", most, sum(last - first + 1 for first, last in missing))
    return _Part(
        phase,
        tuple(
            Counterexample(
                first * limits.block_size,
                "defrag",
                (first,),
                f"exchanging {counted(first, 'pair')} of blocks",
            )
            for first, _ in missing
        ),
    )
