"""Digests of source code: what Python code says, not how it is written.

A Python file is its syntax tree without docstrings and other bare strings, comments, formatting and positions. So mending
a sentence or a line break keeps the digest, and changing a name, a number, an operator or any other string does not. The
tree is written in a form of our own, since `ast.dump` and `ast.unparse` differ between versions of Python: fields that are
empty in all of them are left out, and text has its length before it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from aotgaudi.digest import canonical_json, sha256_bytes, sha256_file

_LEFT_OUT = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
"""Fields that follow from other fields, or say how something is written (``u"text"``)."""


def sha256_source(files: Iterable[Path], root: Path | None = None) -> str:
    """Returns the sha256 of the names and contents of source files, sorted by path.

    A file's name is its path relative to `root`, or without `root` its base name. The content of a ``.py`` file is its code,
    that of any other file its bytes. Raises OSError, and SyntaxError for a file that is not Python.
    """
    return sha256_bytes(
        canonical_json(
            [
                [path.relative_to(root).as_posix() if root else path.name, _content(path)]
                for path in sorted(files)
            ]
        )
    )


def _content(path: Path) -> str:
    return code_digest(path.read_bytes()) if path.suffix == ".py" else sha256_file(path)


def code_digest(source: bytes) -> str:
    """Returns the sha256 of a Python module's code, the same in every version of Python that can parse it."""
    pieces: list[str] = []
    _write(ast.parse(source), pieces)
    return sha256_bytes("".join(pieces).encode("utf-8", "surrogatepass"))


def _write(value: Any, pieces: list[str]) -> None:
    """Appends the form of a node, a list of nodes, or a leaf."""
    if isinstance(value, ast.Constant):
        _write_leaf(value.value, pieces)
    elif isinstance(value, ast.AST):
        pieces.append(f"({type(value).__name__}")
        for name in value._fields:
            field = getattr(value, name, None)
            if field is not None and field != [] and name not in _LEFT_OUT:
                pieces.append(f" {name}=")
                _write(_joined(field) if isinstance(value, ast.JoinedStr) else field, pieces)
        pieces.append(")")
    elif isinstance(value, list):
        pieces.append("[")
        for item in value:
            if not _is_bare_string(item):
                _write(item, pieces)
        pieces.append("]")
    else:
        _write_leaf(value, pieces)


def _write_leaf(value: Any, pieces: list[str]) -> None:
    text = value if isinstance(value, str) else repr(value)  # That of text depends on Unicode's tables.
    pieces.append(f"<{type(value).__name__} {len(text)}:{text}>")


def _is_bare_string(item: Any) -> bool:
    """Whether a statement is only a string: a docstring, or one after a constant or a field."""
    return (
        isinstance(item, ast.Expr)
        and isinstance(item.value, ast.Constant)
        and isinstance(item.value.value, str)
    )


def _joined(parts: list[Any]) -> list[Any]:
    """Returns the parts of an f-string, whose text versions of Python cut differently."""
    found: list[Any] = []
    for is_text, group in groupby(parts, lambda part: isinstance(part, ast.Constant)):
        if not is_text:
            found += group
        elif text := "".join(part.value for part in group):
            found.append(ast.Constant(text))
    return found
