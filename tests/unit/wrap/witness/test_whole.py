"""The witness in processes of its own: ``python -I -S``, nothing but the standard library."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

from aotgaudi.wrap.witness import ENTRY_POINT, SITE
from tests.environment import ROOT
from tests.unit.wrap.witness.guest import Guest

pytestmark = pytest.mark.process

SOURCES = sorted((SITE / "aotgaudi_witness").glob("*.py"))
COMPILE = """
import os, subprocess
open("x.c", "w").write("int f(void) { return 1; }")
subprocess.run(["gcc", "-shared", "-fPIC", "-o", "x.so", "x.c"], check=True)
"""


def pythons() -> list[str]:
    """Returns the interpreters that are there: this one, and those of ci/pythons."""
    return [sys.executable, *map(str, sorted(Path(sys.prefix).glob("pythons/*/bin/python")))]


@pytest.mark.parametrize("python", pythons())
def test_a_process_says_hello_and_goodbye(guest: Guest, python: str) -> None:
    guest.run("aotgaudi_witness.register()", python=python)  # A second time, which changes nothing.

    hello, bye = guest.events()
    assert (hello["e"], bye["e"]) == ("hello", "bye")
    assert hello["role"] == "APIServer"
    assert hello["ppid"] == os.getpid()
    assert {"audit": True, "fork_exec": True, "state": True}.items() <= hello["hooks"].items()


def test_without_the_variable_nothing_happens(guest: Guest) -> None:
    code = "import threading; assert threading.active_count() == 1; assert 'aotgaudi_witness.witness' not in sys.modules"

    guest.run(code, AOTGAUDI_WITNESS="")

    assert guest.files() == []


def test_a_witness_that_cannot_begin_leaves_the_guest_alone(guest: Guest) -> None:
    done = guest.attempt("print('served')", AOTGAUDI_WITNESS="/proc/nothing/here")

    assert (done.returncode, done.stdout) == (0, "served\n")


def test_variables_that_make_no_sense_are_told_as_faults(guest: Guest) -> None:
    guest.run("pass", AOTGAUDI_WITNESS_ROOTS="{", AOTGAUDI_WITNESS_ALLOWED="/nowhere")

    assert {event["hook"] for event in guest.events("fault")} == {
        "AOTGAUDI_WITNESS_ROOTS",
        "AOTGAUDI_WITNESS_ALLOWED",
    }


def test_nobody_who_says_what_the_guest_is_at_is_told(guest: Guest) -> None:
    guest.run("pass", AOTGAUDI_WITNESS_STATE=str(guest.place / "none"))

    assert guest.events("hello")[0]["hooks"]["state"] is False


def test_processes_are_told_with_what_they_do_and_where_from(guest: Guest) -> None:
    guest.run(
        """
        import os, subprocess
        def start():
            subprocess.run(["g++", "--version"], stdout=subprocess.DEVNULL)
            subprocess.run("true; gcc --version > /dev/null", shell=True)
            os.system("true")
            os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
        start()
        """
    )

    told = [(event["argv"][0], event["what"]) for event in guest.events("process")]
    assert told == [("g++", "probe"), ("/bin/sh", "probe"), ("sh", "other"), ("true", "other")]
    assert guest.events("process")[0]["stack"][0].endswith(" start")


def test_a_process_of_multiprocessing_is_told_once(guest: Guest) -> None:
    guest.run(
        "import subprocess, multiprocessing.util as u, os\nr, w = os.pipe()\n"
        "pid = u.spawnv_passfds(b'/bin/true', ['true'], [r]); os.waitpid(pid, 0); subprocess.run(['true', '2'])"
    )

    assert [event["argv"] for event in guest.events("process")] == [["true"], ["true", "2"]]


def test_files_that_are_written_below_a_root_are_told_once_a_state(guest: Guest) -> None:
    guest.run(
        f"""
        import os
        os.chdir({str(guest.root)!r})
        for _ in range(3):
            open("a.so", "w").close()
        open(b"b.tmp", "wb").close(); os.replace("b.tmp", "b")
        os.close(os.open("c", os.O_RDWR | os.O_CREAT))
        open("a.so").close(); open(os.devnull, "w").close()
        say("v")
        open("a.so", "a").close()
        """
    )

    told = [
        (Path(event["path"]).relative_to(guest.root).name, event["phase"]) for event in guest.events("write")
    ]
    assert told == [("a.so", "c"), ("b.tmp", "c"), ("b", "c"), ("c", "c"), ("a.so", "v")]
    assert {event["root"] for event in guest.events("write")} == {str(guest.root)}


def test_events_below_a_root_are_not_about_themselves(guest: Guest) -> None:
    guest.run("pass", AOTGAUDI_WITNESS_ROOTS=json.dumps([str(guest.place)]))

    assert guest.events("write") == []


def compiling(guest: Guest) -> str:
    return COMPILE.replace("x.so", str(guest.place / "x.so")).replace("x.c", str(guest.place / "x.c"))


def test_a_compiler_is_refused_where_nothing_may_compile(guest: Guest) -> None:
    guest.state.write_text("l")

    done = guest.attempt(compiling(guest))

    assert done.returncode == 1
    assert "CompileForbidden: aotgaudi: refused: a compiler: gcc -shared" in done.stderr
    assert not (guest.place / "x.so").exists()
    assert [event["e"] for event in guest.events()] == ["hello", "process", "refused", "bye"]
    assert guest.events("process")[0]["what"] == "compiler"


@pytest.mark.parametrize("state", ["m", "v"])
def test_a_compiler_runs_where_it_is_only_reported(guest: Guest, state: str) -> None:
    guest.state.write_text(state)

    guest.run(compiling(guest))

    assert [event["what"] for event in guest.events("process")] == ["compiler"]
    assert guest.events("refused") == []


def test_the_state_is_the_one_of_the_moment(guest: Guest) -> None:
    """No compiler slips through in the quarter of a second before the thread looks."""
    code = f"open({str(guest.state)!r}, 'w').write('l'); import subprocess; subprocess.run(['gcc', 'x.c'])"

    assert guest.attempt(code).returncode == 1
    assert guest.events("refused")[0]["phase"] == "l"


def test_a_compiler_that_is_asked_its_version_is_never_refused(guest: Guest) -> None:
    guest.state.write_text("l")

    guest.run("import subprocess; subprocess.run(['g++', '--version'], stdout=-3)")


@pytest.fixture
def library(guest: Guest) -> Path:
    source = guest.place / "x.c"
    source.write_text("int f(void) { return 1; }")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(guest.root / "x.so"), str(source)], check=True)
    return guest.root / "x.so"


LOAD = "import ctypes; ctypes.CDLL({!r})"


def test_a_sealed_library_loads_where_nothing_may_compile(guest: Guest, library: Path) -> None:
    guest.state.write_text("l")
    allowed = guest.place / "allowed"
    allowed.write_text(f"{library}\n")

    guest.run(LOAD.format(str(library)), AOTGAUDI_WITNESS_ALLOWED=str(allowed))

    assert [(event["path"], event["sealed"]) for event in guest.events("load")] == [(str(library), True)]


def test_a_planted_library_is_refused(guest: Guest, library: Path) -> None:
    guest.state.write_text("l")
    allowed = guest.place / "allowed"
    allowed.write_text(f"{guest.root / 'other.so'}\n")

    done = guest.attempt(LOAD.format(str(library)), AOTGAUDI_WITNESS_ALLOWED=str(allowed))

    assert "a file that is not sealed" in done.stderr
    assert [event["sealed"] for event in guest.events("load")] == [False]
    assert guest.events("refused")[0]["path"] == str(library)


def test_planted_source_is_refused_before_a_line_of_it_runs(guest: Guest) -> None:
    guest.state.write_text("l")
    (guest.root / "planted.py").write_text("print('it ran')")
    allowed = guest.place / "allowed"
    allowed.touch()

    done = guest.attempt(
        f"sys.path.insert(0, {str(guest.root)!r}); import planted", AOTGAUDI_WITNESS_ALLOWED=str(allowed)
    )

    assert done.returncode == 1
    assert done.stdout == ""
    assert guest.events("refused")[0]["path"].endswith("planted.py")


def test_what_is_loaded_live_is_told_not_refused(guest: Guest, library: Path) -> None:
    guest.state.write_text("v")
    allowed = guest.place / "allowed"
    allowed.touch()

    guest.run(LOAD.format(str(library)), AOTGAUDI_WITNESS_ALLOWED=str(allowed))

    assert [event["sealed"] for event in guest.events("load")] == [False]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_every_way_of_multiprocessing_is_followed(guest: Guest, method: str, tmp_path: Path) -> None:
    script = tmp_path / "guest.py"
    script.write_text(
        f"""
