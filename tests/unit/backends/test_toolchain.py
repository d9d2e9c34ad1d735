"""The compiler that inductor is given: which instructions, no paths, and precompiled headers whole or absent."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor import codecache, cpu_vec_isa
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

from aotgaudi.backends.fake import probe as fake_target
from aotgaudi.backends.inductor import toolchain as toolchain_module
from aotgaudi.backends.inductor.compiler import InductorCompiler
from aotgaudi.backends.inductor.levels import ISA_LEVELS, IsaLevel
from aotgaudi.backends.inductor.toolchain import Toolchain, pinned
from aotgaudi.errors import CompileError

AVX2, AVX512, BF16, AMX = ISA_LEVELS.values()
SOURCE = 'extern "C" const char* where() { return __FILE__; }\n'


def make(folder: Path, level: IsaLevel = AVX2) -> Toolchain:
    return Toolchain(level, level.compiler_flags, folder)


def compiler_of(folder: Path) -> Path:
    """The script of the one toolchain below `folder`."""
    (script,) = folder.glob("*/g++")
    return script


def run(script: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(script), *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def macros(script: Path, *arguments: str) -> set[str]:
    done = run(script, *arguments, "-dM", "-E", "-x", "c++", "/dev/null")
    assert done.returncode == 0, done.stderr
    return {line.split()[1] for line in done.stdout.splitlines()}


@pytest.mark.process
@pytest.mark.parametrize(
    ("level", "has", "lacks"),
    [
        (AVX2, {"__AVX2__", "__FMA__", "__F16C__"}, {"__AVX512F__"}),
        (AVX512, {"__AVX512F__", "__AVX512VL__"}, {"__AVX512VNNI__", "__AVX512BF16__", "__AMX_TILE__"}),
        (BF16, {"__AVX512BF16__"}, {"__AVX512VNNI__", "__AMX_TILE__"}),
        (AMX, {"__AVX512VNNI__", "__AVX512BF16__", "__AMX_TILE__", "__AMX_BF16__"}, {"__AMX_FP16__"}),
    ],
    ids=list(ISA_LEVELS),
)
def test_the_compiler_emits_for_the_level_whatever_it_is_told(
    tmp_path: Path, level: IsaLevel, has: set[str], lacks: set[str]
) -> None:
    make(tmp_path, level)

    found = macros(compiler_of(tmp_path), "-march=native", "-O3")

    assert has <= found
    assert not lacks & found
    assert found == macros(compiler_of(tmp_path), "-march=x86-64", "-O3")


DOT_PRODUCT = """
int dot(const short* a, const short* b) {
    int sum = 0;
    for (int i = 0; i < 4096; ++i) sum += a[i] * b[i];
    return sum;
}
"""
"""What g++ turns into one VNNI instruction where it may."""


@pytest.mark.process
@pytest.mark.parametrize(
    ("level", "has_it"), [(AVX2, False), (AVX512, False), (BF16, False), (AMX, True)], ids=list(ISA_LEVELS)
)
def test_what_the_compiler_finds_for_itself_is_of_the_level_too(
    tmp_path: Path, level: IsaLevel, has_it: bool
) -> None:
    make(tmp_path, level)
    (tmp_path / "dot.cpp").write_text(DOT_PRODUCT)
    command = ("-march=native", "-O3", "-S", "-o", "-", tmp_path / "dot.cpp")

    code = run(compiler_of(tmp_path), *command).stdout

    assert "vpmaddwd" in code or has_it
    assert ("vpdpwssd" in code) == has_it


def build_object(tmp_path: Path, name: str) -> tuple[bytes, str]:
    """Builds one source, of a name that starts with `name`, by a toolchain of its own; its bytes, and its folder."""
    folder = tmp_path / name
    folder.mkdir()
    make(tmp_path / f"tools of {name}".replace(" ", "-"))
    source = folder / f"{name}.wrapper.cpp"
    source.write_text(SOURCE)
    script = compiler_of(tmp_path / f"tools-of-{name}")
    done = run(script, source, "-shared", "-fPIC", "-o", folder / "unit.so")
    assert done.returncode == 0, done.stderr
    return (folder / "unit.so").read_bytes(), str(folder)


@pytest.mark.process
def test_the_directory_and_the_name_of_a_source_do_not_come_into_the_code(tmp_path: Path) -> None:
    (one, folder), (other, _) = build_object(tmp_path, "one"), build_object(tmp_path, "another-longer")

    assert one == other
    assert b"unit/wrapper.cpp" in one
    assert folder.encode() not in one


@pytest.mark.process
def test_headers_of_torch_are_named_from_torch_on(tmp_path: Path) -> None:
    make(tmp_path)
    header = Path(torch.__file__).parent / "include" / "any.h"
    source = f'# 1 "{header}"\nconst char* where = __FILE__;\n'
    (tmp_path / "a.cpp").write_text(source)

    done = run(compiler_of(tmp_path), "-S", "-o", "-", tmp_path / "a.cpp")

    assert '"torch/include/any.h"' in done.stdout


@pytest.mark.process
def test_the_environment_adds_nothing(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "cstddef").write_text("#error not this one\n")
    (tmp_path / "a.cpp").write_text("#include <cstddef>\n" + SOURCE)
    bad = str(tmp_path / "bad")
    command = (tmp_path / "a.cpp", "-shared", "-fPIC", "-o", tmp_path / "a.so")

    plain = run(compiler_of(tmp_path), *command)
    before = (tmp_path / "a.so").read_bytes()
    done = run(compiler_of(tmp_path), *command, CPATH=bad, CPLUS_INCLUDE_PATH=bad, LD_RUN_PATH=bad)

    assert (plain.returncode, done.returncode) == (0, 0), done.stderr
    assert (tmp_path / "a.so").read_bytes() == before


@pytest.mark.process
def test_a_source_that_does_not_compile_fails(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "a.cpp").write_text("nonsense\n")

    done = run(compiler_of(tmp_path), tmp_path / "a.cpp", "-c", "-o", tmp_path / "a.o")

    assert done.returncode != 0
    assert "nonsense" in done.stderr


def precompile(script: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "h.h").write_text("#include <vector>\n")
    return run(script, "-x", "c++-header", folder / "h.h", "-o", folder / "h.h.gch")


@pytest.mark.process
def test_a_precompiled_header_is_used_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    make(tmp_path / "tools")
    (tmp_path / "h.h.gch.123.part").write_text("of a compiler that was killed")
    script = compiler_of(tmp_path / "tools")

    assert precompile(script, tmp_path).returncode == 0

    (tmp_path / "a.cpp").write_text(SOURCE)
    used = run(script, tmp_path / "a.cpp", "-H", "-include", tmp_path / "h.h", "-c", "-o", tmp_path / "a.o")
    assert f"! {tmp_path}/h.h.gch" in used.stderr
    assert sorted(path.name for path in tmp_path.glob("h.h*")) == ["h.h", "h.h.gch"]


@pytest.mark.process
@pytest.mark.parametrize("end", ["exit 1", "kill -9 $$"])
def test_a_compiler_that_ends_early_leaves_no_half_of_a_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Half a header fails every later compile: g++ takes it for whole."""
    stub = tmp_path / "bin" / "g++"
    stub.parent.mkdir()
    stub.write_text(f'#!/bin/sh\nfor a do [ "$b" = -o ] && out=$a; b=$a; done\necho half > "$out"\n{end}\n')
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", str(stub.parent), prepend=os.pathsep)
    make(tmp_path / "tools")

    done = precompile(compiler_of(tmp_path / "tools"), tmp_path)

    assert done.returncode != 0
    assert not (tmp_path / "h.h.gch").exists()


