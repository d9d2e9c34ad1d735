"""Statuses, errors and fields of our server's answers beside those of a real vLLM's, for one model with random weights.

``python -m tests.guests_real.test_vllm_openai OURS THEIRS`` compares two servers that run, given by their URLs.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import SPEC, Workplace, environment
from tests.guests_real.conftest import READY_SECONDS, guest_python
from tests.guests_real.tiny_models import add_weights, written_model
from tests.openai_cases import CASES, Answer, answer_to
from tests.ports import free_port

pytestmark = [pytest.mark.guests, pytest.mark.timeout(5400)]

TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
COMPARED = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize")
NOT_COMPARED = re.compile(
    r"(choices\[\]\.)?(token_ids|routed_experts|prompt_(token_ids|text|logprobs))|service_tier|metrics|[ke][vc]_transfer_params"
    r"|choices\[\]\.message\.(audio|function_call)|usage\.(prompt|completion)_tokens_details(\.cached_tokens)?"
    r"|data\[\]\.permission.*|system_fingerprint|choices\[\]\.logprobs\.refusal"
)
"""Fields that only one of the servers has in all its answers; the table in docs/openai-cases.md says why."""

_NO_DELTA = {"choices[].delta": "choices[].delta.content"}
"""A delta that says nothing is empty, or has an empty text, as the parser of calls has it."""


def shapes(answer: Answer) -> list[frozenset[str]]:
    """The fields of the answer or of its chunks that are compared, and equal neighbours once."""
    found: list[frozenset[str]] = []
    for fields in answer.fields:
        shape = frozenset(
            _NO_DELTA.get(field, field) for field in fields if not NOT_COMPARED.fullmatch(field)
        )
        if found[-1:] != [shape]:
            found.append(shape)
    return found


def _is_within(some: list[frozenset[str]], all_: list[frozenset[str]]) -> bool:
    """Whether `some` are chunks of `all_` in the same order: a busy server may send several tokens in one chunk."""
    rest = iter(all_)
    return all(shape in rest for shape in some)


def differences(ours: Answer, theirs: Answer, case: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is not as the list has it."""
    for who, answer, want in (
        ("our", ours, case["want"]),
        ("vLLM's", theirs, case.get("vllm", case["want"])),
    ):
        if answer.status != want:
            yield f"{who} status is {answer.status}, not {want}: {answer.text[:200]}"
    if "differs" in case or ours.status != theirs.status:
        return
    if ours.error != theirs.error:
        yield f"our error is {ours.error}, vLLM's is {theirs.error}: {theirs.text[:200]}"
    elif case["path"] in COMPARED and case["want"] == 200:
        here, there = shapes(ours), shapes(theirs)
        if not _is_within(here, there) and not _is_within(there, here):
            yield f"our fields are {[sorted(x) for x in here]}, vLLM's are {[sorted(x) for x in there]}"


def compared(ours: str, theirs: str) -> list[str]:
    """Returns a line for each difference that the list does not have."""
    return [
        f"{name}: {difference}"
        for name, case in CASES.items()
        for difference in differences(answer_to(ours, case), answer_to(theirs, case), case)
    ]


FLAGS = "--max-model-len 64 --max-num-seqs 4 --max-num-batched-tokens 64 --dtype float32 --enforce-eager"
OURS = ("--served-model-name", "tiny", "--served-model-name", "org/tiny", *TOOLS)
THEIRS = ("--served-model-name", "tiny", "org/tiny", *TOOLS, *FLAGS.split())


def test_our_server_answers_as_vllms_own_but_for_what_the_table_has(tmp_path: Path) -> None:
    paths = (tmp_path / name for name in ("pair.toml", "model", "store", "pair.bundle"))
    place = Workplace(tmp_path, *paths)
    add_weights(written_model(place.model))
    place.spec.write_text(SPEC)
    built = place.run("build", place.spec, "-o", place.bundle, "--store", place.store, timeout_seconds=3600)
    assert built.returncode == 0, built.stderr
    port = free_port()
    module = [str(guest_python()), "-m", "vllm.entrypoints.openai.api_server", "--model", str(place.model)]
    variables = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HOME": str(tmp_path)}

    with (
        (tmp_path / "vllm.log").open("wb") as log,
        subprocess.Popen(
            [*module, *THEIRS, "--port", str(port)],
            env=environment(tmp_path, **variables),
            stdout=log,
            stderr=log,
        ) as guest,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(url, guest, tmp_path / "vllm.log")
            with place.serve(*OURS) as server:
                found = compared(server.base_url, url)
        finally:
            guest.terminate()

    assert found == []


def _wait_until_ready(url: str, guest: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except OSError:
            assert guest.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline
            time.sleep(0.5)


if __name__ == "__main__":
    print(*compared(*sys.argv[1:3]), sep="\n")