import sys; sys.path.insert(0, {str(SITE)!r})
import aotgaudi_witness, multiprocessing, subprocess
def core():
    aotgaudi_witness.register()
    subprocess.run(["true", "core"])
if __name__ == "__main__":
    aotgaudi_witness.register()
    child = multiprocessing.get_context({method!r}).Process(target=core, name="EngineCore_DP0")
    child.start(); child.join()
    sys.exit(child.exitcode)
"""
    )

    subprocess.run([sys.executable, "-S", script], env=guest.environment, check=True, timeout=60)

    hellos = {event["pid"]: event["role"] for event in guest.events("hello")}
    (core,) = (event for event in guest.events("process") if event["argv"] == ["true", "core"])
    assert hellos[core["pid"]] == "EngineCore"
    assert sorted(event["pid"] for event in guest.events("bye")) == sorted(hellos)


def test_a_process_that_becomes_another_program_says_so_last(guest: Guest) -> None:
    guest.run("import os; os.execv('/bin/sh', ['sh', '-c', 'true'])")

    process, bye = guest.events()[-2:]
    assert (process["e"], process["argv"]) == ("process", ["sh", "-c", "true"])
    assert (bye["e"], bye["why"]) == ("bye", "exec")


def test_a_process_that_looks_for_its_next_program_says_once_that_it_goes(guest: Guest) -> None:
    guest.run("import os; os.execvp('true', ['true'])")

    assert [event["why"] for event in guest.events("bye")] == ["exec"]


def test_a_child_that_is_forked_and_executed_ends_in_an_orderly_way(guest: Guest) -> None:
    guest.run("import os; assert os.spawnvp(os.P_WAIT, 'true', ['true']) == 0")

    assert sorted(str(event.get("why", "")) for event in guest.events("bye")) == ["", "exec"]


def test_a_child_that_only_executes_a_program_says_nothing(guest: Guest) -> None:
    guest.run("import subprocess; subprocess.run(['true'], preexec_fn=lambda: None)")

    assert len(guest.events("hello")) == 1


def test_a_state_that_changed_is_acknowledged_after_all_that_came_before(guest: Guest) -> None:
    guest.run(
        """
        import subprocess
        subprocess.run(["true"])
        for byte in "levf":
            say(byte)
        """
    )

    assert [event["e"] for event in guest.events()] == ["hello", "process", *["state"] * 4, "bye"]
    assert [event["to"] for event in guest.events("state")] == list("levf")


def test_a_process_that_dies_at_once_has_told_what_it_did(guest: Guest) -> None:
    done = guest.attempt("import os, subprocess; subprocess.run(['true']); os.kill(os.getpid(), 9)")

    assert done.returncode == -9
    assert [event["e"] for event in guest.events()] == ["hello", "process"]


def test_secrets_in_a_command_are_not_told(guest: Guest) -> None:
    guest.run("import subprocess; subprocess.run(['true', '--api-key', 'geheim'])")

    assert all("geheim" not in path.read_text() or "subprocess" in path.read_text() for path in guest.files())
    assert guest.events("process")[0]["argv"] == ["true", "--api-key", "***"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_the_sources_are_of_python_39_and_import_the_standard_library_alone(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))

    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [node.module or ""]
        tops = {name.partition(".")[0] for name in names} - {"aotgaudi_witness"}
        assert tops <= set(sys.stdlib_module_names), path


def test_a_guest_finds_it_by_its_entry_points() -> None:
    (found,) = distributions(path=[str(SITE)])

    points = {(point.group, point.name, point.value) for point in found.entry_points}
    value = "aotgaudi_witness:register"
    assert points == {
        ("vllm.general_plugins", ENTRY_POINT, value),
        ("sglang.srt.plugins", ENTRY_POINT, value),
    }


def test_nothing_but_the_witness_is_on_the_guests_path() -> None:
    assert {path.name for path in SITE.iterdir()} == {"aotgaudi_witness", "aotgaudi_witness-1.dist-info"}


def test_the_wheel_carries_it(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )

    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    expected = {
        str(path.relative_to(ROOT)) for path in SITE.rglob("*") if path.is_file() and path.suffix != ".pyc"
    }
    assert expected <= set(names)
