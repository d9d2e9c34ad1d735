"""The pipelines that users copy, run step by step: on the fake backend, with a real registry."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Optional

import pytest

from aotgaudi.bundle.signing import generate_key
from aotgaudi.spec.parse import load_spec
from tests.environment import ROOT, make_bare_environment
from tests.services.conftest import REQUIRED, RealRegistry, aotgaudi
from tests.unit.compile.test_read_through import built
from tests.unit.test_templates import documents

__all__ = ["built"]

AOTGAUDI = {"AOTGAUDI": str(ROOT), "TORCH_INDEX": ""}
"""This checkout, in place of the repository that the recipes name."""


@pytest.fixture
def project(built: object, registry: RealRegistry, tmp_path: Path) -> Path:
    """A checkout with a spec, its manifest and a public key; the shared cache has what a build would trace."""
    folder = tmp_path / "project"
    folder.mkdir()
    (tmp_path / "tiny.toml").rename(folder / "model.toml")
    aotgaudi("build", "manifest", folder / "model.toml", "-o", folder / "model.manifest.json")
    place = ("--store", tmp_path / "built", "--remote", tmp_path / "shared")
    aotgaudi("build", "cache", folder / "model.toml", *place, "--push")
    (folder / "model").mkdir()
    config = load_spec(folder / "model.toml").model.config
    (folder / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "model" / "model.safetensors").write_bytes(b"weights")
    generate_key(tmp_path / "bundle.key")
    (tmp_path / "bundle.key.pub").rename(folder / "bundle.key.pub")
    return folder


@dataclass(frozen=True)
class Runner:
    """A machine of a CI service: an interpreter with pip, which finds what it installs without a network."""

    python: Path
    folder: Path
    environment: Mapping[str, str]

    def run(self, script: str, extra: Mapping[str, str]) -> str:
        script = script.replace(
            "skopeo login", "skopeo login --tls-verify=false"
        )  # It heeds no registries.conf.
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            check=False,
            cwd=self.folder,
            env={**self._own(), **self.environment, **extra},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _own(self) -> dict[str, str]:
        return {
            "PATH": f"{self.python.parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.folder.parent),
            "OMP_NUM_THREADS": "1",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_COMPILE": "1",
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "off",  # pip reads this as "no isolation".
        }


MakeRunner = Callable[[Optional[str], Mapping[str, str]], Runner]


@pytest.fixture
def make_runner(project: Path, registry: RealRegistry, tmp_path: Path) -> MakeRunner:
    """Makes a fresh runner whose packages are those that an extra brings, and where no aotgaudi is installed.

    Its skopeo speaks plain http with the registry.
    """
    _require_hatchling()
    settings = tmp_path / ".config" / "containers"
    settings.mkdir(parents=True)
    text = f'[[registry]]\nlocation = "{registry.host}"\ninsecure = true\n'
    (settings / "registries.conf").write_text(text)

    def make(extra: str | None, environment: Mapping[str, str]) -> Runner:
        folder = tmp_path / f"runner-{extra}"
        python = make_bare_environment(folder, extra, "pip", "hatchling")
        return Runner(python, project, {**environment, "REGISTRY_AUTH_FILE": str(tmp_path / "auth.json")})

    return make


def _require_hatchling() -> None:
    """A wheel is built without a network where what builds it is installed: `ci/setup dev` does."""
    if find_spec("hatchling") is None:
        (pytest.fail if REQUIRED else pytest.skip)("hatchling is not installed: pip install hatchling")


def test_the_github_workflow(
    make_runner: MakeRunner, project: Path, registry: RealRegistry, tmp_path: Path
) -> None:
    (workflow,) = documents("github-actions.yml")
    (tmp_path / "output").touch()
    known = {
        "vars.REGISTRY": f"{registry.host}/team",
        "github.workspace": str(project),
        "vars.CACHE": str(tmp_path / "shared"),
        "secrets.REGISTRY_USER": "builder",
        "secrets.REGISTRY_PASSWORD": "open sesame",
        "secrets.BUNDLE_KEY": (tmp_path / "bundle.key").read_text().rstrip("\n"),
    }

    def filled(text: str) -> str:
        output = dict(line.split("=", 1) for line in (tmp_path / "output").read_text().splitlines())
        found = {**known, "steps.publish.outputs.reference": output.get("reference", "")}
        return re.sub(r"\$\{\{ ([\w.]+) \}\}", lambda match: found[match[1]], text)

    runner = {
        "RUNNER_TEMP": str(tmp_path),
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
        "GITHUB_RUN_NUMBER": "41",
        "GITHUB_SHA": "a" * 40,
    }
    environment = runner | {name: filled(text) for name, text in workflow["env"].items()} | AOTGAUDI
    for job, extra in (("check", None), ("bundle", "build")):
        rows = workflow["jobs"][job]
        environment |= {name: filled(text) for name, text in rows.get("env", {}).items() if filled(text)}
        machine = make_runner(extra, environment)
        for step in rows["steps"]:
            if "run" in step:
                own = {name: filled(text) for name, text in step.get("env", {}).items()}
                machine.run(filled(step["run"]), own)

    assert "/team/model-bundle@sha256:" in (tmp_path / "summary").read_text()


def test_the_gitlab_jobs(
    make_runner: MakeRunner, project: Path, registry: RealRegistry, tmp_path: Path
) -> None:
    (pipeline,) = documents("gitlab-ci.yml")
    variables = {
        "REGISTRY": f"{registry.host}/team",
        "SHARED_CACHE": str(tmp_path / "shared"),
        "CI_PROJECT_DIR": str(project),
    }
    environment = {
        "BUNDLE_KEY": str(tmp_path / "bundle.key"),
        "CI_PIPELINE_IID": "7",
        "CI_COMMIT_SHA": "b" * 40,
        "REGISTRY_USER": "builder",
        "REGISTRY_PASSWORD": "open sesame",
        **{
            name: re.sub(r"\$(\w+)", lambda match: variables[match[1]], text)
            for name, text in pipeline["variables"].items()
        },
        **AOTGAUDI,
    }

    output = ""
    for job, extra in (("check", None), ("bundle", "build")):
        own = pipeline[job].get("variables", {})
        machine = make_runner(extra, environment | own)
        for line in [*pipeline["default"]["before_script"], *pipeline[job]["script"]]:
            if not line.startswith("apt-get "):
                output += machine.run(line, {})

    assert "signed    by one of 1 trusted keys" in output
