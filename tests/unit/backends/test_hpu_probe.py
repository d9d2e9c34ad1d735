"""A Gaudi's target: what it consists of, that each part is in every key, and what is refused of a file with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aotgaudi.backends.base import Target
from aotgaudi.backends.hpu.probe import (
    ENVIRONMENT,
    KEY_MODE,
    TOOLCHAIN,
    assemble,
    hpu_target,
    require_whole,
)
from aotgaudi.backends.offline import find_target
from aotgaudi.compile.keys import unit_key
from aotgaudi.entries import DecodeEntry
from aotgaudi.errors import SpecError, TargetError
from aotgaudi.spec.target import TargetSpec
from tests.environment import ROOT
from tests.specs import spec_of
from tests.workload import program_key

GOLDEN = ROOT / "tests" / "golden" / "data" / "hpu.target.json"
TARGET = Target.model_validate_json(GOLDEN.read_bytes())
COMPONENTS = [name for name, _ in TARGET.components() if name not in ("target.backend", "target.isa")]


def changed(component: str, value: str | None) -> Target:
    """`TARGET` with another value of one component, or without it."""
    document: dict[str, Any] = TARGET.model_dump()
    *place, name = component.removeprefix("target.").split(".", 1)
    table = document[place[0]] if place else document
    if value is None:
        del table[name]
    else:
        table[name] = value
    return Target.model_validate(document)


def test_the_file_is_what_a_machine_gives_byte_for_byte() -> None:
    variables = {
        name.removeprefix(ENVIRONMENT): value for name, value in TARGET.flags.items() if name != KEY_MODE
    }

    target = assemble(
        "gaudi3",
        dict(reversed(TARGET.toolchain.items())),
        {**dict(reversed(variables.items()))},
    )

    assert target == TARGET
    assert f"{target.as_file()}\n".encode() == GOLDEN.read_bytes()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with Intel's software, and its Python package where it is found."""
    plugin = tmp_path / "site-packages" / "habana_frameworks"
    system = tmp_path / "usr" / "lib" / "habanalabs"
    for path in (
        plugin / "__init__.py",
        plugin / "torch" / "lib" / "libhabana_pytorch_plugin.so",
        plugin / "torch" / "dynamo" / "passes.py",
        *(system / name for name in ("libSynapse.so", "libtpc_fuser.so", "libtpc_kernels.so")),
        system / "libgaudi2_complex_guid_lib.so",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)
    monkeypatch.syspath_prepend(plugin.parent)
    return tmp_path


def target_of(machine: Path, **environment: str) -> Target:
    return hpu_target("gaudi2", "1.24.1.482.abc", environment, memory=machine / "memory", root=machine)


def test_a_machine_has_a_whole_target_with_what_builds_set_and_without_what_they_remove(
    machine: Path,
) -> None:
    target = target_of(machine, PATH="/bin", RANK="1", PT_HPU_METRICS_FILE="/x", FUSER_ENABLE_A="1")

    require_whole(target)
    assert target.toolchain["synapse"] == "1.24.1.482.abc"
    assert target.flags.items() >= {
        ("env.PT_HPU_USE_EAGER_FALLBACK", "0"),
        ("env.FUSER_ENABLE_A", "1"),
        ("hpu.key_mode", "stable"),
    }
    assert {"env.PATH", "env.RANK", "env.PT_HPU_METRICS_FILE"}.isdisjoint(target.flags)
    assert str(machine) not in target.as_file()


def test_another_library_is_another_target(machine: Path) -> None:
    before = target_of(machine)
    (machine / "usr" / "lib" / "habanalabs" / "libSynapse.so").write_text("a newer one")

    changed = dict(target_of(machine).components()).items() - dict(before.components()).items()

    assert [name for name, _ in changed] == ["target.toolchain.graph-compiler"]


def test_a_machine_without_the_software_says_so(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="habana-torch-plugin is not installed"):
        target_of(tmp_path)


def test_the_key_of_a_unit_stays_what_it_is() -> None:
    assert unit_key("graph", TARGET).hex == "4ccbeed406192713ac380376b8928021892514b0dda79cb63d79d98292f80a96"


def test_every_component_is_in_every_key_by_its_name() -> None:
    entry, spec = DecodeEntry(1, 1, 1), spec_of(target={"backend": "hpu"})

    for component in COMPONENTS:
        other = changed(component, "other")

        (difference,) = program_key(entry, spec, TARGET).differences(program_key(entry, spec, other))
        assert (difference[0], difference[2]) == (component, "other")
        assert unit_key("graph", TARGET) != unit_key("graph", other)


@pytest.mark.parametrize(
    ("component", "value", "where", "problem"),
    [
        ("target.machine", "gaudi9", "machine", "is 'gaudi9', none of gaudi, gaudi2, gaudi3"),
        *((f"target.toolchain.{name}", None, f"toolchain.{name}", "is missing") for name in TOOLCHAIN),
        ("target.toolchain.gcc", "12", "toolchain.gcc", "is not known to this version"),
        ("target.toolchain.kernels", "A" * 64, "toolchain.kernels", "is not a sha256"),
        ("target.toolchain.bridge", "", "toolchain.bridge", "is not a sha256"),
        ("target.flags.hpu.key_mode", None, "flags.hpu.key_mode", "is None, not 'stable'"),
        ("target.flags.hpu.key_mode", "pinned", "flags.hpu.key_mode", "is 'pinned', not 'stable'"),
        ("target.flags.hpu.frontend", "direct", "flags.hpu.frontend", "is not known"),
        ("target.flags.env.HOME", "/root", "flags.env.HOME", "is not known"),
        ("target.flags.env.HABANA_LOGS", "/x", "flags.env.HABANA_LOGS", "is not known"),
        ("target.flags.O3", "1", "flags.O3", "is not known"),
    ],
)
def test_a_target_that_is_not_whole_is_refused_by_the_name_of_the_component(
    component: str, value: str | None, where: str, problem: str
) -> None:
    with pytest.raises(SpecError) as caught:
        require_whole(changed(component, value))

    assert caught.value.where == where
    assert problem in caught.value.problem
    assert "aotgaudi doctor --hpu --write-target FILE" in caught.value.remedy


def test_instruction_sets_are_of_cpus() -> None:
    with pytest.raises(SpecError, match="no instruction sets"):
        require_whole(TARGET.model_copy(update={"isa": ("avx2",)}))


def test_a_description_stands_for_this_machine_only_where_both_are_of_hpu() -> None:
    assert find_target(TargetSpec(backend="hpu"), TARGET) == TARGET
    assert find_target(TargetSpec(backend="fake")).backend == "fake"
    with pytest.raises(SpecError, match=r"the spec's target\.backend is 'fake'"):
        find_target(TargetSpec(backend="fake"), TARGET)
    with pytest.raises(SpecError, match="that file's is 'cpu'"):
        find_target(TargetSpec(backend="hpu"), Target(backend="cpu", machine="x86_64"))
    with pytest.raises(SpecError, match="is missing"):
        find_target(TargetSpec(backend="hpu"), Target(backend="hpu", machine="gaudi2"))
