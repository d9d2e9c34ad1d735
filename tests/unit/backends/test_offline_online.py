"""Backend names: which can be built for, which can be served from, and what is said of the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from aotgaudi.backends.base import Target, Unit
from aotgaudi.backends.fake import FakeCompiler, probe
from aotgaudi.backends.inductor.probe import probe as probe_cpu
from aotgaudi.backends.offline import make_compiler, probe_target
from aotgaudi.backends.online import check_target, make_runtime
from aotgaudi.compile.keys import unit_key
from aotgaudi.errors import SpecError, TargetError
from aotgaudi.spec.target import TargetSpec


@pytest.mark.parametrize("backend", ["hpu", "cuda"])
def test_a_backend_that_cannot_be_built_for_is_refused_with_what_is_there(backend: str) -> None:
    with pytest.raises(SpecError) as caught:
        probe_target(TargetSpec.model_validate({"backend": backend}))

    assert caught.value.where == "target.backend"
    assert backend in caught.value.problem
    assert caught.value.remedy.startswith("available")
    assert "cpu" in caught.value.remedy


@pytest.mark.process
def test_the_fake_target_is_the_same_everywhere_and_neither_its_compiler_nor_probing_needs_torch() -> None:
    code = (
        "import sys\nfrom aotgaudi.backends.offline import make_compiler, probe_target\n"
        "from aotgaudi.spec.target import TargetSpec\n"
        "import aotgaudi.backends.online\n"
        "probe_target(TargetSpec())\n"
        "target = probe_target(TargetSpec(backend='fake'))\n"
        "make_compiler(target)\n"
        "print(target.model_dump_json())\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert Target.model_validate_json(done.stdout) == probe()


def test_the_fake_compiler_follows_from_the_text_alone(tmp_path: Path) -> None:
    def compiled(text: str, label: str, folder: str) -> bytes:
        (tmp_path / folder).mkdir()
        unit = Unit(text, unit_key(text, probe()), label)
        files = make_compiler(probe()).compile(unit, tmp_path / folder).files
        return files["unit.bin"].read_bytes()

    assert compiled("a", "x", "1") == compiled("a", "y", "2")
    assert compiled("b", "x", "3") != compiled("a", "x", "4")


def test_the_journal_is_part_of_the_target(tmp_path: Path) -> None:
    target = probe({"journal": str(tmp_path / "journal")})

    assert isinstance(make_compiler(target), FakeCompiler)
    assert unit_key("a", target) != unit_key("a", probe())


@pytest.mark.parametrize("backend", ["fake", "hpu", "cuda"])
def test_a_server_refuses_what_it_cannot_run(backend: str) -> None:
    target = Target.model_validate({"backend": backend, "machine": "any"})

    with pytest.raises(TargetError, match=backend):
        check_target(target)
    with pytest.raises(TargetError, match=backend):
        make_runtime(target)


@pytest.mark.process
def test_a_target_of_this_machine_is_satisfied() -> None:
    check_target(probe_cpu("native"))


@pytest.mark.process
@pytest.mark.parametrize(
    ("update", "factor"),
    [
        ({"machine": "sparc"}, "machine sparc"),
        ({"toolchain": {"torch": "1.0"}}, "torch 1.0"),
        ({"isa": ("avx2", "no_such_feature")}, "no_such_feature"),
    ],
)
def test_an_unsatisfied_target_names_the_factor(update: dict[str, object], factor: str) -> None:
    target = probe_cpu("native").model_copy(update=update)

    with pytest.raises(TargetError, match=factor):
        check_target(target)


def test_an_instruction_set_that_the_machine_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aotgaudi.backends.inductor.probe.cpu_features", frozenset)

    with pytest.raises(SpecError, match=r"target\.isa: 'avx2' cannot be built"):
        probe_target(TargetSpec(isa="avx2"))


def test_a_machine_without_a_compiler_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aotgaudi.backends.inductor.probe.shutil.which", lambda name: None)

    with pytest.raises(SpecError, match="install g"):
        probe_target(TargetSpec())
