"""Load tools and a conformance suite ask a server of the demo's model: no request fails, and nothing compiles.

ci/clients installs them, into the folders that `AOTGAUDI_CLIENTS` names; ci/demo makes the model.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Server, command_line, environment

CLIENTS = os.environ.get("AOTGAUDI_CLIENTS", "")
DEMO = Path(os.environ.get("AOTGAUDI_DEMO_DIR", ".aotgaudi")).absolute()
MODEL, BUNDLE = DEMO / "models" / "smollm2-135m", DEMO / "smollm2-135m.cpu.bundle"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not CLIENTS or not BUNDLE.exists(), reason="not installed: ci/demo, then ci/clients"),
]
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for each in messages %}<|im_start|>{{ each.role }}\n{{ each.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The model's own takes no tools."""
EXPECTED_FAILURES = {"chat-image-input", "chat-error-handling"}
"""Images are not served, and a request without a model's name gets the served model, as vLLM's does."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("clients")
    template = folder / "tools.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    where = ("--bundle", BUNDLE, "--model", MODEL, "--port", "0", "--require-warm", "--drain-delay", "0")
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--chat-template", template)
    greedy = ("--override-generation-config", '{"temperature": 0}')
    command = command_line("serve", *where, *tools, *greedy)
    with Server(command, environment(folder / "cache"), folder) as running:
        yield running
        assert running.metric("aotgaudi_compilations_total") == 0
        assert running.is_idle()


def run(folder: Path, program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs one of the programs in `folder`."""
    found = shutil.which(program, path=CLIENTS)
    if found is None:
        pytest.skip(f"{program} is not installed: ci/clients")
    return subprocess.run(
        [found, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def test_guidellm_sweeps(server: Server, tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "guidellm",
        "run",
        *("--backend", f"kind=openai_http,target={server.base_url}"),
        *("--profile", "kind=sweep,sweep_size=3", "--constraint", "kind=max_duration,seconds=30"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
        *("--tokenizer", f"kind=huggingface_auto,model={MODEL}", "--disable-console-interactive"),
    )

    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "benchmarks.json").read_text())
    totals = [benchmark["metrics"]["request_totals"] for benchmark in report["benchmarks"]]
    assert sum(total["successful"] for total in totals) > 0
    assert [total["errored"] for total in totals] == [0, 0, 0]


@pytest.mark.parametrize(
    "options", [(), ("--backend", "openai-chat", "--endpoint", "/v1/chat/completions")], ids=["text", "chat"]
)
def test_vllm_bench_serve(server: Server, tmp_path: Path, options: tuple[str, ...]) -> None:
    """It finds the model's name and its tokenizer in ``/v1/models``."""
    saved = ("--save-result", "--result-dir", tmp_path, "--result-filename", "result.json")

    done = run(
        tmp_path,
        "vllm",
        *("bench", "serve", "--base-url", server.base_url, "--num-prompts", "8"),
        *options,
        *saved,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (8, 0)


def test_llm_comply(server: Server, tmp_path: Path) -> None:
    asked = ("-u", f"{server.base_url}/v1", "-k", "none", "-m", server.model_name, "--format", "openai-chat")

    done = run(tmp_path, "llm-comply", *asked, "--timeout", "300", "--json")

    results = json.loads(done.stdout)["results"]
    failed = {result["id"] for result in results if result["status"] == "failed"}
    assert failed <= EXPECTED_FAILURES, done.stdout
