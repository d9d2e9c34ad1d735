"""docs/architecture.md names every module, each in the row of its package, and no module that is not there.

In the table, a package stands in the second column (``build/``); the rows below it, whose first column is empty, name its
modules there, in back-ticks. ``name*`` stands for several; ``commands/*`` for all modules of a folder.
"""

from __future__ import annotations

import fnmatch
import re

import pytest

from tests.environment import ROOT, tomllib

PACKAGE = ROOT / "aotgaudi"


def table() -> dict[str, set[str]]:
    """Returns what the table names: package (or module of the root) -> its modules, with wildcards."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.partition("## Packages")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    named: dict[str, set[str]] = {}
    package = ""
    for layer, names, *_ in rows[1:]:
        words = re.findall(r"`([^`]+)`", names)
        if layer.strip():
            for word in words:
                package = word.removesuffix("/").removesuffix(".py")
                named[package] = set()
        else:
            named[package] |= set(words)
    return named


def modules() -> dict[str, set[str]]:
    """Returns what is there: package -> its modules, those of sub-packages with their folder's name."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[-1] in ("__init__", "__main__"):
            continue
        found.setdefault(parts[0], set())
        if len(parts) > 1:
            found[parts[0]].add("/".join(parts[1:]))
    return found


def test_every_package_has_its_row_and_every_row_its_package() -> None:
    assert table().keys() == modules().keys()


@pytest.mark.parametrize("package", sorted(modules()))
def test_every_module_is_named_in_its_packages_rows(package: str) -> None:
    patterns = table()[package]
    unnamed = [n for n in modules()[package] if not any(fnmatch.fnmatch(n, p) for p in patterns)]

    assert sorted(unnamed) == []


@pytest.mark.parametrize("package", sorted(table()))
def test_every_module_that_is_named_is_there(package: str) -> None:
    there = modules()[package]
    missing = [pattern for pattern in table()[package] if not fnmatch.filter(there, pattern)]

    assert sorted(missing) == []


def test_the_layers_are_those_of_the_import_contract() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([^|]+)\|", text, re.MULTILINE)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]

    written: dict[int, set[str]] = {}
    for number, names in rows:
        found = {word.removesuffix("/").removesuffix(".py") for word in re.findall(r"`([^`]+)`", names)}
        written.setdefault(int(number), set()).update(found)

    assert list(written.values()) == [set(layer.replace(" ", "").split("|")) for layer in layers]
    assert list(written) == list(range(1, len(layers) + 1))
    told = (
        (ROOT / "CONTRIBUTING.md")
        .read_text(encoding="utf-8")
        .partition("Imports go down only:")[2]
        .partition(".")[0]
    )
    assert [set(re.findall(r"`(\w+)`", part)) for part in told.split(";")] == list(written.values())
