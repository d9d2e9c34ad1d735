"""The pipelines that users copy, run step by step: on the fake backend, with a real registry."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aotgaudi.bundle.signing import generate_key
from tests.services.conftest import RealRegistry, aotgaudi
from tests.unit.build.test_share import built
from tests.unit.test_templates import documents

__all__ = ["built"]


@pytest.fixture
def project(built: object, registry: RealRegistry, tmp_path: Path) -> Path:
    """A checkout with a spec, its manifest and a public key; the shared cache has what a build would trace."""
    folder = tmp_path / "project"
    folder.mkdir()
    (tmp_path / "tiny.toml").rename(folder / "model.toml")
    aotgaudi("build", "manifest", folder / "model.toml", "-o", folder / "model.manifest.json")
    aotgaudi(
        "cache",
        "push",
        f"{registry.host}/team/aotgaudi-cache",
        folder / "model.toml",
        "--store",
        tmp_path / "built",
    )
    generate_key(tmp_path / "bundle.key")
    (tmp_path / "bundle.key.pub").rename(folder / "bundle.key.pub")
    return folder


def run_steps(steps: list[tuple[str, dict[str, str]]], folder: Path, environment: dict[str, str]) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    everything = ""
    for script, extra in steps:
        if script.startswith("pip install"):
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            check=False,
            cwd=folder,
            env={**os.environ, **environment, **extra, "PATH": path},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        everything += done.stdout
    return everything


def test_the_github_workflow(project: Path, registry: RealRegistry, tmp_path: Path) -> None:
    (workflow,) = documents("github-actions.yml")
    (tmp_path / "output").touch()
    known = {
        "vars.REGISTRY": f"{registry.host}/team",
        "github.workspace": str(project),
        "secrets.REGISTRY_USER": "",
        "secrets.REGISTRY_PASSWORD": "",
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
    environment = runner | {name: filled(text) for name, text in workflow["env"].items()}
    for job in ("check", "bundle"):
        rows = workflow["jobs"][job]
        environment |= {name: filled(text) for name, text in rows.get("env", {}).items() if filled(text)}
        for step in rows["steps"]:
            if "run" in step:
                extra = {name: filled(text) for name, text in step.get("env", {}).items()}
                run_steps([(filled(step["run"]), extra)], project, environment)

    assert "/team/model-bundle@sha256:" in (tmp_path / "summary").read_text()


def test_the_gitlab_jobs(project: Path, registry: RealRegistry, tmp_path: Path) -> None:
    (pipeline,) = documents("gitlab-ci.yml")
    variables = {
        "REGISTRY": f"{registry.host}/team",
        "CI_PROJECT_DIR": str(project),
        "CI_SERVER_HOST": "localhost",
    }
    environment = {
        "BUNDLE_KEY": str(tmp_path / "bundle.key"),
        "CI_PIPELINE_IID": "7",
        "CI_COMMIT_SHA": "b" * 40,
        **{
            name: re.sub(r"\$(\w+)", lambda match: variables[match[1]], text)
            for name, text in pipeline["variables"].items()
        },
    }

    scripts = [(line, {}) for job in ("check", "bundle") for line in pipeline[job]["script"]]
    output = run_steps(scripts, project, environment)

    assert "signed    by 1 or more of 1 trusted keys, epoch 1" in output
