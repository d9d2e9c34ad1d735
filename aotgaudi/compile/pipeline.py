"""From a spec to a bundle: the offline half on one page. Imports no torch; the workers do.

::

    spec --enumerate--> manifest --plan--> what is missing --run--> store --receipt, seal--> bundle
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from aotgaudi.backends.base import Target
from aotgaudi.backends.offline import build_target
from aotgaudi.bucketing.mhc_splits import StepSplits
from aotgaudi.bundle.format import BundleIndex
from aotgaudi.bundle.model_directory import bind_model
from aotgaudi.bundle.pack import pack_bundle
from aotgaudi.bundle.programs import load_program, split_problems
from aotgaudi.bundle.receipt import Receipt
from aotgaudi.bundle.signing import Signing, load_signing_key
from aotgaudi.bundle.staging import refuse_foreign
from aotgaudi.compile.cards import find_proof, local_pool, proof_key, prove, require_proof
from aotgaudi.compile.jobs import BuildJob
from aotgaudi.compile.keys import (
    PROVED_BACKENDS,
    ModelCheckRow,
    ProgramRow,
    ProofRow,
    UnitRow,
    builder_versions,
    read_rows,
    record,
    require_key_parts,
)
from aotgaudi.compile.plan import Plan, is_known_complete, make_plan, remember_complete
from aotgaudi.compile.run import BuildOutcome, Progress, Watch, run_plan
from aotgaudi.compile.workers import UNIT_TIMEOUT_SECONDS, Pool
from aotgaudi.digest import Digest
from aotgaudi.entries import Entry
from aotgaudi.errors import BuildInterruptedError, CompileError, CorruptError, NotWarmError, SpecError
from aotgaudi.machine import available_cores
from aotgaudi.manifest.manifest import Manifest, load_manifest_or_spec
from aotgaudi.manifest.manifest import dumps as dump_manifest
from aotgaudi.phases import Phase, Phases
from aotgaudi.share.remote_cache import RemoteCache, Sharing
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.store.location import default_store_root
from aotgaudi.store.scratch import locked_directory
from aotgaudi.store.store import Store

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Workers:
    """Where jobs run: on this machine, or on the Ray cluster at `ray`.

    `jobs` None means one per core, or the whole cluster. `timeout_seconds` limits each unit.
    """

    jobs: int | None = None
    timeout_seconds: float = UNIT_TIMEOUT_SECONDS
    ray: str | None = None

    @property
    def num_local(self) -> int:
        """The number of worker processes on this machine."""
        return self.jobs or available_cores()

    def pool(self, store: Store, target: Target, exchange: str | None = None) -> Pool[BuildJob]:
        """Returns the pool that runs jobs of `store` for `target`.

        Nodes of a cluster exchange results through the remote at `exchange`; None: they share the store. Raises SpecError.
        """
        if self.ray is None:
            scratch, cache_dir = locked_directory(store.root), store.root / "toolcache"
            return local_pool(target, scratch, self.num_local, cache_dir, self.timeout_seconds)
        if target.backend == "hpu":
            raise SpecError(
                "--ray", "distributes jobs among CPUs, and an hpu build needs cards", "leave it out"
            )
        from aotgaudi.compile.ray import RayPlace, RayPool

        place = RayPlace(self.ray, exchange)
        return RayPool(place, store, num_workers=self.jobs, timeout_seconds=self.timeout_seconds)


@dataclass(frozen=True)
class BuildResult:
    """The result of `build`. `bundle` and `index` are None if no bundle was requested. `phases` says where the time went."""

    manifest: Manifest
    outcome: BuildOutcome
    bundle: Path | None
    index: BundleIndex | None
    phases: tuple[Phase, ...] = ()


def build(  # noqa: PLR0913 - all that a build can be given
    spec: PathLike | BuildSpec | Manifest,
    out: PathLike | None = None,
    *,
    store: PathLike | Store | None = None,
    remote: str | Sharing | None = None,
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
        remote: Where to look for what the store lacks, e.g. ``s3://bucket/prefix``. With ``Sharing(url, push=True)``, what
            the store then has is uploaded there.
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
    sharing = Sharing(remote) if isinstance(remote, str) else remote
    with opened.in_use():
        outcome = compile_missing(manifest, opened, manifest.entries, workers, watch, phases, sharing)
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
    sharing: Sharing | None = None,
) -> BuildOutcome:
    """Compiles what `store` lacks for `entries` of `manifest` and the remote of `sharing` does not have. `phases` times it.

    A store that is known to have everything asks no remote, unless it is to upload.

    Raises CompileError if units failed, BuildInterruptedError if `watch` stopped the run, and everything that `run_plan`
    raises.
    """
    phases = phases or Phases()
    with phases.time("plan"):
        target = build_target(manifest.spec)
        is_short = target.backend not in PROVED_BACKENDS and not (sharing and sharing.push)
        if is_short and is_known_complete(entries, manifest.spec, target, store):
            return BuildOutcome()
        plan = make_plan(entries, manifest.spec, target, store)
    build = _Build(manifest, store, entries, target, workers, watch, phases)
    if sharing is None:
        return build.run(plan, None)
    with sharing.open(store, watch.warn) as remote:
        outcome = build.run(plan, remote, sharing.url)
        with phases.time("upload") if sharing.push else nullcontext():
            return replace(outcome, remote=remote.finish(num_here=len(plan.rows)))


@dataclass(frozen=True)
class _Build:
    """One build of `entries` of `manifest` into `store`."""

    manifest: Manifest
    store: Store
    entries: tuple[Entry, ...]
    target: Target
    workers: Workers
    watch: Watch
    phases: Phases

    def plan(self) -> Plan:
        """Returns what there is now, and what is missing."""
        return make_plan(self.entries, self.manifest.spec, self.target, self.store)

    def run(self, plan: Plan, remote: RemoteCache | None, url: str | None = None) -> BuildOutcome:
        """Compiles what `plan` lacks, and proves what needs it. `remote`, at `url`, is behind the store."""
        if remote is not None:
            plan = self._read_through(plan, remote)
        outcome = self._compile(plan, remote, url)
        _raise_for(outcome)
        return replace(outcome, proof=self._proof(remote))

    def _compile(self, plan: Plan, remote: RemoteCache | None, url: str | None) -> BuildOutcome:
        if plan.is_complete and plan.is_checked:
            if self.target.backend not in PROVED_BACKENDS:
                remember_complete(plan, self.store)
            return BuildOutcome()
        self.store.require_writable()
        with self.phases.time("run"):
            pool = self.workers.pool(self.store, self.target, url)
            return run_plan(plan, self.manifest.spec, self.store, pool, self.watch, remote)

    def _read_through(self, plan: Plan, remote: RemoteCache) -> Plan:
        """Returns the plan after `remote` has given what it has of it, and begins to upload the rest."""
        if not (plan.is_complete and plan.is_checked):
            with self.phases.time("fetch"):
                if fetch_missing(plan, self.store, remote):
                    plan = self.plan()
        upload_all(plan, remote)
        return plan

    def _proof(self, remote: RemoteCache | None) -> ProofRow | None:
        """Returns the proof of what the store has now, if the device needs one."""
        if self.target.backend not in PROVED_BACKENDS:
            return None
        plan = self.plan()
        proof = find_proof(plan, self.store)
        if proof is None and remote is not None:
            remote.look_up(proof_key(plan), ProofRow.model_validate, record).result()
            proof = find_proof(plan, self.store)
        if proof is None and any(plan.complete):
            self.store.require_writable()
            with self.phases.time("prove"):
                proof = prove(plan, self.store, self.workers.timeout_seconds)
        if proof is not None and remote is not None:
            remote.upload(proof_key(plan), proof)
        return proof


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


def fetch_missing(plan: Plan, store: Store, remote: RemoteCache) -> bool:
    """Fetches into `store` what `plan` lacks and `remote` has: programs first, then their units.

    Returns whether anything came, so that a new plan finds more. Raises StoreError.
    """
    check, checked = plan.model_check, None
    if check is not None and check.row is None:
        checked = remote.look_up(check.key.hex, ModelCheckRow.model_validate, record)
    untraced = [state.key.hex for state in plan.untraced]
    num_found = remote.look_up_all(untraced, ProgramRow.model_validate, record)
    traced = read_rows(ProgramRow, store, untraced if num_found else ())
    units = {key for row in traced.values() for key in row.units} - plan.units.keys()
    num_found += remote.look_up_all([*plan.missing_units, *units], UnitRow.model_validate, record)
    return num_found > 0 or (checked is not None and checked.result())


def upload_all(plan: Plan, remote: RemoteCache) -> None:
    """Uploads everything that `plan` found and `remote` lacks. Does not wait."""
    for key, row in plan.rows.items():
        remote.upload(key, row)
