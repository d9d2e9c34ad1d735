"""What a command line does: compiles, asks a compiler about itself, or neither. Pure.

A compiler that is given something to compile (a source, a header, an object to link, a script to build by) compiles. One
that is asked its version, its search paths or where a library lies is probed: Inductor, Triton and ctypes do so at every
start.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence

COMPILER, PROBE, OTHER = "compiler", "probe", "other"

_COMPILERS = """
    cc c++ gcc g++ clang clang++ cc1 cc1plus cpp icc icpc icx icpx
    as ld ld.bfd ld.gold ld.lld gold lld mold collect2 llc opt rustc
    nvcc cicc cudafe++ ptxas nvlink fatbinary hipcc amdclang amdclang++ tpc-clang
    """
COMPILERS = frozenset(_COMPILERS.split())
BUILDERS = frozenset({"ninja", "make", "gmake", "cmake", "cargo", "bazel", "meson"})
"""Programs that run compilers themselves, where nobody sees them."""

_WRAPPERS = frozenset(
    {"env", "nice", "ionice", "nohup", "time", "timeout", "taskset", "numactl", "setsid", "stdbuf"}
)
_CACHES = frozenset({"ccache", "sccache", "distcc", "icecc"})
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ash", "ksh"})
_SUFFIXES = """
    .c .cc .cpp .cxx .cu .hip .h .hh .hpp .hxx .cuh .i .ii .s .sx
    .o .a .bc .ll .ptx .cubin .fatbin .gpu .rs .mlir
    """
_INPUTS = tuple(_SUFFIXES.split())
_WITH_VALUE = frozenset(
    {
        *("-o", "-MF", "-MT", "-MQ", "-I", "-L", "-D", "-U", "-x"),
        *("-isystem", "-include", "-arch", "-Xlinker"),
    }
)
_ASKING = frozenset({"--version", "--help", "-h", "-V", "--verbose-version"})
_SUFFIX = re.compile(r"-\d[\d.]*$")
_SEPARATORS = re.compile(r"^[;&|()\n]+$")


def kind_of_command(argv: Sequence[str]) -> str:
    """Returns whether a command line compiles (`COMPILER`), asks a compiler (`PROBE`), or neither (`OTHER`)."""
    words = [str(word) for word in argv]
    if not words:
        return OTHER
    name = program(words[0])
    if name in _SHELLS:
        return _strongest(kind_of_command(command) for command in _commands_of_shell(words))
    if name in _WRAPPERS or name in _CACHES:
        inner = next((i for i, word in enumerate(words[1:], 1) if _is_known(program(word))), None)
        return OTHER if inner is None else kind_of_command(words[inner:])
    if re.fullmatch(r"python[\d.]*", name):
        return _kind_of_python(words)
    return _kind_of_known(name, words[1:])


def program(word: str) -> str:
    """Returns a program's name without folder, machine and version: ``g++`` of ``/usr/bin/x86_64-linux-gnu-g++-12``."""
    name = os.path.basename(word)
    if name in COMPILERS or name in BUILDERS:
        return name
    bare = _SUFFIX.sub("", name)
    last = bare.rpartition("-")[2]  # after x86_64-linux-gnu-
    return last if last in COMPILERS and bare not in COMPILERS else bare


def _is_known(name: str) -> bool:
    return name in COMPILERS or name in BUILDERS or name in _SHELLS


def _kind_of_known(name: str, arguments: Sequence[str]) -> str:
    if name in BUILDERS:
        is_asked = any(word in _ASKING for word in arguments) or (
            name in ("make", "gmake") and "-v" in arguments
        )
        return PROBE if is_asked else COMPILER
    if name in COMPILERS:
        return COMPILER if _has_input(arguments) else PROBE
    return OTHER


def _has_input(arguments: Sequence[str]) -> bool:
    """Whether a compiler is given something to compile."""
    is_value = False
    is_preprocessing = "-E" in arguments
    for word in arguments:
        if is_value:
            is_value = False
        elif word in _WITH_VALUE:
            is_value = True
        elif word == "-":
            if not is_preprocessing:
                return True
        elif word.startswith("@") or (not word.startswith("-") and word.lower().endswith(_INPUTS)):
            return True
    return False


def _kind_of_python(words: Sequence[str]) -> str:
    """A Python that runs ninja or cmake as a module, or builds an extension."""
    for i, word in enumerate(words[1:], 1):
        if word == "-m":
            return kind_of_command(words[i + 1 :])
        if word in ("-c", "-") or word.startswith("-c"):
            return OTHER
        if not word.startswith("-"):
            builds = os.path.basename(word) == "setup.py" and any(w.startswith("build") for w in words[i:])
            return COMPILER if builds else OTHER
    return OTHER


def _commands_of_shell(words: Sequence[str]) -> Iterator[list[str]]:
    """Yields the simple commands of ``sh -c TEXT``; of a script nothing is known."""
    for i, word in enumerate(words[1:], 1):
        if word.startswith("-") and not word.startswith("--") and "c" in word:
            yield from _simple_commands(words[i + 1] if i + 1 < len(words) else "")
            return


def _simple_commands(text: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(text.replace("\n", ";"), posix=True, punctuation_chars=";&|()")
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # an open quotation
        words = text.split()
    command: list[str] = []
    for word in [*words, ";"]:
        if not _SEPARATORS.match(word):
            if command or not re.match(r"^(\w+=.*|exec|then|do|if|else|!|\{)$", word):
                command.append(word)
        elif command:
            yield command
            command = []


def _strongest(kinds: Iterator[str]) -> str:
    found = set(kinds)
    return next((kind for kind in (COMPILER, PROBE) if kind in found), OTHER)
