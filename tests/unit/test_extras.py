"""What pyproject.toml says of extras, what the code imports, and what a missing package's message names are one."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aotgaudi.errors import EXTRAS, AotGaudiError, MissingPackageError
from tests.environment import ROOT, project, requirements

KNOWN = {"aotgaudi", "aotgaudi_witness", "pydantic_core", "opentelemetry", "yaml"}
"""Ourselves, also in other servers' processes; and pydantic pins its core exactly. The packages of OpenTelemetry share one
module; that of pyyaml has another name."""


def named(lines: list[str]) -> set[str]:
    """The modules of requirements: they have the names of their packages."""
    return {re.split(r"[^\w.-]", line)[0].lower().replace("-", "_") for line in lines}


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def test_every_package_that_the_code_imports_is_declared() -> None:
    found = {name for path in (ROOT / "aotgaudi").rglob("*.py") for name in imported(path)}
    declared = named(requirements(None)) | {name for names in EXTRAS.values() for name in names}

    assert found - set(sys.stdlib_module_names) - KNOWN - declared == set()


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_the_message_and_pyproject_agree(extra: str) -> None:
    assert named(project()["optional-dependencies"][extra]) == set(EXTRAS[extra])


def test_the_light_package_has_nothing_of_an_extra() -> None:
    assert named(requirements(None)) & {name for names in EXTRAS.values() for name in names} == set()


def test_both_halves_take_the_same_torch() -> None:
    found = {line for extra in ("build", "serve") for line in requirements(extra) if line.startswith("torch")}

    assert len(found) == 1


@pytest.mark.parametrize(
    ("module", "preferred", "extra"),
    [
        ("torch", "serve", "serve"),
        ("torch", "build", "build"),
        ("torch.export", "model", "build"),
        ("starlette.responses", "serve", "serve"),
        ("transformers", "serve", "build"),
        ("ray", "build", "ray"),
    ],
)
def test_a_failed_import_names_the_extra(module: str, preferred: str, extra: str) -> None:
    error = MissingPackageError.of(ModuleNotFoundError(name=module), preferred)

    assert isinstance(error, AotGaudiError)
    assert str(error) == f"{module.partition('.')[0]} is not installed (pip install 'aotgaudi[{extra}]')"
    assert error.exit_code == 2


def test_an_import_that_no_extra_mends_is_a_bug_of_ours() -> None:
    assert MissingPackageError.of(ModuleNotFoundError(name="aotgaudi.nowhere"), "serve") is None
    assert MissingPackageError.of(ImportError("no name"), "serve") is None
