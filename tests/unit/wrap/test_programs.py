"""Programs that a server's processes start, at any depth and in any language, and libraries that they load."""

from __future__ import annotations

import _bisect
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.machine import within
from aotgaudi.wrap.programs import Compilers, NewLibrary, ProgramStart, ProgramWatch, new_libraries
from aotgaudi.wrap.sandbox import Child, Sandbox, open_sandbox

pytestmark = pytest.mark.process


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    root = Path("/tmp") / f"ag-{os.getpid()}-{time.monotonic_ns() % 10**9}"
    with open_sandbox(root) as found:
        yield found
    shutil.rmtree(root)


def starts(sandbox: Sandbox, script: str) -> list[ProgramStart]:
    with Child(["/bin/sh", "-c", script], dict(os.environ), sandbox) as child:
        deadline = time.monotonic() + 30
        while child.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        if not child.programs.is_watching:
            pytest.skip("the kernel does not ask about programs here")
        return child.programs.take()


def test_every_program_is_seen_with_its_words_and_is_started(sandbox: Sandbox, tmp_path: Path) -> None:
    long = "x" * 5000
    script = (
        f"(echo a | xargs -n1 /bin/echo 'ä b' '' > {tmp_path}/out) & wait; /bin/true {long}; no-such-program"
    )

    words = [start.words for start in starts(sandbox, script)]

    assert ("xargs", "-n1", "/bin/echo", "ä b", "") in words
    assert ("/bin/echo", "ä b", "", "a") in words
    assert ("/bin/true", long[:4096]) in words
    assert (tmp_path / "out").read_text() == "ä b  a\n"


def test_a_watch_of_a_server_that_has_not_said_hello_ends_at_once() -> None:
    watch = ProgramWatch()
    of_server = os.dup(watch.descriptor)
    watch.start()

    within(8.0, watch.close)

    os.close(of_server)
    assert not watch.is_alive()


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("sh {0}/build.sh", ["{0}/bin/g++"]),
        ("find {0} -name build.sh -exec sh {{}} ;", ["{0}/bin/g++"]),
        ("{0}/bin/g++ --version", []),
        ("{0}/bin/g++ -print-file-name=libc.so", []),
        ("cat {0}/build.sh", []),
    ],
)
def test_compilers_are_told_whoever_starts_them_and_once(
    sandbox: Sandbox, tmp_path: Path, script: str, found: list[str]
) -> None:
    """The driver runs an assembler and a linker, which are part of it, even if it is only asked something."""
    for name, text in {
        "g++": f"{tmp_path}/bin/as x.s; {tmp_path}/bin/ld x.o",
        "as": "true",
        "ld": "true",
    }.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    (tmp_path / "build.sh").write_text(f"echo x.cpp | xargs {tmp_path}/bin/g++ -c")

    seen = Compilers().among(starts(sandbox, script.format(tmp_path).replace(" ;", " \\;")), lambda _: False)

    assert [start.words[0] for start in seen] == [one.format(tmp_path) for one in found]


def test_what_an_agent_told_of_is_not_told_again() -> None:
    compilers = Compilers()
    told = ProgramStart(11, 10, ("g++", "x.cpp"))

    assert compilers.among([told], lambda _: True) == []
    assert compilers.among([ProgramStart(12, 11, ("as", "x.s"))], lambda _: False) == []


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.sampled_from(["g++", "sh", "echo"]))))
def test_a_compiler_that_a_process_of_no_compiler_starts_is_never_missed(
    rows: list[tuple[int, int, str]],
) -> None:
    """Process ids are used again, by children of others."""
    history = [ProgramStart(pid, parent, (name, "x.cpp")) for pid, parent, name in rows]
    fresh = ProgramStart(99, 98, ("g++", "x.cpp"))

    assert Compilers().among([*history, fresh], lambda _: False)[-1] == fresh


def load(library: Path, then: str = "pass") -> subprocess.Popen[bytes]:
    code = f"import ctypes, os; ctypes.CDLL({str(library)!r}); {then}; print(flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_library_that_was_made_since_and_is_loaded_is_found(tmp_path: Path) -> None:
    new = Path(shutil.copy(_bisect.__file__, tmp_path / "new.so"))
    now = time.time()
    gone = Path(shutil.copy(_bisect.__file__, tmp_path / "gone.so"))
    processes = [load(new), load(gone, f"os.unlink({str(gone)!r})"), load(Path(_bisect.__file__))]
    pids = [process.pid for process in processes]
    removed = NewLibrary(pids[1], "its file has been removed")

    try:
        assert new_libraries(pids, now - 3600) == {str(new): NewLibrary(pids[0]), str(gone): removed}
        assert new_libraries(pids, now + 3600) == {str(gone): removed}
    finally:
        for process in processes:
            process.communicate()
    assert new_libraries(pids, 0.0) == {}


