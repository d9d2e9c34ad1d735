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

What every unit has in common is compiled once. Inductor writes the C interface of a unit, and the container behind it, into
each wrapper, and a header of torch has each wrapper compile ``std::regex``, to read the word "cpu": measured, nearly all of
what g++ has to do for one. They depend on nothing of the unit but the name of a class, so they are one object, which the
script links into each.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import inspect
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._inductor import codecache, cpp_builder, cpu_vec_isa
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

from aotgaudi.backends.inductor.levels import IsaLevel
from aotgaudi.digest import sha256_bytes
from aotgaudi.errors import CompileError
from aotgaudi.files import write_atomic

_SCRIPT = """\
#!/bin/sh
# g++ as aotgaudi calls it: see aotgaudi/backends/inductor/toolchain.py.
# {identity}
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
set -- "-I${{0%/*}}/include" "$@" "-ffile-prefix-map=${{0%/*}}/include=torch/include" {flags}
case $output in
*.so) [ -e "${{0%/*}}/{interface}" ] && set -- "${{0%/*}}/{interface}" "$@" ;;
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

_INTERFACE = "interface.o"
_INTERFACE_SOURCE = """\
#define AOTGAUDI_INTERFACE
#include <torch/csrc/inductor/aoti_include/cpu.h>
"""

_NO_CHECKS = """
    static constexpr bool _check_aoti_runtime_check_inputs_env() { return false; }
    static inline void __check_inputs_outputs(AtenTensorHandle*, AtenTensorHandle*) {}
"""
"""In place of a function for each input, which compares its sizes where AOTI_RUNTIME_CHECK_INPUTS is set: never here."""

_HEADER = Path("torch/csrc/inductor/aoti_runtime/model_base.h")
_IN_HEADER = re.compile(r"^inline (void parse_device_str\([^)]*\)) (\{.*?^\})$", re.MULTILINE | re.DOTALL)
_NOT_IN_HEADER = r"""\1;
#ifdef AOTGAUDI_INTERFACE
\1 \2
#endif"""
"""A function of torch's header is declared in it, and defined in the interface alone."""

_LONGEST_PATH = 200


class Toolchain:
    """The compiler for one level, installed below `folder`, which outlives compiles. Not thread-safe.

    `flags` say what g++ may emit; they come last. `identity`, one line, names the versions of all that it consists of.
    Raises CompileError where there is no g++.
    """

    def __init__(self, level: IsaLevel, flags: tuple[str, ...], folder: Path, identity: str = "") -> None:
        self._level = level
        self._torch = Path(torch.__file__).absolute().parent
        script = _script((*flags, f"-ffile-prefix-map={self._torch}=torch"), identity)
        # Another script, of another torch say, is another compiler, with headers and an interface of its own.
        self._folder = folder.absolute() / f"{level.name}-{sha256_bytes(script)[:12]}"
        self._compiler = self._folder / "g++"  # By this name torch knows what it is.
        if not self._compiler.exists():
            header = self._folder / "include" / _HEADER
            header.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(header, _without_regex(self._torch / "include" / _HEADER))
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

    @contextlib.contextmanager
    def one_interface(self, options: dict[str, Any]) -> Iterator[None]:
        """Until the end, wrappers are without the interface of units, which is linked into each. Only while `applied`.

        They are without checks of inputs, too, which nobody turns on. `options` are inductor's, all of them: they decide how
        the interface is compiled, by the first who comes.
        """
        made = self._folder / _INTERFACE
        with (self._folder / f"{_INTERFACE}.lock").open("w") as lock, torch._inductor.config.patch(options):
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                _compile_interface(made)
        with (
            _replaced(CppWrapperCpu, "_write_aoti_interface_header", lambda _: None),
            _replaced(CppWrapperCpu, "generate_input_output_runtime_checks", _without_checks),
        ):
            yield

    def path_in(self, artifact: Path, work_dir: Path) -> str | None:
        """Returns a path of this machine that the artifact holds, or None: it must not say where it was built."""
        data = artifact.read_bytes()
        for root in sorted({*_machine_roots(), self._torch, self._folder, work_dir, work_dir.resolve()}):
            at = data.find(os.fsencode(f"{root}/"))
            if at >= 0:
                return data[at : at + _LONGEST_PATH].split(b"\0")[0].decode(errors="replace")
        return None


def _without_checks(wrapper: CppWrapperCpu) -> None:
    wrapper.prefix.splice_aot(_NO_CHECKS)


def _without_regex(header: Path) -> bytes:
    text, number = _IN_HEADER.subn(_NOT_IN_HEADER, header.read_text(encoding="utf-8"))
    if number != 1:
        raise CompileError(f"torch {torch.__version__} has another {_HEADER.name} than this version knows")
    return text.encode()


def _compile_interface(made: Path) -> None:
    """Compiles torch's own source of the interface, as inductor does wrappers, to the file `made`, whole or not at all."""
    source = Path(inspect.getfile(CppWrapperCpu)).parent / "aoti_runtime" / "interface.cpp"
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        copy = Path(folder) / "interface.cpp"
        parts = (source, Path(__file__).with_name("program.h"))  # The latter is ours.
        texts = (part.read_text(encoding="utf-8") for part in parts)
        copy.write_text("\n".join((_INTERFACE_SOURCE, *texts)), encoding="utf-8")
        options = cpp_builder.CppTorchDeviceOptions(
            vec_isa=cpu_vec_isa.pick_vec_isa(),
            device_type="cpu",
            aot_mode=True,
            compile_only=True,
            min_optimize=True,
        )
        builder = cpp_builder.CppBuilder("interface", str(copy), options, folder)
        builder.build()
        Path(builder.get_target_file_path()).replace(made)


def _script(flags: tuple[str, ...], identity: str) -> bytes:
    compiler = shutil.which("g++")
    if compiler is None:
        raise CompileError("no C++ compiler found (install g++)")
    parts = {
        "flags": shlex.join(flags),
        "compiler": shlex.quote(compiler),
        "interface": _INTERFACE,
        "identity": identity,
    }
    return _SCRIPT.format(**parts).encode()


def _machine_roots() -> set[Path]:
    places = (sys.prefix, sys.base_prefix, tempfile.gettempdir(), os.path.expanduser("~"))
    return {Path(place) for place in places if os.path.isabs(place)} - {Path("/")}


@functools.cache
def pinned(level: IsaLevel) -> cpu_vec_isa.VecISA:
    """Returns torch's vector types for `level`, which are always valid and add no flags of their own.

    Torch's own objects find out by compiling probes, and change themselves by the result. One object a level: torch keeps
    what it knows of precompiled headers by it.
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
