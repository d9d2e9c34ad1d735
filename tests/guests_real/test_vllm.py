"""What is promised of wrapped servers, of a real vLLM on CPU."""

from __future__ import annotations

import json
import os
import shutil
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.guests_real.conftest import RealGuest

pytestmark = [pytest.mark.guests, pytest.mark.timeout(5400)]

SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 1, "top_p": 0.9, "top_k": 7},
    {"temperature": 0.5, "repetition_penalty": 1.1},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0, "prompt_logprobs": 1},
    {"temperature": 0, "logit_bias": {"5": 2}},
)


def ask(port: int, **parameters: Any) -> str:
    body = {"model": "m", "prompt": "The capital of Italy is", "max_tokens": 8, **parameters}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        return str(json.load(response)["choices"][0]["text"])


def guest_processes(guest: RealGuest) -> list[str]:
    """The commands of processes that the guest's interpreter runs."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environ = (path / "environ").read_bytes()
        except OSError:
            continue
        if f"AOTGAUDI_WITNESS={guest.work / 'place'}".encode() in environ:
            found.append((path / "comm").read_text().strip())
    return found


def test_what_a_cold_start_compiles_is_proved_to_be_all(captured: RealGuest) -> None:
    """The proof compiled nothing, generated nothing, added nothing, and loaded the one artifact; three witnesses agree."""
    receipt = json.loads((captured.bundle / "receipt.json").read_bytes())

    counts = receipt["proof"]["counts"]
    assert (counts["compile"], counts["generate"], counts["new_files"], counts["loads"]) == (0, 0, 0, 1)
    assert {"process", "files", "counters"} <= set(receipt["proof"]["witnesses"])
    assert receipt["expected"]["loads"] == {"aot:backbone:rank_0_0/model": 1}
    assert receipt["expected"]["roles"] == {"APIServer": 1, "EngineCore": 1, "Worker": 1}
    assert receipt["repairs"] == ["vllm.finalize-loading"]
    assert {file["kind"] for file in receipt["files"]} >= {"library", "pickle", "python", "json"}
    assert len(receipt["factors"]["aot_compile_hash_factors"]) > 200


def test_the_same_build_again_runs_nothing(captured: RealGuest) -> None:
    done = captured.build()

    assert done.returncode == 0
    assert "nothing was run" in done.stdout


def test_it_runs_warm_at_another_place_and_stays_so(captured: RealGuest, tmp_path: Path) -> None:
    """Another path of the model, working directory, home, user, port and log level: vLLM itself would compile again."""
    link = tmp_path / "the-model"
    link.symlink_to(captured.model)
    words = captured.words(18901, "--uvicorn-log-level", "warning", model=link)
    variables = {"LOGNAME": "somebody", "USER": "somebody", "VLLM_LOGGING_LEVEL": "INFO"}

    with captured.running(tmp_path, words, **variables) as running:
        assert running.metric("aotgaudi_compilations_total") == {}
        assert running.metric("aotgaudi_guest_warm") == {"": 1}
        texts = [ask(18901, **parameters) for parameters in SAMPLING]
        assert texts[0] == texts[3] == texts[4]
        assert running.metric("aotgaudi_compilations_total") == {}
        assert running.metric("aotgaudi_cache_files_added_total") == {}

        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(120) == 0
    assert guest_processes(captured) == []


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--max-num-batched-tokens", "1024"), "max-num-batched-tokens"),
        (("--enforce-eager",), "enforce-eager"),
        (("--a-flag-that-nobody-knows", "1"), "a-flag-that-nobody-knows"),
    ],
)
def test_another_flag_is_refused_by_its_name(captured: RealGuest, more: tuple[str, ...], named: str) -> None:
    done = captured.run(words=captured.words(18902, *more))

    assert done.returncode == 3, done.stdout
    assert named in done.stdout.splitlines()[-1]
    assert guest_processes(captured) == []


def test_another_model_is_refused(captured: RealGuest, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(captured.model, folder, copy_function=os.symlink)
    (folder / "config.json").unlink()
    config = json.loads((captured.model / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 12345.0}))

    done = captured.run(words=captured.words(18903, model=folder))

    assert done.returncode == 3, done.stdout
    assert "config.json" in done.stdout


@pytest.mark.parametrize("suffix", [".so", ".py", "/model"])
def test_a_file_with_other_bytes_is_refused_before_the_server_starts(
    captured: RealGuest, tmp_path: Path, suffix: str
) -> None:
    """vLLM itself runs a line that is added to a cached source."""
    bundle = tmp_path / "bundle"
    shutil.copytree(captured.bundle, bundle)
    receipt = json.loads((bundle / "receipt.json").read_bytes())
    file = next(file for file in receipt["files"] if file["path"].endswith(suffix))
    (path,) = (p for p in (bundle / "objects").rglob("*") if p.is_file() and p.name in file["digest"])
    path.chmod(0o644)
    path.write_bytes(path.read_bytes() + b"\nprint('it ran')\n")
    path.chmod(0o444)

    done = captured.run(words=captured.words(18904), bundle=bundle)

    assert done.returncode == 4, done.stdout
    assert "it ran" not in done.stdout
    assert "vLLM" not in done.stdout


def test_without_the_repair_it_is_refused_not_compiled(captured: RealGuest) -> None:
    done = captured.run("--no-repairs", words=captured.words(18905))

    assert done.returncode == 3, done.stdout
    assert guest_processes(captured) == []
