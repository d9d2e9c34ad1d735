"""The corruption matrix: every object of a bundle, damaged in every way, is found before anything could be mapped.

A bundle of fake artifacts (no compiler, no torch). In each round every object is damaged at once, and each of them
must be reported by name; what `serve` would load is asked for in the same way, and must not be there. Then the same
to a store: `cache fsck` must find every object, building them again and sealing must give the same index.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from aotgaudi.backends.base import Target, Unit
from aotgaudi.backends.fake import FakeCompiler, probe
from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.pack import pack_bundle
from aotgaudi.bundle.receipt import Receipt, SealedUnit
from aotgaudi.bundle.verify import hold_bundle
from aotgaudi.digest import Digest, Key, sha256_bytes
from aotgaudi.entries import DecodeEntry, Entry
from aotgaudi.errors import CorruptError
from aotgaudi.graphs.program import Call, Program
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.manifest import dumps as dump_manifest
from aotgaudi.store.cas import ObjectStore, object_path
from aotgaudi.store.fsck import check_store
from aotgaudi.store.store import Store
from tests.specs import spec_of


@dataclass(frozen=True)
class Outcome:
    """One way of damaging: how many objects were damaged, found in the bundle, and found in the store."""

    damage: str
    damaged: int
    found_by_verify: int
    found_by_fsck: int
    mended: bool

    @property
    def is_complete(self) -> bool:
        """Whether nothing was missed, and all of it was mended."""
        return self.damaged == self.found_by_verify == self.found_by_fsck and self.mended


class Workshop:
    """A store of fake artifacts and a bundle of it, made anew as often as asked."""

    def __init__(self, folder: Path, num_entries: int) -> None:
        self.folder, self.bundle = folder, folder / "bundle"
        self.entries: tuple[Entry, ...] = tuple(DecodeEntry(1, 1, n) for n in range(1, num_entries + 1))
        self.manifest = Manifest(spec_of(), self.entries)
        self.store = Store.open(folder / "store")
        self.index = self.build()

    def build(self) -> bytes:
        """Compiles what there is, stores it, and seals it. Returns the index's bytes."""
        receipt = _receipt(self.manifest, self.store.objects, self.folder)
        data = dump_manifest(self.manifest)
        return pack_bundle(data, self.manifest.id, receipt, self.store.objects, self.bundle).dumps()

    def digests(self) -> tuple[Digest, ...]:
        """The objects of the bundle."""
        return open_bundle(self.bundle).index.objects


def _receipt(manifest: Manifest, objects: ObjectStore, folder: Path) -> Receipt:
    """One program an entry, of a unit that all share and one of its own."""
    target = probe()
    shared, sealed_shared = _unit("shared", target, objects, folder)
    programs, units = {}, {shared: sealed_shared}
    for entry in manifest.entries:
        own, units[own] = _unit(str(entry), target, objects, folder)
        calls = tuple(Call(unit=key, inputs=(), outputs=(f"{n}.0",)) for n, key in enumerate((shared, own)))
        program = Program(inputs=(), weights=(), caches=(), calls=calls, outputs=("1.0",))
        programs[entry.id] = str(objects.put_bytes(program.dumps()))
    return Receipt(
        manifest_id=manifest.id, target=target, programs=programs, units=units, builder={"graphs": "1"}
    )


def _unit(text: str, target: Target, objects: ObjectStore, folder: Path) -> tuple[str, SealedUnit]:
    unit = Unit(text, Key.of([("text", text)]), text)
    compiled = FakeCompiler(target).compile(unit, folder)
    artifact = {name: str(objects.put_file(path)) for name, path in compiled.files.items()}
    return sha256_bytes(text.encode()), SealedUnit(artifact=artifact, tolerance=0.0)


@dataclass(frozen=True)
class Victim:
    """An object to damage: where it lies, its bytes, and those of another valid object."""

    path: Path
    data: bytes
    other: bytes

    def write(self, data: bytes) -> None:
        """Puts other bytes into the same file."""
        self.path.chmod(0o644)
        self.path.write_bytes(data)


Damage = Callable[[Victim, random.Random], None]


