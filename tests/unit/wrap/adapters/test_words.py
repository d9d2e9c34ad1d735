from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aotgaudi.errors import SpecError
from aotgaudi.wrap.command_line import LaunchReader, one_integer, one_text
from aotgaudi.wrap.flags import ARITIES, SHORT, SIGNIFICANT
from aotgaudi.wrap.variables import is_secret

READER = LaunchReader(ARITIES, SHORT, "the command", significant=SIGNIFICANT)
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
        (["-O3"], {"optimization-level": "3"}),
        (["--enforce-eager"], {"enforce-eager": True}),
        (["--no-enforce-eager"], {"enforce-eager": False}),
        (["--max-num-seqs", "1", "--max-num-seqs", "2"], {"max-num-seqs": "2"}),
        (["--served-model-name", "a", "b"], {"served-model-name": ["a", "b"]}),
        (["--compilation-config", '{"level": 3}'], {"compilation-config": {"level": 3}}),
        (["--compilation-config.level", "3"], {"compilation-config": {"level": 3}}),
        (["--seed", "-1"], {"seed": "-1"}),
        (["--of-tomorrow"], {"of-tomorrow": True}),
        (["--of_tomorrow", "1"], {"of-tomorrow": "1"}),
        (["--of-tomorrow", "1", "2"], {"of-tomorrow": ["1", "2"]}),
        (["--of-tomorrow={}"], {"of-tomorrow": {}}),
        (["--of-tomorrow.level", "1"], {"of-tomorrow.level": "1"}),
        (["--no-of-tomorrow"], {"no-of-tomorrow": True}),
        (["-x", "1"], {"x": "1"}),
    ],
)
def test_flags_are_read_by_name(words: list[str], flags: dict[str, object]) -> None:
    read = READER.read(["model", *words])

    assert read.flags == flags
    assert read.positional == ("model",)
    assert read.words == ("model", *words)


def test_a_word_after_an_unknown_flag_is_its_value_and_one_after_a_switch_is_not() -> None:
    read = READER.read(["--enforce-eager", "model", "--of-tomorrow", "1"])

    assert read.positional == ("model",)


@given(name=NAMES, values=st.lists(VALUES, max_size=3))
def test_every_unknown_flag_is_kept_with_all_of_its_words(name: str, values: list[str]) -> None:
    assume(name not in ARITIES and not is_secret(name) and f"-{name}" not in SHORT)
    try:
        read = READER.read(["model", f"--{name}", *values])
    except SpecError:
        assert any(flag.startswith(name) for flag in SIGNIFICANT)
        return

    assert set(read.flags) == {name}
    assert (read.flags[name] is True) == (not values)
    assert read.positional == ("model",)


@given(
    words=st.lists(
        st.sampled_from([f"--{name}" for name in sorted(ARITIES)] + ["a", "1", "--new", "{}", "-tp"])
    )
)
def test_any_words_are_read_or_refused_in_a_line(words: list[str]) -> None:
    refusals = []
    try:
        READER.read(words)
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

    assert read.words == public
    assert not set(read.secrets) & set(read.flags)


def test_what_a_secret_was_is_not_shown() -> None:
    assert "sesame" not in repr(READER.read(["--api-key", "sesame"]))


def test_the_beginning_of_a_flag_that_is_acted_on_is_refused() -> None:
    with pytest.raises(SpecError, match="--por: is the beginning of --port"):
        READER.read(["--por", "80"])


def test_another_beginning_counts_as_a_flag_of_its_own() -> None:
    assert READER.read(["--chat-templ", "x"]).flags == {"chat-templ": "x"}


@pytest.mark.parametrize("words", [["--port"], ["--port", "--seed", "1"], ["--enforce-eager=1"]])
def test_a_known_flag_with_too_few_or_too_many_words_is_refused(words: list[str]) -> None:
    with pytest.raises(SpecError, match=words[0].partition("=")[0]):
        READER.read(words)


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
    flags = READER.read(["--port", "80", "--api-server-count", "x", "--served-model-name", "a", "b"]).flags

    assert one_integer(flags, "port", 1) == 80
    assert one_integer(flags, "nnodes", 1) == 1
    assert one_text(flags, "served-model-name") == "a"
    with pytest.raises(SpecError, match="--api-server-count: is 'x'"):
        one_integer(flags, "api-server-count", 1)
