"""Python files where nobody should look for any: in a working directory, a model or a bundle."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import aotgaudi

PACKAGE = Path(aotgaudi.__file__).parent
IN_WRAPPED_SERVERS = PACKAGE / "wrap" / "witness" / "site"
"""What other people's servers load: it starts nothing."""


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Yields each of our modules: its path, from the package's folder, and its syntax tree."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if not path.is_relative_to(IN_WRAPPED_SERVERS):
            yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text(encoding="utf-8"))


def imported_names() -> set[str]:
    """Returns the top-level name of everything that the product imports anywhere, its own included."""
    names = set()
    for _, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add((node.module or "").partition(".")[0])
    return names


def plant(folder: Path, found: Path) -> Path:
    """Puts into `folder` a module of every name that we import: each leaves a file in `found` when it is run.

    Returns `found`, which it makes.
    """
    found.mkdir()
    for name in (*imported_names(), "sitecustomize", "usercustomize"):
        code = f"import posix; posix.close(posix.open({os.fspath(found / name)!r}, posix.O_CREAT | posix.O_WRONLY))\n"
        path = folder / "aotgaudi" / "__init__.py" if name == "aotgaudi" else folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(code, encoding="utf-8")
    return found
