"""What inductor compiles with: exactly the instructions of a level, and no trace of the machine that builds.

Offline only. Left to itself, inductor asks the building machine twice, and keeps what it is told:

* `pick_vec_isa` takes the first valid class of the wanted width, so a machine with AMX or VNNI generates code for
  them, and adds ``-mavx512bf16`` or not by what was compiled before in the process. `pinned` leaves one choice.
* Commands have ``-march=native`` (older versions of torch know no other), and ``__FILE__`` puts the paths of the work
  directory and of torch's headers into the code. There is no option for more compiler flags, but there has always
  been one for the compiler: ours is a script of a few lines, which has the last word on both.

The script also makes precompiled headers whole or absent. Inductor keeps them for ever, in a folder of the
temporary directory that anybody can foresee, and a header that a killed compiler left half-written fails every
later compile. Here they lie in the build's own folder.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._inductor import codecache, cpu_vec_isa

from aotgaudi.atomicfile import write_atomic
from aotgaudi.backends.inductor.levels import IsaLevel
from aotgaudi.digest import sha256_bytes
from aotgaudi.errors import CompileError

_SCRIPT = """\
#!/bin/sh
# g++ as aotgaudi calls it: see aotgaudi/backends/inductor/toolchain.py.
unset CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH LIBRARY_PATH LD_RUN_PATH \\
    DEPENDENCIES_OUTPUT SUNPRO_DEPENDENCIES GCC_COMPARE_DEBUG
previous= output=
for argument do
    case $previous in -o) output=$argument ;; esac
    case $argument in
    *.cpp)
        name=${{argument##*/}}
        set -- "$@" "-ffile-prefix-map=${{argument%/*}}=unit" "-ffile-prefix-map=$argument=unit/${{name#*.}}"
        ;;
    esac
    previous=$argument
done
set -- "$@" {flags}
case $output in
*.gch)
    rm -f "$output".*.part
    {compiler} "$@" -o "$output.$$.part" && exec mv -f "$output.$$.part" "$output"
    exit 1
    ;;
esac
exec {compiler} "$@"
"""
"""Environment variables of g++ that add to its search, or to what it links, are not in a key: they are taken
away. Generated sources are named by hashes of commands that hold paths: they become ``unit/wrapper.cpp`` and the
like. Of several ``-march``, several ``-o`` and several maps that fit, the last one holds."""

_LONGEST_PATH = 200


class Toolchain:
    """The compiler for one level, installed below `folder`, which outlives compiles. Not thread-safe.

    `flags` say what g++ may emit; they come last. Raises CompileError where there is no g++.
    """

    def __init__(self, level: IsaLevel, flags: tuple[str, ...], folder: Path) -> None:
        self._level = level
        self._torch = Path(torch.__file__).absolute().parent
        script = _script((*flags, f"-ffile-prefix-map={self._torch}=torch"))
        # Another script, of another torch say, is another compiler, with headers of its own.
        self._folder = folder.absolute() / f"{level.name}-{sha256_bytes(script)[:12]}"
        self._compiler = self._folder / "g++"  # By this name torch knows what it is.
        if not self._compiler.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self._compiler, script, mode=0o755)
        with contextlib.suppress(
            OSError
        ):  # The store's collector goes by it; in a shared store it may be another's.
            os.utime(self._folder)

    @contextlib.contextmanager
    def applied(self, work_dir: Path) -> Iterator[dict[str, Any]]:
        """Yields the inductor options to compile with; until the end, inductor has no other choice.

        What inductor caches besides goes to `work_dir`, and with it.
        """
        isa = pinned(self._level)
        headers = self._folder / "headers"
        with contextlib.ExitStack() as stack:
            stack.enter_context(_replaced(cpu_vec_isa, "valid_vec_isa_list", lambda: [isa]))
            if hasattr(codecache, "_HEADER_DIR"):  # Before it, headers were not precompiled.
                stack.enter_context(_replaced(codecache, "_HEADER_DIR", str(headers)))
                stack.enter_context(_replaced(codecache, "_HEADER_LOCK_DIR", str(headers / "locks")))
            stack.enter_context(_cache_dir(work_dir / "inductor"))
            options = {"cpp.cxx": str(self._compiler), "cpp.simdlen": self._level.simdlen}
            with torch._inductor.config.patch(options):
                if cpu_vec_isa.pick_vec_isa() is not isa:
                    raise CompileError(
                        f"torch {torch.__version__} does not let its instruction set be pinned"
                    )
            yield options

    def path_in(self, artifact: Path, work_dir: Path) -> str | None:
        """Returns a path of this machine that the artifact holds, or None: it must not say where it was built."""
        data = artifact.read_bytes()
        for root in sorted({*_machine_roots(), self._torch, self._folder, work_dir, work_dir.resolve()}):
            at = data.find(os.fsencode(f"{root}/"))
            if at >= 0:
                return data[at : at + _LONGEST_PATH].split(b"\0")[0].decode(errors="replace")
        return None


def _script(flags: tuple[str, ...]) -> bytes:
    compiler = shutil.which("g++")
    if compiler is None:
        raise CompileError("no C++ compiler found (install g++)")
    return _SCRIPT.format(flags=shlex.join(flags), compiler=shlex.quote(compiler)).encode()


def _machine_roots() -> set[Path]:
    places = (sys.prefix, sys.base_prefix, tempfile.gettempdir(), os.path.expanduser("~"))
    return {Path(place) for place in places if os.path.isabs(place)} - {Path("/")}


def pinned(level: IsaLevel) -> cpu_vec_isa.VecISA:
    """Returns torch's vector types for `level`, which are always valid and add no flags of their own.

    Torch's own objects find out by compiling probes, and change themselves by the result.
    """
    base: Any = getattr(cpu_vec_isa, level.vec_isa)

    class Pinned(base):  # type: ignore[misc]
        _is_avx512_bf16_supported = level.has_bf16
        _is_amx_fp16_supported = False
        __hash__ = base.__hash__

        def __bool__(self) -> bool:
            return True

        def build_arch_flags(self) -> str:
            return ""

    return Pinned()


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextlib.contextmanager
def _cache_dir(path: Path) -> Iterator[None]:
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    os.environ[name] = str(path)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
