"""The compiler that inductor calls: exactly the instructions of a level, and no trace of the machine that builds.

Offline only. By default inductor asks the building machine twice and keeps the answers:

* `pick_vec_isa` takes the first valid class of the wanted width. So a machine with AMX or VNNI generates code for
  them, and ``-mavx512bf16`` depends on what the process compiled before. `pinned` leaves one choice.
* Commands have ``-march=native`` (older versions of torch know no other), and ``__FILE__`` puts the paths of the work
  directory and of torch's headers into the code. Torch has no option for more compiler flags, but it has one for the
  compiler: ours is a short script, whose flags come last and win.

The script also makes precompiled headers whole or absent. Inductor keeps them for ever, in a predictable folder of the
temporary directory, and a header that a killed compiler left half-written fails every later compile. Ours lie in the
build's folder.

Code that all units share is compiled once. Inductor writes a unit's C interface, and the container behind it, into each
wrapper, and a header of torch makes each wrapper compile ``std::regex`` to read the word "cpu": measured, nearly all of
g++'s work for one. This code depends only on the name of a class, so it is one object, linked into each unit.
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
"""The script removes environment variables that add to g++'s search paths or libraries, since no key has them. Generated
sources, named by hashes of commands with paths in them, become ``unit/wrapper.cpp`` and the like. Of several ``-march``,
``-o`` and matching maps, g++ takes the last."""

_INTERFACE = "interface.o"
_INTERFACE_SOURCE = """\
#define AOTGAUDI_INTERFACE
#include <torch/csrc/inductor/aoti_include/cpu.h>
"""

_NO_CHECKS = """
    static constexpr bool _check_aoti_runtime_check_inputs_env() { return false; }
    static inline void __check_inputs_outputs(AtenTensorHandle*, AtenTensorHandle*) {}
"""
"""Replaces functions that compare each input's sizes if AOTI_RUNTIME_CHECK_INPUTS is set, which it never is here."""

_HEADER = Path("torch/csrc/inductor/aoti_runtime/model_base.h")
_IN_HEADER = re.compile(r"^inline (void parse_device_str\([^)]*\)) (\{.*?^\})$", re.MULTILINE | re.DOTALL)
_NOT_IN_HEADER = r"""\1;
#ifdef AOTGAUDI_INTERFACE
\1 \2
#endif"""
"""Leaves a function's declaration in torch's header and defines it only in the interface."""

_LONGEST_PATH = 200


class Toolchain:
    """The compiler for one level, installed below `folder`, which outlives compiles. Not thread-safe.

    `flags` say what g++ may emit; they come last. `identity`, one line, names the versions of all parts.
    Raises CompileError if g++ is missing.
    """

    def __init__(self, level: IsaLevel, flags: tuple[str, ...], folder: Path, identity: str = "") -> None:
        self._level = level
        self._torch = Path(torch.__file__).absolute().parent
        script = _script((*flags, f"-ffile-prefix-map={self._torch}=torch"), identity)
        # Another script (of another torch, say) is another compiler, with other headers and another interface.
        self._folder = folder.absolute() / f"{level.name}-{sha256_bytes(script)[:12]}"
        self._compiler = self._folder / "g++"  # By this name torch knows what it is.
        if not self._compiler.exists():
            header = self._folder / "include" / _HEADER
            header.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(header, _without_regex(self._torch / "include" / _HEADER))
            write_atomic(self._compiler, script, mode=0o755)
        with contextlib.suppress(
            OSError
        ):  # The store's collector reads this time. In a shared store the folder may belong to another user.
            os.utime(self._folder)

    @contextlib.contextmanager
    def applied(self, work_dir: Path) -> Iterator[dict[str, Any]]:
        """Yields the inductor options to compile with. While active, inductor has no other choice.

        Inductor's other caches go to `work_dir` and end with it.
        """
        isa = pinned(self._level)
        headers = self._folder / "headers"
        with contextlib.ExitStack() as stack:
            stack.enter_context(_replaced(cpu_vec_isa, "valid_vec_isa_list", lambda: [isa]))
            if hasattr(codecache, "_HEADER_DIR"):  # Older versions do not precompile headers.
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
        """While active, wrappers omit the interface of units, which is linked into each unit. Only while `applied`.

        Wrappers also omit checks of inputs, which are never on. `options` are all of inductor's options: the first caller
        compiles the interface with them.
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
        """Returns a path of this machine that the artifact contains, or None. Artifacts must not hold one."""
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
    """Compiles torch's source of the interface to `made`, with inductor's commands for wrappers, whole or not at all."""
    source = Path(inspect.getfile(CppWrapperCpu)).parent / "aoti_runtime" / "interface.cpp"
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        copy = Path(folder) / "interface.cpp"
        parts = (source, Path(__file__).with_name("program.h"))  # The second file is ours.
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
    """Returns torch's vector types for `level`, which are always valid and add no flags.

    Torch's objects compile probes to find out, and change themselves by the result. There is one object per level, because
    torch remembers precompiled headers by it.
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
