"""A bundle that holds a part of its manifest: what its server serves, and how it treats other requests (docs/adr/0062)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from aotgaudi.bundle.bundle import Bundle
from aotgaudi.bundle.receipt import ClosedUnder, Receipt, SealedPart
from aotgaudi.bundle.verify import Report
from aotgaudi.entries import Entry
from aotgaudi.errors import CorruptError, NotWarmError, SpecError
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.memory import MemoryNeed
from aotgaudi.manifest.subset import Chunks, Subset, largest_subset, subset_under

Outside = Literal["refuse", "chunk", "pad-up"]
"""How a server treats a request that the warm entries do not cover. `served_manifest` says what each choice serves."""


def sealed_part(manifest: Manifest, warm: Iterable[Entry]) -> SealedPart:
    """Returns what a receipt records about a part with these entries. Raises NotWarmError if no limits close them."""
    has = tuple(warm)
    whole, cut = (largest_subset(manifest, has, chunks) for chunks in ("whole", "cut"))
    if whole is None or cut is None:
        raise NotWarmError(
            f"the {len(has)} entries that are built, of {len(manifest.entries)}, can serve nothing: they are closed under no"
            " limits (aotgaudi build cache MANIFEST --tier least builds what can be served)"
        )
    return SealedPart(
        limits=ClosedUnder.of(whole.limits), chunked=ClosedUnder.of(cut.limits), settings=whole.settings
    )


def proved_part(bundle: Bundle, chunks: Chunks) -> Subset | None:
    """Returns the part that the bundle holds, after proving it again; None for a bundle of the whole manifest.

    Raises CorruptError if its entries are not closed under the sealed limits. Otherwise raises as `Bundle.manifest` does.
    """
    receipt, manifest = bundle.require_programs(), bundle.manifest
    if receipt.part is None:
        return None
    sealed = receipt.part.limits if chunks == "whole" else receipt.part.chunked
    settings, whole = manifest.spec.sampler.settings, manifest.spec.limits
    if max(receipt.part.settings) >= len(settings) or not sealed.is_within(whole):
        raise CorruptError(f"bundle {bundle.path}: its part has larger limits than its manifest")
    chosen = [settings[place] for place in receipt.part.settings]
    part = subset_under(manifest, built_entries(manifest, receipt), sealed.lowering(whole), chosen)
    if not part.coverage.is_closed:
        raise CorruptError(
            f"bundle {bundle.path}: the part that it holds is not closed under {sealed}: {part.coverage}"
            f" ({bundle.mending_command})"
        )
    return part


def served_manifest(bundle: Bundle, outside: Outside) -> Manifest:
    """Returns the entries and limits that a server of the bundle serves. For a bundle of the whole, they are the manifest's.

    ==========  ==================================================================================
    refuse      the part, under its limits for the spec's chunks
    chunk       the part, under its limits for shorter chunks
    pad-up      the part, under the limits of the whole, which larger entries must cover
    ==========  ==================================================================================

    Raises NotWarmError if `outside` is ``pad-up`` and the part does not cover the whole. Otherwise raises as `proved_part`
    does.
    """
    manifest = bundle.manifest
    part = proved_part(bundle, "cut" if outside == "chunk" else "whole")
    if part is None:
        return manifest
    if outside == "pad-up" and not part.has_whole_limits:
        raise NotWarmError(
            f"bundle {bundle.path} holds {describe_part(part)}; --outside pad-up serves all that the whole does, and larger"
            " warm entries do not cover that (build more: --tier covering; or serve less: --outside refuse, or chunk)"
        )
    return part.manifest


def memory_need(served: Manifest, report: Report, *, maps_weights: bool = False) -> MemoryNeed | None:
    """Returns what a server of `served`, on a device whose caches are in the machine's memory, needs of that memory.

    None: the bundle cannot be served anyway, or its config lacks a size. Mapped weights (`maps_weights`) need no memory.
    """
    if not report.is_intact:
        return None
    try:
        return MemoryNeed.of(served.spec, served.entries, 0 if maps_weights else report.weights_bytes)
    except SpecError:
        return None


def built_entries(manifest: Manifest, receipt: Receipt) -> tuple[Entry, ...]:
    """Returns the entries that have a program in the receipt, in the order of the manifest."""
    return tuple(entry for entry in manifest.entries if entry.id in receipt.programs)


def describe_part(part: Subset) -> str:
    """Describes in words how many entries a part has, and under which limits it is closed."""
    num_left, num_all = len(part.settings), len(part.whole.spec.sampler.settings)
    settings = "" if num_left == num_all else f" and {num_left} of {num_all} sampler settings"
    return (
        f"{len(part.manifest.entries)} of {len(part.whole.entries)} entries,"
        f" closed under {ClosedUnder.of(part.limits)}{settings}"
    )