def flip(victim: Victim, chance: random.Random) -> None:
    """One bit, anywhere."""
    position = chance.randrange(len(victim.data) * 8)
    changed = bytearray(victim.data)
    changed[position // 8] ^= 1 << position % 8
    victim.write(bytes(changed))


def to_directory(victim: Victim, _: random.Random) -> None:
    """A directory with the file in it."""
    victim.path.unlink()
    victim.path.mkdir()
    (victim.path / victim.path.name).write_bytes(victim.data)


def to_symlink(victim: Victim, _: random.Random) -> None:
    """A link to the very bytes."""
    elsewhere = victim.path.parents[4] / "elsewhere" / victim.path.name
    elsewhere.parent.mkdir(exist_ok=True)
    elsewhere.write_bytes(victim.data)
    victim.path.unlink()
    victim.path.symlink_to(elsewhere)


def to_fifo(victim: Victim, _: random.Random) -> None:
    """A FIFO that nobody writes to."""
    victim.path.unlink()
    os.mkfifo(victim.path)


OTHER_DAMAGES: tuple[tuple[str, Damage], ...] = (
    ("truncated to 0", lambda victim, _: victim.write(b"")),
    ("truncated to 1", lambda victim, _: victim.write(victim.data[:1])),
    ("truncated to half", lambda victim, _: victim.write(victim.data[: len(victim.data) // 2])),
    ("truncated by 1", lambda victim, _: victim.write(victim.data[:-1])),
    ("one byte appended", lambda victim, _: victim.write(victim.data + b"\0")),
    ("swapped with another", lambda victim, _: victim.write(victim.other)),
    ("a directory", to_directory),
    ("a symlink", to_symlink),
    ("a FIFO", to_fifo),
)


def run(workshop: Workshop, num_flips: int, chance: random.Random) -> Iterator[Outcome]:
    """Damages, looks, mends; once for each way."""
    digests = workshop.digests()
    data = {digest: workshop.store.objects.read(digest) for digest in digests}
    rotated = dict(zip(digests, (*digests[1:], digests[0]), strict=True))
    flips = [(f"bit flip {number + 1}", flip) for number in range(num_flips)]
    for name, damage in (*flips, *OTHER_DAMAGES):
        found = []
        for root, look in ((workshop.bundle, found_by_verify), (workshop.store.root, found_by_fsck)):
            for digest in digests:
                damage(Victim(object_path(root, digest), data[digest], data[rotated[digest]]), chance)
            found.append(len(look(workshop)))
        mended = workshop.build() == workshop.index and not found_by_verify(workshop)
        yield Outcome(name, len(digests), found[0], found[1], mended)


def found_by_verify(workshop: Workshop) -> set[Digest]:
    """The objects that verifying calls corrupt, and that nobody can load; none where the bundle is intact."""
    held = hold_bundle(open_bundle(workshop.bundle))
    try:
        bad = {Path(row.path).name for row in held.report.corrupt}
        loadable = {digest for digest in workshop.digests() if _is_loadable(held.path, digest)}
        try:
            held.report.raise_if_bad(workshop.bundle)
        except CorruptError:
            return {d for d in workshop.digests() if d.sha256 in bad and d not in loadable}
        return set()
    finally:
        held.objects.close()


def _is_loadable(path_of: Callable[[str], Path], digest: Digest) -> bool:
    try:
        return path_of(str(digest)).exists()
    except KeyError:
        return False


def found_by_fsck(workshop: Workshop) -> set[Digest]:
    """The objects that `cache fsck` removes."""
    report = check_store(workshop.store)
    bad = {Path(row.path).name for row in report.damage if row.is_removed}
    return {digest for digest in workshop.digests() if digest.sha256 in bad}


def main() -> None:
    """Runs the matrix, prints a summary; exits with 1 when anything was missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--entries", type=int, default=78, help="entries of the bundle [default: 78]")
    parser.add_argument("--flips", type=int, default=100, help="bits flipped in each object [default: 100]")
    parser.add_argument("--seed", type=int, default=0, help="where bits are flipped [default: 0]")
    parser.add_argument("--json", type=Path, help="file for the outcome")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # The store names each object that it removes.
    folder = Path(tempfile.mkdtemp(prefix="aotgaudi-corruption-"))
    began = time.perf_counter()
    try:
        outcomes = list(run(Workshop(folder, args.entries), args.flips, random.Random(args.seed)))
    finally:
        shutil.rmtree(folder)
    seconds = time.perf_counter() - began
    missed = [outcome for outcome in outcomes if not outcome.is_complete]
    cases = sum(outcome.damaged for outcome in outcomes)
    found = sum(outcome.found_by_verify for outcome in outcomes)
    print(
        f"{args.entries} entries, {outcomes[0].damaged} objects, {len(outcomes)} ways of damage: "
        f"{found} of {cases} found by verifying, {sum(o.found_by_fsck for o in outcomes)} by fsck, "
        f"{sum(o.mended for o in outcomes)} of {len(outcomes)} rounds mended, {seconds:.1f} s"
    )
    for outcome in missed:
        print(f"missed: {outcome}")
    if args.json:
        args.json.write_text(
            json.dumps([asdict(outcome) for outcome in outcomes], indent=1), encoding="utf-8"
        )
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
