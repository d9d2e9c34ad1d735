"""The page that shows the running server: what it says, and what it may do. Seen by a browser in tests/services."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from aotgaudi.engine.stats import CounterSnapshot, EntryCounters, Total
from aotgaudi.engine.steps import StepWork
from aotgaudi.entries import DecodeEntry, Entry, PromptEntry
from aotgaudi.llm.running import Warmth
from aotgaudi.phases import Phase
from aotgaudi.runtime.guard import CAUSES
from aotgaudi.server.app import create_app
from aotgaudi.server.hosts import AllowedHosts
from aotgaudi.server.options import Observability
from aotgaudi.server.pages.routes import MAX_ENTRIES
from aotgaudi.server.service import Service

DASHBOARD = ("/dashboard", "/dashboard/page.css", "/dashboard/dashboard.js")
FILES = (*DASHBOARD, "/docs", "/docs/page.css", "/docs/docs.js")
PATHS = (*FILES, "/dashboard/data")
SHOWN = Observability(dashboard=True)


@pytest.fixture
def shown(service: Service) -> TestClient:
    return TestClient(create_app(service, observability=SHOWN))


@pytest.mark.parametrize("path", [*DASHBOARD, "/dashboard/data"])
def test_the_dashboard_is_not_there_unless_asked_for(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


@pytest.mark.parametrize("path", PATHS)
def test_it_may_load_nothing_from_elsewhere_and_nobody_may_frame_it(shown: TestClient, path: str) -> None:
    headers = shown.get(path).headers

    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("path", FILES)
def test_its_files_name_no_other_place_and_need_no_exception_of_the_policy(
    shown: TestClient, path: str
) -> None:
    text = shown.get(path).text

    others = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", text)) - {"http://www.w3.org/2000/svg"}
    assert others == set(), "but for SVG's own name"
    assert "@import" not in text
    assert not re.search(r"<script(?![^>]*src=)|<style| style=| on\w+=", text) or path.count("/") > 1


@pytest.mark.parametrize("path", ["/dashboard/dashboard.js", "/docs/docs.js"])
def test_its_script_puts_nothing_into_the_page_as_markup(shown: TestClient, path: str) -> None:
    script = shown.get(path).text

    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert word not in script


@pytest.mark.parametrize("path", PATHS)
def test_another_host_is_refused_as_everywhere(service: Service, path: str) -> None:
    app = create_app(service, AllowedHosts.of("127.0.0.1"), SHOWN)

    assert TestClient(app, base_url="http://rebound.example").get(path).status_code == 421
    assert TestClient(app, base_url="http://localhost:8000").get(path).status_code == 200


def test_the_data_are_those_of_the_engine(shown: TestClient, service: Service) -> None:
    service.metrics.tell_start(1.5, [Phase("verify", 0.25, 0.75)])

    data = shown.get("/dashboard/data").json()

    assert data["server"]["model"] == "tiny"
    assert data["readiness"]["ready"] is True
    assert data["coverage"]["warm"] == data["coverage"]["entries"] == 4
    assert data["coverage"]["guard"] == ["seccomp", "hook"]
    assert data["start"] == {"seconds": 1.5, "phases": [{"phase": "verify", "begin": 0.25, "end": 0.75}]}
    assert (data["requests"]["running"], data["requests"]["waiting"]) == (2, 3)
    assert (data["kv"]["used"], data["kv"]["free"]) == (5, 7)
    assert data["defrag"] == {"swaps": 13}
    assert data["entries"] == []


def test_entries_have_their_figures_and_the_rest_is_one_row(
    make_service: Callable[..., Service], engine
) -> None:
    counters = EntryCounters(Total(2, 0.5), StepWork(6, 2, 3, 5), gaps=Total(6, 0.3))
    entries: dict[Entry, EntryCounters] = {DecodeEntry(n, 1, 8): counters for n in range(1, MAX_ENTRIES + 3)}
    entries[PromptEntry(1, 128, 0)] = counters
    stats = replace(engine.stats(), counters=CounterSnapshot(entries))
    engine.stats = lambda: stats
    warmth = Warmth(4, 4, dict.fromkeys(CAUSES, 0), num_samplers_used=3)
    client = TestClient(create_app(make_service(warmth=lambda: warmth), observability=SHOWN))

    data = client.get("/dashboard/data").json()

    rows = {(row["kind"], row["bucket"]): row for row in data["entries"]}
    assert len(rows) == MAX_ENTRIES + 2
    assert rows["decode", "1,1,8"]["steps"] == 2
    assert rows["decode", "1,1,8"]["padding_tokens"] == 2
    assert rows["decode", "other"]["steps"] == 4
    assert rows["prompt", "other"]["gaps"] == 6
    assert data["coverage"]["used_by_kind"] == {
        "prompt": 1,
        "decode": MAX_ENTRIES + 2,
        "defrag": 0,
        "sampler": 3,
    }
    assert data["coverage"]["used"] == MAX_ENTRIES + 6
    assert data["kinds"]["decode"]["tokens"] == 6 * (MAX_ENTRIES + 2)


def test_it_is_in_no_description_and_counted_by_its_routes(shown: TestClient) -> None:
    shown.get("/dashboard")

    assert not [
        path for path in shown.get("/openapi.json").json()["paths"] if "dashboard" in path or "docs" in path
    ]
    assert 'aotgaudi_requests_total{endpoint="/dashboard",status="200"} 1.0' in shown.get("/metrics").text
