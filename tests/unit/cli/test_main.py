from __future__ import annotations

import importlib.util
import subprocess
import sys

import click
import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from aotgaudi import errors
from aotgaudi.cli.main import RootGroup, cli
from aotgaudi.cli.verbs import BUILD_COMMANDS, COMMANDS, LazyCommand


def root_that(action: BaseException | int | None) -> RootGroup:
    """Returns a root group whose command `act` raises, exits with, or returns `action`."""

    @click.command()
    @click.pass_context
    def act(context: click.Context) -> None:
        if isinstance(action, BaseException):
            raise action
        if action is not None:
            context.exit(action)

    root = RootGroup("root", lazy={"act": LazyCommand("nowhere:act", "")})
    root.get_command = lambda ctx, cmd_name: act  # type: ignore[method-assign]
    return root


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.SpecError("limits.x", "is 1", "2"), 2),
        (errors.NotWarmError("m"), 3),
        (errors.CorruptError("m"), 4),
        (errors.TargetError("m"), 5),
        (errors.CompileError("m"), 6),
        (errors.CoverageError("m"), 7),
    ],
)
def test_an_error_of_ours_is_one_line_and_its_exit_code(error: errors.AotGaudiError, code: int) -> None:
    result = CliRunner().invoke(root_that(error), ["act"])

    assert (result.exit_code, result.stdout, result.stderr) == (code, "", f"error: {error}\n")


def test_an_error_that_is_a_list_keeps_its_lines() -> None:
    """What failed, one a line, each with its log."""
    result = CliRunner().invoke(root_that(errors.CompileError("a\n  b")), ["act"])

    assert result.stderr == "error: a\n  b\n"


def test_interrupt_exits_130() -> None:
    result = CliRunner().invoke(root_that(KeyboardInterrupt()), ["act"])

    assert result.exit_code == 130
    assert "Traceback" not in result.output


def test_exit_codes_of_commands_are_kept() -> None:
    assert CliRunner().invoke(root_that(3), ["act"]).exit_code == 3
    assert CliRunner().invoke(root_that(None), ["act"]).exit_code == 0


def test_an_error_that_is_not_ours_is_not_hidden() -> None:
    assert isinstance(
        CliRunner().invoke(root_that(ZeroDivisionError()), ["act"]).exception, ZeroDivisionError
    )


def test_an_error_that_quotes_megabytes_is_bounded_and_says_how_much_is_left_out() -> None:
    error = errors.SpecError("model." + "a" * 10**6, "is " + "x, " * 10**6, "another")

    result = CliRunner().invoke(root_that(error), ["act"])

    assert len(result.stderr) < errors.MOST_LINE_CHARACTERS
    assert result.stderr.startswith("error: model.aaa")
    assert "characters) ..." in result.stderr
    assert result.stderr.endswith("(another)\n")
    assert all(
        len(line) <= 2 * errors.MOST_LINE_CHARACTERS
        for line in str(errors.NotWarmError("y" * 10**6 + "\nz")).split("\n")
    )
    assert str(errors.NotWarmError("a\nb")) == "a\nb"


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        (["spec.toml"], ["spec.toml"]),
        (["-j", "4", "spec.toml"], ["-j", "4", "spec.toml"]),
        (["all", "spec.toml"], ["spec.toml"]),
        (["./manifest", "x"], ["./manifest", "x"]),
    ],
)
def test_build_without_a_command_is_build_all(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], passed: list[str]
) -> None:
    seen: list[str] = []

    @click.command(context_settings={"ignore_unknown_options": True})
    @click.argument("rest", nargs=-1)
    def build_all(rest: tuple[str, ...]) -> None:
        seen.extend(rest)

    def load(command: LazyCommand) -> click.Command:
        return build_all if command.target.endswith(":build_all") else real_load(command)

    real_load = LazyCommand.load
    monkeypatch.setattr(LazyCommand, "load", load)
    result = CliRunner().invoke(cli, ["build", *arguments])

    assert (result.exit_code, seen) == (0, passed)


def test_every_registered_command_has_a_module() -> None:
    modules = {command.target.partition(":")[0] for command in (*COMMANDS.values(), *BUILD_COMMANDS.values())}

    assert {name for name in modules if importlib.util.find_spec(f"aotgaudi.cli.{name}") is None} == set()


@pytest.mark.parametrize(
    ("words", "incomplete", "expected"),
    [
        ([], "", list(COMMANDS)),
        ([], "co", ["coverage"]),
        (["build"], "pl", ["plan", "pl"]),
        (["build"], "", [*BUILD_COMMANDS, ""]),
        (["build"], "nothing", ["nothing"]),
        (["build", "cache"], "--en", ["--entry"]),
        (["build", "tiny.toml"], "--sto", ["--store", "--store-limit"]),
        (["cache"], "f", ["fsck"]),
    ],
)
def test_the_shell_completes_commands_and_options_and_files_where_a_spec_may_be(
    words: list[str], incomplete: str, expected: list[str]
) -> None:
    completer = BashComplete(cli, {}, "aotgaudi", "_AOTGAUDI_COMPLETE")

    items = completer.get_completions(words, incomplete)

    assert [item.value for item in items] == expected
    assert [item.type for item in items].count("file") == (words == ["build"])


@pytest.mark.process
def test_a_process_that_was_started_with_interrupts_ignored_can_be_interrupted() -> None:
    """As a script's background jobs are."""
    code = (
        "import signal, sys\nfrom aotgaudi.cli import main as module\n"
        "module.cli.main = lambda **_: signal.raise_signal(signal.SIGINT)\n"
        "module.main()"
    )
    done = subprocess.run(
        ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode != 0
    assert "KeyboardInterrupt" in done.stderr
