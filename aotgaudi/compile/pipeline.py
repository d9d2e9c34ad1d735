"""From a spec to a bundle: the offline half on one page. Imports no torch; the workers do.

::

    spec --enumerate--> manifest --plan--> what is missing --run--> store --receipt, seal--> bundle
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from aotgaudi.backends.base import Target
from aotgaudi.backends.offline import build_target
from aotgaudi.bucketing.mhc_splits import StepSplits
from aotgaudi.bundle.format import BundleIndex
from aotgaudi.bundle.model import bind_model
from aotgaudi.bundle.pack import pack_bundle
from aotgaudi.bundle.programs import load_program, split_problems
from aotgaudi.bundle.receipt import Receipt
from aotgaudi.bundle.signing import Signing, load_signing_key
from aotgaudi.bundle.staging import refuse_foreign
from aotgaudi.compile.cards import local_pool
from aotgaudi.compile.jobs import BuildJob
from aotgaudi.compile.keys import PROVED_BACKENDS, ProofRow, builder_versions, require_key_parts
from aotgaudi.compile.plan import Plan, is_known_complete, make_plan, remember_complete
from aotgaudi.compile.recipe_proof import find_proof, prove, require_proof
from aotgaudi.compile.run import BuildOutcome, Progress, Watch, run_plan
from aotgaudi.compile.workers import UNIT_TIMEOUT_SECONDS, Pool
from aotgaudi.digest import Digest
from aotgaudi.entries import Entry
from aotgaudi.errors import BuildInterruptedError, CompileError, CorruptError, NotWarmError, SpecError
from aotgaudi.machine import available_cores
from aotgaudi.manifest.manifest import Manifest, load_manifest_or_spec
from aotgaudi.manifest.manifest import dumps as dump_manifest
from aotgaudi.phases import Phase, Phases
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.store.location import default_store_root
from aotgaudi.store.scratch import locked_directory
from aotgaudi.store.store import Store

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Workers:
    """Where jobs run: on this machine, or on the Ray cluster at `ray`.

    `jobs` None means one per core, or the whole cluster. `timeout_seconds` limits each unit. `ray_store` is the URL of the
    remote through which nodes exchange results if they do not share the store.
    """

    jobs: int | None = None
    timeout_seconds: float = UNIT_TIMEOUT_SECONDS
    ray: str | None = None
    ray_store: str | None = None

    @property
    def num_local(self) -> int:
        """The number of worker processes on this machine."""
        return self.jobs or available_cores()

    def pool(self, store: Store, target: Target) -> Pool[BuildJob]:
        """Returns the pool that runs jobs of `store` for `target`. Raises SpecError for an impossible `ray_store`."""
        if self.ray is None:
            scratch, cache_dir = locked_directory(store.root), store.root / "toolcache"
            return local_pool(target, scratch, self.num_local, cache_dir, self.timeout_seconds)
        if target.backend == "hpu":
            raise SpecError(
                "--ray", "distributes jobs among CPUs, and an hpu build needs cards", "leave it out"
            )
        from aotgaudi.compile.ray import RayPlace, RayPool

        place = RayPlace(self.ray, target.backend, self.ray_store)
        return RayPool(place, store, num_workers=self.jobs, timeout_seconds=self.timeout_seconds)


@dataclass(frozen=True)
class BuildResult:
    """The result of `build`. `bundle` and `index` are None if no bundle was requested. `phases` says where the time went."""

    manifest: Manifest
    outcome: BuildOutcome
    bundle: Path | None
    index: BundleIndex | None
    phases: tuple[Phase, ...] = ()


def build(
    spec: PathLike | BuildSpec | Manifest,
    out: PathLike | None = None,
    *,
    store: PathLike | Store | None = None,
    jobs: int | Workers | None = None,
    sign_key: PathLike | Signing | None = None,
    model: PathLike | None = None,
    on_progress: Callable[[Progress], None] | Watch | None = None,
    phases: Phases | None = None,
) -> BuildResult:
    """Enumerates the entries of `spec`, compiles what the store lacks, and seals a bundle. A second run does nothing.

    Args:
        spec: A spec file (``.toml``), a manifest file, or either as a value.
        out: The bundle's directory. None: compile into the store, and seal no bundle.
        store: The store or its directory. None: $AOTGAUDI_STORE, else the user's cache directory.
        jobs: The number of worker processes on this machine (None: one a core), or `Workers` for other places.
        sign_key: The private key that signs the bundle (``aotgaudi key generate``). None: no signature.
        model: The model directory to which the bundle is bound: the signature then covers its weights, tokenizer, template
            and configuration, and the bundle serves no other model. None: the bundle serves any checkpoint of its model.
        on_progress: Called several times a second while jobs run. A `Watch` may also stop the build.
        phases: Times the build; None: starts now.

    Raises:
        SpecError, ManifestError: The spec or the manifest is wrong, or its model cannot be built.
        CompileError: Units failed. The message names each with its log. The other units are in the store.
        BuildInterruptedError: The `Watch` stopped the build. The next build continues from there.
        StoreError: The store or `out` cannot be used.
        TargetError: This machine cannot compile for the spec's target.
        UntrustedError: The key cannot be used.
    """
    phases = phases or Phases()
    manifest = spec if isinstance(spec, Manifest) else _manifest(spec, phases)
    place = None if out is None else Path(out)
    if place is not None:
        refuse_foreign(place)
    signing = (
        sign_key if isinstance(sign_key, Signing | None) else Signing((load_signing_key(Path(sign_key)),))
    )
    opened = store if isinstance(store, Store) else Store.open(_store_root(store))
    workers = jobs if isinstance(jobs, Workers) else Workers(jobs)
    watch = on_progress if isinstance(on_progress, Watch) else Watch(on_progress or (lambda _: None))
    with opened.in_use():
        outcome = compile_missing(manifest, opened, manifest.entries, workers, watch, phases)
        directory, index = None if model is None else Path(model), None
        if place is not None:
            with phases.time("seal"):
                index = seal(manifest, opened, place, signing=signing, model=directory)
    return BuildResult(manifest, outcome, place, index, phases.done)


def plan_manifest(
    manifest: Manifest,
    store: Store,
    entries: Iterable[Entry] | None = None,
    described: Target | None = None,
) -> Plan:
    """Returns the plan for `entries` (default: the whole manifest) on this machine's target, or on `described`.

    Raises SpecError like `build_target`.
    """
    target = build_target(manifest.spec, described)
    return make_plan(manifest.entries if entries is None else entries, manifest.spec, target, store)


def compile_missing(
    manifest: Manifest,
    store: Store,
    entries: tuple[Entry, ...],
    workers: Workers,
    watch: Watch,
    phases: Phases | None = None,
) -> BuildOutcome:
    """Compiles what `store` lacks for `entries` of `manifest`. `phases` times the work.

    Raises CompileError if units failed, BuildInterruptedError if `watch` stopped the run, and everything that `run_plan`
    raises.
    """
    phases = phases or Phases()
    outcome = _compile(manifest, store, entries, workers, watch, phases)
    _raise_for(outcome)
    return _proved(outcome, manifest, store, entries, workers, phases)


def _compile(
    manifest: Manifest,
    store: Store,
    entries: tuple[Entry, ...],
    workers: Workers,
    watch: Watch,
    phases: Phases,
) -> BuildOutcome:
    with phases.time("plan"):
        target = build_target(manifest.spec)
        is_proved = target.backend in PROVED_BACKENDS
        if not is_proved and is_known_complete(entries, manifest.spec, target, store):
            return BuildOutcome()
        plan = make_plan(entries, manifest.spec, target, store)
        is_done = plan.is_complete and plan.is_checked
        if is_done and not is_proved:
            remember_complete(plan, store)
        if is_done:
            return BuildOutcome()
    store.require_writable()
    with phases.time("run"):
        pool = workers.pool(store, target)
        return run_plan(plan, manifest.spec, store, pool, watch)


def _proved(
    outcome: BuildOutcome,
    manifest: Manifest,
    store: Store,
    entries: tuple[Entry, ...],
    workers: Workers,
    phases: Phases,
) -> BuildOutcome:
    """Returns `outcome` with the proof of what `store` has for `entries` now, if the device needs one."""
    if manifest.spec.target.backend not in PROVED_BACKENDS:
        return outcome
    plan = plan_manifest(manifest, store, entries)
    proof = find_proof(plan, store)
    if proof is None and any(plan.complete):
        store.require_writable()
        with phases.time("prove"):
            proof = prove(plan, store, workers.timeout_seconds)
    return replace(outcome, proof=proof)


def make_receipt(manifest: Manifest, plan: Plan, proof: ProofRow | None = None) -> Receipt:
    """Returns the receipt of the complete programs of `plan`, with the additional recipes that `proof` lists."""
    programs: dict[str, Digest] = {}
    units = {}
    for state, row in plan.complete:
        programs.update(dict.fromkeys((entry.id for entry in state.entries), Digest.parse(row.program)))
        units.update({key: plan.units[key] for key in row.units})
    checked = None if plan.model_check is None else plan.model_check.row
    return Receipt(
        manifest_id=manifest.id,
        target=plan.target,
        programs=programs,
        units=units,
        recipes={} if proof is None else proof.recipes,
        builder=builder_versions(),
        model_check=None if checked is None else checked.check,
    )


def seal(
    manifest: Manifest,
    store: Store,
    out: Path,
    *,
    signing: Signing | None = None,
    model: Path | None = None,
) -> BundleIndex:
    """Seals what the store has for `manifest` into a bundle at `out`, signed if `signing` is given.

    With `model`, the bundle is bound to the files of that model directory.

    Raises:
        SpecError: The model directory holds another model.
        NotWarmError: Entries are missing.
        CorruptError: A step calls the hyper-connections of another class.
        MissingPackageError: torch or transformers is not installed.
    """
    require_key_parts()
    plan = plan_manifest(manifest, store)
    receipt = make_receipt(manifest, plan, require_proof(plan, store))
    missing = receipt.missing(manifest.entries)
    if missing:
        raise NotWarmError(
            f"{len(missing)} of {len(manifest.entries)} entries have no artifact in the store, first: {missing[0]} "
            "(run: aotgaudi build cache MANIFEST)"
        )
    _check_splits(manifest, receipt, store)
    if model is not None:
        receipt = receipt.model_copy(update={"model": bind_model(model, manifest.spec)})
    return pack_bundle(dump_manifest(manifest), manifest.id, receipt, store.objects, out, signing)


def _check_splits(manifest: Manifest, receipt: Receipt, store: Store) -> None:
    """Raises CorruptError if a step calls the hyper-connections of another class than its own."""
    if StepSplits.of(manifest.spec) is None:
        return
    found = ((entry, receipt.programs.get(entry.id)) for entry in manifest.entries)
    programs = {entry: load_program(store.objects.read(d), d) for entry, d in found if d is not None}
    for _, problem in split_problems(manifest.spec, programs):
        raise CorruptError(f"{problem} (build it again in another store)")


def _manifest(spec: PathLike | BuildSpec, phases: Phases) -> Manifest:
    with phases.time("enumerate"):
        return Manifest.of(spec) if isinstance(spec, BuildSpec) else load_manifest_or_spec(Path(spec))


def _store_root(store: PathLike | None) -> Path:
    return Path(store or os.environ.get("AOTGAUDI_STORE") or default_store_root())


def _raise_for(outcome: BuildOutcome) -> None:
    failures, num_compiled = outcome.failures, len(outcome.compiled)
    if outcome.interrupted:
        failed = f" and {len(failures)} jobs failed" if failures else ""
        raise BuildInterruptedError(
            f"stopped at a unit boundary with {num_compiled} units done{failed};"
            " resumable: run the same command again"
        )
    if failures:
        num_jobs = len(failures) + num_compiled + outcome.num_traced
        rows = [f"  {failure.label}: {failure.message}\n    log: {failure.log_path}" for failure in failures]
        head = f"{len(failures)} of {num_jobs} jobs failed; the others are in the store"
        raise CompileError("\n".join([head, *rows]))
