"""The examples do what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Server, Workplace, environment
from tests.environment import ROOT

pytestmark = pytest.mark.slow


def test_one_builds_a_bundle_and_generates_from_it(workplace: Workplace) -> None:
    """The store has everything, so nothing is compiled here."""
    example = ROOT / "examples" / "build_and_serve_cpu.py"
    bundle = workplace.folder / "example.bundle"
    arguments = [workplace.spec, workplace.model, bundle, "--store", workplace.store, "--prompt", "the quick"]

    done = subprocess.run(
        [sys.executable, example, *arguments],
        env=environment(workplace.folder / "cache"),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "built:     0 units" in done.stdout
    assert "verified:  intact" in done.stdout
    assert "generated: " in done.stdout
    assert "compiled while it ran: 0" in done.stdout


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"max_tokens": 8, **body}}


def test_another_answers_a_file_of_requests_and_goes_on_where_it_was_stopped(
    server: Server, tmp_path: Path
) -> None:
    chat = [{"role": "user", "content": "the lazy dog"}]
    rows = [
        *(line(f"text {number}", prompt=f"~{number} the quick", temperature=0) for number in range(4)),
        line("chat", "/v1/chat/completions", messages=chat, temperature=0),
        line("refused", prompt="the fox", temperature=7),
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def answer() -> bytes:
        script = ROOT / "examples" / "answer_batch.py"
        words = [sys.executable, script, source, out, "--server", server.base_url, "--at-once", "2"]
        done = subprocess.run(
            words, env=environment(tmp_path / "cache"), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return out.read_bytes()

    whole = answer()
    assert answer() == whole
    kept = b"".join(whole.splitlines(keepends=True)[:3])
    out.write_bytes(whole[: len(kept) + 9])  # The fourth line is torn, as a killed process leaves it.
    assert answer().startswith(kept)

    answers = [json.loads(text) for text in out.read_text(encoding="utf-8").splitlines()]
    assert len(answers) == len(rows)
    responses = {each["custom_id"]: each["response"] for each in answers}
    for row in rows:
        expected, found = server.post(row["url"], row["body"]), responses[row["custom_id"]]
        assert found["status_code"] == expected.status_code
        if expected.status_code == 200:
            (theirs,), (ours,) = expected.json()["choices"], found["body"]["choices"]
            assert ours == theirs
        else:
            assert found["body"] == expected.json()
