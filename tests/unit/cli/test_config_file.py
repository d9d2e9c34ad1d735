"""Options of `serve` in a file: read as on the command line, which wins."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aotgaudi.cli.main import cli
from aotgaudi.cli.serve import serve
from aotgaudi.phases import Phases
from aotgaudi.server.engine.channel import Begin
from aotgaudi.server.launch import ServeOptions
from aotgaudi.server.options import digests_of
from tests.unit.cli.test_serve_command import NoProcess, model_directory


class Started:
    """What a server was started with."""

    options: ServeOptions
    begin: Begin


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    found = Started()

    def launched(options: ServeOptions, process: NoProcess, _: Phases) -> None:
        found.options, (found.begin,) = options, process.told

    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.delenv("AOTGAUDI_API_KEY", raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr("aotgaudi.server.engine.start.EngineProcess", NoProcess)
    monkeypatch.setattr("aotgaudi.bundle.kind.is_capture", lambda _: False)
    monkeypatch.setattr("aotgaudi.server.launch.launch", launched)
    return found


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Result]:
    """Runs `serve` with a file of `text`; it names a bundle and a model unless it is told not to."""
    model_directory(tmp_path)

    def run(text: str, *options: str, complete: bool = True) -> Result:
        where = f"bundle = {json.dumps(str(tmp_path))}\nmodel = {json.dumps(str(tmp_path))}\n"
        (tmp_path / "serve.toml").write_text((where if complete else "") + text, encoding="utf-8")
        return CliRunner().invoke(cli, ["serve", "--config", str(tmp_path / "serve.toml"), *options])

    return run


def test_every_kind_of_option_can_stand_in_the_file(
    tmp_path: Path, started: Started, run: Callable[..., Result]
) -> None:
    done = run(
        """
        require-warm = true
        enable-prefix-caching = false
        port = 9000
        drain-delay = 2.5
        policy = "throughput"
        served-model-name = ["chat", "small"]
        allowed-host = "chat.example.com"
        override-generation-config = { temperature = 0.6, top_k = 20 }
        api-key = "sesame"
        access-log = true
        root-path = "/llm/"
        """
    )

    assert done.exit_code == 0, done.stderr
    given = started.options
    assert given.require_warm
    assert (given.listening.port, given.listening.allowed_hosts) == (9000, ("chat.example.com",))
    assert given.listening.root_path == "/llm"
    assert given.stop_times.delay == 2.5
    assert given.served_model_names == ("chat", "small")
    assert len(given.access.key_digests) == 1
    assert given.observability.access_log
    model = started.begin.options
    assert (model.bundle, model.prefix_caching, model.policy) == (tmp_path, False, "throughput")
    assert model.generation_config.override == {"temperature": 0.6, "top_k": 20}
    assert "sesame" not in repr((given, done.output, done.stderr))


def test_the_command_line_wins_over_the_file(started: Started, run: Callable[..., Result]) -> None:
    options = ("--port", "9001", "--served-model-name", "other", "--enable-prefix-caching")

    done = run('port = 9000\nserved-model-name = ["chat"]\nenable-prefix-caching = false', *options)

    assert done.exit_code == 0, done.stderr
    assert started.options.listening.port == 9001
    assert started.options.served_model_names == ("other",)
    assert started.begin.options.prefix_caching is True


def test_the_environment_wins_over_the_file(
    monkeypatch: pytest.MonkeyPatch, started: Started, run: Callable[..., Result]
) -> None:
    monkeypatch.setenv("AOTGAUDI_API_KEY", "of-environment")

    run('api-key = "of-file"')

    assert started.options.access.key_digests == digests_of(["of-environment"], "--api-key")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prt = 8000", "serve.toml: prt: is not an option of this command (did you mean 'port'?)"),
        ("max-model-len = 64", "max-model-len: is not supported (limits are sealed in the bundle"),
        ("max_requests = 64", "did you mean 'max-requests'?"),
        ("zebra = 1", "`--help` lists all"),
        ('config = "other.toml"', "config: is not an option"),
        ("help = true", "help: is not an option"),
        ("[serve]\nport = 1", "serve: is not an option"),
        ("port = 70000", "serve.toml: port: 70000 is not in the range"),
        ('port = "http"', "serve.toml: port: 'http' is not a valid integer"),
        ("port = 8000.5", "serve.toml: port: '8000.5' is not a valid integer"),
        ("port = true", "serve.toml: port: must be a text or a number"),
        ("port = [8000]", "serve.toml: port: must be a text or a number"),
        ("port = 2026-01-01", "serve.toml: port: must be a text or a number"),
        ("drain-delay = nan", "is not a finite number"),
        ("require-warm = 1", "serve.toml: require-warm: must be true or false"),
        ('require-warm = "yes"', "must be true or false"),
        ('policy = "fast"', "serve.toml: policy: 'fast' is not one of"),
        ("served-model-name = [1, [2]]", "must be a text or a number"),
        ("served-model-name = { a = 1 }", "must be a text or a number"),
        ("override-generation-config = { temprature = 1 }", "has 'temprature'; the sampling defaults are"),
        ('override-generation-config = "{"', "is not JSON"),
        ('root-path = "llm"', "must be a path such as /llm"),
        ("port: 8000", "serve.toml: is not TOML"),
        ("port = 1\nport = 2", "serve.toml: is not TOML"),
        ('uds = "a.sock"\nport = 9000', "leave out --port"),
        ('ssl-certfile = "none.pem"', "none.pem: cannot be read"),
        ('on-compile = "exit"', "--on-compile goes with bundles that `build capture` sealed"),
    ],
)
def test_what_is_wrong_in_the_file_is_said_with_its_place(
    started: Started, run: Callable[..., Result], text: str, said: str
) -> None:
    done = run(text)

    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not hasattr(started, "options")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "large.toml").write_text("#" * (1024 * 1024 + 1))
    for name, said in (
        ("none.toml", "cannot be read: No such file"),
        (".", "Is a directory"),
        ("large.toml", "is larger than"),
    ):
        done = CliRunner().invoke(cli, ["serve", "--config", str(tmp_path / name)])

        assert (done.exit_code, said in done.stderr) == (2, True)


def test_what_the_file_leaves_out_is_missing(run: Callable[..., Result]) -> None:
    done = run("port = 1", complete=False)

    assert done.exit_code == 2
    assert "Missing option '--bundle'" in done.stderr


@pytest.mark.parametrize(
    ("text", "options", "accepted"),
    [
        ("", ["--uds", "a.sock"], True),
        ("port = 9000", ["--uds", "a.sock"], True),
        ("", ["--uds", "a.sock", "--port", "9000"], False),
        ("", ["--uds", "a.sock", "--host", "127.0.0.1"], False),
        ('uds = "a.sock"', ["--port", "9000"], False),
        ("", ["--port", "9000", "--host", "::1"], True),
    ],
)
def test_a_socket_file_and_an_address_exclude_each_other_except_that_the_command_line_wins(
    started: Started, run: Callable[..., Result], text: str, options: list[str], accepted: bool
) -> None:
    done = run(text, *options)

    assert done.exit_code == (0 if accepted else 2)
    assert ("--uds listens on a file" in done.stderr) is not accepted


LISTED = [
    option
    for option in serve.params
    if isinstance(option, click.Option) and option.opts[0] not in ("--config", "--help")
]


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=st.integers() | st.floats() | st.booleans() | st.lists(st.integers()) | st.text(max_size=5),
    data=st.data(),
)
def test_no_value_of_any_option_leads_to_a_traceback(
    started: Started, run: Callable[..., Result], value: object, data: st.DataObject
) -> None:
    import tomli_w

    option = data.draw(st.sampled_from(LISTED))
    name = option.opts[0].removeprefix("--")

    done = run(tomli_w.dumps({name: value}), complete=name not in ("bundle", "model"))

    assert done.exit_code in (0, 2, 3, 4, 5), (name, value, done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit)
