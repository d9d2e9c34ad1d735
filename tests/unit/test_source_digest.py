"""Mending prose or formatting keeps the digest of code; any change of what it says is another digest."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from aotgaudi.source_digest import code_digest, sha256_source

ROOT = Path(__file__).parents[2]
FOLDERS = ("graphs", "backends/inductor", "backends/hpu")
FILES = sorted(path for name in FOLDERS for path in (ROOT / "aotgaudi" / name).rglob("*.py"))
NAMES = [path.relative_to(ROOT / "aotgaudi").as_posix() for path in FILES]
CHANGES_A_FILE = 12

SAMPLE = '''
"""A module."""
from __future__ import annotations
import os.path as p
from .. import *
LIMIT: int = 0x10  # sixteen
"""What it is."""
def f(a, /, b: "int" = 1_000, *rest, c=-1.5e-7, **more) -> bytes:
    """Says it."""
    global LIMIT
    x = f"{a!r:>{b}} {{}} " "and " f"{b=}{c:}" u"ü" if not a else b'\\x00' * 2j
    y = [i async for i in rest if i is not None and i < 3 <= 7]
    lambda *z: (yield z)
    del y[1:2, ...], a.b
    return x @ ~b or {**more, 1: {2}}
class C(p.P, metaclass=f):
    @f(1, *[], **{})
    async def g(self):
        async with self as s, s.t: await s
        while (n := s):
            try: raise E from n
            except (A, B) as e: continue
            finally: assert n, "why"
        else: break
match f:
    case {"a": [1, *_], **r} | C(x=None) as m if m: pass
    case -1 | "b" | p.q: ...
'''
SAMPLE_DIGEST = "e68ecee7f589e31145c77f08199ed4c80be9a5ccc78da58f7d49b205237e7d9d"


def same(text: str) -> bytes:
    """The same code, with other formatting, other comments and other docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if _is_bare_string(node):
            node.value.value = "Another sentence."  # type: ignore[attr-defined]
    return b"# A comment.\n\n" + ast.unparse(tree).replace("\n\n", "\n\n\n  # Another.\n\n").encode()


def _is_bare_string(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_mending_prose_and_formatting_keeps_the_digest(path: Path) -> None:
    text = path.read_text(encoding="utf-8")

    assert same(text) != text.encode()
    assert code_digest(same(text)) == code_digest(text.encode())


def _other_constant(node: ast.Constant) -> None:
    value = node.value
    if isinstance(value, str):
        node.value = value + "x"
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        node.value = value + 1
    else:
        node.value = "other"


def _other_operator(node: ast.BinOp) -> None:
    node.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()


def _other_comparison(node: ast.Compare) -> None:
    node.ops[0] = ast.Lt() if isinstance(node.ops[0], ast.LtE) else ast.LtE()


def changes(tree: ast.Module) -> Iterator[Callable[[], None]]:
    """Yields everything that can be changed in a module: a number, a text, a name, an operator, an order."""
    bare = {id(node.value) for node in ast.walk(tree) if _is_bare_string(node)}  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in bare:
            yield lambda node=node: _other_constant(node)  # type: ignore[misc]
        for field in ("id", "attr", "arg", "name", "module"):
            if isinstance(name := getattr(node, field, None), str):
                yield lambda node=node, field=field, name=name: setattr(node, field, f"{name}_")  # type: ignore[misc]
        if isinstance(node, ast.BinOp):
            yield lambda node=node: _other_operator(node)  # type: ignore[misc]
        if isinstance(node, ast.Compare):
            yield lambda node=node: _other_comparison(node)  # type: ignore[misc]
        if (
            isinstance(node, ast.Call)
            and len(node.args) > 1
            and ast.dump(node.args[0]) != ast.dump(node.args[1])
        ):
            yield lambda node=node: node.args.reverse()  # type: ignore[misc]


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_changing_what_the_code_says_changes_the_digest(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    before, num = code_digest(text.encode()), len(list(changes(ast.parse(text))))
    unseen = []
    for number in Random(0).sample(range(num), min(num, CHANGES_A_FILE)):
        tree = ast.parse(text)
        list(changes(tree))[number]()
        changed = ast.unparse(tree)
        if code_digest(changed.encode()) == before:
            unseen.append(changed)

    assert unseen == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 1", "x = True"),
        ("x = 1", "x = 1.0"),
        ("x = 'a'", "x = b'a'"),
        ("x = 'a'", "'a'"),
        ("x = f'a{y}'", "x = f'{y}a'"),
        ("x = f'{y}'", "x = f'{y!r}'"),
        ("x = f'{y}'", "x = f'{y:3}'"),
        ("x = (1, 2), 3", "x = 1, (2, 3)"),
        ("x = [a, b]", "x = [a], b"),
        ("x = a; y = b", "y = b; x = a"),
        ("from . import a", "from .. import a"),
        ("x: 'a'", "x: 'b'"),
        ("def f(): ...", "async def f(): ..."),
        ("def f(a, /): ...", "def f(*, a): ..."),
        ("if a:\n  b\nc", "if a:\n  b\n  c"),
        ("x = ' <str 1:a>'", "x = ' <str 2:a>'"),
    ],
)
def test_what_looks_alike_differs(one: str, other: str) -> None:
    assert code_digest(one.encode()) != code_digest(other.encode())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 0x10", "x = 1_6  # sixteen"),
        ("x = 'a' 'b'", 'x = (\n  u"ab"\n)'),
        ("x = f'a' f'{y}' 'b'", "x = f'a{y}b'"),
        ("def f():\n  '''Says.'''\n  return 1", "def f(): return 1"),
        ("X = 1\n'''What it is.'''", "X = 1"),
    ],
)
def test_what_is_written_otherwise_is_the_same(one: str, other: str) -> None:
    assert code_digest(one.encode()) == code_digest(other.encode())


def test_the_digest_is_what_earlier_releases_made_of_the_same_code() -> None:
    """When this fails, every user's store is void."""
    assert code_digest(SAMPLE.encode()) == SAMPLE_DIGEST


@pytest.mark.process
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_every_version_of_python_makes_the_same_digest(version: str) -> None:
    python = ROOT / ".venv" / "pythons" / version / "bin" / "python"
    if not python.exists():
        pytest.skip(f"ci/pythons found no Python {version}")
    script = (
        "import sys; from pathlib import Path; from aotgaudi.source_digest import sha256_source;"
        "print(sha256_source(map(Path, sys.argv[2:]), Path(sys.argv[1])))"
    )

    done = subprocess.run(
        [python, "-c", script, str(ROOT), *map(str, FILES)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )

    assert done.stdout.strip() == sha256_source(FILES, ROOT)


def test_names_count_and_other_files_count_by_their_bytes(tmp_path: Path) -> None:
    code, header = tmp_path / "a.py", tmp_path / "a.h"
    code.write_text("x = 1")
    header.write_text("int x; // one")
    before = sha256_source([header, code], tmp_path)

    assert sha256_source([code, header], tmp_path) == before
    code.write_text("x = 1  # one")
    assert sha256_source([code, header], tmp_path) == before
    header.write_text("int x;  // one")
    assert sha256_source([code, header], tmp_path) != before
    header.write_text("int x; // one")
    assert sha256_source([code.rename(tmp_path / "b.py"), header], tmp_path) != before
