"""The pages of a real server, guard and all, in a real headless browser."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import NAMES, Browser, Page, find_browser, run_browser
from tests.e2e.conftest import workplace
from tests.e2e.harness import Server, Workplace
from tests.services.conftest import REQUIRED

__all__ = ["workplace"]

NAME = "<img src=x onerror=document.title='owned'>&amp;"
WIDTHS = (1200, 768, 360)
_SECONDS = 30.0


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    binary = find_browser()
    if binary is None:
        reason = f"none of {', '.join(NAMES)} is installed: apt-get install {NAMES[0]}"
        (pytest.fail if REQUIRED else pytest.skip)(reason)
    assert binary is not None
    with run_browser(binary, tmp_path_factory.mktemp("browser") / "profile") as running:
        yield running


@pytest.fixture(scope="module")
def server(workplace: Workplace) -> Iterator[Server]:
    """A server with a name that is markup, which has answered a request."""
    options = ("--dashboard", "--served-model-name", NAME, "--log-format", "json", "--access-log")
    with workplace.serve(*options) as running:
        running.complete("seven wizards", max_tokens=8)
        yield running


@pytest.fixture
def page(browser: Browser, server: Server) -> Page:
    page = browser.open(f"{server.base_url}/dashboard")
    until(page, "Number(document.body.dataset.drawn || 0) >= 2")
    return page


def until(page: Page, expression: str) -> None:
    """Waits until what the page computes is true; each look takes its time."""
    deadline = time.monotonic() + _SECONDS
    while not page.value(expression):
        assert time.monotonic() < deadline, (expression, page.complaints())
        time.sleep(0.05)


def text(page: Page, place: str) -> str:
    return str(page.value(f"document.querySelector({place!r}).innerText"))


def test_it_shows_what_the_server_says_and_complains_of_nothing(page: Page, server: Server) -> None:
    data: dict[str, Any] = server.client.get("/dashboard/data").json()

    assert page.complaints() == []
    assert text(page, "#state") == "ready"
    coverage = data["coverage"]
    assert f"used so far {coverage['used']}\nwarm {coverage['warm']}\ncold 0" in text(page, "#coverage")
    assert coverage["said"] in text(page, "#coverage")
    assert str(data["server"]["manifest_id"])[:16] in text(page, "#coverage")
    shown = page.value(
        "Array.from(document.querySelectorAll('#entries tbody tr'), r => Array.from(r.cells, c => c.innerText.trim()))"
    )
    assert {(kind, bucket): steps for kind, bucket, steps, *_ in shown} == {
        (row["kind"], row["bucket"]): str(row["steps"]) for row in data["entries"]
    }
    phases = page.value("Array.from(document.querySelectorAll('.gantt > span.quiet'), e => e.innerText)")
    assert phases == [phase["phase"] for phase in data["start"]["phases"]]


def test_a_name_that_is_markup_is_text(page: Page) -> None:
    assert text(page, "#model") == NAME
    assert page.value("document.querySelectorAll('img').length") == 0
    assert page.value("document.title") == f"{NAME} · aotgaudi"


def test_it_asks_its_own_server_alone(page: Page, server: Server) -> None:
    requests = page.requests()

    assert {url.removeprefix(server.base_url) for url in requests} == {
        *("/dashboard/page.css", "/dashboard/dashboard.js", "/dashboard/data")
    }


def test_its_policy_holds_scripts_in_the_page_off(page: Page) -> None:
    """What a mistake of ours might let in would not run."""
    script = "const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s)"
    page.value(f"(() => {{ {script}; }})()")

    assert page.value("window.ran === undefined")
    assert any("Content Security Policy" in told for told in page.complaints())


def test_it_goes_on_as_the_server_works(page: Page, server: Server) -> None:
    before = int(page.value("document.body.dataset.drawn"))
    rows = "Array.from(document.querySelectorAll('#entries tbody tr'), row => Number(row.cells[2].innerText))"
    steps = f"{rows}.reduce((a, b) => a + b, 0)"
    counted = page.value(steps)

    server.complete("a jar of potion", max_tokens=8)
    until(page, f"{steps} >= {counted + 8}")

    assert int(page.value("document.body.dataset.drawn")) > before
    assert page.complaints() == []


def test_nothing_is_wider_than_its_window_in_light_and_dark(page: Page, tmp_path: Path) -> None:
    for width in WIDTHS:
        page.resize(width, 900)
        assert page.value("document.documentElement.scrollWidth") <= width
    colours = []
    for dark in (False, True):
        page.prefer(dark=dark)
        colours.append(page.value("getComputedStyle(document.body).backgroundColor"))
        page.screenshot(tmp_path / f"dark-{dark}.png")
    assert colours[0] != colours[1]


def test_the_guard_counts_nothing_and_the_log_is_json_to_its_last_line(page: Page, server: Server) -> None:
    assert server.metric("aotgaudi_compilations_total") == 0
    lines = [json.loads(line) for line in server.log.splitlines()]
    assert all("request_id" in line for line in lines)
    (first,) = [line for line in lines if line.get("generated_tokens") == 8][:1]
    assert first["path"] == "/v1/completions"
    assert not [line for line in lines if line.get("path") == "/dashboard/data"]


def test_the_description_of_the_api_shows_every_field_and_links_to_what_it_names(
    browser: Browser, server: Server
) -> None:
    api: dict[str, Any] = server.client.get("/openapi.json").json()
    page = browser.open(f"{server.base_url}/docs")
    until(page, f"document.querySelector('#state').innerText === '{len(api['paths'])} paths.'")

    assert page.complaints() == []
    titles = page.value("Array.from(document.querySelectorAll('h2 > code'), e => e.textContent)")
    assert titles == [f"{m.upper()} {path}" for path, methods in api["paths"].items() for m in methods]
    names = set(page.value("Array.from(document.querySelectorAll('dt'), e => e.textContent)"))
    schemas = api["components"]["schemas"]
    assert names == {name for schema in schemas.values() for name in schema.get("properties", {})}
    broken = "Array.from(document.querySelectorAll('a[href^=\"#\"]')).filter(a => !document.getElementById(a.hash.slice(1)))"
    assert page.value(f"{broken}.length") == 0
    assert "undefined" not in str(page.value("document.body.textContent"))
