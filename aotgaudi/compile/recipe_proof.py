"""Proves that a new process finds every recipe of a build and compiles nothing. Imports no torch; its workers do.

Each round is a new process whose directory holds the recorded recipes. If the first one compiles something, the keys of
some units depend on what ran before them (K-10): it is recorded for the programs, and the second must find everything.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aotgaudi.backends.base import Target
from aotgaudi.compile.cards import card_environment
from aotgaudi.compile.jobs import logged_errors
from aotgaudi.compile.keys import PROVED_BACKENDS, ProofRow, read_proof, record
from aotgaudi.compile.plan import Plan
from aotgaudi.compile.workers import LocalPool
from aotgaudi.digest import Digest, canonical_json, sha256_bytes
from aotgaudi.errors import CompileError, NotWarmError
from aotgaudi.gaudi.identity import usable_modules
from aotgaudi.gaudi.recipes import RecipeName, materialise
from aotgaudi.graphs.program import Program
from aotgaudi.store.cas import ObjectStore
from aotgaudi.store.scratch import locked_directory
from aotgaudi.store.store import Store

_NUM_ROUNDS = 2
_MOST_NAMED = 5
_WAIT_SECONDS = 1.0

Files = Mapping[str, str]
"""Name -> digest."""


@dataclass(frozen=True)
class Round:
    """What a process reported: what it compiled (label, key), and the resulting files."""

    compiled: tuple[tuple[str, str], ...]
    files: Files


@dataclass(frozen=True)
class ProveJob:
    """Run `programs` (digests) of `units` (key -> label, files) in a process whose directory has `recipes`."""

    programs: tuple[str, ...]
    units: Mapping[str, tuple[str, Files]]
    recipes: Files
    target: Target
    store_root: Path
    log_path: Path
    lower: tuple[Path, ...] = ()
    label: str = "proof"

    def run(self) -> Round:
        """Raises CompileError, StoreError."""
        with logged_errors(self):
            from aotgaudi.backends.hpu.compiler import StoredUnit, look

            objects = ObjectStore(self.store_root, self.lower, heals=True)
            programs = [
                Program.model_validate_json(objects.read(Digest.parse(digest))) for digest in self.programs
            ]
            units = {
                key: StoredUnit(
                    label,
                    {name: objects.path(Digest.parse(digest)) for name, digest in files.items()},
                    is_foreign=any(
                        self.recipes.get(name, digest) != digest for name, digest in files.items()
                    ),
                )
                for key, (label, files) in self.units.items()
            }
            compiled, files = look(programs, units, self.target)
            return Round(compiled, {name: str(objects.put_file(path)) for name, path in files.items()})


def find_proof(plan: Plan, store: Store) -> ProofRow | None:
    """Returns the recorded proof of the complete programs of `plan`; None without one."""
    return read_proof(store, proof_key(plan))


def require_proof(plan: Plan, store: Store) -> ProofRow | None:
    """Returns the proof of what `plan` has; None for a backend that needs none. Raises NotWarmError if it is missing."""
    if plan.target.backend not in PROVED_BACKENDS:
        return None
    found = find_proof(plan, store)
    if found is None:
        raise NotWarmError(
            "what the store has was not proved to load in a new process (run: aotgaudi build cache MANIFEST)"
        )
    return found


def prove(plan: Plan, store: Store, timeout_seconds: float) -> ProofRow:
    """Returns the proof of all complete programs of `plan`. Runs processes on a card unless there is a proof already.

    Raises CompileError, naming the units, if keys do not settle.
    """
    found = find_proof(plan, store)
    if found is not None:
        return found
    units = _units(plan)
    late: dict[str, str] = {}
    last: Round | None = None
    for number in range(1, _NUM_ROUNDS + 1):
        last = _round(plan, store, units, late, timeout_seconds)
        if not last.compiled:
            row = ProofRow(
                recipes=_parsed(late), num_recipes=len(_recipes(units, late)) // 2, num_rounds=number
            )
            record(store, proof_key(plan), row)
            return row
        late |= last.files
    assert last is not None
    labels = list(dict.fromkeys(label for label, _ in last.compiled))
    more = f" and {len(labels) - _MOST_NAMED} more" if len(labels) > _MOST_NAMED else ""
    raise CompileError(
        f"proof: after {_NUM_ROUNDS} rounds a new process still compiles {len(last.compiled)} graphs, so their keys do not"
        f" settle: {', '.join(labels[:_MOST_NAMED])}{more} (aotgaudi doctor --hpu, H-06)"
    )


def _round(
    plan: Plan,
    store: Store,
    units: Mapping[str, tuple[str, Files]],
    late: Files,
    timeout_seconds: float,
) -> Round:
    recipes = _recipes(units, late)
    with locked_directory(store.root) as scratch:
        directory = scratch / "recipes"
        objects = _parsed(recipes)
        materialise({name: (one, store.objects.path(one)) for name, one in objects.items()}, directory)
        directory.chmod(0o700)  # So that what is compiled is stored, and that it can be removed.
        job = ProveJob(
            programs=_programs(plan),
            units=units,
            recipes=recipes,
            target=plan.target,
            store_root=store.root,
            log_path=store.root / "logs" / "proof.log",
            lower=store.lower,
        )
        environment = card_environment(directory, usable_modules(os.environ)[0])
        with LocalPool(
            1, store.root / "toolcache", timeout_seconds=timeout_seconds, environment=environment
        ) as pool:
            pool.submit(0, job)
            while not (done := pool.wait(_WAIT_SECONDS)):
                pass
    if done[0].error is not None:
        raise done[0].error
    found: Round = done[0].result
    return found


def _parsed(files: Files) -> dict[str, Digest]:
    return {name: Digest.parse(digest) for name, digest in files.items()}


def _programs(plan: Plan) -> tuple[str, ...]:
    return tuple(dict.fromkeys(row.program for _, row in plan.complete))


def _units(plan: Plan) -> dict[str, tuple[str, Files]]:
    return {
        key: (
            plan.units[key].label,
            {name: str(digest) for name, digest in plan.units[key].artifact.items()},
        )
        for key in sorted({key for _, row in plan.complete for key in row.units})
    }


def _recipes(units: Mapping[str, tuple[str, Files]], late: Files) -> dict[str, str]:
    """Returns the recipes of all units, one file a name: the one with the smallest digest, as a server chooses it."""
    chosen: dict[str, str] = {}
    for files in (late, *(files for _, files in units.values())):
        for name, digest in files.items():
            if RecipeName.parse(name) is not None:
                chosen[name] = min(digest, chosen.get(name, digest))
    return chosen


def proof_key(plan: Plan) -> str:
    """Returns the key of the proof of the complete programs of `plan`, 64 hex digits."""
    content = [sorted(_programs(plan)), {key: files for key, (_, files) in _units(plan).items()}]
    return sha256_bytes(b"aotgaudi.proof/1\n" + canonical_json(content))