def test_a_toolchain_is_installed_once_and_one_of_anything_else_beside_it(tmp_path: Path) -> None:
    make(tmp_path)
    script = compiler_of(tmp_path)
    before = script.stat()
    os.utime(script.parent, (0, 0))

    make(tmp_path)

    assert compiler_of(tmp_path).stat() == before
    assert script.parent.stat().st_mtime > 1.0e9  # For the collector of the store.
    make(tmp_path, AVX512)
    for identity in ("torch 1", "torch 2", "torch 1"):
        Toolchain(AVX2, AVX2.compiler_flags, tmp_path, identity)
    assert len(list(tmp_path.glob("*/g++"))) == 4


@pytest.mark.process
def test_the_interface_is_linked_into_units_and_into_nothing_else(tmp_path: Path) -> None:
    make(tmp_path)
    script = compiler_of(tmp_path)
    (tmp_path / "a.cpp").write_text('extern "C" int a() { return 1; }\n')
    (tmp_path / "interface.cpp").write_text('extern "C" int interface() { return 2; }\n')
    interface = script.parent / "interface.o"
    assert run(script, tmp_path / "interface.cpp", "-c", "-fPIC", "-o", interface).returncode == 0

    assert run(script, tmp_path / "a.cpp", "-c", "-fPIC", "-o", tmp_path / "a.o").returncode == 0
    assert run(script, tmp_path / "a.o", "-shared", "-o", tmp_path / "a.so").returncode == 0

    assert b"interface" not in (tmp_path / "a.o").read_bytes()
    assert b"interface" in (tmp_path / "a.so").read_bytes()


