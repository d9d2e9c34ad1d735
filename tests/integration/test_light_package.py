"""``pip install aotgaudi`` alone: no torch, no transformers, nothing that serves; and what needs an extra says which.

In an environment of this Python, and in those that ``ci/pythons`` has made for others.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from aotgaudi.compile.pipeline import seal
from aotgaudi.errors import EXTRAS
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.parse import load_spec
from aotgaudi.store.store import Store
from tests.environment import ROOT, make_environment
from tests.parallel import nightly
from tests.unit.compile.test_read_through import built

__all__ = ["built"]
CONFIG = ROOT / "manifests" / "configs" / "llama-3.1-8b.json"


@dataclass(frozen=True)
class Light:
    """An environment without extras, and a folder in which its commands run."""

    python: Path
    folder: Path

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Runs ``aotgaudi`` as its user would."""
        return subprocess.run(
            [self.python.with_name("aotgaudi"), *map(str, arguments)],
            check=False,
            cwd=self.folder,
            env={"PATH": "/usr/bin:/bin", "HOME": str(self.folder), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )

    def output(self, *arguments: object) -> str:
        """Standard output of a command that succeeds."""
        done = self.run(*arguments)
        assert done.returncode == 0, f"{arguments}: {done.stderr}"
        assert "Traceback" not in done.stderr
        return done.stdout


THIS = f"{sys.version_info.major}.{sys.version_info.minor}"
OTHERS = {"3.10", "3.11", "3.12", "3.13"} - {THIS}
BOUNDS = {"3.10", "3.13"}


@pytest.fixture(scope="module", params=[THIS, *sorted(OTHERS & BOUNDS), *nightly(*sorted(OTHERS - BOUNDS))])
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == THIS:
        return make_environment(tmp_path_factory.mktemp("light") / "venv")
    made = Path(sys.prefix) / "pythons" / request.param / "bin" / "python"
    if not made.exists():
        pytest.skip(f"no environment of Python {request.param} (see ci/pythons)")
    return made


@pytest.fixture
def light(python: Path, tmp_path: Path) -> Light:
    return Light(python, tmp_path)


def test_no_module_of_an_extra_can_be_imported(python: Path) -> None:
    extras = {module for found in EXTRAS.values() for module in found}
    modules = sorted(
        {"numpy", "opentelemetry", *extras} - {"h11"}
    )  # huggingface_hub's HTTP client stands on h11, too.
    code = f"from importlib.util import find_spec; print([n for n in {modules} if find_spec(n)])"

    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


IMPORTS = """
import importlib, pkgutil, sys
import aotgaudi

extras = set(sys.argv[1:])
for module in pkgutil.walk_packages(aotgaudi.__path__, "aotgaudi.", onerror=lambda name: None):
    if module.name.endswith(".__main__") or "aotgaudi.wrap.witness.site" in module.name:
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in extras:
            raise
    else:
        print(module.name)
"""


def test_every_module_can_be_imported_or_lacks_a_package_of_an_extra(python: Path) -> None:
    extras = {"numpy", "opentelemetry", *(module for found in EXTRAS.values() for module in found)}

    done = subprocess.run(
        [python, "-W", "error::SyntaxWarning", "-c", IMPORTS, *extras],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    imported = done.stdout.split()
    assert {"aotgaudi.manifest.enumerate", "aotgaudi.wrap.supervise", "aotgaudi.share.oci"} & set(imported)
    assert len(imported) > 200


def test_a_spec_is_enumerated_proved_planned_and_compared(light: Light) -> None:
    spec = ROOT / "manifests" / "tiny-llama.cpu.toml"

    assert "entries" in light.output("build", "manifest", spec, "-o", "tiny.json")
    assert "every step" in light.output("build", "manifest", spec, "-o", "tiny.json", "--check")
    assert "decode" in light.output("coverage", "tiny.json")
    assert "no difference" in light.output("diff", "tiny.json", spec)
    plan = json.loads(light.output("build", "plan", "tiny.json", "--store", "store", "--json"))
    assert plan["target"]["toolchain"]["torch"] == "not installed"
    assert len(plan["trace"]) == plan["num_programs"] > 0
    assert "0 programs" in light.output("explain", "tiny.json", "--store", "store")
    light.output("cache", "stats", "--store", "store")


def test_a_manifest_for_a_gaudi_is_planned_and_explained(light: Light) -> None:
    manifest = ROOT / "manifests" / "llama-3.1-8b.gaudi3.manifest.json"
    options = ("--target", ROOT / "tests" / "golden" / "data" / "hpu.target.json", "--store", "store")

    assert "no record of this store is of units compiled on a Gaudi" in light.output(
        "build", "plan", manifest, *options
    )
    assert "never built" in light.output("explain", manifest, *options)


def test_doctor_says_what_is_missing_and_for_what(light: Light) -> None:
    document = json.loads(light.output("doctor", "--store", "store", "--json"))

    assert (document["can_build"], document["can_serve"]) == (False, False)
    found = {finding["subject"]: finding for finding in document["findings"]}
    assert "[build] lacks torch, transformers, safetensors" in found["packages"]["observation"]
    assert found["packages"]["remedy"] == "pip install 'aotgaudi[build,serve]'"
    assert "torch" not in found
    assert not (light.folder / "store").exists()


def test_a_vllm_command_is_enumerated(light: Light) -> None:
    command = "vllm serve llama --max-num-seqs 4 --max-model-len 1024 --num-gpu-blocks-override 64"

    light.output("build", "manifest", "--from-vllm", command, "--model-config", CONFIG, "-o", "vllm.json")

    assert light.output("coverage", "vllm.json")


def test_a_bundle_is_signed_verified_explained_shared_and_put_into_an_image(
    light: Light, built: Store
) -> None:
    seal(Manifest.of(load_spec(light.folder / "tiny.toml")), built, light.folder / "bundle")

    light.output("key", "generate", "key")
    light.output("sign", "bundle", "--sign-key", "key")
    assert "signed" in light.output("verify", "bundle", "--trusted-key", "key.pub")
    explained = light.output("explain", "tiny.toml", "--against", "bundle", "--store", "built")
    assert "not installed" in explained
    light.output("build", "image", "bundle", "-o", "image")
    light.output("pull", "oci:image", "-o", "pulled", "--trusted-key", "key.pub")


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        ("serve --bundle b --model m", "[serve]"),
        ("build tiny.toml -o b --store s", "[build]"),
        ("build cache tiny.toml --store s", "[build]"),
        ("model import a b", "[build]"),
        ("build bundle tiny.toml -o b --store s", "[build]"),
        ("build cache tiny.toml --store s --remote ./b", "[build]"),
        ("build cache tiny.toml --store s --remote s3://bucket/prefix", "[s3]"),
    ],
)
def test_what_needs_an_extra_names_it_in_one_line(light: Light, arguments: str, missing: str) -> None:
    text = (ROOT / "manifests" / "tiny-llama.cpu.toml").read_text(encoding="utf-8")
    (light.folder / "tiny.toml").write_text(text.replace("configs/", f"{ROOT}/manifests/configs/"))

    done = light.run(*arguments.split())

    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert f"(pip install 'aotgaudi{missing}')" in line
    assert "Traceback" not in done.stderr
