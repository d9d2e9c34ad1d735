"""Bodies and templates that are long to parse, to render or to hold."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.harness import Workplace
from tests.hostile import attackers
from tests.hostile.attackers import CHAT, COMPLETIONS
from tests.hostile.conftest import Trial

SECONDS = 5.0
MESSAGES = b'{"messages":[' + b",".join([b'{"role":"user","content":""}'] * 142_000) + b"]}"
PARTS = (
    b'{"messages":[{"role":"user","content":[' + b",".join([b'{"type":"text","text":""}'] * 150_000) + b"]}]}"
)
METADATA = (
    b'{"prompt":"a","max_tokens":1,"metadata":{'
    + b",".join(b'"%d":0' % number for number in range(380_000))
    + b"}}"
)
NESTED = b'{"prompt":"a","metadata":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"
IDS = b'{"prompt":[' + b",".join([b"1"] * 2_000_000) + b"]}"
STOPS = b'{"prompt":"a","stop":[' + b",".join([b'"a"'] * 1_000_000) + b"]}"


@pytest.mark.parametrize(
    ("path", "body", "num_clients"),
    [
        pytest.param(CHAT, MESSAGES, 4, id="messages-4"),
        pytest.param(CHAT, PARTS, 4, id="parts-4"),
        pytest.param(COMPLETIONS, METADATA, 4, id="metadata-4"),
        pytest.param(CHAT, MESSAGES, 1, id="messages-1", marks=pytest.mark.nightly),
        pytest.param(CHAT, PARTS, 1, id="parts-1", marks=pytest.mark.nightly),
        pytest.param(COMPLETIONS, METADATA, 1, id="metadata-1", marks=pytest.mark.nightly),
        pytest.param(COMPLETIONS, NESTED, 4, id="nesting-4", marks=pytest.mark.nightly),
        pytest.param(COMPLETIONS, IDS, 4, id="ids-4", marks=pytest.mark.nightly),
        pytest.param(COMPLETIONS, STOPS, 4, id="stops-4", marks=pytest.mark.nightly),
    ],
)
def test_h4_bodies_of_many_pieces(trial: Trial, path: str, body: bytes, num_clients: int) -> None:
    with trial() as it:
        it.attack(attackers.repeat, path, body, SECONDS, (200, 400, 413, 429, 503), times=num_clients)


TEMPLATES = [
    pytest.param(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", id="loops"
    ),
    pytest.param("{{ 'a' * 3000000000 }}", id="a long text"),
    pytest.param(
        "{% set ns = namespace(t='aaaaaaaa') %}{% for a in range(99) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}"
        "{{ ns.t }}",
        id="a growing text",
    ),
    pytest.param("{{ messages | tojson(indent=2000000000) }}", id="a deep indent", marks=pytest.mark.nightly),
    pytest.param("{% set n = 9 %}{{ n ** 99999999 }}", id="a power", marks=pytest.mark.nightly),
    pytest.param(
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", id="recursion", marks=pytest.mark.nightly
    ),
]
CHAT_BODY = json.dumps({"messages": [{"role": "user", "content": "go"}], "max_tokens": 2}).encode()


def model_with(workplace: Workplace, folder: Path, template: str) -> Path:
    model = Path(shutil.copytree(workplace.model, folder / "model"))
    config = json.loads((model / "tokenizer_config.json").read_bytes())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return model


@pytest.mark.parametrize("template", TEMPLATES)
def test_m4_chat_templates_that_do_not_end_when_asked(
    trial: Trial, workplace: Workplace, tmp_path: Path, template: str
) -> None:
    model = model_with(workplace, tmp_path, "{% if messages[0].content == 'go' %}" + template + "{% endif %}")
    with trial(server=workplace.serve(model=model)) as it:
        it.attack(attackers.repeat, CHAT, CHAT_BODY, SECONDS, (400, 429, 500, 503), times=2)


def test_m4_a_constant_that_the_compiler_of_templates_would_compute(
    workplace: Workplace, tmp_path: Path
) -> None:
    model = model_with(workplace, tmp_path, "{{ 9 ** 9999999 }}")
    with workplace.serve(model=model) as server:
        assert server.complete("a", max_tokens=1)["choices"]
        assert server.post("/v1/chat/completions", json.loads(CHAT_BODY)).status_code in (400, 500)
        assert "Traceback" not in server.log
