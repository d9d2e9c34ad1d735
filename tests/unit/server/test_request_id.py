"""Which request something is about: in the answer, in the engine's names, and in every line of the log."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from aotgaudi.engine.output import ErrorEvent
from aotgaudi.server.app import create_app
from aotgaudi.server.boundary import AllowedHosts, request_id_of
from aotgaudi.server.log import REQUEST_ID, log_handler
from aotgaudi.server.options import Observability
from aotgaudi.server.service import Service

OURS = re.compile(r"[0-9a-f]{32}")
GIVEN = "trace/2026-11:a.b_c@d=e+1"


@given(st.from_regex(r"[A-Za-z0-9._:=@+/-]{1,128}", fullmatch=True))
def test_a_sane_id_is_taken_as_it_is(given_id: str) -> None:
    assert request_id_of(given_id) == given_id


@pytest.mark.parametrize(
    "header", [None, "", " ", "a b", "a" * 129, "a\nb", "a\r\nX: y", "é", '"', "<b>", "a,b", "\x00", "a;b"]
)
def test_any_other_gets_one_of_ours(header: str | None) -> None:
    first, second = request_id_of(header), request_id_of(header)

    assert OURS.fullmatch(first)
    assert first != second


@given(st.text(max_size=200))
def test_whatever_comes_an_id_is_short_and_plain(header: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9._:=@+/-]{1,128}", request_id_of(header))


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": "hi"}, 200),
        ("/v1/completions", {"prompt": "hi", "stream": True}, 200),
        ("/v1/completions", {"model": "other", "prompt": "hi"}, 404),
        ("/v1/completions", {"prompt": 1.5}, 400),
        ("/nowhere", {}, 404),
    ],
)
def test_every_answer_carries_the_id(client: TestClient, path: str, body: object, status: int) -> None:
    answer = client.post(path, json=body, headers={"X-Request-Id": GIVEN})

    assert answer.status_code == status
    assert answer.headers.get_list("x-request-id") == [GIVEN]
    assert OURS.fullmatch(client.post(path, json=body).headers["x-request-id"])


def test_an_answer_of_another_host_carries_it_too(service: Service) -> None:
    client = TestClient(create_app(service, AllowedHosts("127.0.0.1")), base_url="http://elsewhere")

    answer = client.get("/ready", headers={"X-Request-Id": GIVEN})

    assert (answer.status_code, answer.headers["x-request-id"]) == (421, GIVEN)


def test_the_engine_knows_requests_by_it(client: TestClient, engine) -> None:
    for _ in range(2):
        body = client.post("/v1/completions", json={"prompt": "hi"}, headers={"X-Request-Id": GIVEN}).json()
        assert body["id"].startswith(f"cmpl-{GIVEN}-")

    names = [added.request_id for added in engine.added]
    assert len(set(names)) == 2
    assert all(name.startswith(f"cmpl-{GIVEN}-") and name.endswith("-0") for name in names)


# The log


@pytest.fixture
def lines() -> Iterator[Callable[[], list[dict[str, object]]]]:
    """What is logged meanwhile, as JSON."""
    memory = io.StringIO()
    handler, ours = log_handler(memory, "json"), logging.getLogger("aotgaudi")
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in memory.getvalue().splitlines()]
    ours.removeHandler(handler)
    ours.setLevel(logging.NOTSET)


Lines = Callable[[], list[dict[str, object]]]


def test_what_is_logged_while_a_request_is_handled_names_it(client: TestClient, engine, lines: Lines) -> None:
    engine.script = lambda name: (ErrorEvent(request_id=name, error=RuntimeError("inside\nout")),)

    client.post("/v1/completions", json={"prompt": "hi"}, headers={"X-Request-Id": GIVEN})

    (line,) = lines()
    assert (line["level"], line["message"], line["request_id"]) == ("ERROR", "a request failed", GIVEN)
    assert "RuntimeError: inside\nout" in str(line["exception"])
    assert REQUEST_ID.get() is None


def test_what_is_about_no_request_says_so(lines: Lines) -> None:
    logging.getLogger("aotgaudi.test").info("on %s lines", "two\n")

    (line,) = lines()
    assert line["request_id"] is None
    assert line["message"] == "on two\n lines"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", str(line["time"]))


def test_a_record_may_say_which_request_it_is_about(lines: Lines) -> None:
    logging.getLogger("aotgaudi.test").warning("gone", extra={"request_id": "cmpl-1-0"})

    assert [line["request_id"] for line in lines()] == ["cmpl-1-0"]


def test_there_is_no_line_for_each_request_unless_asked(client: TestClient, lines: Lines) -> None:
    client.post("/v1/completions", json={"prompt": "hi"})

    assert lines() == []


@pytest.mark.parametrize("is_stream", [True, False])
def test_the_access_log_says_what_a_request_was(service: Service, lines: Lines, is_stream: bool) -> None:
    client = TestClient(create_app(service, observability=Observability(access_log=True)))

    client.post(
        "/v1/completions", json={"prompt": "hi", "stream": is_stream}, headers={"X-Request-Id": GIVEN}
    )

    (line,) = lines()
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
    assert (line["prompt_tokens"], line["generated_tokens"], line["cached_tokens"]) == (3, 3, 0)
    assert line["request_id"] == GIVEN
    assert isinstance(line["duration_seconds"], float)
    assert str(line["arrived"]) <= str(line["time"])


def test_the_access_log_has_refusals_with_their_reason_and_unknown_paths(
    service: Service, lines: Lines
) -> None:
    client = TestClient(create_app(service, observability=Observability(access_log=True)))

    client.post("/v1/completions", json={"prompt": 1.5})
    client.get("/evil%0Aline?secret")
    client.get("/" + "a" * 5000)
    client.post("/v1/completions", json={"prompt": "a", "metadata": {"evil\nline": 1}})

    refused, unknown, long, forged = lines()
    assert (refused["status"], "prompt_tokens" in refused) == (400, False)
    assert str(refused["error"]).startswith("Invalid value for 'prompt'")
    assert str(refused["message"]).endswith(str(refused["error"]))
    assert (unknown["path"], unknown["status"]) == ("/evil%0Aline", 404)
    assert len(str(long["path"])) < 300
    assert "\n" not in str(forged["message"])
    assert "evil\\nline" in str(forged["error"])
    requests = client.get("/metrics").text
    assert 'aotgaudi_requests_total{endpoint="other",status="404"} 2.0' in requests


def test_probes_that_are_answered_leave_no_line(service: Service, lines: Lines) -> None:
    client = TestClient(create_app(service, observability=Observability(access_log=True)))

    for path in ("/health", "/ready", "/metrics"):
        assert client.get(path).status_code == 200
    service.begin_drain()
    client.get("/ready")

    assert [(line["path"], line["status"]) for line in lines()] == [("/ready", 503)]


def test_text_lines_name_the_request_above_the_traceback() -> None:
    memory = io.StringIO()
    handler = log_handler(memory)
    token = REQUEST_ID.set(GIVEN)
    try:
        raise RuntimeError("inside")
    except RuntimeError as error:
        record = logging.LogRecord(
            "n", logging.ERROR, __file__, 1, "it failed", (), (type(error), error, None)
        )
        handler.handle(record)
    finally:
        REQUEST_ID.reset(token)

    first, *_, last = memory.getvalue().splitlines()
    assert first.endswith(f" ERROR it failed [request {GIVEN}]")
    assert last == "RuntimeError: inside"
