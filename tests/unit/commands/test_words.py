from __future__ import annotations

import argparse
from collections.abc import Sequence

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from aotgaudi.commands.flags import FLAGS, SHORT_FLAGS
from aotgaudi.commands.variables import is_secret
from aotgaudi.commands.words import CommandReader, one_integer, one_text
from aotgaudi.errors import SpecError
from aotgaudi.wrap.adapters.vllm import ACTED_ON

ARITIES = {name: flag.arity for name, flag in FLAGS.items()}
READER = CommandReader(ARITIES, SHORT_FLAGS, acted_on=ACTED_ON)
EXPANDING = CommandReader(ARITIES, SHORT_FLAGS, expands=True)
NAMES = st.from_regex(r"[a-z][a-z0-9]{0,6}(-[a-z0-9]{1,6}){0,3}", fullmatch=True)
VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=8).filter(
    lambda text: not text.startswith("-")
)


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["--max-model-len", "512"], {"max-model-len": "512"}),
        (["--max_model_len=512"], {"max-model-len": "512"}),
        (["-tp", "2"], {"tensor-parallel-size": "2"}),
        (["-tp=2"], {"tensor-parallel-size": "2"}),
        (["-O3"], {"optimization-level": "3"}),
        (["-cc.level=3"], {"compilation-config": {"level": 3}}),
        (["--enforce-eager"], {"enforce-eager": True}),
        (["--no_enforce_eager"], {"enforce-eager": False}),
        (["--max-num-seqs", "1", "--max-num-seqs", "2"], {"max-num-seqs": "2"}),
        (["--served-model-name", "a", "b"], {"served-model-name": ["a", "b"]}),
        (["--compilation-config", '{"level": 3}'], {"compilation-config": {"level": 3}}),
        (["--compilation-config.level", "3"], {"compilation-config": {"level": 3}}),
        (
            ["--compilation-config.a.b=x", "--compilation-config", '{"c": 1}'],
            {"compilation-config": {"a": {"b": "x"}, "c": 1}},
        ),
        (["--seed", "-1"], {"seed": "-1"}),
        (["--chat-template", "- a list"], {"chat-template": "- a list"}),
        (["--of-tomorrow"], {"of-tomorrow": True}),
        (["--of_tomorrow", "1"], {"of-tomorrow": "1"}),
        (["--of-tomorrow", "1", "2"], {"of-tomorrow": ["1", "2"]}),
        (["--of-tomorrow={}"], {"of-tomorrow": {}}),
        (["--of-tomorrow", '{"a": 1}'], {"of-tomorrow": {"a": 1}}),
        (["--of-tomorrow.level", "1"], {"of-tomorrow.level": "1"}),
        (["--no-of-tomorrow"], {"no-of-tomorrow": True}),
        (["-x", "1"], {"x": "1"}),
    ],
)
def test_flags_are_read_by_name(words: list[str], flags: dict[str, object]) -> None:
    read = READER.read(["model", *words])

    assert read.flags() == flags
    assert read.positional == ("model",)
    assert read.public_words() == ("model", *words)


def test_a_word_after_an_unknown_flag_is_its_value_and_one_after_a_switch_is_not() -> None:
    read = READER.read(["--enforce-eager", "model", "--of-tomorrow", "1"])

    assert read.positional == ("model",)


@given(name=NAMES, values=st.lists(VALUES, max_size=3))
def test_every_unknown_flag_is_kept_with_all_of_its_words(name: str, values: list[str]) -> None:
    assume(name not in ARITIES and not is_secret(name) and f"-{name}" not in SHORT_FLAGS)
    try:
        read = READER.read(["model", f"--{name}", *values])
    except SpecError:
        assert any(flag.startswith(name) for flag in ACTED_ON)
        return

    assert set(read.flags()) == {name}
    assert (read.flags()[name] is True) == (not values)
    assert read.positional == ("model",)


