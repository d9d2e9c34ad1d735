"""The words of a command, compared with those that shells make of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from aotgaudi.commands.shell import Unread, read_script, split_string
from aotgaudi.errors import SpecError

KNOWN = {"A": "v", "B": "p q", "EMPTY": "", "STAR": "*", "TILDE": "~", "HASH": "#x", "QUOTE": "it's \\ \""}
PIECES = [*"ab'\"\\ \t\n#~$`{},.*?[]=:;&|<>()!-@%^+1é\u00a0\r"]
PIECES += [
    "$A",
    "${B}",
    "$EMPTY",
    '"$STAR"',
    "$STAR",
    "$TILDE",
    "$HASH",
    '"$QUOTE"',
    "$NONE",
    "${A:-b}",
    "$(echo x)",
    "\\\n",
]
PIECES += [
    "{a,b}",
    "{1..3}",
    "~/x",
    "A=~",
    "'a b'",
    '"c d"',
    "#c",
    "--flag=",
    "$'x'",
    '$"x"',
    "2>&1",
    "$1",
    "$$",
    "é",
    "[a]",
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with files that patterns would match."""
    folder = tmp_path_factory.mktemp("files")
    for name in ("a", "b", "ab", "x"):
        (folder / name).touch()
    return folder


def words_of(shell: str, script: str, folder: Path) -> list[str]:
    done = subprocess.run(
        [shell, "-c", script],
        env=KNOWN,
        cwd=folder,
        capture_output=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert (done.returncode, done.stderr) == (0, b""), done.stderr
    return done.stdout.decode().split("\0")[:-1]


@pytest.mark.process
@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(text="a \\\n b # c\n\n# d\n")
@example(text='"a\\d\\$A\\\\" \'\\\' $A"$B"')
@example(text="a#b ''#c {} a{b}c {a [ ] []")
@given(text=TEXTS)
def test_what_is_accepted_is_what_the_shell_makes_of_it(shell: str, text: str, folder: Path) -> None:
    script = f"printf '%s\\0' x {text}"
    try:
        words = read_script(script, "T", KNOWN).words
    except SpecError:
        return
    if not any(isinstance(word, Unread) for word in words):
        assert list(words[2:]) == words_of(shell, script, folder)


@pytest.mark.parametrize(
    ("text", "character"),
    [
        ("a | b", "'|'"),
        ("a; b", "';'"),
        ("a && b", "'&&'"),
        ("a &", "'&'"),
        ("a > log", "'>'"),
        ("a 2>&1", "'2>&1'"),
        ("a < in", "'<'"),
        ("(a)", "'('"),
        ("a $(b", "'$('"),
        ("a $1", "'$1'"),
        ("a $@", "'$@'"),
        ("a $'b'", '"$\'"'),
        ("a `b", "'`'"),
        ("a *.txt", "'*'"),
        ("a b?", "'?'"),
        ("a [bc]", "'['"),
        ("a {b,c}", "'{'"),
        ('a {"b":1,"c":2}', "'{'"),
        ("a\nb", "a second command, 'b'"),
        ("a $B", "$B, whose value a shell would split or expand"),
        ("a 'b", "no closing quotation"),
        ("a b\\", "no escaped character"),
    ],
)
def test_what_a_shell_would_do_besides_is_refused_by_its_characters(text: str, character: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_script(text, "the script", KNOWN)

    assert caught.value.where == "the script"
    assert character in caught.value.problem


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a $NONE", "$NONE"),
        ('a "x${NONE}"', "${NONE}"),
        ("a ~/b", "~"),
        ("a x=~/b", "~"),
        ("a $(pwd)/b", "$(pwd)"),
        ("a `pwd`", "`pwd`"),
        ("a ${A:-b}", "${A:-b}"),
        ("C=1 a $C", "$C"),
        ("A=1 a $A", "$A"),
    ],
)
def test_what_is_not_known_is_kept_as_a_word_that_is_not_read(text: str, part: str) -> None:
    (unread,) = [word for word in read_script(text, "T", KNOWN).words if isinstance(word, Unread)]

    assert unread.part == part


def test_lines_before_the_command_assign_and_export() -> None:
    script = read_script("#!/bin/sh\nset -e\nC=1\nexport D=2 A=3\nrun $C $D\n\n# end", "T", KNOWN)

    assert (script.words, script.variables) == (("run", "1", "2"), {"D": "2", "A": "3"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a 'b c' \"d e\" f\\ g", ("a", "b c", "d e", "f g")),
        ("a\n  --b $C *.x ~ #d {e,f}\n", ("a", "--b", "$C", "*.x", "~", "#d", "{e,f}")),
        ('a "b\\"c" \'\'', ("a", 'b"c', "")),
        ("$'a b'", ("$a b",)),
    ],
)
def test_a_string_of_compose_is_split_and_not_expanded(text: str, words: tuple[str, ...]) -> None:
    assert split_string(text, "T") == words
