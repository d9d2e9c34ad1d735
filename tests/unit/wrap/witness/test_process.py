from __future__ import annotations

import pytest
from aotgaudi_witness.process import role_of

REGISTRY = ["python", "-m", "vllm.model_executor.models.registry"]


@pytest.mark.parametrize(
    ("name", "argv", "target", "role"),
    [
        ("MainProcess", ["vllm", "serve", "m"], "", "APIServer"),
        ("MainProcess", REGISTRY, "", "Registry"),
        ("EngineCore", [], "", "EngineCore"),
        ("EngineCore_DP0", [], "", "EngineCore"),
        ("DPEngineCoreActor_DP0", [], "", "EngineCore"),
        ("VllmWorker-3", [], "", "Worker"),
        ("Worker_TP0", [], "", "Worker"),
        ("ApiServer_1", [], "", "APIServer"),
        ("SpawnProcess-1", [], "run_scheduler_process", "Worker"),
        ("Process-2", [], "run_detokenizer_process", "other"),
        ("forked", [], "", "other"),
    ],
)
def test_the_role_of_a_process(name: str, argv: list[str], target: str, role: str) -> None:
    assert role_of(name, argv, target) == role
