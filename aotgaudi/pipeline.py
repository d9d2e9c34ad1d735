"""Spec -> bundle on one page. The offline half; imports no torch (workers do).

::

    spec --enumerate--> manifest --make_plan--> plan --Executor--> store --make_receipt, pack--> bundle
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from aotgaudi.backends.offline import build_target
from aotgaudi.build.keys import builder_versions, require_key_parts
from aotgaudi.build.plan import Plan, is_known_complete, make_plan
from aotgaudi.bundle.format import BundleIndex
from aotgaudi.bundle.pack import pack_bundle
from aotgaudi.bundle.receipt import Receipt
from aotgaudi.bundle.signing import Signing
from aotgaudi.entries import Entry
from aotgaudi.errors import NotWarmError
from aotgaudi.manifest.codec import dumps as dump_manifest
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.store.store import Store


def plan_manifest(manifest: Manifest, store: Store, entries: Iterable[Entry] | None = None) -> Plan:
    """Returns what is missing for `entries` (default: all of the manifest) on this machine's target."""
    target = build_target(manifest.spec)
    return make_plan(manifest.entries if entries is None else entries, manifest.spec, target, store)


def is_known_built(manifest: Manifest, store: Store, entries: Iterable[Entry]) -> bool:
    """Whether the last build of `entries` left nothing to do and all of that is still there; False: make a plan."""
    target = build_target(manifest.spec)
    return is_known_complete(entries, manifest.spec, target, store)


def make_receipt(manifest: Manifest, plan: Plan) -> Receipt:
    """Returns the receipt of every program of `plan` that is whole; the others are left out."""
    programs: dict[str, str] = {}
    units = {}
    for state in plan.programs:
        if state.row is None or any(key not in plan.units for key in state.row.units):
            continue
        programs.update({entry.id: state.row.program for entry in state.entries})
        units.update({key: plan.units[key] for key in state.row.units})
    return Receipt(
        manifest_id=manifest.id,
        target=plan.target,
        programs=programs,
        units=units,
        builder=builder_versions(),
    )


def seal(
    manifest: Manifest,
    store: Store,
    out: Path,
    *,
    allow_missing: bool = False,
    signing: Signing | None = None,
) -> BundleIndex:
    """Seals what the store has for `manifest` into a bundle at `out`, signed where there is a `signing`.

    Raises NotWarmError when entries are missing, unless `allow_missing`; MissingPackageError where torch or
    transformers is not installed.
    """
    require_key_parts()
    receipt = make_receipt(manifest, plan_manifest(manifest, store))
    missing = receipt.missing(manifest.entries)
    if missing and not allow_missing:
        raise NotWarmError(
            f"{len(missing)} of {len(manifest.entries)} entries have no artifact in the store, first: {missing[0]} "
            "(run: aotgaudi build cache MANIFEST)"
        )
    return pack_bundle(dump_manifest(manifest), manifest.id, receipt, store.objects, out, signing)
