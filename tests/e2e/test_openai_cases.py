"""Requests as clients of vLLM send them, to a real server: see tests/openai_cases.py."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.e2e.harness import Server, Workplace
from tests.openai_cases import CASES, answer_to

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(workplace: Workplace) -> Iterator[Server]:
    names = ("--served-model-name", "tiny", "--served-model-name", "org/tiny")
    with workplace.serve(*names, "--enable-auto-tool-choice", "--tool-call-parser", "hermes") as running:
        yield running


@pytest.mark.parametrize("name", CASES)
def test_a_request_has_the_status_that_the_list_says(server: Server, name: str) -> None:
    answer = answer_to(server.base_url, CASES[name])

    assert answer.status == CASES[name]["want"], answer.text[:1000]
    assert "Traceback" not in server.log


def test_each_difference_from_vllm_has_its_reason_in_the_table(pytestconfig: pytest.Config) -> None:
    page = (pytestconfig.rootpath / "docs" / "openai-cases.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE))

    reasons = {case["differs"] for case in CASES.values() if "differs" in case}
    assert [name for name, case in CASES.items() if "vllm" in case and "differs" not in case] == []
    assert reasons <= rows
    assert len(CASES) >= 220
