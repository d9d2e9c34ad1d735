"""Stores in which programs are traced and units are compiled, without a compiler, in as many seconds as a test says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aotgaudi.backends.base import Target
from aotgaudi.compile.keys import UnitRow, record, unit_key
from aotgaudi.compile.plan import Plan, make_plan
from aotgaudi.compile.why import Finding, History, explain_plan
from aotgaudi.entries import Entry
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.store.store import Store
from tests.workload import FAKE, seed, text_of

SECONDS = 2.5


def compiled(store: Store, text: str, label: str, target: Target = FAKE, seconds: float = SECONDS) -> str:
    """Records that the unit of this text was compiled, and returns its key."""
    key = unit_key(text, target)
    row = UnitRow(
        artifact={"unit.bin": str(store.objects.put_bytes(key.hex.encode()))},
        tolerance=0.0,
        label=label,
        compile_seconds=seconds,
        max_abs_error=0.0,
        cpu_seconds=seconds,
        components=dict(key.components),
    )
    record(store, key.hex, row)
    return key.hex


def built(
    store: Store,
    spec: BuildSpec,
    entries: Iterable[Entry],
    labels: Sequence[Sequence[str]],
    target: Target = FAKE,
    seconds: float = SECONDS,
) -> None:
    """Records every program of `entries` and all of its units, as `seed` does, and what compiling them took."""
    seed(store, spec, entries, labels, target)
    for label in dict.fromkeys(label for mine in labels for label in mine):
        compiled(store, text_of(label), label, target, seconds)


def findings(
    store: Store, spec: BuildSpec, entries: Iterable[Entry], target: Target = FAKE
) -> tuple[Finding, ...]:
    """What there is to say of these entries."""
    plan: Plan = make_plan(entries, spec, target, store)
    return explain_plan(plan, store, History.of_store(store))
