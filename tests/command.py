"""The command line, run in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from aotgaudi.cli.main import cli


def keep_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that serves does not give this process's rights away, which would be for good."""
    monkeypatch.setattr("aotgaudi.server.launch.leave_others_alone", lambda: False)


class Command:
    """``aotgaudi WORDS...``, to be called with further arguments."""

    def __init__(self, *words: str) -> None:
        self._words = words

    def __call__(self, *arguments: object) -> Result:
        """Runs it."""
        return CliRunner().invoke(cli, [*self._words, *map(str, arguments)])

    def document(self, *arguments: object, code: int = 0) -> Any:
        """Runs it with ``--json``, which must exit with `code`, and returns what it prints."""
        result = self(*arguments, "--json")
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)

    def refusal(self, *arguments: object, code: int = 2) -> str:
        """Runs it, which must exit with `code` and one line on standard error, and returns that line."""
        result = self(*arguments)
        assert result.exit_code == code, result.output
        (line,) = result.stderr.splitlines()
        return line
