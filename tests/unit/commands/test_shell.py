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
    "> f",
    "2>>$A",
    "&>f",
    '>"f"',
    "| tee f",
    "| tee -a f b",
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)
FRONTS = [
    "A=1",
    "export A=2",
    "export A=3 D=4",
    "D=5 export A",
    "set -e",
    "true",
    "false",
    "test -n x",
    "test -z x",
]
FRONTS += [
    "echo y > f",
    "D=6 true",
    "printf -v A 7",
    "cd .",
    "read A",
    "unset A",
    "{ A=8",
    "# c\n",
    ":",
    "true | tee f",
]
JOINTS = [";", "&&", "\n", " & ", "||", "|"]
SERVER = '#!/bin/sh\nfor word; do printf "%s\\0" "$word"; done > found\nprintf "%s" "$A-$D" > variables\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with files that patterns would match."""
    folder = tmp_path_factory.mktemp("files")
    for name in ("a", "b", "ab", "x"):
        (folder / name).touch()
    (folder / "bin").mkdir()
    (folder / "bin/vllm").write_text(SERVER, encoding="utf-8")
    (folder / "bin/vllm").chmod(0o755)
    return folder


def started_by(shell: str, script: str, folder: Path) -> tuple[list[str], str] | None:
    """The words and the variables A and D of the server that a shell starts; None if it starts none."""
    (folder / "found").unlink(missing_ok=True)
    done = subprocess.run(
        [shell, "-c", f"{script}\nwait"],
        env={**KNOWN, "PATH": f"{folder}/bin:/usr/bin:/bin"},
        cwd=folder,
        capture_output=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if not (folder / "found").exists():
        assert ">" in script or any(front in script for front in FRONTS), done.stderr
        return None
    words = (folder / "found").read_bytes().decode().split("\0")[:-1]
    return words, (folder / "variables").read_bytes().decode()


@pytest.mark.process
@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(text="a \\\n b # c\n\n# d\n")
@example(text='"a\\d\\$A\\\\" \'\\\' $A"$B"')
@example(text="a#b ''#c {} a{b}c {a [ ] []")
@given(text=TEXTS)
def test_what_is_accepted_is_what_the_shell_makes_of_it(shell: str, text: str, folder: Path) -> None:
    script = f"vllm serve x {text}"
    try:
        words = read_script(script, "T", KNOWN).words
    except SpecError:
        return
    if not any(isinstance(word, Unread) for word in words):
        started = started_by(shell, script, folder)
        assert started is None or list(words[1:]) == started[0]


@pytest.mark.process
@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(rows=[("test -z x", "&&"), ("A=1", ";")])
@example(rows=[("A=1", "&&"), ("true", "\n"), ("echo y > f", ";")])
@given(rows=st.lists(st.tuples(st.sampled_from(FRONTS), st.sampled_from(JOINTS)), max_size=4))
def test_what_runs_before_a_server_changes_nothing_or_is_refused(
    shell: str, rows: list[tuple[str, str]], folder: Path
) -> None:
    script = "".join(front + joint for front, joint in rows) + 'vllm serve "$A" > log'
    try:
        found = read_script(script, "T", KNOWN)
    except SpecError:
        return
    if any(isinstance(word, Unread) for word in found.words):
        return
    started = started_by(shell, script, folder)
    expected = {**KNOWN, **found.variables}
    assert started is None or started == (list(found.words[1:]), f"{expected['A']}-{expected.get('D', '')}")
    run_before = [front.split()[-1] for front, _ in rows if front.split()[-1] in ("true", "false")]
    assert all(f"'{name}'" in "".join(found.notes) for name in run_before)


@pytest.mark.parametrize(
    ("text", "character"),
    [
        ("a | b", "'|'"),
        ("a || b", "'||'"),
        ("a & b", "'&'"),
        ("a > $(pwd)", "'>'"),
        ("a 2>&-", "'>&'"),
        ("a < in", "'<'"),
        ("vllm serve a; b", "a second command, 'b'"),
        ("vllm serve a && b", "a second command, 'b'"),
        ("vllm serve a\nb", "a second command, 'b'"),
        ("docker rm a\nb", "a second command, 'b'"),
        ("source a; b", "a second command, 'b'"),
        ("a && A=1; b", "a second command, 'A=1'"),
        ("(a)", "'('"),
        ("a $(b", "'$('"),
        ("a $1", "'$1'"),
        ("a $@", "'$@'"),
        ("a $'b'", '"$\'"'),
        ("a `b", "'`'"),
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
        ("a *.txt", "*"),
        ("a b?", "?"),
        ("a x[bc]", "["),
        ("a {b,c}", "{"),
        ('a {"b":1,"c":2}', "{"),
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
