"""A bundle is built once and served many times: from read-only directories, from start to orderly stop."""

from __future__ import annotations

import json
import shutil
import signal
import stat
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.harness import Server, Workplace, copy_bundle, eventually, streaming
from tests.parallel import nightly

pytestmark = pytest.mark.slow


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Path -> mode, size and time of the last change, of everything under `folder` and of itself."""
    states = {str(path): path.lstat() for path in (folder, *folder.rglob("*"))}
    return {name: (state.st_mode, state.st_size, state.st_mtime_ns) for name, state in states.items()}


def refuses_requests(server: Server) -> bool:
    try:
        return httpx.get(f"{server.base_url}/ready").status_code == 503
    except httpx.TransportError:
        return True


def test_building_again_compiles_nothing_and_leaves_the_bundle_alone(workplace: Workplace) -> None:
    before = snapshot(workplace.bundle)

    done = workplace.run("build", workplace.spec, "-o", workplace.bundle, "--store", workplace.store)

    assert done.returncode == 0
    assert "nothing to do" in done.stdout
    assert snapshot(workplace.bundle) == before


@pytest.mark.smoke
def test_the_bundle_verifies(workplace: Workplace) -> None:
    done = workplace.run("verify", workplace.bundle)

    assert (done.returncode, done.stderr) == (0, "")
    assert "all answered" in done.stdout


def test_a_read_only_bundle_and_model_are_served_again_and_again_alike(
    workplace: Workplace, tmp_path: Path
) -> None:
    bundle = copy_bundle(workplace.bundle, tmp_path / "bundle")
    for path in (bundle, *bundle.rglob("*")):
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    before = snapshot(bundle), snapshot(workplace.model)
    answers = []

    for _ in range(2):
        with workplace.serve(bundle=bundle) as server:
            answers.append(server.complete("seven wizards", max_tokens=20)["choices"])

    assert answers[0] == answers[1]
    assert (snapshot(bundle), snapshot(workplace.model)) == before
    for path in (bundle, *bundle.rglob("*")):
        path.chmod(path.stat().st_mode | stat.S_IWUSR)


@pytest.mark.parametrize("number", [signal.SIGTERM, *nightly(signal.SIGINT)])
def test_a_server_that_is_told_to_stop_finishes_what_runs_and_exits_with_0(
    workplace: Workplace, number: signal.Signals
) -> None:
    num_prompts, num_tokens = 8, 40
    body = {"prompt": [[3]] * num_prompts, "max_tokens": num_tokens, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}

    with workplace.serve() as server:
        with streaming(server, body) as events:
            next(events)
            server.process.send_signal(number)
            assert eventually(lambda: refuses_requests(server))
            rest = list(events)

        reasons = [choice["finish_reason"] for event in rest for choice in event["choices"]]
        assert reasons.count("length") == num_prompts
        assert rest[-1]["usage"]["completion_tokens"] == num_prompts * num_tokens
        assert server.process.wait(30) == 0
        assert "Traceback" not in server.log


def test_a_server_tells_its_names_and_how_warm_it_is_and_has_the_models_sampling_defaults(
    workplace: Workplace, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(workplace.model, tmp_path / "model"))
    stated = {"temperature": 0, "max_new_tokens": 6}
    (model / "generation_config.json").write_text(json.dumps(stated), encoding="utf-8")
    chat = {"messages": [{"role": "user", "content": "the fox"}]}

    with workplace.serve("--served-model-name", "one", "--served-model-name", "two", model=model) as server:
        ready = server.client.get("/ready").json()

        assert [model["id"] for model in server.client.get("/v1/models").json()["data"]] == ["one", "two"]
        assert ready["entries_warm"] == ready["entries_total"] > 0
        assert (ready["ready"], ready["compilations"]) == (True, 0)
        assert server.client.get("/health").status_code == 200
        assert 0 < server.metric("aotgaudi_time_to_ready_seconds") < 60
        assert server.metric("aotgaudi_ready") == 1

        answers = [server.post("/v1/chat/completions", chat).json() for _ in range(2)]
        greedy = server.post("/v1/chat/completions", {**chat, "temperature": 0, "max_tokens": 6}).json()

        assert answers[0]["choices"] == answers[1]["choices"] == greedy["choices"]
        assert answers[0]["usage"]["completion_tokens"] <= 6
        assert "sampling defaults of the model: temperature = 0, max_tokens = 6" in server.log


def test_when_its_engine_is_killed_a_server_ends_its_streams_with_an_error_and_exits_nonzero(
    workplace: Workplace,
) -> None:
    body = {"prompt": [[3] * 4] * 32, "max_tokens": 50, "ignore_eos": True}  # It runs for seconds.

    with workplace.serve() as server:
        engine = server.engine
        with streaming(server, body) as events:
            next(events)
            engine.kill()
            *_, last = events
        assert last["error"]["type"] == "ServiceUnavailableError"

        assert server.process.wait(20) == 1
        assert "error: the engine's process has ended (SIGKILL)" in server.log
        assert "Traceback" not in server.log
        server.process.returncode = 0  # As it was meant to end.


def test_without_its_preprocessor_pool_a_server_finishes_what_runs_and_exits_nonzero(
    workplace: Workplace,
) -> None:
    with workplace.serve() as server:
        (fork_server,) = {*psutil.Process(server.process.pid).children()} - {server.engine}
        body = {"model": server.model_name, "prompt": [3] * 4, "max_tokens": 50, "ignore_eos": True}
        with streaming(server, body) as events:
            next(events)
            fork_server.kill()
            *_, last = events
        assert last["choices"][0]["finish_reason"] == "length"

        assert server.process.wait(20) == 1
        assert "error: the preprocessor pool has died" in server.log
        assert "Traceback" not in server.log
        server.process.returncode = 0  # As it was meant to end.


def test_no_process_outlives_a_server_that_is_killed(workplace: Workplace) -> None:
    with workplace.serve() as server:
        others = psutil.Process(server.process.pid).children(recursive=True)
        assert server.engine in others
        server.process.kill()

        assert eventually(lambda: not any(map(_runs, others)))
        server.process.wait()
        server.process.returncode = 0  # As it was meant to end.


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):  # It may end between the two questions.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def test_the_process_that_speaks_http_has_no_torch(server: Server) -> None:
    api, engine = (
        Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
        for pid in (server.process.pid, server.engine.pid)
    )

    assert "libtorch" in engine
    assert "libtorch" not in api
    assert "tokenizers" not in api
