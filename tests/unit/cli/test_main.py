from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import click
import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from aotgaudi import __version__, errors
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


def test_version() -> None:
    assert __version__ in CliRunner().invoke(cli, ["--version"]).output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["biuld"], "No such command 'biuld'. Did you mean 'build'?"),
        (["zzz"], "No such command 'zzz'. There are: build,"),
        (["build", "manfest", "x.toml"], "No such command 'manfest'. Did you mean 'manifest'?"),
        (["--nothing"], "No such option"),
        (["build", "plan"], "Missing argument 'MANIFEST'"),
        (["build", "plan", "a.toml", "b.toml"], "unexpected extra argument"),
        (["build", "bundle", "x.toml"], "Missing option '-o'"),
        (["build", "cache", "x.toml", "-j", "0"], "0 is not in the range x>=1"),
        (["build", "cache", "x.toml", "-j", "many"], "'many' is not a valid integer"),
    ],
)
def test_bad_usage_exits_2_and_names_the_nearest(arguments: list[str], expected: str) -> None:
    result = CliRunner().invoke(cli, arguments)

    assert result.exit_code == 2
    assert expected in result.output


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--enable-lora", "--enable-lora is not supported: adapters are not served"),
        ("--tensor-parallel-size", "is not supported: a model runs on one device"),
        ("--max-model-len", "sealed in the bundle; build again with another limits.max_model_len"),
        ("--drain-dely", "No such option '--drain-dely'. Did you mean '--drain-delay'?"),
        ("--api-kez", "No such option '--api-kez'. Did you mean '--api-key'?"),
        ("--delay", "No such option '--delay'."),
    ],
)
def test_an_unknown_option_gets_a_reason_or_a_close_name_or_neither(option: str, said: str) -> None:
    result = CliRunner().invoke(cli, ["serve", option])

    assert result.exit_code == 2
    assert said in result.stderr
    assert ("Did you mean" in result.stderr) is ("Did you mean" in said)


def test_serve_lists_its_options_by_what_they_are_for() -> None:
    lines = CliRunner().invoke(cli, ["serve", "--help"]).output.splitlines()

    headings = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Options:", "For bundles of programs:", "For captures:"]
    places = [
        next(i for i, line in enumerate(lines) if name in line)
        for name in ("--bundle", "--model", "--on-compile")
    ]
    assert [sum(lines.index(heading) < place for heading in headings) for place in places] == [1, 2, 3]


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


@pytest.mark.parametrize("arguments", [["--help"], ["build", "--help"], ["build", "-h"]])
def test_help_lists_the_commands_and_imports_none(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom aotgaudi.cli.main import cli\n"
        f"try: cli.main({arguments!r}, prog_name='aotgaudi')\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'rich', 'fastapi', 'aotgaudi.cli.build_manifest'}\n"
        "sys.exit(' '.join(heavy & sys.modules.keys()))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert process.stderr.strip() == ""
    assert "build" in process.stdout


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


@pytest.mark.parametrize("command", [*COMMANDS.values(), *BUILD_COMMANDS.values()])
def test_every_registered_command_has_a_module(command: LazyCommand) -> None:
    assert importlib.util.find_spec(f"aotgaudi.cli.{command.target.partition(':')[0]}") is not None


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


def test_completion_works_as_the_shell_calls_it_and_imports_no_command() -> None:
    code = (
        "import atexit, sys\n"
        "shown = lambda: print(*sorted(m for m in sys.modules if m.startswith('aotgaudi.cli.')), file=sys.stderr)\n"
        "atexit.register(shown)\n"
        "from aotgaudi.cli.main import main\nmain()"
    )
    asked = {"_AOTGAUDI_COMPLETE": "bash_complete", "COMP_WORDS": "aotgaudi ex", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True, check=False
    )

    assert done.stdout == "plain,explain\n"
    assert done.stderr == "aotgaudi.cli.main aotgaudi.cli.verbs\n"


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
