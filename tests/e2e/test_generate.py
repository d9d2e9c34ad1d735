"""`aotgaudi generate`: the answers of a real server, without one; killed, stopped and started again."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.harness import START_TIMEOUT_SECONDS, Server, Workplace, command_line, environment, eventually

pytestmark = pytest.mark.slow
CHAT = {"messages": [{"role": "user", "content": "the lazy dog"}]}


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": url,
        "body": {"temperature": 0, "max_tokens": 8, "ignore_eos": True, **body},
    }


def write(path: Path, lines: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf-8")
    return path


def read(path: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(each) for each in path.read_text(encoding="utf-8").splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each["response"] for each in found}


def options(workplace: Workplace, source: Path, out: Path) -> list[str]:
    where = ("--bundle", workplace.bundle, "--model", workplace.model, "--input", source, "-o", out)
    return ["generate", *map(str, where)]


def same(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in ("id", "created")}


def alike(one: object, other: object) -> bool:
    """Whether two answers are equal, but for the last bits of numbers: in another batch, a model computes others."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, abs_tol=1e-4)
    return one == other


def test_answers_are_those_of_the_server(workplace: Workplace, server: Server, tmp_path: Path) -> None:
    lines = [
        line("text", prompt="the quick brown"),
        line("ids", prompt=[1, 2, 3]),
        line("chat", "/v1/chat/completions", **CHAT),
        line("sampled", prompt="seven wizards", temperature=0.7, top_p=0.9, top_k=20, seed=7),
        line("logprobs", prompt="a jar", temperature=0.7, top_k=20, seed=3, logprobs=3),
        line("refused", prompt="the fox", temperature=7),
        line("too long", prompt="the fox", max_tokens=10_000),
    ]
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"

    done = workplace.run(*options(workplace, source, out), "--json")

    assert done.returncode == 8, done.stderr
    assert "2 of 7 answers are errors" in done.stderr
    counts = json.loads(done.stdout)
    assert (counts["requests"], counts["errors"], counts["generated_tokens"]) == (7, 2, 40)
    answers = read(out)
    for each in lines:
        expected = server.post(each["url"], each["body"])
        found = answers[each["custom_id"]]
        assert found["status_code"] == expected.status_code
        assert alike(same(found["body"]), same(expected.json())), (found["body"], expected.json())


def many(num: int) -> list[dict[str, Any]]:
    return [line(f"r{index}", prompt=f"~{index} the quick", max_tokens=24) for index in range(num)]


def start(workplace: Workplace, source: Path, out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command_line(*options(workplace, source, out)),
        cwd=workplace.folder,
        env=environment(workplace.folder / "cache"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("how", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)]
)
def test_a_batch_that_is_stopped_goes_on_and_ends_as_one_that_was_not(
    workplace: Workplace, tmp_path: Path, how: signal.Signals, exit_code: int
) -> None:
    source, out = write(tmp_path / "in.jsonl", many(60)), tmp_path / "out.jsonl"
    process = start(workplace, source, out)
    children = []
    try:
        assert eventually(
            lambda: out.exists() and out.read_bytes().count(b"\n") >= 5, START_TIMEOUT_SECONDS
        ), process.communicate()
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(how)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    kept = out.read_bytes()
    if how is signal.SIGKILL:
        out.write_bytes(kept := kept[:-7])  # Torn, as a process that dies while it writes leaves it.

    resumed = workplace.run(*options(workplace, source, out))

    assert process.returncode == exit_code
    assert "Traceback" not in said
    assert eventually(lambda: not any(child.is_running() for child in children))
    assert resumed.returncode == 0, resumed.stderr
    assert kept.count(b"\n") + 1 >= 5
    assert kept.count(b"\n") < 60
    assert out.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    whole = workplace.run(*options(workplace, source, tmp_path / "whole.jsonl"))
    assert whole.returncode == 0
    texts = {name: each["body"]["choices"][0]["text"] for name, each in read(out).items()}
    assert texts == {
        name: each["body"]["choices"][0]["text"] for name, each in read(tmp_path / "whole.jsonl").items()
    }
    assert len(texts) == 60


def test_a_batch_that_is_answered_loads_nothing(workplace: Workplace, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", many(2)), tmp_path / "out.jsonl"
    assert workplace.run(*options(workplace, source, out)).returncode == 0

    began = time.monotonic()
    again = workplace.run(*options(workplace, source, out), "--json")

    assert again.returncode == 0
    assert json.loads(again.stdout) == {
        "output": str(out),
        "requests": 2,
        "answered_before": 2,
        "errors": 0,
        "generated_tokens": 0,
        "seconds": 0.0,
    }
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("text", "more", "exit_code", "said"),
    [
        ("{\n", [], 2, "in.jsonl: is not a batch: line 1 is not JSON"),
        ("", [], 2, "in.jsonl: has no request"),
        (json.dumps(line("a", prompt="x")), ["--bundle", "none"], 2, "no bundle at none"),
        (json.dumps(line("a", prompt="x")), ["--model", "none"], 2, "none: is not a model directory"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_one_line(
    workplace: Workplace, tmp_path: Path, text: str, more: list[str], exit_code: int, said: str
) -> None:
    (tmp_path / "in.jsonl").write_text(text)

    done = workplace.run(*options(workplace, tmp_path / "in.jsonl", tmp_path / "out.jsonl"), *more)

    assert done.returncode == exit_code
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_bundle_that_is_not_warm_is_refused(
    workplace: Workplace, holed_bundle: Path, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl", many(1))

    done = workplace.run(*options(workplace, source, tmp_path / "out.jsonl"), "--bundle", holed_bundle)

    assert done.returncode == 3
    assert "Traceback" not in done.stderr
