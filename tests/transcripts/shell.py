"""Transcripts: text files in which each command is followed by what it prints; and the shell that runs them.

A line that begins with two blanks and ``$`` is a command; ``\\`` at its end continues it, and ``<< EOF`` gives it lines. The
other lines that begin with two blanks are what it printed, and ``[N]`` where it exited with N. All else is prose.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from aotgaudi.cli.main import cli

_PROMPT, _INDENT = "  $ ", "  "
_DIGEST = re.compile(
    r"\b[0-9a-f]{64}\b|((?<=\bunit )|(?<=\bkey )|(?<=\bentry ))[0-9a-f]{12}\b|(?<=-)[0-9a-f]{12}(?=\.log)"
)
"""A digest or its first 12 digits. DIGEST1 is written for the first one that a shell prints, wherever it prints it."""
_VARIES = (
    (r"\b\d+\.\d+ s\b", "N s"),
    (r"\b(enumerate|plan|run|seal|tracing|compiling|idle) \d+\.\d\b", r"\1 N"),
    (r"about \d+ s on", "about N s on"),
    (r"(?m)^\[\d+/\d+\] about \d+ s left: (?!done).*\n", ""),
    (r"\d+ bytes, all re-hashed", "N bytes, all re-hashed"),
    (r"\b\d+\.\d kB", "N kB"),
    (r"\(\d+ bytes\)", "(N bytes)"),
    (r"should have \d+", "should have N"),
)
"""What differs from run to run or between machines, and what is written in its place."""

Builtin = Callable[[list[str], str], str]
"""A command: its arguments and its input -> what it prints."""


def replay(text: str, run: Callable[[str], str]) -> str:
    """Returns a transcript with what its commands print now in the place of what they printed."""
    lines, written = text.splitlines(), []
    while lines:
        written.append(lines.pop(0))
        if not written[-1].startswith(_PROMPT):
            continue
        command = [written[-1].removeprefix(_PROMPT)]
        while command[-1].endswith("\\") or (command[0].endswith(" << EOF") and command[-1] != "EOF"):
            written.append(lines.pop(0))
            command.append(written[-1].removeprefix(_INDENT))
        del lines[: _num_printed(lines)]
        written += [f"{_INDENT}{line}".rstrip() for line in run("\n".join(command)).rstrip().splitlines()]
    return "\n".join(written) + "\n"


def _num_printed(lines: list[str]) -> int:
    """How many of the lines after a command are what it printed: blank ones between those, too."""
    number = 0
    for place, line in enumerate(lines, 1):
        if line.startswith(_PROMPT) or (line and not line.startswith(_INDENT)):
            break
        number = place if line else number
    return number


class Shell:
    """Runs commands in this process, in its working directory and environment; `more` are further ones, by name."""

    def __init__(self, environ: pytest.MonkeyPatch, more: Mapping[str, Builtin] | None = None) -> None:
        self._environ = environ
        self._known = {one.__name__.strip("_"): one for one in _BUILTINS} | dict(more or {})
        self._known["export"] = self._export
        self._digests: dict[str, str] = {}

    def run(self, command: str) -> str:
        """Returns what a command prints. Standard error does not go into a file or a pipe, except by ``|&``."""
        line, _, text = command.replace("\\\n", "").partition("\n")
        words = shlex.split(os.path.expandvars(line.removesuffix(" << EOF")))
        target = Path(words[-1]) if words[-2:-1] in ([">"], [">>"]) else None
        parts = list(_split(words[:-2] if target else words))
        text, aside, code = text.removesuffix("EOF"), "", 0
        for name, *arguments in parts:
            if name == "aotgaudi":
                result = _aotgaudi(arguments)
                is_whole = "|&" in words or (target is None and len(parts) == 1)
                text, aside = (result.output, "") if is_whole else (result.stdout, result.stderr)
                code = result.exit_code
                continue
            try:
                text = self._known[name](arguments, text)
            except Exception as error:
                raise ValueError(f"$ {command}: {error!r}") from error
        if target is not None:
            with target.open("a" if words[-2] == ">>" else "w", encoding="utf-8") as file:
                file.write(text)
            text = ""
        printed = [f"{aside}{text}".rstrip("\n"), f"[{code}]" if code else ""]
        return self._normal("\n".join(filter(None, printed)))

    def _normal(self, text: str) -> str:
        text = _DIGEST.sub(
            lambda found: self._digests.setdefault(found[0][:12], f"DIGEST{len(self._digests) + 1}"), text
        )
        text = text.replace(os.getcwd(), "$PWD")
        for pattern, word in _VARIES:
            text = re.sub(pattern, word, text)
        return text

    def _export(self, arguments: list[str], _: str) -> str:
        """Sets variables; takes away one that is given without a value."""
        for name, equals, value in (word.partition("=") for word in arguments):
            if equals:
                self._environ.setenv(name, value)
            else:
                self._environ.delenv(name, raising=False)
        return ""


def _aotgaudi(arguments: list[str]) -> Result:
    result = CliRunner().invoke(cli, arguments, prog_name="aotgaudi")
    if not isinstance(result.exception, SystemExit | None):
        raise result.exception
    return result


def _split(words: list[str]) -> Iterator[list[str]]:
    """The commands between pipes."""
    part: list[str] = []
    for word in [*words, "|"]:
        if word in ("|", "|&"):
            yield part
            part = []
        else:
            part.append(word)


def _cat(names: list[str], text: str) -> str:
    return "".join(Path(name).read_text(encoding="utf-8") for name in names) if names else text


def _echo(words: list[str], _: str) -> str:
    return " ".join(words) + "\n"


def _sed(arguments: list[str], text: str) -> str:
    """``s/a/b/`` with Python's expressions; what is not found is an error, lest a test test nothing."""
    script, *names = arguments
    _, old, new, _ = script.split(script[1])
    text, number = re.subn(old, new, _cat(names, text), flags=re.MULTILINE)
    assert number, f"sed: {old} is not in {names}"
    return text


