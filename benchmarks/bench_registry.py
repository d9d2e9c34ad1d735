"""Pushing and pulling a bundle, beside `skopeo copy` of the same blobs, on a registry of this machine.

Needs docker-registry and skopeo. Every way starts with an empty registry and an empty destination; what is timed are
whole processes. A bundle goes as an artifact (`cache push` and `cache pull`: objects are blobs) and
as an image (`build image` is not timed; pushing it, and `cache pull`, which unpacks and verifies every object, are).
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import harness
from harness import Spread, Table, verdict

from aotgaudi.backends.fake.probe import probe
from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.pack import pack_bundle
from aotgaudi.bundle.receipt import Receipt, SealedUnit
from aotgaudi.digest import sha256_bytes
from aotgaudi.entries import DecodeEntry
from aotgaudi.graphs.program import Call, Program
from aotgaudi.share.image import write_image
from aotgaudi.store.cas import ObjectStore

TARGET = 0.6
KINDS = ("image", "artifact")
WAYS = tuple(f"{tool} {kind}" for kind in KINDS for tool in ("skopeo", "aotgaudi"))
PUSH_IMAGE = """
import sys
from pathlib import Path
from aotgaudi.digest import Digest
from aotgaudi.share.registry_client import Credentials, RegistryClient
from aotgaudi.share.image import WrittenImage
from aotgaudi.share.image_transfer import push_image
from aotgaudi.share.layout import Layout
from aotgaudi.share.reference import parse_reference
from aotgaudi.share.registry import Registry
from aotgaudi.share.transfer import Conduct

