"""Options of `serve` in a file: read as on the command line, which wins."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aotgaudi.cli.main import cli
from aotgaudi.cli.serve import serve
from aotgaudi.server.options import digests_of
from tests.unit.cli.conftest import Started, model_directory


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


def test_a_file_that_names_a_certificate_that_is_not_there_is_refused(
    started: Started, run: Callable[..., Result]
) -> None:
    assert "none.pem: cannot be used" in run('ssl-certfile = "none.pem"').stderr
    assert started.options is None


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", ["--uds", "a.sock"]),
        ("port = 9000", ["--uds", "a.sock"]),
        ("", ["--port", "9000", "--host", "::1"]),
    ],
)
def test_a_socket_file_of_the_command_line_wins_over_an_address_of_the_file(
    started: Started, run: Callable[..., Result], text: str, options: list[str]
) -> None:
    assert run(text, *options).exit_code == 0
    assert started.options is not None


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
