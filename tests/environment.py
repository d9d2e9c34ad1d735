"""Environments that hold what one extra of the package brings and nothing else, made without a network.

The packages themselves are links to those that run the tests: what ``pip install 'aotgaudi[EXTRA]'`` would install is
worked out from pyproject.toml and from what each package requires. ``ci/wheels`` does the same with pip, from a wheel.
"""

from __future__ import annotations

import os
import sys
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
_STUB = "import sys; from aotgaudi.cli.main import main; sys.argv[0] = 'aotgaudi'; main()"


def project() -> dict[str, object]:
    """Returns the table ``[project]``."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements(extra: str | None) -> list[str]:
    """Returns what the package requires, with that extra, as pyproject.toml has it."""
    table = project()
    return [*table["dependencies"], *(table["optional-dependencies"][extra] if extra else ())]


def make_environment(folder: Path, extra: str | None = None) -> Path:
    """Returns the interpreter of an environment at `folder` with the light package, or with one `extra`."""
    python = make_bare_environment(folder, extra)
    (_packages(folder) / "aotgaudi.pth").write_text(f"{ROOT}\n")
    _write_command(folder, "aotgaudi", _STUB)
    return python


def make_bare_environment(folder: Path, extra: str | None = None, *tools: str) -> Path:
    """Returns the interpreter of an environment at `folder` with what aotgaudi and `extra` require, but without aotgaudi.

    `tools` are further packages, such as pip.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    for name in _closure([*requirements(extra), *tools]):
        _link(metadata.distribution(name), _packages(folder))
    for tool in tools:
        _write_command(
            folder, tool, f"from runpy import run_module; run_module({tool!r}, run_name='__main__')"
        )
    return folder / "bin" / "python"


def _write_command(folder: Path, name: str, code: str) -> None:
    command = folder / "bin" / name
    command.write_text(f"#!{folder / 'bin' / 'python'}\n{code}\n")
    command.chmod(0o755)


def _packages(folder: Path) -> Path:
    return folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _closure(lines: Iterable[str]) -> set[str]:
    """The distributions that pip would install for these requirements; one that is not here is an error."""
    wanted = [(Requirement(line), "") for line in lines]
    seen: set[tuple[str, str]] = set()
    while wanted:
        requirement, extra = wanted.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for wanted_extra in ("", *requirement.extras):
            if (name, wanted_extra) not in seen:
                seen.add((name, wanted_extra))
                further = metadata.distribution(name).requires or ()
                wanted += [(Requirement(line), wanted_extra) for line in further]
    return {name for name, _ in seen}


def _link(distribution: metadata.Distribution, packages: Path) -> None:
    for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
        target = Path(os.fspath(distribution.locate_file(top)))
        if target.exists() and not (packages / top).is_symlink():
            (packages / top).symlink_to(target)
