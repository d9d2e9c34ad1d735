"""Requests to an OpenAI server, with what ours answers, and where and why vLLM's own answers otherwise.

A line of ``openai_cases.jsonl`` has `id`, `path`, `body` (JSON) or `raw` (text), `method`, `headers`; `want` is our status.
`vllm` is vLLM's status where it differs. `differs` names the row of docs/openai-cases.md with the reason for a difference in
status, in the error's type, or in the fields of the answer.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

CASES: Mapping[str, Mapping[str, Any]] = {
    case["id"]: case
    for case in map(json.loads, Path(__file__).with_suffix(".jsonl").read_text(encoding="utf-8").splitlines())
}
_BY_TOKEN = ("top_logprobs[]", "prompt_logprobs[]")
"""Objects whose keys are tokens, so that they are no fields."""


@dataclass(frozen=True)
class Answer:
    """A status, the type and the code of an error, and the fields of the answer, or of each kind of chunk in order."""

    status: int
    error: tuple[object, object] | None
    fields: Sequence[frozenset[str]]
    text: str


def answer_to(base_url: str, case: Mapping[str, Any]) -> Answer:
    """Asks the server at `base_url`."""
    address = urlsplit(base_url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)
    raw = case.get("raw", json.dumps(case["body"]) if "body" in case else None)
    headers = {} if raw is None else {"Content-Type": "application/json"}
    body = None if raw is None else raw.encode("utf-8", "surrogatepass")
    connection.request(case.get("method", "POST"), case["path"], body, {**headers, **case.get("headers", {})})
    response = connection.getresponse()
    text, kind = response.read().decode("utf-8", "replace"), response.getheader("content-type", "")
    connection.close()
    events = list(_events(text)) if kind.startswith("text/event-stream") else _parsed(text)
    errors = [event["error"] for event in events if isinstance(event, dict) and "error" in event]
    error = (errors[0].get("type"), errors[0].get("code")) if errors and isinstance(errors[0], dict) else None
    return Answer(response.status, error, [frozenset(fields_of(event)) for event in events], text)


def fields_of(value: object, path: str = "") -> Iterator[str]:
    """Yields the paths of all leaves; ``[]`` stands for any item. A list of values is a leaf, and so is what is empty."""
    if isinstance(value, dict) and value and not path.endswith(_BY_TOKEN):
        for name, item in value.items():
            yield from fields_of(item, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value:
        for item in value:
            yield from fields_of(item, f"{path}[]")
    else:
        yield path.removesuffix("[]")


def _events(text: str) -> Iterator[object]:
    for line in text.splitlines():
        if line.startswith("data: "):
            yield {"[DONE]": None} if line == "data: [DONE]" else json.loads(line[6:])


def _parsed(text: str) -> list[object]:
    try:
        return [json.loads(text)]
    except ValueError:
        return []
