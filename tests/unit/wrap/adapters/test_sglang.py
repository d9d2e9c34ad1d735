"""What SGLang is told, what is expected of it, and the token counts that it is asked for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.backends.base import Target
from aotgaudi.bundle.launch import world
from aotgaudi.errors import SpecError
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.parse import spec_from_json
from aotgaudi.wrap.adapters.base import Flags
from aotgaudi.wrap.adapters.sglang import SGLANG
from tests.guests_here import Here
from tests.launches import a_launch
from tests.specs import spec_tables

PLACE = Path("/run/aotgaudi")
GUEST = SGLANG
GPU = Target(backend="cuda", machine="x86_64", toolchain={"cuda.0": "H100, 9.0, 550"})
MHC = {"model_type": "deepseek_v4", "hc_mult": 4, "hc_sinkhorn_iters": 20, "hidden_size": 4096}


def read(*words: str) -> Flags:
    return GUEST.read(["--model-path", "tiny", *words], {})


def spec_of(**config: Any) -> BuildSpec:
    return spec_from_json(
        spec_tables(
            config={**MHC, "max_position_embeddings": 16384, **config},
            limits={"max_num_batched_tokens": 8192, "max_model_len": 16384, "num_blocks": 2048},
            mhc={"enabled": True},
            target={"backend": "fake", "num_sms": 132},
        )
    )


@pytest.mark.parametrize(
    "words",
    [
        ("--model", "tiny", "--tp", "2", "--port=30001"),
        ("--model-path=tiny", "--tensor-parallel-size", "2", "--port", "30001", "--trust-remote-code"),
        ("tiny", "--tp-size=2", "--port", "30001", "--mem-fraction-static", "0.9", "--new-flag"),
    ],
)
def test_names_of_one_flag_are_one_flag(words: tuple[str, ...]) -> None:
    found = GUEST.read(words, {})

    assert (found.model, found.address.served_name, found.address.port) == ("tiny", "tiny", 30001)
    assert found.world["tensor_parallel"] == 2
    assert found.values["tp-size"] == "2"


def test_what_a_client_needs_is_read_and_a_secret_is_not_kept() -> None:
    found = read("--host", "0.0.0.0", "--api-key", "k", "--context-length", "4096")

    assert (found.address.host, found.address.authorization, found.room.max_model_len) == (
        "127.0.0.1",
        "Bearer k",
        4096,
    )
    assert "k" not in found.words
    assert "api-key" not in found.values


def test_unknown_flags_are_kept_as_they_are_written() -> None:
    found = read("--moe-runner-backend", "deep_gemm", "--enable-new-thing", "--lora-paths", "a", "b")

    assert found.values["moe-runner-backend"] == "deep_gemm"
    assert found.values["enable-new-thing"] is True
    assert found.values["lora-paths"] == ["a", "b"]


@pytest.mark.parametrize("words", [(), ("a", "b")])
def test_a_command_names_one_model(words: tuple[str, ...]) -> None:
    with pytest.raises(SpecError, match="the SGLang command"):
        GUEST.read(words, {})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--nnodes", "2"), "--nnodes: is more than 1"),
        (("--use-ray",), "--use-ray: cannot be wrapped"),
        (("--disaggregation-mode", "prefill"), "--disaggregation-mode: cannot be wrapped"),
        (("--tokenizer-worker-num", "4"), "--tokenizer-worker-num: is more than 1"),
        (("--ssl-keyfile", "k"), "--ssl-keyfile: cannot be wrapped"),
        (("--config", "x.yaml"), "--config: cannot be wrapped"),
    ],
)
def test_what_cannot_be_watched_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        GUEST.require_witnessed(read(*words), {})

    assert str(caught.value).startswith(message)


def test_a_server_of_embeddings_is_wrapped() -> None:
    GUEST.require_witnessed(read("--is-embedding"), {})


def test_all_caches_lie_below_the_root_and_their_variables_do_not_count() -> None:
    found = GUEST.environment(PLACE, "cold", {})

    assert all(str(PLACE / path) == found[name] for name, path in GUEST.cache_roots.items())
    assert found["SGLANG_DG_CACHE_DIR"] == "/run/aotgaudi/cache/sglang/deep_gemm"
    assert GUEST.variable_rules.keyed(found) == {}


@pytest.mark.parametrize(
    ("phase", "sweeps"), [("cold", "1"), ("measure", "0"), ("load", "0"), ("exercise", "0"), ("live", "0")]
)
def test_the_sweep_over_all_token_counts_is_for_the_build_alone(phase: Any, sweeps: str) -> None:
    environ = GUEST.environment(PLACE, phase, {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "x"})

    assert environ["SGLANG_JIT_DEEPGEMM_PRECOMPILE"] == sweeps


def test_the_witness_is_among_plugins_that_are_named() -> None:
    assert GUEST.environment(PLACE, "cold", {"SGLANG_PLUGINS": "a"})["SGLANG_PLUGINS"] == "a,aotgaudi_witness"
    assert "SGLANG_PLUGINS" not in GUEST.environment(PLACE, "cold", {})


def test_variables_of_its_kernels_count() -> None:
    environ = {"SGLANG_OPT_USE_TILELANG_MHC_PRE": "0", "SGLANG_LOG_MS": "1", "DG_JIT_X": "1", "PATH": "x"}

    assert GUEST.variable_rules.keyed(environ) == {"SGLANG_OPT_USE_TILELANG_MHC_PRE": "0", "DG_JIT_X": "1"}


@pytest.mark.parametrize(
    ("flags", "ranks", "workers"),
    [
        ({}, {}, 1),
        ({}, {"tensor_parallel": 8}, 8),
        ({}, {"tensor_parallel": 2, "data_parallel": 4}, 8),
        ({"enable-dp-attention": True}, {"tensor_parallel": 8, "data_parallel": 8}, 8),
    ],
)
def test_ranks_are_schedulers(flags: dict[str, Any], ranks: dict[str, int], workers: int) -> None:
    launch = a_launch(guest="sglang", flags=flags, world=world(ranks))

    assert GUEST.roles(launch) == {"APIServer": 1, "Worker": workers}


def test_deep_gemm_s_kernels_are_compiled_before_the_cold_run_where_there_is_a_device() -> None:
    words = ("/opt/venv/bin/sglang", "serve", "--model-path", "tiny", "--tp", "8")
    launch = a_launch(guest="sglang", words=words, target=GPU, software={"sgl-kernel": "1 ab"})

    assert GUEST.build_steps(launch) == (
        ("/opt/venv/bin/python", "-m", "sglang.compile_deep_gemm", "--model-path", "tiny", "--tp", "8"),
    )
    assert GUEST.build_steps(launch.model_copy(update={"software": {}})) == ()
    assert GUEST.build_steps(a_launch(guest="sglang", words=words, software={"sgl-kernel": "1 ab"})) == ()


def test_each_number_of_partial_sums_is_asked_for_once() -> None:
    spec = spec_of()

    found = GUEST.shapes(spec, read(), {})

    counts = sorted({entry.row()[0] for entry in Manifest.of(spec).of_kind("mhc")})
    prompts = [request.body["prompt"] for request in found.requests]
    assert [len(prompt) for prompt in prompts if isinstance(prompt, list)] == counts
    assert len(counts) > 2
    assert found.manifest_id == Manifest.of(spec).id
    assert found.words == ("--chunked-prefill-size", "8192")
    assert GUEST.shapes(spec, read("--chunked-prefill-size", "8192"), {}).words == ()


def test_with_dp_attention_the_largest_step_is_for_all_ranks() -> None:
    """By server_args.py, --chunked-prefill-size is divided by the ranks; without DP attention each replica has all of it."""
    attention = ("--tp", "8", "--dp", "8", "--enable-dp-attention")

    assert GUEST.shapes(spec_of(), read(*attention), {}).words == ("--chunked-prefill-size", "65536")
    assert GUEST.shapes(spec_of(), read("--dp", "8"), {}).words == ("--chunked-prefill-size", "8192")
    GUEST.shapes(spec_of(), read(*attention, "--chunked-prefill-size", "65536"), {})
    with pytest.raises(
        SpecError, match="is 8192, which 8 ranks divide, and the spec's largest step has 8192"
    ):
        GUEST.shapes(spec_of(), read(*attention, "--chunked-prefill-size", "8192"), {})
    with pytest.raises(SpecError, match="--attn-dp-size: is given"):
        GUEST.shapes(spec_of(), read("--tp", "8", "--attn-dp-size", "8"), {})


def test_no_prompt_begins_as_another_does() -> None:
    prompts = [request.body["prompt"] for request in GUEST.shapes(spec_of(), read(), {}).requests]

    firsts = [prompt[0] for prompt in prompts if isinstance(prompt, list)]
    assert len(set(firsts)) == len(prompts)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--chunked-prefill-size", "4096"), "--chunked-prefill-size: is 4096, and the spec's largest step"),
        (
            ("--context-length", "8192"),
            "--context-length: is 8192: a step of 8192 tokens is no single prompt",
        ),
    ],
)
def test_a_command_that_is_not_the_spec_s_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        GUEST.shapes(spec_of(), read(*words), {})

    assert str(caught.value).startswith(message)


def test_a_model_without_hyper_connections_has_no_shapes() -> None:
    plain = spec_from_json(spec_tables())

    with pytest.raises(SpecError, match="--shapes: is of no use to sglang with a model without"):
        GUEST.shapes(plain, read(), {})


@pytest.mark.process
@pytest.mark.parametrize("start", [("sglang", "serve"), ("python", "-m", "sglang.launch_server")])
def test_it_is_found_by_its_command(here: Here, start: tuple[str, ...]) -> None:
    here.install("sglang", "0.5.23")
    here.script("sglang")
    program = sys.executable if start[0] == "python" else start[0]

    found = here.find(program, *start[1:], "--model-path", here.model(), "--port", "30001")

    assert (found.adapter.name, found.flags.address.port) == ("sglang", 30001)
    assert "sglang" in found.installed.distributions
    command = GUEST.command(found.words, found.flags, PLACE, is_aliased=True)
    assert command[-2:] == ("--served-model-name", str(here.folder / "tiny"))
    assert "/run/aotgaudi/model" in command
