from __future__ import annotations

import sys

import pytest
from aotgaudi_witness.process import role_of
from aotgaudi_witness.stacks import is_secret, stack_of, told_arguments
from hypothesis import example, given
from hypothesis import strategies as st

from aotgaudi.commands import variables
from aotgaudi.commands.flags import FLAGS, VARIABLES


def test_the_innermost_frame_comes_first() -> None:
    def outer() -> list[str]:
        return inner()

    def inner() -> list[str]:
        return stack_of(sys._getframe())

    told = outer()

    assert [frame.partition(" ")[2] for frame in told[:2]] == ["inner", "outer"]
    assert told[0].startswith(f"{__name__}:")


def test_a_deep_stack_keeps_the_frames_that_are_no_compilers() -> None:
    def deep(levels: int) -> list[str]:
        return stack_of(sys._getframe()) if levels == 0 else deep(levels - 1)

    compiler = {"__name__": "torch._dynamo.deep", "stack_of": stack_of, "sys": sys}
    source = "def deep(n): return stack_of(sys._getframe()) if n == 0 else deep(n - 1)"
    exec(source, compiler)

    def server() -> list[str]:
        return compiler["deep"](50)

    told = server()

    assert len(told) <= 12
    assert sum(frame.startswith("torch._dynamo.deep:") for frame in told) == 6
    assert told[6].endswith(" server")


_WORDS = "api key keys hf token tokens secret password passphrase bearer access id max num tokenizer mode"


@given(
    name=st.lists(st.sampled_from(_WORDS.split()), min_size=1, max_size=4),
    sep=st.sampled_from("_-."),
    is_upper=st.booleans(),
)
@example(name=["secretAccessKey"], sep="_", is_upper=False)
def test_the_secrets_are_those_of_a_launch(name: list[str], sep: str, is_upper: bool) -> None:
    text = sep.join(name).upper() if is_upper else sep.join(name)

    assert is_secret(text) == variables.is_secret(text)
    assert is_secret(f"--{text}") == variables.is_secret(text)


def test_the_secrets_among_known_flags_and_variables_are_those_of_a_launch() -> None:
    known = {*FLAGS, *VARIABLES}

    assert {name for name in known if is_secret(name)} == {
        name for name in known if variables.is_secret(name)
    }


def test_secrets_are_not_told() -> None:
    argv = [
        "vllm",
        "serve",
        "--api-key",
        "abc",
        "second",
        "--hf-token=def",
        "HF_TOKEN=ghi",
        "--tokenizer",
        "x",
    ]

    told = told_arguments([*argv, b"\xff"])

    assert " ".join(told[:9]) == "vllm serve --api-key *** *** --hf-token=*** HF_TOKEN=*** --tokenizer x"


def test_long_words_are_cut() -> None:
    (word,) = told_arguments(["x" * 1000])

    assert len(word) == 160


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
        ("VLLM_DP_Coordinator", [], "", "DPCoordinator"),
        ("SpawnProcess-1", [], "run_scheduler_process", "Worker"),
        ("Process-2", [], "run_detokenizer_process", "other"),
        ("forked", [], "", "other"),
    ],
)
def test_the_role_of_a_process(name: str, argv: list[str], target: str, role: str) -> None:
    assert role_of(name, argv, target) == role
