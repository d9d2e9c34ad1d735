"""`aotgaudi run` with a fake server: proved warm, or ended with one sentence, then watched as long as it serves."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.guests.conftest import ENVIRON, Captured, build
from tests.guests.fake import Fake, make_model
from tests.guests.running import Runs, left_in, wait
from tests.ports import free_port


def test_elsewhere_and_otherwise_named_it_is_warm(runs: Runs, captured: Captured, tmp_path: Path) -> None:
    """Another directory of the model, HOME, port, log level and working directory change no code."""
    model = shutil.copytree(captured.fake.model, tmp_path / "elsewhere")
    fake = Fake(model, free_port(), flags=("--log-level", "debug"))
    environ = {"HOME": str(tmp_path), "USER": "somebody", "LOGNAME": "somebody"}

    with runs.started(fake, cwd=tmp_path, environ=environ) as running:
        running.wait_ready()
        report = running.report()

        assert running.metric("aotgaudi_guest_warm") == 1
        assert running.metric('aotgaudi_guest_artifacts{state="loaded"}') == 1
        assert running.metric('aotgaudi_witness_processes{state="present"}') == 3
        assert (report["verdict"], report["compilations"]) == ("Warm", {})
        assert running.complete()[0] == 200
        assert running.end() == 0, running.log
    assert not left_in(captured.root)


def test_a_capture_without_requests_runs_and_reports_what_was_not_asked(
    runs: Runs, captured: Captured
) -> None:
    bare = replace(captured, bundle=captured.bundle.with_name("bare.bundle"))
    build(bare, "--exercise", "none")

    with replace(runs, bundle=bare.bundle).started(bare.fake) as running:
        running.wait_ready()
        report = running.report()

    assert (report["residuals"], report["live_graphs"]) == ([], [])
    assert any("--exercise none does not ask for it" in line for line in report["not_exercised"])


def test_one_that_probes_its_folders_and_leaves_nothing_is_warm_and_stays_so(runs: Runs, fake: Fake) -> None:
    with runs.started(fake.but("probes"), on_compile="exit") as running:
        running.wait_ready()
        for _ in range(3):
            assert running.complete()[0] == 200

        report = running.report()
        assert (report["verdict"], report["findings"], report["files"]["added"]) == ("Warm", [], [])
        assert running.get("/ready")[0] == 200
        assert running.end() == 0, running.log


def test_another_launch_is_refused_by_name_before_anything_starts(
    runs: Runs, captured: Captured, fake: Fake
) -> None:
    before = captured.root.stat()

    refusal = runs.refusal(replace(fake, flags=("--max-num-seqs", "9")))

    sentence = "flag.max-num-seqs is 9, the capture was built for (default)"
    assert (refusal[0], sentence in refusal[1]) == (3, True), refusal
    assert captured.root.stat().st_mtime_ns == before.st_mtime_ns


def test_other_bytes_are_refused_before_anything_starts(runs: Runs, fake: Fake, tmp_path: Path) -> None:
    bundle = shutil.copytree(runs.bundle, tmp_path / "damaged")
    path = sorted(p for p in (bundle / "objects").rglob("*") if p.is_file())[-1]
    for data in (path.read_bytes()[:-1] + b"\xff", path.read_bytes() + b"\nprint('injected')\n"):
        path.chmod(0o644)
        path.write_bytes(data)

        status, sentence = replace(runs, bundle=bundle).refusal(fake)

        assert status == 4
        assert "is not what was sealed" in sentence
        assert path.name in sentence


FAULTS = {
    "silent-miss": (3, "aot generated code again"),
    "compile-at-start": (3, "a compiler was run"),
    "delete": (3, "was removed from the cache"),
    "plant": (4, "was added to the cache, and not by the server"),
    "crash-at-start": (
        13,
        "before it was ready, with 0 of 1 artifacts loaded; its last line: fatal: no device for",
    ),
    "raises-at-start": (1, "ended with exit code 1 before it was ready, with 0 of 1 artifacts loaded"),
    "builds-by-script": (3, "a compiler was run: "),
    "loads-what-it-made": (3, "made.so was loaded, and was made since the server started"),
    "swap-cache": (3, "was removed from the cache"),
    "plant-beside-agent": (4, "witness/sitecustomize.py was added to the cache, and not by the server"),
    "worker-dies": (3, "ended before its report was complete"),
    "runs-what-it-removes": (3, "kernels/passing.so was loaded, and its file has been removed"),
    "loads-from-memory": (
        3,
        "/memfd:kernel was loaded, and it lies in memory, where no file can be compared",
    ),
    "loads-from-shm": (3, ".so was loaded, and its file has been removed"),
}
MORE_FAULTS = {
    "eager": (3, "aot"),
    "rewrite": (4, "does not have the bytes that were sealed"),
    "load-failure": (1, "with 0 of 1 artifacts loaded; its last line: fake: the engine failed"),
    "plant-and-load": (4, "is not of the bundle"),
    "counts-wrong": (3, "aot"),
    "refuses-requests": (3, "was not answered as in the build"),
    "skip-plugins": (3, "an agent in 1 of 1 APIServer"),
    "killed-at-start": (139, "ended with exit code 139"),
}


def is_refused(runs: Runs, captured: Captured, fake: Fake, fault: str, expected: tuple[int, str]) -> None:
    status, sentence = runs.refusal(fake.but(fault))

    assert (status, expected[1] in sentence) == (expected[0], True), sentence
    assert "\n" not in sentence
    assert not left_in(captured.root)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_is_not_warm_is_ended_with_one_sentence(
    runs: Runs, captured: Captured, fake: Fake, fault: str
) -> None:
    is_refused(runs, captured, fake, fault, FAULTS[fault])


def test_a_server_that_ends_without_an_agent_is_told_how_it_lost_it(runs: Runs, fake: Fake) -> None:
    status, sentence = runs.refusal(fake.but("crash-at-start", "skip-plugins"))

    assert (status, "none of its processes had an agent" in sentence) == (13, True), sentence


def test_a_worker_without_an_agent_is_not_warm(
    runs: Runs, captured: Captured, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aotgaudi.wrap.supervise.SETTLE_SECONDS", 5.0)

    is_refused(runs, captured, fake, "skip-plugin", (3, "in vain for an agent in 1 of 1 Worker processes"))


@pytest.mark.nightly
@pytest.mark.parametrize("fault", MORE_FAULTS)
def test_and_so_is_one_with_another_fault(runs: Runs, captured: Captured, fake: Fake, fault: str) -> None:
    is_refused(runs, captured, fake, fault, MORE_FAULTS[fault])


def test_a_server_that_hangs_is_killed_with_all_it_started(
    runs: Runs, captured: Captured, fake: Fake
) -> None:
    status, sentence = runs.refusal(fake.but("hang", "orphan"), start_seconds=1.0, termination_seconds=0.5)

    assert (status, "did not serve within 1 s" in sentence) == (3, True), sentence
    assert not left_in(captured.root)


def test_a_live_compile_is_seen_by_three_sources_and_reported(runs: Runs, fake: Fake) -> None:
    """No warm-up request has logprobs, for which this server has a separate kernel."""
    with runs.started(fake) as running:
        running.wait_ready()
        assert running.complete(logprobs=1)[0] == 200

        def counters() -> dict[str, int]:
            worker = next(one for one in running.report()["processes"] if one["role"] == "Worker")
            return dict(worker["counters"])

        def added() -> list[str]:
            return [path for path in running.report()["files"]["added"] if path.endswith("logprobs.so")]

        wait(lambda: running.metric("aotgaudi_guest_warm") == 0)
        wait(added, "the file")
        wait(lambda: counters().get("vllm.num_inductor_compiles") == 1, "the agent's next look")
        report = running.report()

        assert running.metric('aotgaudi_compilations_total{phase="live",what="process"}') == 1
        assert "compile < " in running.log, "the log names the frames"
        assert (
            "not exercised: kinds of sampling: --exercise smoke does not ask for it"
            in running.get("/ready")[1]
        )
        (told,) = [line for line in running.log.splitlines() if "the first compile after ready: " in line]
        assert told.startswith("WARNING ")
        assert "from fake_server" in told.replace("__mp_main__", "fake_server"), "where it came from"
        assert "cmpl-none-0" in told, "which request it was"
        line = told[told.index('({"method"') + 1 : told.index("}})") + 2]
        assert json.loads(line) == {
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": [10], "temperature": 0, "max_tokens": 16, "logprobs": 1},
        }
        assert report["verdict"] == "NotWarm"
        assert "after ready: a compiler was run" in report["reasons"][0]
        assert running.complete()[0] == 200, "it still serves"
        assert running.end() == 0


def test_a_live_compile_ends_it_where_that_is_asked_for(runs: Runs, captured: Captured, fake: Fake) -> None:
    with runs.started(fake, on_compile="exit") as running:
        running.wait_ready()
        with contextlib.suppress(OSError):
            running.complete(logprobs=1)

        assert running.wait() == 3, running.log
    assert not left_in(captured.root)


def test_what_does_not_match_starts_cold_where_warmth_is_not_required(
    runs: Runs, captured: Captured, fake: Fake
) -> None:
    with runs.started(replace(fake, flags=("--max-num-seqs", "9")), require_warm=False) as running:
        running.wait_ready()

        assert running.metric("aotgaudi_guest_warm") == 0
        assert "starting cold, in a private cache: flag.max-num-seqs" in running.log
        assert running.end() == 0


def test_nothing_is_refused_where_warmth_is_not_required(runs: Runs, fake: Fake) -> None:
    with runs.started(fake.but("compile-at-start"), require_warm=False) as running:
        running.wait_ready()

        assert running.metric("aotgaudi_guest_warm") == 0
        assert running.metric('aotgaudi_compilations_total{phase="load",what="process"}') == 1
        assert running.report()["verdict"] == "NotWarm"
        assert running.end(signal.SIGINT) == 0


def test_other_weights_of_one_architecture_are_warm_from_one_capture(
    runs: Runs, captured: Captured, tmp_path: Path
) -> None:
    """No graph depends on weights, but every answer does."""
    model = shutil.copytree(captured.fake.model, tmp_path / "tuned")
    (model / "model.safetensors").write_text("fine-tuned")

    with runs.started(Fake(model, free_port())) as running:
        running.wait_ready()

        assert running.metric("aotgaudi_guest_warm") == 1
        assert running.end() == 0


def test_other_adapters_in_the_slots_are_warm_and_requests_of_each_kind_compile_nothing(folder: Path) -> None:
    fake = Fake(
        make_model(folder / "model"), free_port(), flags=("--enable-lora", "--lora-modules", "sql=/a")
    )
    captured = Captured(folder / "bundle", fake, folder / "root", folder / "store")
    build(captured)
    other = replace(fake, flags=("--enable-lora", "--lora-modules", "chat=/b"))

    with Runs(captured.bundle, folder, ENVIRON).started(other) as running:
        running.wait_ready()
        for index in range(200):
            kind: dict[str, object] = [{}, {"model": "chat"}, {"logprobs": 1}, {"temperature": 0.5}][
                index % 4
            ]
            assert running.complete(**kind)[0] == 200

        assert running.metric("aotgaudi_guest_warm") == 1
        assert running.report()["compilations"] == {}
        assert running.end() == 0


def test_a_signal_to_end_while_the_warm_up_requests_are_sent_ends_it_well(runs: Runs, fake: Fake) -> None:
    with runs.started(fake.but("slow-answers")) as running:
        wait(lambda: "the server serves after" in running.log, "the warm-up")

        assert running.end() == 0, running.log


def test_a_signal_that_the_server_ignores_while_it_loads_still_ends_it(runs: Runs, fake: Fake) -> None:
    with runs.started(fake.but("deaf-at-start"), termination_seconds=6.0) as running:
        wait(lambda: "/ready /live /metrics" in running.log, "the start")
        wait(lambda: "the server is starting" in running.get("/ready")[1], "the server")
        time.sleep(0.5)

        assert running.end() in (137, 143), running.log


def test_the_exit_code_of_a_server_that_crashes_later_is_kept(runs: Runs, fake: Fake) -> None:
    with runs.started(fake.but("crash-live@" + str(runs.folder / "now"))) as running:
        running.wait_ready()
        (runs.folder / "now").touch()
        with contextlib.suppress(OSError):
            running.complete()

        assert running.wait() == 13, running.log


def test_nothing_is_left_and_the_place_is_free_when_we_are_killed(
    runs: Runs, captured: Captured, fake: Fake
) -> None:
    with runs.started(fake.but("orphan")) as running:
        running.wait_ready()
        assert left_in(captured.root)

        assert running.end(signal.SIGKILL) == -signal.SIGKILL
    wait(lambda: not left_in(captured.root))
    started = time.monotonic()
    with runs.started(replace(fake, port=free_port())) as running:
        running.wait_ready()
        assert running.end() == 0
    assert time.monotonic() - started < 120


def test_a_signal_before_there_is_a_server_ends_us(runs: Runs, fake: Fake) -> None:
    with runs.started(fake) as running:
        os.kill(running.pid, signal.SIGSTOP)
        os.kill(running.pid, signal.SIGTERM)
        os.kill(running.pid, signal.SIGCONT)

        assert running.wait() in (143, 0, -signal.SIGTERM)
