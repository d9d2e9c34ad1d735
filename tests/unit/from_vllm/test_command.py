from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.commands.flags import FLAGS
from aotgaudi.commands.words import Remark
from aotgaudi.errors import SpecError
from aotgaudi.from_vllm.command import VllmCommand

MODULE = "python -m vllm.entrypoints.openai.api_server"
TAKEN = sorted(
    name
    for name, flag in FLAGS.items()
    if flag.effect == "taken" and flag.arity == "value" and name != "model"
)


def parse(words: str) -> VllmCommand:
    return VllmCommand.parse(f"vllm serve org/model {words}")


def mistake_in(text: str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        VllmCommand.parse(text)
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_command_and_what_it_says() -> None:
    command = parse("--max-num-seqs 128 --enforce-eager --port 8000")

    assert command.model == "org/model"
    assert command.values == {"max-num-seqs": "128"}
    assert command.switches == {"enforce-eager": True}
    assert command.harmless == (Remark("--port", "where and how the server listens"),)
    assert (command.assignments, command.notes, command.unknown) == ({}, (), ())


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve org/model",
        "/opt/venv/bin/vllm serve org/model",
        "vllm serve --model org/model",
        "vllm serve --port 1 org/model",
        "python -m vllm.entrypoints.openai.api_server --model org/model",
        "python3.11 -m vllm.entrypoints.openai.api_server --model=org/model",
        "numactl -N 0 python3 -m vllm.entrypoints.openai.api_server --model org/model",
        "vllm serve 'org/model'",
        "vllm serve \\\n  org/model",
    ],
)
def test_forms_of_a_servers_command(text: str) -> None:
    assert VllmCommand.parse(text).model == "org/model"


@pytest.mark.parametrize("words", ["--max-num 3", "--max-num=3", "--no-enable-p"])
def test_an_ambiguous_beginning_is_refused_with_the_flags_that_it_begins(words: str) -> None:
    error = mistake_in(f"vllm serve m {words}")

    assert (error.where, error.problem) == (
        words.split(maxsplit=1)[0].partition("=")[0],
        "begins several flags",
    )
    assert error.remedy.startswith("--max-num-seqs, " if "max" in words else "--no-enable-prefix-caching, ")


def test_the_first_of_several_names_and_a_whole_table_are_taken() -> None:
    command = parse(
        "--served-model-name a b --api-key k1 k2 --limit_mm_per_prompt.image.count 0 --max-num-seqs 8"
    )

    assert command.values == {
        "served-model-name": "a",
        "max-num-seqs": "8",
        "limit-mm-per-prompt": '{"image": {"count": 0}}',
    }
    assert [remark.name for remark in command.harmless] == ["--api-key"]


def test_assignments_before_the_command_are_kept() -> None:
    command = VllmCommand.parse("env VLLM_CONTIGUOUS_PA=true X='a b' vllm serve m")

    assert command.assignments == {"VLLM_CONTIGUOUS_PA": "true", "X": "a b"}


@pytest.mark.parametrize(
    "words",
    [
        "--task generate",
        "--cpu-offload-gb 0",
        "--nnodes 2",
        "--device hpu",
    ],
)
def test_values_that_ask_for_nothing_pass(words: str) -> None:
    assert parse(words).values == {}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--attention-backend X", "chooses the attention's code"),
        ("-O3", "chooses how graphs are compiled"),
        ("-O 2", "chooses how graphs are compiled"),
        ("--compilation-config.mode 3", "chooses how graphs are compiled"),
        ("--model-impl transformers", "chooses the model's code"),
        ("--mamba-cache-dtype float32", "is part of the code of recurrent layers"),
        ("--mamba-ssm-cache-dtype float32", "is part of the code of recurrent layers"),
        ("--enable-prompt-embeds", "lets prompts be embeddings, whose steps have other inputs"),
    ],
)
def test_what_a_spec_has_no_place_for_may_change_what_is_warm(words: str, why: str) -> None:
    command = parse(words)

    assert (command.values, command.harmless) == ({}, ())
    assert [remark.text for remark in command.unknown] == [why]


@pytest.mark.parametrize(
    ("words", "flag", "why"),
    [
        ("-dcp 2", "--decode-context-parallel-size", "not enumerated"),
        ("--enable-dbo", "--enable-dbo", "not enumerated"),
        ("--device cuda", "--device", "Gaudi"),
        ("--task embed", "--task", "pooling"),
        ("--runner pooling", "--runner", "pooling"),
        ("--num-scheduler-steps 8", "--num-scheduler-steps", "multi-step"),
    ],
)
def test_what_a_spec_cannot_express_is_refused_with_the_reason(words: str, flag: str, why: str) -> None:
    error = mistake_in(f"vllm serve m {words}")

    assert error.where == flag
    assert why in error.remedy