def the_servers_own() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm", add_help=False, exit_on_error=False, argument_default=argparse.SUPPRESS
    )
    for name, arity in ARITIES.items():
        forms = [f"--{name}", *(short for short, long in SHORT_FLAGS.items() if long == name)]
        if arity == "switch":
            parser.add_argument(*forms, dest=name, action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(*forms, dest=name, nargs="+" if arity == "values" else None)
    return parser


@given(
    words=st.lists(
        st.one_of(
            st.sampled_from([f"--{name}" for name in ARITIES]),
            st.sampled_from([f"--no-{name}" for name, arity in ARITIES.items() if arity == "switch"]),
            st.sampled_from([f"--{name}=x" for name, arity in ARITIES.items() if arity != "switch"]),
            st.sampled_from(
                ["--gpu-memory-util", "--max-num-batched=8", "-tp", "-q=fp8", "-O3", "-n2", "-as"]
            ),
            st.sampled_from(["a", "8k", "-1", "-0.5", "", '{"level": 3}', "- a list"]),
        ),
        max_size=8,
    )
)
@example(words=["--served-model-name", "a", "-tp", "2", "M"])
def test_known_flags_are_read_as_argparse_reads_them(words: list[str]) -> None:
    try:
        found, rest = the_servers_own().parse_known_args(words)
    except argparse.ArgumentError:
        with pytest.raises(SpecError):
            EXPANDING.read(words)
        return

    read = EXPANDING.read(words)

    assert {name: as_lists(value) for name, value in read.given.items()} == vars(found)
    assert list(read.positional) == rest


def as_lists(value: object) -> object:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


@given(
    words=st.lists(
        st.sampled_from([f"--{name}" for name in sorted(ARITIES)] + ["a", "1", "--new", "{}", "-tp", "--a.b"])
    )
)
def test_any_words_are_read_or_refused_in_a_line(words: list[str]) -> None:
    refusals = []
    for reader in (READER, EXPANDING):
        try:
            reader.read(words)
        except SpecError as error:
            refusals.append(str(error))

    assert not any("\n" in refusal for refusal in refusals)


@pytest.mark.parametrize(
    ("words", "public"),
    [
        (["--api-key", "a", "b", "--port", "1"], ("--port", "1")),
        (["--api-key=a"], ()),
        (["--hf-token", "a", "--seed", "1"], ("--seed", "1")),
        (["--my-own-secret", "a", "b"], ()),
        (["--x", "http://me:pw@host/p"], ("--x", "http://host/p")),
        (['--x={"password": "p", "a": 1}'], ('--x={"a": 1}',)),
        (["--max-model-len", "8"], ("--max-model-len", "8")),
    ],
)
def test_words_of_secrets_are_left_out(words: list[str], public: tuple[str, ...]) -> None:
    read = READER.read(words)

    assert read.public_words() == public
    assert not set(read.secrets()) & set(read.flags())


def test_a_table_that_has_no_canonical_form_is_kept_as_text_without_its_secrets() -> None:
    read = READER.read(['--x={"password": "sesame", "a": 123456789012345678901}'])

    assert read.flags() == {"x": '{"a": 123456789012345678901}'}


@pytest.mark.parametrize(
    "words",
    [
        ["--api-key", "sesame"],
        ["--api-key=sesame"],
        ["--my-own-secret", "sesame"],
        ['--x={"password": "sesame"}'],
        ["env", "HF_TOKEN=sesame"],
    ],
)
def test_what_was_read_never_shows_a_secret(words: list[str]) -> None:
    assert "sesame" not in repr(READER.read(words))


def test_the_abbreviation_of_a_flag_that_is_acted_on_is_refused() -> None:
    with pytest.raises(SpecError, match="--por: is the beginning of --port"):
        READER.read(["--por", "80"])


def test_another_abbreviation_counts_as_an_unknown_flag() -> None:
    assert READER.read(["--chat-templ", "x"]).flags() == {"chat-templ": "x"}


def test_an_abbreviation_is_expanded_and_noted_where_that_is_wanted() -> None:
    read = EXPANDING.read(["--gpu-memory-util", "0.8", "--no-enable-dbo"])

    assert read.given == {"gpu-memory-utilization": "0.8", "enable-dbo": False}
    assert read.notes == ("--gpu-memory-util is read as --gpu-memory-utilization",)


def test_a_word_that_follows_a_key_is_no_abbreviation() -> None:
    assert EXPANDING.read(["--speculative-config.a", "--logging_config={}"]).notes == ()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--port"], "--port: has no value"),
        (["--port", "--seed", "1"], "--port: has no value"),
        (["--api-key"], "--api-key: has no value"),
        (["--enforce-eager=1"], "--enforce-eager: is a switch, and is given '1'"),
        (["--no-enforce-eager=1"], "--enforce-eager: is a switch, and is given '1'"),
        (["--enforce-eager.x", "1"], "--enforce-eager: is a switch"),
        (["--kernel-config.x"], "--kernel-config.x: has no value"),
        (["--kernel-config", "{x", "--kernel-config.y", "1"], "--kernel-config: is '{x'"),
    ],
)
def test_a_known_flag_with_too_few_or_too_many_words_is_refused(words: list[str], problem: str) -> None:
    for reader in (READER, EXPANDING):
        with pytest.raises(SpecError) as caught:
            reader.read(words)
        assert str(caught.value).startswith(problem)


def test_a_word_is_renamed_only_where_it_is_the_flags_value() -> None:
    words = ["m", "--served-model-name", "m", "--tokenizer=m", "--model=m", "--model", "m"]

    renamed = tuple(READER.renamed(words, "model", "m", "/alias"))

    assert renamed == (
        "/alias",
        "--served-model-name",
        "m",
        "--tokenizer=m",
        "--model=/alias",
        "--model",
        "/alias",
    )


def test_values_are_taken_as_text_or_as_integers() -> None:
    flags = READER.read(["--port", "80", "--api-server-count", "x", "--served-model-name", "a", "b"]).flags()

    assert one_integer(flags, "port", 1) == 80
    assert one_integer(flags, "nnodes", 1) == 1
    assert one_text(flags, "served-model-name") == "a"
    with pytest.raises(SpecError, match="--api-server-count: is 'x'"):
        one_integer(flags, "api-server-count", 1)
