"""Which names a request may use for the server that it reaches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from starlette.testclient import TestClient

from aotgaudi.server.app import create_app
from aotgaudi.server.boundary import AllowedHosts
from aotgaudi.server.launch import warn_of_reach
from aotgaudi.server.service import Service

LOOPBACK = ["127.0.0.1", "localhost", "::1", "127.0.0.2"]


@pytest.mark.parametrize("host", LOOPBACK)
@pytest.mark.parametrize(
    "header",
    ["localhost", "LOCALHOST:8000", "localhost.:8000", "127.0.0.1:8000", "127.0.0.2", "[::1]:8000", "[::1]"],
)
def test_on_the_loopback_its_names_are_taken(host: str, header: str) -> None:
    assert AllowedHosts(host).has(header)


@pytest.mark.parametrize("host", LOOPBACK)
@pytest.mark.parametrize(
    "header",
    [
        "evil.example",
        "localhost.evil.example",
        "evil.example:8000",
        "10.0.0.1",
        "[fe80::1]",
        "",
        ":8000",
        "a@localhost",
    ],
)
def test_on_the_loopback_no_other_name_is_taken(host: str, header: str) -> None:
    assert not AllowedHosts(host).has(header)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.5", "chat.internal"])
def test_beyond_the_loopback_any_name_is_taken_unless_names_are_given(host: str) -> None:
    assert AllowedHosts(host).has("chat.example.com")

    named = AllowedHosts(host, ["Chat.example.com", "*.pods.example"])
    assert named.has("chat.example.com:80")
    assert named.has("a.pods.example")
    assert named.has("10.1.2.3:8000")  # A probe's.
    assert not named.has("pods.example")
    assert not named.has("evil.example")


def test_a_star_is_any_name() -> None:
    assert AllowedHosts("127.0.0.1", ["*"]).has("evil.example")


@pytest.mark.parametrize("path", ["/metrics", "/ready", "/v1/models", "/none"])
def test_a_request_for_another_server_is_refused(service: Service, path: str) -> None:
    client = TestClient(create_app(service, AllowedHosts("127.0.0.1")), base_url="http://localhost:8000")

    refused = client.get(path, headers={"Host": "evil.example"})

    assert (refused.status_code, refused.headers["connection"]) == (421, "close")
    assert "'evil.example'" in refused.json()["error"]["message"]
    assert client.get(path).status_code in (200, 404)


def test_no_redirect_goes_where_the_host_header_says(make_service: Callable[..., Service]) -> None:
    app = create_app(make_service(), root_path="/llm")
    client = TestClient(app, headers={"Host": "evil.example"}, follow_redirects=False)
    for path in ("/metrics", "/llm/v1/models", "/v1/models/org/tiny", "/v1/models/tiny"):
        for end in ("/", "%2F"):
            answer = client.get(f"{path}{end}?a=/b/")
            assert (answer.status_code, answer.headers.get("location")) == (307, f"{path}?a=/b/")

    assert client.post("/v1/completions/").headers["location"] == "/v1/completions"
    assert client.get("//evil.example/").status_code == client.get("/llm//evil.example/").status_code == 404


@pytest.mark.parametrize(
    ("host", "warns"),
    [
        *((host, False) for host in ("127.0.0.1", "127.1.2.3", "localhost", "::1")),
        *((host, True) for host in ("0.0.0.0", "::", "10.0.0.1", "example.com", "")),
    ],
)
def test_a_server_that_others_reach_warns(host: str, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_reach(host)

    assert [record.levelname for record in caplog.records] == ["WARNING"] * warns


def test_a_server_that_asks_for_a_key_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_reach("0.0.0.0", asks_for_key=True)

    assert not caplog.records
