"""What a start refuses: a manifest with holes, and a bundle that lacks what it needs."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from aotgaudi.bundle.verify import Report
from aotgaudi.entries import Entry
from aotgaudi.errors import CoverageError
from aotgaudi.llm.running import ModelOptions
from aotgaudi.manifest.coverage import coverage_of
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.scheduler import SchedulerSpec

logger = logging.getLogger(__name__)


def accept(report: Report, entries: Sequence[Entry], options: ModelOptions) -> list[Entry]:
    """Returns the entries that the bundle can run.

    Raises unless the bundle may be served: whole under `require_warm`, else merely not corrupt.
    """
    if options.require_warm or report.corrupt or report.extra:
        report.raise_if_bad(options.bundle)
    for gone in report.missing:
        logger.warning("entry %s is not in the bundle: it compiles on first use", gone.entry)
    missing = {gone.entry for gone in report.missing}
    return [entry for entry in entries if str(entry) not in missing]


def check_coverage(manifest: Manifest, *, require_warm: bool) -> str:
    """Warns of possible steps without an entry. Under `require_warm` it raises CoverageError instead.

    Returns the result of the proof in one line.
    """
    coverage = coverage_of(manifest, SchedulerSpec())  # Our scheduler serves, whichever the spec describes.
    if coverage.is_closed:
        return str(coverage)
    if require_warm:
        raise CoverageError(
            f"manifest: {coverage} (`aotgaudi coverage MANIFEST` lists the holes and says what closes them)"
        )
    logger.warning("%s: prompts are cut shorter where that helps; else such requests fail", coverage)
    return str(coverage)
