"""Builds missing entries on first use, without --require-warm, in another process that keeps them in the store.

This process never compiles. It starts ``aotgaudi build cache --entry ID``, waits, and loads the result. All requests wait
meanwhile, which a warm bundle avoids.

If a signature is required, only objects that the signed receipt names are loaded. Builds are reproducible, so an honest
builder makes exactly these objects.
"""

from __future__ import annotations

import json
import logging
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from aotgaudi.bundle.programs import load_program
from aotgaudi.bundle.receipt import Receipt
from aotgaudi.bundle.receipt import loads as load_receipt
from aotgaudi.child import python_command
from aotgaudi.digest import Digest
from aotgaudi.entries import Entry
from aotgaudi.errors import CorruptError, NotWarmError, UntrustedError
from aotgaudi.runtime.executables import ExecutableTable
from aotgaudi.runtime.guard import Guard
from aotgaudi.runtime.load import Artifacts, Loader
from aotgaudi.store.cas import ObjectStore
from aotgaudi.store.memfd import SealedObjects

logger = logging.getLogger(__name__)


class FirstUseBuilder:
    """Makes cold entries warm. Runs on the engine's thread, which waits.

    `num_built` counts the entries that it has made warm.
    """

    def __init__(
        self,
        manifest_bytes: bytes,
        store_root: Path,
        loader: Loader,
        table: ExecutableTable,
        guard: Guard,
        environment: Mapping[str, str] | None = None,
        signed: Receipt | None = None,
    ) -> None:
        """`guard` lets the builder start and counts what it compiles.

        `environment` is the builder's environment; None is this process's. `signed` names all objects that may be loaded;
        None allows every object that the builder reports.
        """
        self._signed = signed
        self._manifest_bytes, self._store_root = manifest_bytes, store_root
        self._loader, self._table = loader, table
        self._guard, self._environment = guard, environment
        self.num_built = 0

    def __call__(self, entry: Entry) -> None:
        """Builds and loads `entry`. Raises NotWarmError if the build fails; the next step that needs it tries again.

        Raises UntrustedError, and loads nothing, if the signed receipt does not name the entry, or if the store lacks an
        object that it names after the build.
        """
        if self._signed is not None and entry.id not in self._signed.programs:
            raise UntrustedError(f"entry {entry} is not built on first use: no trusted key has signed for it")
        logger.warning("Configuration: %s was not warmed-up!", entry)
        with tempfile.TemporaryDirectory(prefix="aotgaudi-") as scratch:
            manifest_path, receipt_path = Path(scratch, "manifest.json"), Path(scratch, "receipt.json")
            manifest_path.write_bytes(self._manifest_bytes)
            num_compiled = self._build(entry, manifest_path, receipt_path)
            receipt = self._signed or load_receipt(receipt_path.read_bytes())
            held = SealedObjects()
            try:
                self._loader.load([entry], self._artifacts(receipt, held), self._table)
            finally:
                held.close()
        self._guard.count("first_use", num_compiled)
        self.num_built += 1
        logger.warning("Configuration: %s is warm now (%d units compiled)", entry, num_compiled)

    def _build(self, entry: Entry, manifest_path: Path, receipt_path: Path) -> int:
        options = (
            "--entry",
            entry.id,
            "--store",
            str(self._store_root),
            "--receipt",
            str(receipt_path),
            "--json",
        )
        command = python_command("aotgaudi.cli.main", "build", "cache", str(manifest_path), *options)
        with self._guard.excusing():
            done = subprocess.run(command, capture_output=True, text=True, env=self._environment, check=False)
        if done.returncode != 0:
            raise NotWarmError(f"entry {entry} could not be built on first use: {done.stderr.strip()[-500:]}")
        return int(json.loads(done.stdout)["num_compiled"])

    def _artifacts(self, receipt: Receipt, held: SealedObjects) -> Artifacts:
        objects = ObjectStore(self._store_root)

        def read(digest: Digest) -> bytes:
            self._require_made(objects, digest)
            return objects.read(digest)

        def verified(digest: Digest) -> Path:
            self._require_made(objects, digest)
            fault = held.hold(objects.path(digest), digest)
            if fault is not None:
                raise CorruptError(f"object {digest} in {self._store_root}: {fault.reason} (build it again)")
            return held.path(digest)

        return Artifacts(
            receipt=receipt,
            program=lambda entry_id: load_program(
                read(receipt.programs[entry_id]), receipt.programs[entry_id]
            ),
            read=read,
            path=verified,
        )

    def _require_made(self, objects: ObjectStore, digest: Digest) -> None:
        if self._signed is not None and not objects.has(digest):
            raise UntrustedError(
                f"what was built on first use is not what was signed: {self._store_root} has no object {digest}"
                " (build with what the bundle was built with, or serve a whole bundle)"
            )
