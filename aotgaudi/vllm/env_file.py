"""Environment files: ``NAME=VALUE`` lines, as docker's ``--env-file`` and shells have them."""

from __future__ import annotations

import re
import shlex

from aotgaudi.errors import SpecError
from aotgaudi.vllm.ignored import PREFIXES

_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*)")


def parse_env_file(text: str, where: str) -> dict[str, str]:
    """Returns the variables of a file's text; the last line of a name counts.

    Blank lines and lines that begin with ``#`` are skipped, ``export`` is allowed, quotes are taken off, and a
    ``#`` after a space begins a comment. Nothing is expanded; of variables that are not ``VLLM_*`` or ``PT_HPU*``
    the text is left as it stands.

    Raises:
        SpecError: a line of another form, with its number.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(text.removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}").splitlines(), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        match = _LINE.fullmatch(stripped)
        if match is None:
            raise SpecError(f"{where}:{number}", "is no assignment", "NAME=VALUE")
        name, value = match.groups()
        found[name] = _value(value, f"{where}:{number}") if name.startswith(PREFIXES) else value
    return found


def _value(text: str, where: str) -> str:
    """Returns a value of ours; what other programs read is left as it stands."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise SpecError(where, str(error).lower(), "a value without quotes, or between two") from error
    value = " ".join(words)
    if re.search(r"\$(\w|\{)", value) and not text.startswith("'"):
        raise SpecError(where, f"has {value!r}, which a shell would expand", "the value itself")
    return value
