"""A server that drives the recipe cache as vllm-gaudi does is captured with the shapes of a spec, and proved."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from aotgaudi.backends.base import Target
from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.bundle.sealed import capture_of
from aotgaudi.capture.run import Built, Order, build_capture
from aotgaudi.capture.shapes import Shaped, shaped_command
from aotgaudi.errors import CaptureError
from aotgaudi.gaudi.recipes import RecipeName
from aotgaudi.guests.describe import describe
from aotgaudi.guests.vllm_gaudi.guest import VllmGaudi
from aotgaudi.manifest.bucket_file import bucket_file_of
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.parse import spec_from_json
from aotgaudi.store.store import Store
from tests.environment import ROOT
from tests.guests_here import Here
from tests.specs import ONE_SEQUENCE, spec_tables

pytestmark = pytest.mark.hpu_double

SERVER = ROOT / "tests" / "guests" / "gaudi_server.py"
BUCKETS = "cache/shapes/vllm.buckets"


class Told:
    """A `Progress` that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def begin(self, heading: str) -> None:
        self.lines.append(heading)

    def note(self, text: str) -> None:
        pass

    def end(self, text: str) -> None:
        self.lines.append(text)

    def warn(self, text: str) -> None:
        self.lines.append(f"warning: {text}")


@dataclass
class Bench:
    """A folder with the stand-in as ``vllm``, beside a plugin's metadata, a model, a store and a place."""

    folder: Path
    double: Path
    told: Told = field(default_factory=Told)

    def __post_init__(self) -> None:
        here = Here(self.folder)
        here.install("vllm-gaudi", "0.27.0")
        here.install("vllm", "0.27.0")
        here.model()
        command = here.script()
        command.write_text(
            f"#!{sys.executable}\nimport runpy\nrunpy.run_path({str(SERVER)!r}, run_name='__main__')\n"
        )

    @property
    def spec(self) -> BuildSpec:
        return spec_from_json(spec_tables(limits=ONE_SEQUENCE, scheduler={"engine": "vllm"}))

    def environ(self, more: Mapping[str, str]) -> dict[str, str]:
        paths = [str(self.double), str(self.folder / "site"), str(ROOT)]
        kept = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
        return {
            **kept,
            "PATH": f"{self.folder / 'bin'}:{self.double / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": ":".join(paths),
            "AOTGAUDI_DOUBLE_COMPILE_MS": "1",
            "OMP_NUM_THREADS": "1",
            **more,
        }

    def shaped(self, **environ: str) -> Shaped:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        words = ("vllm", "serve", str(self.folder / "tiny"), "--port", str(port))
        return shaped_command(words, self.environ(environ), self.spec, self.folder / "r")

    def build(self, **environ: str) -> Built:
        given = self.shaped(**environ)
        launch = describe(
            given.found,
            root=str(self.folder / "r"),
            asked=given.asked("smoke"),
            manifest_id=given.manifest_id,
        )
        order = Order(given.found, launch, self.folder / "out", ready_seconds=240, given=given.files)
        return build_capture(order, Store.open(self.folder / "store"), self.told)


@pytest.fixture
def bench(newest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(VllmGaudi, "target", lambda *_: Target(backend="hpu", machine="gaudi2"))
    return Bench(tmp_path, newest)


def test_a_capture_holds_the_recipes_of_the_closed_table_and_is_proved_from_them_alone(bench: Bench) -> None:
    built = bench.build()

    bundle = open_bundle(bench.folder / "out")
    receipt, launch = capture_of(bundle), bundle.launch
    assert built.is_new
    recipes = [file for file in receipt.files if file.kind == "recipe"]
    keys = {name.key for name in map(RecipeName.parse, (Path(file.path).name for file in recipes)) if name}
    table = bucket_file_of(bench.spec)
    assert launch.manifest_id == Manifest.of(table.spec).id
    assert len(recipes) == 2 * len(keys) > 0
    assert len(keys) >= len({*table.prompt, *table.decode})
    assert [file.path for file in receipt.files if file not in recipes] == [BUCKETS]
    assert receipt.expected.counters == {"hpu.graph_compilation": 0, "hpu.recipe_misses": 0}
    assert receipt.expected.loads == {f"recipe:{key}": 1 for key in keys}
    assert receipt.proof.counts["compile"] == receipt.proof.counts["new_files"] == 0
    assert launch.flags["num-gpu-blocks-override"] == "8"
    assert launch.place.variables["VLLM_BUCKETING_FROM_FILE"] == str(bench.folder / "r" / BUCKETS)


def test_a_server_that_counts_its_blocks_anew_is_not_sealed(bench: Bench) -> None:
    """As where the number of KV blocks follows free memory: another shape, and so other recipes, at each start."""
    with pytest.raises(CaptureError, match=r"is not warm.*nothing was sealed") as caught:
        bench.build(GAUDI_SERVER_FAULT="drifts")

    assert "hpu" in str(caught.value)
    assert not (bench.folder / "out").exists()