def test_the_interface_is_compiled_once_and_wrappers_are_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Path] = []

    def compile_interface(made: Path) -> None:
        compiled.append(made)
        made.write_bytes(b"object")

    monkeypatch.setattr(toolchain_module, "_compile_interface", compile_interface)
    before = CppWrapperCpu._write_aoti_interface_header

    for _ in range(2):
        with make(tmp_path).one_interface({}):
            assert CppWrapperCpu._write_aoti_interface_header is not before
    with make(tmp_path, AVX512).one_interface({}):
        pass

    assert CppWrapperCpu._write_aoti_interface_header is before
    assert [path.parent.name.split("-")[0] for path in compiled] == ["avx2", "avx512"]


def test_without_a_compiler_there_is_no_toolchain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)

    with pytest.raises(CompileError, match="install g"):
        make(tmp_path)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("level", ISA_LEVELS.values(), ids=list(ISA_LEVELS))
def test_torch_has_one_choice_within_and_its_own_again_after(
    tmp_path: Path, level: IsaLevel, fails: bool
) -> None:
    listed, headers = cpu_vec_isa.valid_vec_isa_list, codecache._HEADER_DIR
    environment = dict(os.environ)

    with suppress(ZeroDivisionError), make(tmp_path, level).applied(tmp_path / "work") as options:
        with torch._inductor.config.patch(options):
            picked = cpu_vec_isa.pick_vec_isa()
        assert type(picked).__mro__[1].__name__ == level.vec_isa
        assert bool(picked)
        assert picked.build_arch_flags() == ""
        assert codecache._HEADER_DIR.startswith(str(tmp_path))
        assert options["cpp.cxx"] == str(compiler_of(tmp_path))
        if fails:
            raise ZeroDivisionError

    assert cpu_vec_isa.valid_vec_isa_list is listed
    assert headers == codecache._HEADER_DIR
    assert dict(os.environ) == environment


def test_a_torch_that_cannot_be_pinned_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", cpu_vec_isa.VecAVX2)

    with pytest.raises(CompileError, match="pinned"), make(tmp_path).applied(tmp_path / "work"):
        pass


def test_a_pinned_class_never_looks_at_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", None)

    assert all(bool(pinned(level)) for level in ISA_LEVELS.values())
    assert pinned(AVX512).is_avx512_bf16_supported() is False
    assert pinned(AMX).is_avx512_bf16_supported() is True
    assert pinned(AMX).is_amx_fp16_supported() is False


@pytest.fixture(scope="module")
def toolchain(tmp_path_factory: pytest.TempPathFactory) -> Toolchain:
    return make(tmp_path_factory.mktemp("tools"))


@given(before=st.binary(max_size=50), after=st.binary(max_size=50), which=st.integers(0, 3))
def test_a_path_of_the_machine_is_found_wherever_it_stands(
    toolchain: Toolchain, tmp_path_factory: pytest.TempPathFactory, before: bytes, after: bytes, which: int
) -> None:
    folder = tmp_path_factory.mktemp("work")
    roots = (folder, Path(torch.__file__).parent, sys.prefix, tempfile.gettempdir())
    artifact = folder / "unit.so"
    artifact.write_bytes(before + f"{roots[which]}/x.h".encode() + b"\0" + after)

    assert toolchain.path_in(artifact, folder) is not None


@pytest.mark.parametrize(
    "data", [b"", b"torch/include/torch/x.h\0", b"https://pytorch.org/docs\0", b"//\0", b"/lib64/ld-linux.so"]
)
def test_an_artifact_without_a_path_of_the_machine_passes(
    toolchain: Toolchain, tmp_path: Path, data: bytes
) -> None:
    (tmp_path / "unit.so").write_bytes(data)

    assert toolchain.path_in(tmp_path / "unit.so", tmp_path) is None


def test_a_target_of_no_known_level_is_refused() -> None:
    with pytest.raises(CompileError, match=r"'' is not one of avx2, avx512, avx512\+bf16, avx512\+amx"):
        InductorCompiler(fake_target())