def test_a_refused_switch_may_be_off() -> None:
    assert parse("--no-enable-dbo --no-enable-eplb").switches == {}


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("", "the vLLM command", "is empty"),
        ("echo hello", "the vLLM command", "starts no server"),
        ("vllm bench serve", "the vLLM command", "starts no server"),
        ("vllm serve", "the vLLM command", "names no model"),
        ("vllm serve --port 8000", "the vLLM command", "names no model"),
        ("vllm serve a b", "the vLLM command", "has 'b' beside the model 'a'"),
        ("vllm serve a --model b", "the vLLM command", "has 'b' beside the model 'a'"),
        ("vllm serve --model=b a", "the vLLM command", "has 'b' beside the model 'a'"),
        ("vllm serve --model a --model b", "the vLLM command", "has 'b' beside the model 'a'"),
        (
            "vllm serve --model a --trust-remote-code false",
            "the vLLM command",
            "has 'a' beside the model 'false'",
        ),
        (f"{MODULE} a", "the vLLM command", "has 'a', which belongs to no flag"),
        (
            f"{MODULE} --model b --trust-remote-code true",
            "the vLLM command",
            "has 'true', which belongs to no flag",
        ),
        ("vllm serve 'a", "the vLLM command", "cannot be split into words: no closing quotation"),
        ("vllm serve a | tee log", "the vLLM command", "has '|', which a shell would read"),
        ("vllm serve a 2>&1", "the vLLM command", "has '2>&1', which a shell would read"),
        ("vllm serve a\n--port 1", "the vLLM command", "has a second command, '--port'"),
        ("vllm serve ~/a", "the command", "has '~', which a shell would expand"),
        ("vllm serve a --config none.yaml", "none.yaml", "cannot be read"),
        ("vllm serve a > log", "the vLLM command", "has '>', which a shell would read"),
        ("vllm serve a && x", "the vLLM command", "has '&&', which a shell would read"),
        ("vllm serve $MODEL", "the command", "has '$MODEL', which a shell would expand"),
        ("vllm serve a --port ${PORT}", "the command", "has '${PORT}', which a shell would expand"),
        ("vllm serve a --max-num-seqs", "--max-num-seqs", "has no value"),
        ("vllm serve a --wibble 3", "--wibble", "is a flag that is not known"),
        ("vllm serve a -x", "-x", "is a flag that is not known"),
        ("vllm serve a --", "--", "is a flag that is not known"),
        ("vllm serve a --no-port", "--no-port", "is a flag that is not known"),
        ("vllm serve a --wibble.x 1", "--wibble", "is a flag that is not known"),
        ("vllm serve a --moe-backend x", "--moe-backend", "is a flag that is not known"),
        ("vllm serve a --help", "--help", "is a flag that is not known"),
    ],
)
def test_other_mistakes(text: str, where: str, what: str) -> None:
    error = mistake_in(text)

    assert (error.where, error.problem.startswith(what)) == (where, True)


def test_an_unknown_flag_comes_with_the_nearest_known_one() -> None:
    assert "did you mean --max-num-seqs?" in str(mistake_in("vllm serve m --max-nmu-seqs=3"))


def test_a_command_of_absurd_length_is_refused() -> None:
    assert mistake_in("vllm serve m " + "x" * 100_000).problem.startswith("has 1000")


@given(
    st.dictionaries(st.sampled_from(TAKEN), st.from_regex(r"[a-z0-9.]{1,8}", fullmatch=True), max_size=6),
    st.booleans(),
    st.booleans(),
)
def test_what_is_written_is_read(values: dict[str, str], with_equals: bool, with_underscores: bool) -> None:
    names = {name: name.replace("-", "_") if with_underscores else name for name in values}
    words = [
        word
        for name, value in values.items()
        for word in ([f"--{names[name]}={value}"] if with_equals else [f"--{names[name]}", value])
    ]

    assert VllmCommand.parse(shlex.join(["vllm", "serve", "m", *words])).values == values


@given(st.text(max_size=40))
def test_any_text_is_parsed_or_refused_in_one_line(text: str) -> None:
    for command in (text, f"vllm serve m {text}"):
        try:
            VllmCommand.parse(command)
        except SpecError as error:
            message = str(error)
        else:
            message = ""
        assert len(message) < 900
