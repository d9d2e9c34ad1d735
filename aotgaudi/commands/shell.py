"""Splits the text of one command into words, as a shell does. What a shell would do besides is refused by its characters.

Sources: POSIX.1-2024, Shell Command Language (2.2 quoting, 2.3 tokens, 2.6 expansions); brace expansion is bash's. For a
string of Docker Compose, mattn/go-shellwords: quotes and backslashes alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from aotgaudi.commands.starts import FORMS, PlainCommand, assignments, find_vllm
from aotgaudi.errors import SpecError, shown

LONGEST = 100_000
"""The most characters of a command."""

_REMEDY = "the command alone, with the value itself, in quotes"
_EXPANSION = r"\$\w*\\\n|\$(?:[A-Za-z_]\w*|\{[A-Za-z_][^{}'\"`\\$]*\}|\([^()'\"`\\$]*\))|`[^`\\$'\"]*`|\$[\w@*#?$!({[-]|`"
_FILE = r"[\w./~${}-]+"
_TOKEN = re.compile(
    rf"""(?P<joined>\\\n) | \\(?P<escaped>.) | '(?P<single>[^']*)' | "(?P<double>(?:[^"\\]|\\.)*)"
    | (?P<output>(?:(?<!\\\n)(?<![^ \t\n;&|])\d)?>>?[ \t]*(?:&\d|"{_FILE}"|{_FILE})(?=[ \t\n;&|]|\Z)
        | (?:&>>?[ \t]*{_FILE}|\|[ \t]*tee(?:[ \t]+{_FILE})*)(?=[ \t]*(?:[\n;&]|\Z)) | &(?=[ \t\n]*\Z))
    | (?P<open>["'\\]) | (?P<blank>[ \t]+) | (?P<end>\n) | (?P<operator>[|&;()<>]+)
    | (?P<expansion>{_EXPANSION} | \$['"]) | (?P<comment>\#[^\n]*) | (?P<other>.)""",
    re.DOTALL | re.VERBOSE | re.ASCII,
)
_IN_QUOTES = re.compile(
    rf"""(?P<joined>\\\n) | \\(?P<escaped>[$`"\\]) | (?P<expansion>{_EXPANSION}) | (?P<other>.)""",
    re.DOTALL | re.VERBOSE | re.ASCII,
)
_PARAMETER = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)
_WHOLE = re.compile(r"\$[A-Za-z_]\w*|\$[({].*[)}]|`.+`", re.DOTALL | re.ASCII)
_PATTERN = re.compile(r"[*?]|\[.+\]|\{.*(,|\.\.).*\}", re.DOTALL)
_SPLIT_AGAIN = re.compile(r"[ \t\n*?\[]")
_SETTING = re.compile(r"[-+][eux]*o?|pipefail")
_OF_THE_SHELL = """. { alias builtin case cd command declare do done eval exec exit export for function getopts if let local
    mapfile popd printf pushd read readarray readonly return select set shift source then trap typeset unset until while"""
"""Commands that may change what the shell makes of the next ones. Programs cannot."""


class Unread(str):
    """A word with something that a shell would expand to we do not know what: `part`."""

    part: str

    def __new__(cls, text: str, part: str) -> Unread:
        """Returns the word as written."""
        word = super().__new__(cls, text)
        word.part = part
        return word


def read_script(text: str, where: str, known: Mapping[str, str]) -> PlainCommand:
    """Returns the command of a script, with the variables that it exports. Words may be `Unread`.

    Before it may be comments, assignments, ``export`` and ``set -e``. Programs, and where output goes, are left out.

    Args:
        text: the script.
        where: its name in errors.
        known: the variables that the shell expands: those of its environment.

    Raises:
        SpecError: it has several commands, or syntax that cannot be read.
    """
    variables = dict(known)
    splitter = _Splitter(text, where, variables)
    exported: dict[str, str] = {}
    command: list[str] = []
    notes: list[str] = []
    for words in splitter.commands():
        is_export = words[0] == "export" and len(words) > 1
        given = dict(assignments(words[is_export:]))
        assigns = len(given) == len(words) - is_export
        is_needed = find_vllm(command) or {*FORMS, *_OF_THE_SHELL.split()}.intersection(command)
        if is_needed or (assigns and (command or notes)):  # A program may decide whether it is assigned.
            raise SpecError(where, f"has a second command, {shown(words[0])}", _REMEDY)
        programs = [word for word in command if "=" not in word]
        notes += [f"{where}: leaves out {shown(word)}" for word in programs[:1]]
        command = []
        if assigns:
            require_read(words, where)
            variables.update(given)
            exported.update({n: v for n, v in given.items() if is_export or n in exported or n in known})
        elif words[0] != "set" or not all(map(_SETTING.fullmatch, words[1:])):
            command = words
    return PlainCommand(words=tuple(command), variables=exported, notes=tuple(notes))


def split_string(text: str, where: str) -> tuple[str, ...]:
    """Returns the words of a string as Docker Compose splits it: nothing is expanded. Raises SpecError."""
    return tuple(word for words in _Splitter(text, where, None).commands() for word in words)


def require_read(words: Iterable[str], where: str) -> None:
    """Raises SpecError for a word that a shell would expand."""
    for word in words:
        if isinstance(word, Unread):
            raise SpecError(where, f"has {shown(word.part)}, which a shell would expand", _REMEDY)


@dataclass
class _Splitter:
    """Splits one text. `known`: the variables that are expanded; None for a string of Docker Compose."""

    text: str
    where: str
    known: dict[str, str] | None
    words: list[str] = field(default_factory=list)
    word: str | None = None
    part: str = ""  # What could not be read in the word.
    plain: str = ""  # The word with each quoted part as one x: where a tilde and braces count.

    def __post_init__(self) -> None:
        if len(self.text) > LONGEST:
            raise SpecError(self.where, f"has {len(self.text)} characters", f"at most {LONGEST}")

    def commands(self) -> Iterator[list[str]]:
        """Yields the words of each command that has any."""
        position = 0
        while position < len(self.text):
            token = _TOKEN.match(self.text, position)
            assert token is not None
            position = token.end()
            if self._is_literal(token):
                self._add(token[0][0], "x")
                position = token.start() + 1
            elif token[0] in ("\n", ";", "&&") and self.known is not None:
                self._end_word()
                if self.words:
                    yield self.words
                self.words = []
            else:
                self._take(token)
        self._end_word()
        if self.words:
            yield self.words

    def _is_literal(self, token: re.Match[str]) -> bool:
        """Returns whether the first character of a token stands for itself where it is."""
        if self.known is None:
            return token["comment"] is not None or token[0].startswith("$")
        return token["comment"] is not None and bool(self.plain or self.word)

    def _take(self, token: re.Match[str]) -> None:
        kind, text = token.lastgroup, token[0]
        is_left_out = kind == "output" and self.known is not None and not (self.word or "").isdigit()
        if kind in ("blank", "end") or is_left_out:
            self._end_word()
        elif kind == "comment" or (kind == "joined" and self.known is not None):
            pass
        elif kind in ("joined", "escaped", "single"):
            self._add(text[1:] if kind != "single" else token["single"], "x")
        elif kind == "double":
            self._add("", "x")
            self._take_quoted(token["double"])
        elif kind == "open":
            problem = "no escaped character" if text == "\\" else "no closing quotation"
            raise SpecError(self.where, f"cannot be split into words: {problem}", "closed quotes")
        elif kind in ("operator", "output"):
            raise SpecError(self.where, f"has {shown(text)}, which a shell would read", _REMEDY)
        elif kind == "expansion":
            self._expand(text, is_quoted=False)
        else:
            if text == "~" and self.known is not None and (not self.plain or self.plain[-1] in "=:"):
                self.part = self.part or text
            self._add(text, text)

    def _take_quoted(self, text: str) -> None:
        if self.known is None:
            self._add(re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL), "x")
            return
        for token in _IN_QUOTES.finditer(text):
            if token["expansion"]:
                self._expand(token[0], is_quoted=True)
            elif not token["joined"]:
                self._add(token["escaped"] or token[0], "x")

    def _expand(self, text: str, *, is_quoted: bool) -> None:
        name = _PARAMETER.fullmatch(text)
        found = "" if name is None else name[1] or name[2]
        known = self.known or {}
        if not _WHOLE.fullmatch(text):
            raise SpecError(self.where, f"has {shown(text)}, which a shell would expand", _REMEDY)
        is_known = found in known and not isinstance(known[found], Unread)
        if not is_known or found in dict(assignments(self.words)):
            self.part = self.part or text
            self._add(text, "x")
            return
        if not is_quoted and _SPLIT_AGAIN.search(known[found]):
            problem = f"has {text}, whose value a shell would split or expand"
            raise SpecError(self.where, problem, f'"{text}"')
        self.plain += "x"
        if is_quoted or known[found]:
            self._add(known[found], "")

    def _add(self, text: str, plain: str) -> None:
        self.word = (self.word or "") + text
        self.plain += plain

    def _end_word(self) -> None:
        if self.word is not None:
            pattern = None if self.known is None else _PATTERN.search(self.plain)
            part = self.part or (pattern[0][0] if pattern else "")
            self.words.append(Unread(self.word, part) if part else self.word)
        self.word, self.part, self.plain = None, "", ""
