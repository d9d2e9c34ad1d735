"""What vllm-gaudi is told, what is expected of it, and the shapes that a spec decides for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.backends.base import Target
from aotgaudi.bundle.launch import world
from aotgaudi.errors import CompileError, CoverageError, SpecError, TargetError
from aotgaudi.manifest.bucket_file import bucket_file_of
from aotgaudi.manifest.coverage import live_graphs_of
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.parse import spec_from_json
from aotgaudi.wrap.adapters.base import Flags, Shapes, as_sealed
from aotgaudi.wrap.adapters.vllm import VLLM
from aotgaudi.wrap.adapters.vllm_gaudi import VLLM_GAUDI, _require_version, find_machine
from aotgaudi.wrap.exercise import Feature
from aotgaudi.wrap.launch_machine import Installed
from tests.guests_here import Here
from tests.launches import a_launch
from tests.specs import spec_tables
from tests.unit.wrap.logs import event, history

PLACE = Path("/run/aotgaudi")
GUEST = VLLM_GAUDI
GAUDI = Target(backend="hpu", machine="gaudi2")
FILE = "/run/aotgaudi/cache/shapes/vllm.buckets"
PAIR = ("7_a_syn1.24.1.482.6c1b7a2.recipe", "7_a_syn1.24.1.482.6c1b7a2.metadata")


def spec_of(limits: dict[str, int] | None = None, **bucketing: Any) -> BuildSpec:
    return spec_from_json(spec_tables(limits=limits, scheduler={"engine": "vllm"}, bucketing=bucketing))


def read(*words: str) -> Flags:
    return GUEST.read(["tiny", *words], {})


def test_recipes_lie_in_one_directory_that_nothing_is_deleted_from() -> None:
    environ = GUEST.environment(PLACE, "load", {})

    assert environ["PT_HPU_RECIPE_CACHE_CONFIG"] == "/run/aotgaudi/cache/hpu,false,0"
    assert environ["PT_HPU_METRICS_FILE"] == "/run/aotgaudi/tmp/hpu-metrics.json"
    assert environ["PT_HPU_ENABLE_CACHE_METRICS"] == "1"
    assert environ["VLLM_CACHE_ROOT"].startswith("/run/aotgaudi/cache/")


@pytest.mark.parametrize("phase", ["cold", "load", "measure", "exercise", "live"])
def test_what_keeps_recipes_from_being_found_again_is_unset(phase: Any) -> None:
    environ = {"PT_RECIPE_CACHE_IGNORE_VERSION": "1", "VLLM_FORCE_AOT_LOAD": "1", "PT_HPU_LAZY_MODE": "1"}

    found = GUEST.environment(PLACE, phase, environ)

    assert not {"PT_RECIPE_CACHE_IGNORE_VERSION", "VLLM_FORCE_AOT_LOAD"} & found.keys()
    assert found["PT_HPU_LAZY_MODE"] == "1"


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (f"cache/hpu/{PAIR[0]}", "recipe"),
        (f"cache/hpu3/{PAIR[1]}", "recipe"),
        ("cache/vllm/x.py", "python"),
        ("cache/shapes/vllm.buckets", "other"),
    ],
)
def test_kinds_of_files(path: str, kind: str) -> None:
    assert GUEST.kind_of(path) == kind


def test_variables_of_the_bridge_count_and_files_by_their_content(tmp_path: Path) -> None:
    config = tmp_path / "quant.json"
    config.write_text("{}")
    environ = {
        "PT_HPU_LAZY_MODE": "1",
        "ENABLE_EXPERIMENTAL_FLAGS": "1",
        "VLLM_CONTIGUOUS_PA": "false",
        "QUANT_CONFIG": str(config),
        "HABANA_VISIBLE_DEVICES": "all",
        "VLLM_BUCKETING_FROM_FILE": FILE,
        "HABANA_API_KEY": "secret",
        "PATH": "/usr/bin",
    }

    counted = GUEST.variable_rules.keyed(environ)

    assert counted.keys() == {
        "PT_HPU_LAZY_MODE",
        "ENABLE_EXPERIMENTAL_FLAGS",
        "VLLM_CONTIGUOUS_PA",
        "QUANT_CONFIG",
    }
    assert counted["QUANT_CONFIG"].startswith("sha256:")
    assert GUEST.variable_rules.conditions(environ)["VLLM_BUCKETING_FROM_FILE"] == FILE


@pytest.mark.parametrize(
    ("ranks", "roles"),
    [(1, {"APIServer": 1, "EngineCore": 1}), (8, {"APIServer": 1, "EngineCore": 1, "Worker": 8})],
)
def test_ranks_are_processes(ranks: int, roles: dict[str, int]) -> None:
    launch = a_launch(guest="vllm-gaudi", target=GAUDI, world=world({"tensor_parallel": ranks}))

    assert GUEST.roles(launch) == roles


@pytest.mark.parametrize(
    ("model_type", "words", "is_asked"),
    [
        ("llama", (), True),
        ("llama", ("--enable-lora",), False),
        ("llama", ("--no-enable-lora",), True),
        ("qwen3_moe", (), False),
    ],
)
def test_a_server_is_not_asked_what_ends_its_engine(
    model_type: str, words: tuple[str, ...], is_asked: bool
) -> None:
    found, others = (
        GUEST.features(read(*asked), {"model_type": kind}, "hpu")
        for kind, asked in ((model_type, words), ("", ()))
    )

    def names(features: Iterable[Feature]) -> list[str]:
        return [one.name for feature in features for one in feature.requests]

    assert names(found) == [name for name in names(others) if is_asked or name != "prompt logprobs"]
    assert any("prompt_logprobs" in feature.gap for feature in found) != is_asked


def test_a_warm_start_misses_no_recipe_and_compiles_no_graph() -> None:
    worker = history(2, event("counters", values={"hpu.recipe_hits": 3}))

    found = GUEST.expected(a_launch(guest="vllm-gaudi", target=GAUDI), [worker])

    assert found.counters == {"hpu.graph_compilation": 0, "hpu.recipe_misses": 0}
    assert found.hooks == ("audit", "habana.metrics")


@pytest.mark.parametrize(
    ("words", "environ", "message"),
    [
        ((), {}, "--num-gpu-blocks-override: is not given: the server then counts"),
        (("--num-gpu-blocks-override", "8"), {"VLLM_SKIP_WARMUP": "true"}, "VLLM_SKIP_WARMUP: is 'true'"),
        (
            ("--num-gpu-blocks-override", "8"),
            {"VLLM_BUCKETING_FROM_FILE": "/mine"},
            "VLLM_BUCKETING_FROM_FILE: is '/mine', whose content would be no part of the launch",
        ),
        (("--num-gpu-blocks-override", "8", "--nnodes", "2"), {}, "--nnodes: is more than 1"),
    ],
)
def test_servers_whose_shapes_are_not_fixed_are_refused(
    words: tuple[str, ...], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        GUEST.require_witnessed(read(*words), environ)

    assert str(caught.value).startswith(message)


def test_a_server_with_its_blocks_pinned_is_taken() -> None:
    GUEST.require_witnessed(read("--num-gpu-blocks-override", "8"), {"VLLM_BUCKETING_FROM_FILE": FILE})


def test_shapes_are_the_closed_table_and_what_pins_it() -> None:
    spec = spec_of()

    found = GUEST.shapes(spec, read("--max-model-len", "128"), {"VLLM_CONTIGUOUS_PA": "False"})

    assert found.files == {"cache/shapes/vllm.buckets": bucket_file_of(spec).text}
    assert found.manifest_id == Manifest.of(bucket_file_of(spec).spec).id
    assert " ".join(found.words) == (
        "--num-gpu-blocks-override 24 --block-size 16 --max-num-batched-tokens 32 --max-num-seqs 2"
        " --enable-chunked-prefill --enable-prefix-caching"
    )
    sizes = {size for size, _, _ in bucket_file_of(spec).decode}
    assert {request.copies + len(request.beside) for request in found.requests} == sizes == {1, 2}
    assert found.variables == {}
    assert found.environ({"A": "b"}, PLACE) == {"A": "b", "VLLM_BUCKETING_FROM_FILE": FILE}


def test_shapes_say_which_traffic_compiles_and_request_logprobs_while_they_are_few() -> None:
    few, many = (GUEST.shapes(spec_of(), read(*words), {}) for words in (("--max-logprobs", "1"), ()))

    def states(found: Shapes) -> dict[str, str]:
        return {row.kind: row.state for row in found.live_graphs}

    assert (states(few)["logprobs"], states(many)["logprobs"]) == ("closed", "open")
    proved = [[one for one in found.requests if not one.at_start] for found in (few, many)]
    assert len(proved[0]) == 3 * len(proved[1])
    assert all(len({one.name for one in found.requests}) == len(found.requests) for found in (few, many))
    assert {row.kind for row in many.live_graphs} == {row.kind for row in live_graphs_of(spec_of())}


def torch_compiled() -> BuildSpec:
    target = {"backend": "hpu", "execution_mode": "torch_compile"}
    return spec_from_json(spec_tables(scheduler={"engine": "vllm"}, target=target))


def test_under_torch_compile_shapes_are_static_so_that_a_bucket_is_one_graph() -> None:
    assert GUEST.shapes(torch_compiled(), read(), {}).variables["VLLM_T_COMPILE_DYNAMIC_SHAPES"] == "false"
    given = {"VLLM_T_COMPILE_DYNAMIC_SHAPES": "0"}
    assert "VLLM_T_COMPILE_DYNAMIC_SHAPES" not in GUEST.shapes(torch_compiled(), read(), given).variables
    with pytest.raises(SpecError, match="VLLM_T_COMPILE_DYNAMIC_SHAPES: is 'true'"):
        GUEST.shapes(torch_compiled(), read(), {"VLLM_T_COMPILE_DYNAMIC_SHAPES": "true"})


@pytest.mark.parametrize(
    ("words", "environ", "message"),
    [
        (("--max-model-len", "256"), {}, "--max-model-len: is 256, and the spec says 128"),
        (("--no-enable-chunked-prefill",), {}, "--enable-chunked-prefill: is False, and the spec says True"),
        ((), {"VLLM_CONTIGUOUS_PA": "true"}, "VLLM_CONTIGUOUS_PA: is 'true', and the spec says 'false'"),
        ((), {"VLLM_SKIP_WARMUP": "1"}, "VLLM_SKIP_WARMUP: is '1'"),
        ((), {"VLLM_ENABLE_BUCKETING": "false"}, "VLLM_ENABLE_BUCKETING: is 'false'"),
        ((), {"VLLM_PROMPT_BS_BUCKET_MAX": "4"}, "VLLM_PROMPT_BS_BUCKET_MAX: is '4'"),
        ((), {"VLLM_BUCKETING_FROM_FILE": "x"}, "VLLM_BUCKETING_FROM_FILE: is set"),
    ],
)
def test_a_command_that_is_not_the_spec_s_is_refused(
    words: tuple[str, ...], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        GUEST.shapes(spec_of(), read(*words), environ)

    assert str(caught.value).startswith(message)


def test_variables_that_leave_it_as_it_is_are_taken() -> None:
    GUEST.shapes(spec_of(), read(), {"VLLM_ENABLE_BUCKETING": "true", "VLLM_SKIP_WARMUP": "false"})


def test_a_server_that_would_make_buckets_on_live_traffic_is_refused() -> None:
    with pytest.raises(CoverageError, match="the smallest: a prompt chunk of 1 token after 113 tokens"):
        GUEST.shapes(spec_of(version="vllm-gaudi@v0.16.0"), read(), {})
    with pytest.raises(SpecError, match="steps of several prompts"):
        GUEST.shapes(spec_of({"max_num_prefill_seqs": 2}), read(), {})


def plugin(version: str) -> Installed:
    return Installed(
        python="3.12",
        libc="glibc",
        prefix="/",
        site_packages="/",
        distributions={"vllm-gaudi": f"{version} {'0' * 64}"},
    )


@pytest.mark.parametrize(
    ("version", "installed"),
    [
        ("vllm-gaudi@v0.26.0", "0.26.0"),
        ("vllm-gaudi@v0.24.0", "0.26.0"),
        ("vllm-gaudi@v0.26.0", "0.26.1.dev3+g1234567"),
        ("vllm-gaudi@091bbad", "0.26.1.dev9+g091bbad01"),
        ("vllm-gaudi@v0.26.0", "unknown"),
    ],
)
def test_a_plugin_that_makes_the_spec_s_buckets_is_taken(version: str, installed: str) -> None:
    _require_version(spec_of(version=version), plugin(installed))


@pytest.mark.parametrize(
    ("version", "installed"),
    [("vllm-gaudi@v0.16.0", "0.26.0"), ("vllm-gaudi@v0.26.0", "0.16.0"), ("vllm-gaudi@091bbad", "0.26.0")],
)
def test_a_plugin_that_makes_other_buckets_is_refused_by_its_version(version: str, installed: str) -> None:
    with pytest.raises(SpecError, match=f"is {version}, and vllm-gaudi {installed} is installed"):
        GUEST.shapes(spec_of(version=version), read(), {}, plugin(installed))


NOISE = """
    HCCL_COMM_ID HCCL_SOCKET_IFNAME VLLM_DEBUG VLLM_RPC_TIMEOUT VLLM_ENGINE_ITERATION_TIMEOUT_S VLLM_PROFILER_ENABLED
    VLLM_TORCH_PROFILER_DIR HABANA_PROFILE