MAPPING = """
import ctypes, mmap, os, sys
source, folder = sys.argv[1:]
code = open(source, "rb").read()

def memory(name, data):
    descriptor = os.memfd_create(name)
    os.write(descriptor, data)
    return descriptor

def run(descriptor, offset=0):
    kept.append(mmap.mmap(descriptor, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_EXEC, offset=offset))

def unnamed(data):
    descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o700)
    os.write(descriptor, data)
    return descriptor

def named(name, data):
    path = os.path.join(folder, name)
    with open(path, "wb") as file:
        file.write(data)
    return path

def removed(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.unlink(path)
    return descriptor

kept = []
load = lambda descriptor: ctypes.CDLL(f"/proc/self/fd/{descriptor}")
jit = b"\\xc3" * 8192
DOING
print(flush=True); input()
"""


@pytest.mark.parametrize(
    ("doing", "found"),
    [
        ("load(memory('kernel', code))", "/memfd:kernel"),
        ("load(memory('libffi', code))", "/memfd:libffi"),
        ("run(memory('x', jit)); load(memory('x', code))", "/memfd:x"),
        ("load(unnamed(code))", "#"),
        ("run(memory('x', code), 4096)", "/memfd:x"),
        ("path = named('ffi123456', code); ctypes.CDLL(path); os.unlink(path)", "/ffi123456"),
        ("run(removed(named('kernel.bin', jit)))", "/kernel.bin"),
        ("run(memory('libffi', jit))", ""),
        ("run(memory('xbyak', jit))", ""),
        ("run(unnamed(jit))", ""),
        ("run(removed(named('ffi123456', jit)))", ""),
        ("run(-1)", ""),
        ("kept.append(mmap.mmap(memory('data', code), 4096))", ""),
    ],
)
def test_code_in_memory_is_a_library_by_its_bytes_whatever_its_name(
    tmp_path: Path, doing: str, found: str
) -> None:
    """A JIT's memory, and libffi's, has such names too. Memory that is only read is nobody's code."""
    words = [sys.executable, "-c", MAPPING.replace("DOING", doing), _bisect.__file__, tmp_path]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        libraries = new_libraries([process.pid], time.time() + 3600)
        process.communicate(b"\n")

    assert bool(libraries) == bool(found), libraries
    assert all(found in path and library.why for path, library in libraries.items())


def test_a_library_in_shared_memory_is_a_file_like_any_other() -> None:
    now = time.time()
    library = Path(shutil.copy(_bisect.__file__, f"/dev/shm/ag-{os.getpid()}.so"))
    try:
        process = load(library)
        assert new_libraries([process.pid], now - 3600) == {str(library): NewLibrary(process.pid)}
        assert new_libraries([process.pid], now + 3600) == {}, "one that somebody made before"
        library.unlink()
        assert new_libraries([process.pid], now + 3600)[str(library)].why == "its file has been removed"
        process.communicate()
    finally:
        library.unlink(missing_ok=True)


def test_a_library_that_is_linked_elsewhere_is_not_made_by_that(tmp_path: Path) -> None:
    """As by an installer that links from a cache into another environment while a server runs."""
    library = Path(shutil.copy(_bisect.__file__, tmp_path / "old.so"))
    process, now = load(library), time.time()

    try:
        time.sleep(0.05)  # Times of files have the grain of the kernel's clock.
        (tmp_path / "link.so").hardlink_to(library)
        assert library.stat().st_ctime > now
        assert new_libraries([process.pid], now) == {}
        with library.open("r+b") as file:
            file.write(file.read(1))
        assert new_libraries([process.pid], now) == {str(library): NewLibrary(process.pid)}
    finally:
        process.communicate()


def test_programs_that_may_not_be_read_start_and_are_said_to_be_unseen(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("aotgaudi.wrap.programs._start", forbidden)

    with Child(["/bin/sh", "-c", f"/bin/echo ran > {tmp_path}/out"], dict(os.environ), sandbox) as child:
        deadline = time.monotonic() + 30
        while child.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)

        assert not child.programs.is_watching
    assert (tmp_path / "out").read_text() == "ran\n"
