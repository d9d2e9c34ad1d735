from __future__ import annotations

import json
from typing import Any

import pytest

from aotgaudi.bucketing.reachable import ReachablePrompts
from aotgaudi.manifest.coverage import coverage_of, coverage_of_server, left_out
from aotgaudi.manifest.enumerate import enumerate_entries
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.manifest.summary import Summary, coverage_document
from aotgaudi.spec.bucketing import VersionName
from aotgaudi.spec.build_spec import BuildSpec
from tests.unit.from_vllm.test_from_vllm import LLAMA, mistake, notes, spec

MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8}
PARTS = {
    "model_type": "x",
    "text_config": LLAMA | {"block_configs": [{"block_type": "moe", "n_routed_experts": 4}]},
}
TRANSFER: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}


def manifest_of(found: BuildSpec) -> Manifest:
    return Manifest(found, enumerate_entries(found))


@pytest.mark.parametrize(
    ("version", "config", "size"),
    [
        ("vllm-gaudi@v0.26.0", LLAMA, 1),
        ("vllm-gaudi@v0.26.0", MIXTRAL, 4),
        ("vllm-gaudi@v0.26.0", PARTS, 4),
        (
            "vllm-gaudi@v0.26.0",
            {**LLAMA, "block_configs": [{"block_type": "mamba", "n_routed_experts": 4}]},
            1,
        ),
        ("vllm-gaudi@v0.26.0", {**LLAMA, "num_experts": 0, "num_local_experts": 8}, 1),
        ("vllm-gaudi@v0.26.0", {**LLAMA, "moe_num_experts": [64, 64]}, 4),
        ("vllm-gaudi@v0.26.0", {**LLAMA, "language_config": {"n_routed_experts": 64}}, 4),
        ("vllm-gaudi@v0.26.0", {**LLAMA, "thinker_config": {"text_config": {"num_experts": 128}}}, 4),
        ("vllm-gaudi@v0.26.0", {**LLAMA, "moe_num_experts": [0, 64]}, 1),
        ("vllm-gaudi@v0.14.1", LLAMA, 1),
        ("vllm-gaudi@v0.13.0", LLAMA, 4),
        ("vllm-gaudi@v0.11.2", LLAMA, 4),
    ],
)
def test_replicas_run_in_lockstep_by_release_and_model(
    version: VersionName, config: dict[str, Any], size: int
) -> None:
    found = spec("-dp 4", version=version, config=config)

    assert found.parallel.data_parallel_size == size
    assert "4 replicas" in notes("-dp 4", version=version, config=config)


def test_independent_replicas_and_one_replica_share_a_manifest() -> None:
    assert manifest_of(spec("-dp 4")).id == manifest_of(spec("-dp 1")).id == manifest_of(spec()).id
    assert "data_parallel_size" not in json.dumps(spec("-tp 2").to_json())


def test_replicas_in_lockstep_have_the_same_entries_in_any_number() -> None:
    one, two, four = (manifest_of(spec(f"-dp {size}", config=MIXTRAL)) for size in (1, 2, 4))

    assert two.entries == four.entries
    assert set(one.entries) < set(two.entries)


def test_a_table_for_one_replica_does_not_cover_several() -> None:
    found = spec("-dp 2 --max-num-batched-tokens 8192", config=MIXTRAL)
    upstream = found.model_copy(
        update={"bucketing": found.bucketing.model_copy(update={"coverage": "upstream"})}
    )

    server, closed = coverage_of_server(found), coverage_of(manifest_of(found))
    opened = Summary(manifest_of(upstream))

    assert closed.is_closed
    assert server is not None
    assert not server.coverage.is_closed
    assert "to which replicas pad steps of each other" in "\n".join(map(str, server.holes))
    assert not opened.coverage.is_closed
    assert {*opened.closing, *manifest_of(upstream).entries} >= {*manifest_of(found).entries}
    assert [phase["kind"] for phase in coverage_document(opened)["phases"]][2] == "replicas"


