"""What our Python children run: our modules, and never a file of the directory that they are started in."""

from __future__ import annotations

import ast
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import aotgaudi
from aotgaudi.child import python_command
from aotgaudi.wrap.programs import ProgramWatch
from tests.planted import plant, sources

pytestmark = pytest.mark.process

ARGUMENTS: dict[str, list[str]] = {
    "aotgaudi.backends.hpu.frontend": ["result.json"],
    "aotgaudi.compile.ray": ["1"],
    "aotgaudi.compile.workers": ["{fd}", "cache", "{pid}"],
    "aotgaudi.doctor.hpu.bridge": ["devices.count", "{}", "result.json", "{pid}"],
    "aotgaudi.server.engine.main": ["{fd}", "0"],
    "aotgaudi.server.preprocess.worker": ["{fd}", "auto"],
    "aotgaudi.wrap.exec_shim": ["{pid}", "{fd}", "--", "/bin/true"],
    "aotgaudi.wrap.process_tree": ["{victim}", "mark", "0.1"],
}
"""Every Python child that the product starts, and arguments with which it imports what it needs and ends."""

STARTERS = ("python_command", "spawn")
PASSES_ON = ("child.py", "module")
"""Where one starter calls the other with its argument."""
BARE = {"aotgaudi.wrap.exec_shim"}


def test_only_one_function_starts_python() -> None:
    starters = {
        path
        for path, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, (ast.List, ast.Tuple)) and any(map(starts_python, node.elts))
    }

    assert starters == {"child.py", "wrap/adapters/sglang.py"}  # The second repeats the user's own command.


def starts_python(word: ast.expr) -> bool:
    """Whether `word` of a command is our interpreter, or has one look for a module."""
    is_flag = isinstance(word, ast.Constant) and word.value == "-m"
    return is_flag or (isinstance(word, ast.Attribute) and word.attr == "executable")


def test_every_child_is_known() -> None:
    started = set()
    for path, tree in sources():
        for node in ast.walk(tree):
            is_start = isinstance(node, ast.Call) and getattr(node.func, "id", "") in STARTERS
            if is_start and (path, ast.unparse(node.args[0])) != PASSES_ON:
                started.add(ast.literal_eval(node.args[0]))

    assert started == set(ARGUMENTS)


@pytest.mark.parametrize(
    ("search", "cwd"), [("{ours}:", "here"), (".:{ours}", "here"), ("{here}:{ours}", ".")]
)
def test_the_command_searches_no_modules_in_its_working_directory_or_in_a_model(
    search: str, cwd: str, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    found = plant(here, tmp_path / "found")
    shutil.rmtree(here / "aotgaudi")  # Python would import it, and these, before we can look.
    late = ("tokenizers", "torch", "jinja2", "uvicorn")
    for path in here.iterdir():
        if path.stem.endswith("customize") or (cwd != "here" and path.stem not in late):
            path.unlink()
    script = tmp_path / "aotgaudi"
    script.write_text("from aotgaudi.cli.main import main\nmain()\n", encoding="utf-8")
    ours = Path(aotgaudi.__file__).parents[1]

    done = subprocess.run(
        [sys.executable, str(script), "serve", "--bundle", tmp_path / "no", "--model", here, "--require-warm"],
        cwd=tmp_path / cwd, env={**os.environ, "PYTHONPATH": search.format(ours=ours, here=here)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert done.returncode == 2, done.stderr
    assert not list(found.iterdir())


@pytest.mark.parametrize("module", ARGUMENTS)
def test_a_child_runs_nothing_of_the_working_directory(module: str, tmp_path: Path) -> None:
    found = plant(tmp_path, tmp_path / "found")
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs, subprocess.Popen(["sleep", "60"], start_new_session=True) as victim:
        fields = {"{fd}": theirs.fileno(), "{pid}": os.getpid(), "{victim}": victim.pid}
        arguments = [str(fields.get(word, word)) for word in ARGUMENTS[module]]

        done = subprocess.run(
            python_command(module, *arguments, bare=module in BARE),
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            pass_fds=[theirs.fileno()],
            timeout=120,
            check=False,
        )
        victim.kill()

    assert not list(found.iterdir()), done.stderr.decode()
    assert b"ImportError" not in done.stderr
    assert b"ModuleNotFoundError" not in done.stderr


@pytest.mark.parametrize("bare", [False, True])
def test_a_child_runs_our_package_and_has_its_arguments(bare: bool, tmp_path: Path) -> None:
    assert printed("echo", "a b", cwd=tmp_path, bare=bare) == "a b\n"


def printed(*words: str, cwd: Path, bare: bool = False) -> str:
    """What a command prints that a child of ours becomes."""
    watch = ProgramWatch()
    child = python_command(
        "aotgaudi.wrap.exec_shim", str(os.getpid()), str(watch.descriptor), "--", *words, bare=bare
    )
    with subprocess.Popen(
        child, cwd=cwd, pass_fds=(watch.descriptor,), stdout=subprocess.PIPE, text=True
    ) as process:
        watch.start()
        found, _ = process.communicate(timeout=60)
    watch.close()
    assert process.returncode == 0
    return found


def test_what_a_child_starts_leaves_the_working_directory_out_too(tmp_path: Path) -> None:
    found = plant(tmp_path, tmp_path / "found")
    show = "import sys; print(sys.path); import tokenizers"

    shown = printed(sys.executable, "-c", show, cwd=tmp_path)

    if sys.version_info >= (3, 11):  # Older ones know no such variable.
        assert "['', " not in shown
        assert not list(found.iterdir())


def test_python_dash_m_takes_the_working_directory_off(tmp_path: Path) -> None:
    found = plant(tmp_path, tmp_path / "found")
    # Python imports some of them, and a folder `aotgaudi`, before our first line.
    for name in sys.stdlib_module_names:
        (tmp_path / f"{name}.py").unlink(missing_ok=True)
    shutil.rmtree(tmp_path / "aotgaudi")

    done = subprocess.run(
        [sys.executable, "-m", "aotgaudi", "serve", "--bundle", ".", "--model", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert not list(found.iterdir()), done.stderr
    assert done.returncode != 0