"""


def test_places_and_noise_do_not_count() -> None:
    assert GUEST.variable_rules.keyed(dict.fromkeys(NOISE.split(), "10.0.0.7:5000")) == {}


def test_a_model_that_is_calibrated_anew_is_another_launch(tmp_path: Path) -> None:
    config = tmp_path / "quant.json"
    config.write_text(json.dumps({"mode": "QUANTIZE", "dump_stats_path": str(tmp_path / "m")}))
    counted = []
    for measured in (b"1", b"2", b"1"):
        (tmp_path / "m_hooks_maxabs.npz").write_bytes(measured)
        counted.append(GUEST.variable_rules.keyed({"QUANT_CONFIG": str(config)})["QUANT_CONFIG"])

    assert counted[0] == counted[2] != counted[1]


def test_other_guests_take_no_shapes() -> None:
    with pytest.raises(SpecError, match="--shapes: is of no use to vllm"):
        VLLM.shapes(spec_of(), read(), {})


def test_who_serves_need_not_repeat_what_the_shapes_added() -> None:
    words = ("vllm", "serve", "tiny", "--max-model-len", "128")
    shapes = GUEST.shapes(spec_of(), read(*words[3:]), {})
    flags = GUEST.read([*words[2:], *shapes.words], {}).values
    sealed = a_launch(
        guest="vllm-gaudi",
        flags=dict(flags),
        variables={"VLLM_CONTIGUOUS_PA": "false", "PT_HPU_LAZY_MODE": "1"},
        manifest_id=shapes.manifest_id,
    )

    again, environ = as_sealed(GUEST, sealed, words, {"A": "b"})

    assert GUEST.read(again[2:], {}).values == flags
    assert environ == {"A": "b", "VLLM_CONTIGUOUS_PA": "false"}
    assert as_sealed(GUEST, sealed, again, environ) == (again, environ)
    otherwise = (*words, "--num-gpu-blocks-override", "25")
    assert (
        GUEST.read(as_sealed(GUEST, sealed, otherwise, {})[0][2:], {}).values["num-gpu-blocks-override"]
        == "25"
    )
    unshaped = sealed.model_copy(update={"manifest_id": None})
    assert as_sealed(GUEST, unshaped, words, {}) == (words, {})


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("vllm-gaudi", "0.24.0"),
        ("vllm-hpu-extension", "0.1"),  # The fork of Gaudi 1.22's README.
        ("vllm", "0.9.0.1+gaudi.1.22.0.gaudi122"),
    ],
)
def test_vllm_for_gaudi_as_a_plugin_or_as_a_fork_is_this_guest(here: Here, name: str, version: str) -> None:
    shutil.rmtree(here.site, ignore_errors=True)
    here.install(name, version)
    here.script()
    here.model()

    found = here.find("vllm", "serve", here.folder / "tiny", "--num-gpu-blocks-override", "8")

    assert found.adapter.name == "vllm-gaudi"
    with pytest.raises(SpecError, match="--num-gpu-blocks-override: is not given"):
        here.find("vllm", "serve", here.folder / "tiny")


def write(folder: Path, *names: str, size: int = 3) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"x" * size)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_settling_leaves_complete_pairs_under_plain_names(tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "hpu"
    other = ("9_a_syn1.24.1.482.6c1b7a2.recipe", "9_a_syn1.24.1.482.6c1b7a2.metadata")
    write(cache, *PAIR, "eviction.lock", "temp_8_a_syn1.24.1.482.6c1b7a2.metadata_12_0123456789ab")
    write(cache, *(f"{name}_12_0123456789ab" for name in other))
    write(cache, *(f"{name}_13_0123456789ab" for name in other))
    write(cache, "5_a_syn1.24.1.482.6c1b7a2.metadata", size=0)
    write(tmp_path / "cache" / "hpu1", *PAIR)

    GUEST.settle(tmp_path)

    assert names(cache) == {*PAIR, *other}
    assert names(tmp_path / "cache" / "hpu1") == set(PAIR)
    GUEST.settle(tmp_path)
    assert names(cache) == {*PAIR, *other}


@pytest.mark.parametrize(
    ("files", "sizes", "message"),
    [
        (PAIR[:1], 3, "has no metadata: its writer was killed"),
        (PAIR[1:], 3, "has metadata and no recipe"),
        ((*PAIR, "7_a_syn1_const_tensor_0.data"), 3, "holds constants"),
        ((*PAIR, *(name.replace("7_a", "8_b") for name in PAIR)), 3, "holds recipes of several versions"),
    ],
)
def test_a_recipe_that_was_cut_or_cannot_be_restored_fails_the_build(
    tmp_path: Path, files: tuple[str, ...], sizes: int, message: str
) -> None:
    write(tmp_path / "cache" / "hpu", *files, size=sizes)

    with pytest.raises(CompileError, match=message):
        GUEST.settle(tmp_path)


def test_a_cache_that_is_not_there_is_in_order(tmp_path: Path) -> None:
    GUEST.settle(tmp_path)


def a_gaudi(root: Path) -> Path:
    """A card's files, and the software's; returns where packages lie."""
    device = root / "sys/class/accel/accel0/device"
    device.mkdir(parents=True)
    for name, text in (("vendor", "0x1da3"), ("device", "0x1020"), ("module_id", "0"), ("pci_addr", "0")):
        (device / name).write_text(text)
    site, system = root / "site", root / "usr/lib/habanalabs"
    write(site / "habana_frameworks/torch/lib", "libhabana_pytorch2_plugin.so")
    write(site / "habana_frameworks/torch/dynamo", "passes.py")
    write(system, "libSynapse.so", "libtpc_kernels.so", "libtpc_fuser.so", "libgaudi2_complex_guid_lib.so")
    return site


def test_the_machine_is_its_card_and_the_libraries_that_compile_for_it(tmp_path: Path) -> None:
    site = a_gaudi(tmp_path)

    found = find_machine(str(site), tmp_path)
    (tmp_path / "usr/lib/habanalabs/libSynapse.so").write_bytes(b"another")

    assert (found.backend, found.machine) == ("hpu", "gaudi2")
    assert set(found.toolchain) == {"bridge", "bridge-python", "graph-compiler", "kernels"}
    again = find_machine(str(site), tmp_path)
    assert {name for name in found.toolchain if found.toolchain[name] != again.toolchain[name]} == {
        "graph-compiler"
    }
    with pytest.raises(TargetError, match="the bridge of the Gaudi software was not found"):
        find_machine(str(tmp_path / "elsewhere"), tmp_path)


def test_shapes_are_a_plain_value() -> None:
    found = GUEST.shapes(spec_of(), read(), {})

    assert json.loads(found.model_dump_json())["paths"] == {
        "VLLM_BUCKETING_FROM_FILE": "cache/shapes/vllm.buckets"
    }


def test_only_buckets_can_be_cut() -> None:
    found = GUEST.shapes(spec_of(), read(), {})

    assert [list(files) for files in GUEST.slices(found.files, 2)] == [["cache/shapes/vllm.buckets"]] * 2
    with pytest.raises(SpecError, match="given without --shapes"):
        GUEST.slices({}, 2)
    with pytest.raises(SpecError, match="is of no use to vllm"):
        VLLM.slices(found.files, 2)