layout, reference = Layout(Path(sys.argv[1])), parse_reference(sys.argv[2])
written = WrittenImage(Digest.of(layout.find(None).manifest_bytes), None)
push_image(layout, written, Registry(RegistryClient(reference, Credentials())), reference.tag, Conduct())
"""


def main() -> None:
    """Measures, prints, writes."""
    args = _arguments()
    for binary in ("docker-registry", "skopeo"):
        if shutil.which(binary) is None:
            sys.exit(f"{binary} is not installed: apt-get install docker-registry skopeo")
    machine = harness.environment()
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="aotgaudi-bench-") as name:
        folder = Path(name)
        num_bytes = _make_bundle(folder, args.megabytes, args.objects)
        _copy_artifact(folder)
        for _ in range(args.runs):
            for label in WAYS:
                with _registry(
                    folder
                ) as host:  # Empty each time: skopeo would mount what it knows to be there.
                    push, pull = _commands(label, folder, host)
                    samples.setdefault(f"{label} push", []).append(harness.run(push)[0])
                    samples.setdefault(f"{label} pull", []).append(harness.run(pull)[0])
                shutil.rmtree(folder / "out")
                shutil.rmtree(folder / "registry")
    spreads = {label: Spread(tuple(values)) for label, values in samples.items()}
    values = {label: spread.json() for label, spread in spreads.items()}
    harness.finish("registry", args, machine, values, [_table(spreads, num_bytes, args)])


def _arguments() -> argparse.Namespace:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=200, help="of the bundle's objects")
    parser.add_argument("--objects", type=int, default=100)
    parser.add_argument("--runs", type=int, default=5)
    return parser.parse_args()


def _make_bundle(folder: Path, megabytes: int, num_objects: int) -> int:
    """Seals artifacts half of which compress, as code does, and writes the image. Returns the objects' bytes."""
    chance = random.Random(7)
    objects, programs, units = ObjectStore(folder / "store"), {}, {}
    size = megabytes * 1_000_000 // num_objects
    for number in range(num_objects):
        half = chance.randbytes(size // 4) * 2
        artifact = objects.put_bytes(half + chance.randbytes(size - len(half)))
        key = sha256_bytes(str(number).encode())
        units[key] = SealedUnit(artifact={"unit.so": str(artifact)}, tolerance=0.0)
        calls = (Call(unit=key, inputs=(), outputs=()),)
        program = Program(inputs=(), weights=(), caches=(), calls=calls, outputs=())
        programs[DecodeEntry(1, 1, number + 1).id] = str(objects.put_bytes(program.dumps()))
    receipt = Receipt(
        manifest_id="0" * 64, target=probe(), programs=programs, units=units, builder={"graphs": "1"}
    )
    pack_bundle(b"{}", "0" * 64, receipt, objects, folder / "bundle")
    bundle = open_bundle(folder / "bundle")
    write_image(bundle, folder / "image", tag="v1")
    return bundle.index.counts.object_bytes


def _commands(way: str, folder: Path, host: str) -> tuple[list[str], list[str]]:
    """The processes that push and pull."""
    tool, kind = way.split()
    out, layout, name = folder / "out", folder / kind, f"{host}/bench/{kind}:v1"
    out.mkdir()
    if tool == "skopeo":
        copy = ["skopeo", "copy", "--quiet"]
        return (
            [*copy, "--dest-tls-verify=false", f"oci:{layout}:v1", f"docker://{name}"],
            [*copy, "--src-tls-verify=false", f"docker://{name}", f"oci:{out / 'pulled'}:v1"],
        )
    pull = harness.command("cache", "pull", name, "-o", out / "pulled")
    if kind == "image":
        return [sys.executable, "-c", PUSH_IMAGE, str(layout), name], pull
    return harness.command("cache", "push", name, folder / "bundle"), pull


def _copy_artifact(folder: Path) -> None:
    """Makes a layout of the bundle's artifact, for skopeo to push."""
    with _registry(folder) as host:
        harness.run(harness.command("cache", "push", f"{host}/bench/artifact:v1", folder / "bundle"))
        source, target = f"docker://{host}/bench/artifact:v1", f"oci:{folder / 'artifact'}:v1"
        harness.run(["skopeo", "copy", "--quiet", "--src-tls-verify=false", source, target])
    shutil.rmtree(folder / "registry")


def _table(spreads: dict[str, Spread], num_bytes: int, args: argparse.Namespace) -> Table:
    rows = []
    for kind in KINDS:
        seconds = {
            tool: spreads[f"{tool} {kind} push"].median + spreads[f"{tool} {kind} pull"].median
            for tool in ("skopeo", "aotgaudi")
        }
        for tool, both in seconds.items():
            share = seconds["skopeo"] / both
            judged = "" if tool == "skopeo" else verdict(share, TARGET, at_least=True)
            push, pull = (spreads[f"{tool} {kind} {step}"].text() for step in ("push", "pull"))
            rate = f"{2 * num_bytes / both / 1e6:.0f} MB/s"
            rows.append((f"{tool} {kind}", f"{push} s", f"{pull} s", rate, f"{share:.0%}", judged))
    columns = ("way", "push", "pull", "of the bundle's bytes", "of skopeo's speed", "target")
    note = (
        f"{num_bytes / 1e6:.0f} MB in {args.objects} artifacts, {args.runs} rounds, whole processes, registry on loopback."
        " skopeo copies blobs; aotgaudi's pull also unpacks the image's layer, and verifies every object of the bundle."
    )
    return Table("Push and pull", columns, tuple(rows), note)


@contextmanager
def _registry(folder: Path) -> Iterator[str]:
    """Runs docker-registry on the loopback address; yields ``host:port``."""
    port = free_port()
    config = folder / "registry.yml"
    lines = (
        "version: 0.1",
        "log: {level: error, accesslog: {disabled: true}}",
        f"storage: {{filesystem: {{rootdirectory: {folder / 'registry'}}}}}",
        f"http: {{addr: 127.0.0.1:{port}}}",
    )
    config.write_text("\n".join(lines), encoding="utf-8")
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            ["docker-registry", "serve", str(config)],
            stdout=log,
            stderr=log,
            env={**os.environ, "OTEL_TRACES_EXPORTER": "none"},
        )
        try:
            harness.wait_until(lambda: _answers(port), "docker-registry")
            yield f"127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=30)


def free_port() -> int:
    """A port of the loopback address that nobody listens to at this moment."""
    with socket.socket() as probing:
        probing.bind(("127.0.0.1", 0))
        return int(probing.getsockname()[1])


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    main()
