"""Instruction-set levels: what a machine can build, and what it refuses to load before anything is mapped."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.backends.base import Target
from aotgaudi.backends.inductor.levels import ISA_LEVELS
from aotgaudi.backends.inductor.probe import cpu_features, probe, require_satisfied
from aotgaudi.backends.inductor.runtime import InductorRuntime
from aotgaudi.backends.online import check_target, make_runtime
from aotgaudi.errors import SpecError, TargetError
from aotgaudi.spec.target import TargetSpec

PROBE = "aotgaudi.backends.inductor.probe.cpu_features"
AVX2, AVX512, BF16, AMX = ISA_LEVELS.values()
ZEN5_OR_SO = frozenset({*AVX512.features, "avx512_vnni", "avx512_bf16", "gfni", "sse2"})
"""AVX-512 with VNNI and BF16, and no AMX."""

EVERYTHING = frozenset(AMX.features)


def with_features(monkeypatch: pytest.MonkeyPatch, features: frozenset[str]) -> None:
    monkeypatch.setattr(PROBE, lambda: features)


def target_of(name: str) -> Target:
    """A target of this machine's torch and architecture, for another instruction set."""
    with pytest.MonkeyPatch.context() as patch:
        with_features(patch, EVERYTHING)
        return probe(name)


def test_the_names_are_those_of_the_spec() -> None:
    isa = TargetSpec.model_fields["isa"].annotation

    assert get_args(isa) == ("native", *ISA_LEVELS)
    assert TargetSpec(isa="avx512+amx").isa == "avx512+amx"


def test_each_level_has_all_of_the_one_before_and_more() -> None:
    levels = list(ISA_LEVELS.values())

    for lower, higher in itertools.pairwise(levels):
        assert set(lower.features) < set(higher.features)
    for level in levels:
        assert list(level.features) == sorted(set(level.features))


@pytest.mark.process
@pytest.mark.parametrize(
    ("features", "name"),
    [
        (frozenset(AVX2.features), "avx2"),
        (frozenset({*AVX512.features}) - {"avx512vl"}, "avx2"),
        (ZEN5_OR_SO, "avx512+bf16"),
        (EVERYTHING - {"avx512_bf16"}, "avx512"),
        (EVERYTHING, "avx512+amx"),
    ],
    ids=["AVX2", "half of AVX-512", "BF16 without AMX", "AMX with a feature masked", "AMX"],
)
def test_native_is_the_best_level_that_is_whole(
    monkeypatch: pytest.MonkeyPatch, features: frozenset[str], name: str
) -> None:
    with_features(monkeypatch, features)

    target = probe("native")

    assert target.isa == ISA_LEVELS[name].features
    assert target.flags["aotgaudi.isa"] == name


@pytest.mark.process
def test_one_level_is_one_target_on_every_machine_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """No feature of the building machine beyond the level may come into the key, or into the code."""
    with_features(monkeypatch, frozenset(AVX512.features))
    plain = probe("avx512")
    for features in (ZEN5_OR_SO, EVERYTHING):
        with_features(monkeypatch, features)
        assert probe("avx512") == plain


@pytest.mark.parametrize("name", ISA_LEVELS)
def test_building_for_what_the_machine_lacks_is_refused_and_names_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    missing = ISA_LEVELS[name].features[0]
    with_features(monkeypatch, frozenset(ISA_LEVELS[name].features) - {missing})

    with pytest.raises(SpecError, match="cannot be built on this machine") as caught:
        probe(name)

    assert caught.value.problem.endswith(f"which lacks {missing}")
    assert caught.value.exit_code == 2


def test_a_machine_below_every_level_is_told_which_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with_features(monkeypatch, frozenset())

    with pytest.raises(SpecError, match=r"it has: none of avx2, avx512, avx512\+bf16, avx512\+amx"):
        probe("native")


@pytest.mark.process
@given(
    name=st.sampled_from(list(ISA_LEVELS)), more=st.frozensets(st.text("abcxyz_0123", max_size=8), max_size=5)
)
def test_a_machine_with_more_loads_it(name: str, more: frozenset[str]) -> None:
    target = target_of(name)

    with pytest.MonkeyPatch.context() as patch:
        with_features(patch, frozenset(target.isa) | more)
        require_satisfied(target)
        check_target(target)


@pytest.mark.process
@given(data=st.data(), name=st.sampled_from(list(ISA_LEVELS)))
def test_a_machine_with_less_is_refused_and_every_missing_feature_is_named(
    data: st.DataObject, name: str
) -> None:
    target = target_of(name)
    missing = data.draw(st.frozensets(st.sampled_from(target.isa), min_size=1))

    with pytest.MonkeyPatch.context() as patch:
        with_features(patch, EVERYTHING - missing)
        with pytest.raises(TargetError) as caught:
            check_target(target)

    assert f"with {', '.join(sorted(missing))}, which" in str(caught.value)
    assert caught.value.exit_code == 5


@pytest.mark.process
def test_the_refusal_names_the_level_to_rebuild_with(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of("avx512+amx")

    with_features(monkeypatch, ZEN5_OR_SO)
    with pytest.raises(TargetError, match=r'rebuild with target\.isa = "avx512\+bf16"$'):
        check_target(target)

    with_features(monkeypatch, frozenset({"sse2"}))
    with pytest.raises(TargetError, match="no level is low enough"):
        check_target(target)


@pytest.mark.process
def test_without_a_satisfied_target_there_is_no_runtime_to_map_with(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of("avx512")
    with_features(monkeypatch, frozenset(AVX2.features))

    for make in (make_runtime, InductorRuntime):
        with pytest.raises(TargetError, match="avx512bw"):
            make(target)


@pytest.mark.process
def test_tiles_that_the_kernel_does_not_give_are_refused_before_anything_is_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the permission the first tile instruction is a SIGILL, whatever /proc/cpuinfo says."""
    with_features(monkeypatch, EVERYTHING)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: False)

    InductorRuntime(probe("avx512"))
    with pytest.raises(TargetError, match="tiles"):
        InductorRuntime(probe("avx512+amx"))

    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: True)
    InductorRuntime(probe("avx512+amx"))


@pytest.mark.parametrize(
    ("text", "features"),
    [
        (
            "processor\t: 0\nmodel name\t: flags: of many\nflags\t\t: fpu avx2\nflags\t\t: x\n\n",
            {"fpu", "avx2"},
        ),
        *((text, set[str]()) for text in ("", "processor : 0\n", "\n:\n", "flags\n")),
    ],
)
def test_features_are_read_from_cpuinfo(tmp_path: Path, text: str, features: set[str]) -> None:
    (tmp_path / "cpuinfo").write_text(text)

    assert cpu_features(tmp_path / "cpuinfo") == features
    assert cpu_features(tmp_path / "absent") == frozenset()


@pytest.mark.process
def test_the_toolchain_is_named_down_to_its_distribution() -> None:
    """Two builds of one version of g++ differ in their defaults: both lines must be in the key."""
    with pytest.MonkeyPatch.context() as patch:
        with_features(patch, EVERYTHING)
        toolchain = probe("avx2").toolchain

    assert toolchain["compiler"].startswith("g++ (")
    assert toolchain["linker"].startswith("GNU ld")
    assert toolchain["libc"].split()[0] in ("glibc", "musl")
