"""Which requests need an API key, and what happens to those that do not carry one."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.testclient import TestClient

from aotgaudi.errors import SpecError
from aotgaudi.server.app import create_app
from aotgaudi.server.boundary import AllowedHosts
from aotgaudi.server.options import Access, Observability, digests_of, read_key_digests
from aotgaudi.server.service import Service

KEYS = ("sesame-1", "sesame-2")
ACCESS = Access(key_digests=digests_of(KEYS, "test"))
PAGE = "https://chat.example.com"


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def app(service: Service) -> Starlette:
    return create_app(service, AllowedHosts(), Observability(access_log=True), ACCESS)


@pytest.fixture
def guarded(app: Starlette) -> TestClient:
    return TestClient(app)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER "])
def test_each_key_lets_a_request_in(guarded: TestClient, key: str, scheme: str) -> None:
    headers = {"Authorization": f"{scheme} {key}"}

    assert guarded.post("/v1/completions", json={"prompt": "hi"}, headers=headers).status_code == 200
    assert guarded.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Bearer sesame-",
        "Bearer sesame-12",
        "Bearer sesame-1 sesame-2",
        "Basic sesame-1",
        "sesame-1",
        "Bearer \xff",
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/tokenize", "/no/such/path"])
def test_a_request_without_a_key_is_refused_in_the_form_of_openai(
    guarded: TestClient, path: str, header: str | None
) -> None:
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}

    answer = guarded.get(path, headers=headers)

    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("Unauthorized", 401)


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/version"])
def test_probes_and_scrapers_need_no_key(guarded: TestClient, path: str) -> None:
    assert guarded.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/live", "/ping"])
def test_a_probe_under_the_name_of_another_server_is_not_asked_for_a_key(app: Starlette, path: str) -> None:
    assert TestClient(app).get(path).status_code != 401


@given(st.text(st.characters(max_codepoint=255), max_size=40).filter(lambda text: text.strip() not in KEYS))
def test_no_other_key_lets_a_request_in(key: str) -> None:
    from aotgaudi.server.boundary import KeyCheck

    async def nobody(*_: object) -> None:
        raise AssertionError

    check = KeyCheck(nobody, ACCESS.key_digests)

    assert not check._has(f"Bearer {key}")


def test_a_refused_request_is_neither_read_nor_prepared(guarded: TestClient, engine) -> None:
    answer = guarded.post("/v1/completions", content=b"{" * 1000, headers=_bearer("wrong"))

    assert answer.status_code == 401
    assert engine.added == []


def test_the_official_client_sends_its_key(app: Starlette) -> None:
    def client(key: str) -> openai.OpenAI:
        http = TestClient(app)
        return openai.OpenAI(base_url="http://testserver/v1", api_key=key, http_client=http, max_retries=0)

    answer = client("sesame-2").completions.create(model="tiny", prompt="hi")
    with pytest.raises(openai.AuthenticationError, match="Incorrect API key") as refused:
        client("wrong").completions.create(model="tiny", prompt="hi")

    assert answer.choices[0].text == "Hello"
    assert refused.value.status_code == 401


def test_no_key_is_shown_anywhere(guarded: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    wrong = "wrong-" + "x" * 20
    refused = guarded.post("/v1/completions", json={"prompt": "hi"}, headers=_bearer(wrong)).text
    guarded.post("/v1/completions", json={"prompt": "hi"}, headers=_bearer(KEYS[0]))

    shown = refused + guarded.get("/metrics").text + caplog.text + repr(ACCESS)

    assert not any(key in shown for key in (wrong, *KEYS))
    assert "Incorrect API key" in caplog.text


def test_a_flood_of_wrong_keys_does_not_grow_memory(guarded: TestClient) -> None:
    def flood(num: int) -> None:
        for index in range(num):
            assert guarded.get("/v1/models", headers=_bearer(f"wrong-{index}" * 50)).status_code == 401
        gc.collect()  # The client leaves cycles.

    flood(100)
    tracemalloc.start()
    flood(50)
    before, _ = tracemalloc.get_traced_memory()
    flood(500)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert after - before < 500 * 200  # A key of each request would take more.


def test_pages_of_allowed_origins_may_read_answers_and_ask_before_they_send_a_key(service: Service) -> None:
    access = Access(key_digests=ACCESS.key_digests, allowed_origins=(PAGE,))
    client = TestClient(create_app(service, access=access))
    asks = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }

    asked = client.options("/v1/completions", headers=asks)
    refused = client.get("/v1/models", headers={"Origin": PAGE})
    answered = client.get("/v1/models", headers={"Origin": PAGE, **_bearer(KEYS[0])})
    elsewhere = client.options("/v1/completions", headers={**asks, "Origin": "https://evil.example"})

    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in asked.headers["access-control-allow-headers"].lower()
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)
    assert (answered.status_code, answered.headers["access-control-allow-origin"]) == (200, PAGE)
    assert elsewhere.status_code == 400
    assert "access-control-allow-origin" not in elsewhere.headers


def test_without_origins_no_page_of_another_origin_may_read_answers(client: TestClient) -> None:
    answer = client.get("/v1/models", headers={"Origin": PAGE})

    assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_allowed_origins_do_not_allow_other_hosts(make_service: Callable[..., Service]) -> None:
    app = create_app(make_service(), AllowedHosts("127.0.0.1"), access=Access(allowed_origins=("*",)))

    refused = TestClient(app, base_url="http://evil.example").get("/v1/models", headers={"Origin": PAGE})

    assert refused.status_code == 421


def test_a_file_has_one_key_a_line(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sesame-1\r\n\n  sesame-2  \nsesame-1")

    assert read_key_digests(tmp_path / "keys") == ACCESS.key_digests


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "has no API key"),
        (b"\n \n", "has no API key"),
        (b"fine\nwith space\n", "key 2 is not an API key"),
        ("schl\u00fcssel".encode(), "key 1 is not an API key"),
        (b"x" * 513, "key 1 is not an API key"),
        (b"\xff\xfe", "key 1 is not an API key"),
        (b"secret\x00\n", "key 1 is not an API key"),
        (b"secret\n" * 200_000, "is larger than"),
    ],
)
def test_a_file_without_keys_is_refused_and_never_quoted(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "keys").write_bytes(content)

    with pytest.raises(SpecError, match=said) as refused:
        read_key_digests(tmp_path / "keys")

    assert "secret" not in str(refused.value)
    assert str(tmp_path / "keys") in str(refused.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read: Is a directory"):
        read_key_digests(tmp_path)
    with pytest.raises(SpecError, match="cannot be read: No such file"):
        read_key_digests(tmp_path / "none")