@pytest.mark.parametrize(
    ("flags", "version", "where", "what"),
    [
        ("-dp 2", "vllm-gaudi@v0.10.1", "--data-parallel-size", "does not say how replicas step together"),
        (
            "-dp 2 --num-speculative-tokens 2",
            "vllm-gaudi@v0.26.0",
            "--data-parallel-size",
            "with speculation",
        ),
        ("-dp 2 --max-model-len 128", "vllm-gaudi@v0.26.0", "--data-parallel-size", "compute 128 tokens"),
        ("-dp 0", "vllm-gaudi@v0.26.0", "--data-parallel-size", "is '0'"),
    ],
)
def test_replicas_whose_steps_are_not_known_are_refused(
    flags: str, version: VersionName, where: str, what: str
) -> None:
    error = mistake(flags, version=version, config=MIXTRAL)

    assert error.where == where
    assert what in error.problem


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_every_role_of_a_transfer_has_all_steps(role: str) -> None:
    flags = f"--kv-transfer-config '{json.dumps({**TRANSFER, 'kv_role': role})}'"

    found, plain = spec(flags), spec()

    assert found.scheduler.kv_transfer
    assert found == spec(
        "--kv-transfer-config.kv_connector NixlConnector --kv-transfer-config.kv_role kv_both"
    )
    assert manifest_of(found).entries == manifest_of(plain).entries
    assert any("copies of KV blocks" in text for text in left_out(found))


def test_without_chunks_a_prompt_may_start_after_any_token_that_was_sent() -> None:
    flags = "--no-enable-chunked-prefill --no-enable-prefix-caching --max-num-batched-tokens 8192"

    found = spec(f"{flags} --kv-transfer-config '{json.dumps(TRANSFER)}'")

    assert ReachablePrompts.of(found.limits, found.bucketing, found.scheduler).contexts == "any"
    assert coverage_of(manifest_of(found)).is_closed


@pytest.mark.parametrize(
    ("table", "version", "where"),
    [
        ({**TRANSFER, "kv_connector": "P2pNcclConnector"}, "vllm-gaudi@v0.26.0", "kv_connector"),
        ({**TRANSFER, "kv_connector": "OffloadingConnector"}, "vllm-gaudi@v0.14.1", "kv_connector"),
        ({**TRANSFER, "kv_connector": "LMCacheConnectorV1"}, "vllm-gaudi@v0.11.2", "kv_connector"),
        (TRANSFER, "vllm-gaudi@v0.10.1", "kv_connector"),
        ({**TRANSFER, "kv_connector_module_path": "mine"}, "vllm-gaudi@v0.26.0", "kv_connector"),
        ({**TRANSFER, "kv_connector": "MultiConnector"}, "vllm-gaudi@v0.26.0", "kv_connector"),
        ({"kv_connector": "NixlConnector"}, "vllm-gaudi@v0.26.0", "kv_role"),
        ({"kv_role": "producer"}, "vllm-gaudi@v0.26.0", "kv_role"),
    ],
)
def test_a_connector_whose_steps_are_not_known_is_refused(
    table: dict[str, Any], version: VersionName, where: str
) -> None:
    error = mistake(f"--kv-transfer-config '{json.dumps(table)}'", version=version)

    assert error.where == f"--kv-transfer-config {where}"


def test_connectors_in_a_connector_are_taken_if_all_are_known() -> None:
    def multi(*names: str) -> str:
        extra = {"connectors": [{**TRANSFER, "kv_connector": name} for name in names]}
        return json.dumps({**TRANSFER, "kv_connector": "MultiConnector", "kv_connector_extra_config": extra})

    assert spec(
        f"--kv-transfer-config '{multi('NixlConnector', 'OffloadingConnector')}'"
    ).scheduler.kv_transfer
    for name in ("Mine", "MultiConnector"):
        assert name in mistake(f"--kv-transfer-config '{multi('NixlConnector', name)}'").problem


def test_a_module_of_null_is_the_connector_of_that_name() -> None:
    table = {**TRANSFER, "kv_connector_module_path": None}

    assert spec(f"--kv-transfer-config '{json.dumps(table)}'").scheduler.kv_transfer


@pytest.mark.parametrize("text", ["{}", '{"kv_connector":null}', '{"kv_role":"kv_both"}'])
def test_an_empty_configuration_of_transfers_is_none(text: str) -> None:
    assert spec(f"--kv-transfer-config '{text}'") == spec()
