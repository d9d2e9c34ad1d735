"""Reports for tests: of small specs, of stores that hold what a test says, and of names that nobody should give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aotgaudi.bundle.bundle import Bundle, open_bundle
from aotgaudi.compile.pipeline import seal
from aotgaudi.compile.plan import make_plan
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.report.compute import Given, Report, inventory_of_bundle, inventory_of_plan, report_of
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.store.store import Store
from tests.unit.compile.explaining import built
from tests.workload import FAKE, tiny_spec

LABELS = (("layer (prompt, 1, 16, 0)", "head (prompt, 1, 16, 0)"), ("layer (decode, 1, 1, 1)", "swap x"))
HOSTILE = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>{{7*7}}&lt;"


def report_on(spec: BuildSpec, **given: Any) -> Report:
    """The report of a spec of which nothing is built."""
    values = {"path": "x.toml", "kind": "spec", "unknown": "there is no store", **given}
    return report_of(Given(manifest=Manifest.of(spec), **values))


def report_on_store(store: Store, **given: Any) -> Report:
    """The report of `tiny_spec`, all of it built in `store`."""
    spec = tiny_spec()
    manifest = Manifest.of(spec)
    built(store, spec, manifest.entries, LABELS)
    inventory = inventory_of_plan(make_plan(manifest.entries, spec, FAKE, store))
    return report_on(spec, inventory=inventory, unknown=None, **given)


def sealed_bundle(store: Store, path: Path) -> Bundle:
    """A bundle of `tiny_spec` at `path`."""
    spec = tiny_spec()
    manifest = Manifest.of(spec)
    built(store, spec, manifest.entries, LABELS)
    seal(manifest, store, path)
    return open_bundle(path)


def report_on_bundle(bundle: Bundle, store: Store | None = None) -> Report:
    """The report of a bundle, with the times that are in `store`."""
    inventory = inventory_of_bundle(bundle, store)
    return report_of(Given(path="x", kind="bundle", manifest=bundle.manifest, inventory=inventory))