def _grep(arguments: list[str], text: str) -> str:
    """The lines that hold an expression, those that do not (-v), or their number (-c)."""
    option = arguments.pop(0) if arguments[0] in ("-v", "-c") else ""
    pattern, *names = arguments
    lines = _cat(names, text).splitlines(keepends=True)
    lines = [line for line in lines if bool(re.search(pattern, line)) is not (option == "-v")]
    return f"{len(lines)}\n" if option == "-c" else "".join(lines)


def _jq(arguments: list[str], text: str) -> str:
    """``.a.b[0].c, .d``: values of JSON, one a line; ``[]`` is each of a list."""
    paths, *names = arguments
    document, lines = json.loads(_cat(names, text)), []
    for path in paths.split(","):
        found = [document]
        for part in re.findall(r"\w+|\[\d*\]", path):
            if part == "[]":
                found = [value for values in found for value in values]
            else:
                key = int(part[1:-1]) if part[0] == "[" else part
                found = [value[key] for value in found]
        lines += [f"{json.dumps(value)}\n" for value in found]
    return "".join(lines)


def _ls(names: list[str], _: str) -> str:
    """What lies in a folder, without what a test has linked there."""
    return "".join(f"{path.name}\n" for path in sorted(Path(*names).iterdir()) if not path.is_symlink())


def _cmp(names: list[str], _: str) -> str:
    first, second = (Path(name).read_bytes() for name in names)
    return "" if first == second else f"{names[0]} {names[1]} differ\n"


def _rm(names: list[str], _: str) -> str:
    for path in map(Path, names):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return ""


def _cp(names: list[str], _: str) -> str:
    shutil.copy(*names)
    return ""


def _chmod(arguments: list[str], _: str) -> str:
    mode, *names = arguments
    for name in names:
        Path(name).chmod(int(mode, 8))
    return ""


def _mkdir(names: list[str], _: str) -> str:
    for name in names:
        Path(name).mkdir(parents=True)
    return ""


_BUILTINS: tuple[Builtin, ...] = (_cat, _chmod, _cmp, _cp, _echo, _grep, _jq, _ls, _mkdir, _rm, _sed)
