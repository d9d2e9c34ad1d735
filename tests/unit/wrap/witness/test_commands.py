from __future__ import annotations

import pytest
from aotgaudi_witness.commands import kind_of_command, program


@pytest.mark.parametrize(
    "command",
    [
        "g++ main.cpp -o main.so",
        "/usr/bin/x86_64-linux-gnu-g++-12 -shared -o x.so x.cc",
        "clang-17 -c kernel.c",
        "g++ -x c++-header -o pch.h.gch pch.h",
        "g++ @arguments.rsp",
        "gcc -xc - -o a.out",
        "nvcc -arch sm_90a -cubin kernel.cu",
        "ptxas --gpu-name=sm_90a kernel.ptx -o kernel.cubin",
        "ld -o x.so a.o b.o",
        "ninja",
        "ninja -v -j 4",
        "make -C csrc",
        "cmake --build .",
        "ccache g++ -c x.cpp",
        "nice -n 5 env CXX=g++ g++ -c x.cpp",
        "taskset -c 0 g++ -c x.cpp",
        "python -m ninja -v",
        "python3.11 -u setup.py build_ext --inplace",
    ],
)
def test_a_compiler_with_something_to_compile_compiles(command: str) -> None:
    assert kind_of_command(command.split()) == "compiler"


@pytest.mark.parametrize(
    "command",
    [
        "g++ --version",
        "g++ -v",
        "gcc -print-file-name=libgomp.so",
        "gcc -Wl,-t -o /tmp/tmpabcdef -lcuda",  # ctypes.util.find_library
        "ld -t -L /usr/lib -o /dev/null -lm",
        "g++ -E -v -",
        "g++ -o out.o --version",
        "nvcc --version",
        "ninja --version",
        "make -v",
        "cmake --version",
        "ptxas --version",
        "ccache g++ --version",
    ],
)
def test_a_compiler_that_is_asked_about_itself_is_probed(command: str) -> None:
    assert kind_of_command(command.split()) == "probe"


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["lscpu"],
        ["ldconfig", "-p"],
        ["python", "-c", "import x; g++ = 1"],
        ["python", "-m", "vllm.model_executor.models.registry"],
        ["cat", "x.cpp"],
        ["sh", "build.sh"],
        ["ls", "/usr/bin/g++"],
        ["git", "rev-parse", "HEAD"],
        ["nvidia-smi"],
    ],
)
def test_anything_else_is_neither(argv: list[str]) -> None:
    assert kind_of_command(argv) == "other"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("g++ -c x.cpp", "compiler"),
        ("cd /tmp && g++ -c x.cpp -o x.o", "compiler"),
        ("g++ --version; echo done", "probe"),
        ("echo a | cat; (g++ a.cpp)", "compiler"),
        ("CC=gcc LD_LIBRARY_PATH=/x exec gcc a.c", "compiler"),
        ("if which g++; then g++ a.cpp; fi", "compiler"),
        ("echo 'g++ a.cpp'", "other"),
        ("unfinished 'quotation g++", "other"),
        ("line\ng++ x.cpp", "compiler"),
    ],
)
def test_a_shell_does_the_strongest_of_its_commands(text: str, kind: str) -> None:
    assert kind_of_command(["/bin/sh", "-c", text]) == kind
    assert kind_of_command(["bash", "-lc", text]) == kind


def test_a_program_has_no_folder_no_machine_and_no_version() -> None:
    names = [
        "/usr/bin/aarch64-linux-gnu-gcc-13",
        "clang++-17",
        "g++",
        "x86_64-pc-linux-gnu-g++-12.2.0",
        "python3",
    ]

    assert [program(name) for name in names] == ["gcc", "clang++", "g++", "g++", "python3"]
