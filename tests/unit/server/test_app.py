"""Routes, streaming, errors, and clients that go away."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from aotgaudi.engine.output import ErrorEvent
from aotgaudi.errors import RequestError
from aotgaudi.llm.running import SplitCounts, Warmth
from aotgaudi.machine import within
from aotgaudi.runtime.guard import CAUSES
from aotgaudi.server.app import create_app
from aotgaudi.server.generation import Generation
from aotgaudi.server.http import sse
from aotgaudi.server.metrics import SAME, Metrics
from aotgaudi.server.service import Service
from tests.unit.server.conftest import WAIT_SECONDS, assert_refused, events_of, prepared, token

HI = {"messages": [{"role": "user", "content": "hi"}]}


def test_completion(client: TestClient, engine) -> None:
    body = client.post("/v1/completions", json={"model": "org/tiny", "prompt": "hi"}).json()

    choice = {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    assert body["object"] == "text_completion"
    assert body["model"] == "org/tiny"
    assert body["choices"] == [choice]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert body["system_fingerprint"] == "aotgaudi-0123456789ab"
    assert engine.added[0].token_ids[0] == 256  # BOS, which the tokenizer adds


def test_token_ids_are_passed_as_they_are(client: TestClient, engine) -> None:
    client.post("/v1/completions", json={"prompt": [5, 6, 7]})

    assert engine.added[0].token_ids == (5, 6, 7)


@pytest.mark.parametrize("prompt", [["a", "b"], [[1, 2], [3, 4]]])
def test_several_prompts_are_several_choices(client: TestClient, prompt: object) -> None:
    body = client.post("/v1/completions", json={"prompt": prompt}).json()

    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert [choice["text"] for choice in body["choices"]] == ["Hello", "Hello"]
    assert body["usage"]["prompt_tokens"] == 4


def test_text_longer_than_a_socket_buffer_is_served(make_service: Callable[..., Service], engine) -> None:
    engine.refusal = RequestError("seen", param="prompt")
    client = TestClient(create_app(make_service(max_model_len=100_000)))

    response = client.post("/v1/completions", json={"prompt": "a" * 20_000})

    assert response.json()["error"]["message"] == "seen"


def test_all_prompts_are_queued_or_none(client: TestClient, engine) -> None:
    response = client.post("/v1/completions", json={"prompt": ["a", "b" * 63]})

    assert response.status_code == 400
    assert engine.added == []


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_full_server_says_when_to_come_again(client: TestClient, engine, is_stream: bool) -> None:
    engine.refusal = RequestError("the server is full; try again later", http_status=429)

    response = client.post("/v1/completions", json={"prompt": "a", "stream": is_stream})

    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"] == {
        "message": "the server is full; try again later",
        "type": "Too Many Requests",
        "param": None,
        "code": 429,
    }


def test_only_a_full_server_says_when_to_come_again(client: TestClient) -> None:
    assert "retry-after" not in client.post("/v1/completions", json={}).headers


@pytest.mark.parametrize("num_digits", [20, 400, 4300, 4301])
@pytest.mark.parametrize(
    "name",
    [
        *("max_tokens", "top_k", "seed", "logprobs", "temperature", "top_p", "min_p", "top_n_sigma"),
        *("stop_token_ids", "n", "prompt"),
    ],
)
def test_a_number_of_any_length_is_answered(client: TestClient, name: str, num_digits: int) -> None:
    number = "9" * num_digits
    value = f"[{number}]" if name in ("stop_token_ids", "prompt") else number
    body = json.dumps({"prompt": "a"})[:-1] + f', "{name}": {value}}}'

    response = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})

    assert response.status_code == 400
    assert len(response.text) < 500


def test_completion_stream(client: TestClient) -> None:
    response = client.post("/v1/completions", json={"prompt": "hi", "stream": True})

    events = events_of(response.text)
    assert response.headers["content-type"].startswith("text/event-stream")
    # One event a token; the second token's text is held back.
    assert [event["choices"][0]["text"] for event in events] == ["Hel", "", "lo"]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, "stop"]
    assert len({event["id"] for event in events}) == 1


@pytest.mark.parametrize(
    ("path", "body", "counts"),
    [
        ("/v1/completions", {"prompt": "hi"}, [1, 2, 3]),
        ("/v1/chat/completions", HI, [0, 1, 2, 3]),
    ],
)
def test_continuous_usage_is_in_each_chunk_and_at_the_end(
    client: TestClient, path: str, body: dict[str, object], counts: list[int]
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}

    *events, last = events_of(
        client.post(path, json={**body, "stream": True, "stream_options": options}).text
    )

    assert [event["usage"]["completion_tokens"] for event in events] == counts
    num_prompt_tokens = last["usage"]["prompt_tokens"]
    assert {event["usage"]["prompt_tokens"] for event in events} == {num_prompt_tokens}
    assert [event["usage"]["total_tokens"] for event in events] == [num_prompt_tokens + num for num in counts]
    assert "".join(choice.get("text", "") for event in events for choice in event["choices"]) in ("Hello", "")
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)


def test_continuous_usage_counts_each_choice_alone(client: TestClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["a", "bcd"], "stream": True, "stream_options": options}

    *events, last = events_of(client.post("/v1/completions", json=body).text)

    seen: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
    for event in events:
        usage = event["usage"]
        seen[event["choices"][0]["index"]].append((usage["prompt_tokens"], usage["completion_tokens"]))
    assert seen == {0: [(2, 1), (2, 2), (2, 3)], 1: [(4, 1), (4, 2), (4, 3)]}
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (6, 6)


@pytest.mark.parametrize(
    "options", [{"continuous_usage_stats": True}, {"include_usage": False, "continuous_usage_stats": True}]
)
def test_without_include_usage_no_chunk_has_usage(client: TestClient, options: dict[str, bool]) -> None:
    body = {"prompt": "hi", "stream": True, "stream_options": options}

    events = events_of(client.post("/v1/completions", json=body).text)

    assert len(events) == 3
    assert not any("usage" in event for event in events)


def test_chat(client: TestClient, engine) -> None:
    body = client.post("/v1/chat/completions", json=HI).json()

    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Hello",
        "refusal": None,
        "annotations": [],
        "reasoning": None,
    }
    assert body["choices"][0]["finish_reason"] == "stop"
    assert engine.added[0].token_ids.count(256) == 1  # BOS comes from the template only


def test_chat_stream_starts_with_the_role_and_ends_with_usage(client: TestClient) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = events_of(client.post("/v1/chat/completions", json={**HI, **options}).text)

    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    opening = {"role": "assistant", "content": ""}
    assert deltas == [opening, {"content": "Hel"}, {"content": ""}, {"content": "lo"}]
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 3


def test_chat_without_template_is_refused(make_service: Callable[..., Service]) -> None:
    client = TestClient(create_app(make_service(template=None)))

    assert_refused(client, "/v1/chat/completions", HI, "messages", "no chat template")


def test_error_in_the_engine_is_500_and_tells_nothing(client: TestClient, engine, scripts, caplog) -> None:
    engine.script = scripts["broken"]

    whole = client.post("/v1/completions", json={"prompt": "a"})
    stream = client.post("/v1/completions", json={"prompt": "a", "stream": True})

    first, last = events_of(stream.text)
    assert whole.status_code == 500
    assert first["choices"][0]["text"] == "Hel"
    assert last == whole.json()
    assert last["error"]["type"] == "InternalServerError"
    assert "secret" not in whole.text + stream.text
    assert "secret detail" in caplog.text


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_request_for_which_nan_is_computed_is_told_so(client: TestClient, engine, path: str) -> None:
    error = RequestError("The model computed NaN", http_status=500)
    engine.script = lambda request_id: (ErrorEvent(request_id=request_id, error=error),)
    body = {"prompt": "a"} if path == "completions" else HI

    whole = client.post(f"/v1/{path}", json=body)
    stream = client.post(f"/v1/{path}", json={**body, "stream": True})

    assert whole.status_code == 500
    assert whole.json() == events_of(stream.text)[-1]
    assert whole.json()["error"] == {
        "message": "The model computed NaN",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_event_has_what_json_does_not_have(value: float) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        sse({"logprob": value})


@given(st.text(max_size=8))
def test_an_event_is_one_line_by_any_rule_and_says_the_same(text: str) -> None:
    line, *rest = sse({"text": text}).decode().splitlines()

    assert rest == [""]
    assert json.loads(line.removeprefix("data: ")) == {"text": text}


def test_unexpected_error_is_500_and_tells_nothing(make_service, caplog) -> None:
    def fail() -> object:
        raise RuntimeError("secret detail")

    app = create_app(make_service(warmth=fail))
    client = TestClient(app, raise_server_exceptions=False)

    response = client.get("/ready")

    assert response.status_code == 500
    assert response.json()["error"]["code"] == 500
    assert "secret" not in response.text
    assert "secret detail" in caplog.text


def test_output_aborted_by_shutdown_is_503(client: TestClient, engine, scripts) -> None:
    engine.script = scripts["shutdown"]

    assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 503


def drain(service: Service) -> None:
    service.begin_drain()


def test_a_signal_that_comes_while_one_is_handled_finds_no_lock_taken(service: Service) -> None:
    """As if a handler ran on entry to each function that the first one calls, in its own thread."""

    def signalled(*_: object) -> None:
        sys.settrace(None)
        service.begin_drain()
        sys.settrace(signalled)

    def handle() -> None:
        sys.settrace(signalled)
        try:
            service.begin_drain()
        finally:
            sys.settrace(None)

    within(WAIT_SECONDS, handle)

    assert service.readiness()["reason"] == "draining"


def lose_engine(service: Service) -> None:
    service.engine.failure = RuntimeError("dead")


def stall_engine(service: Service) -> None:
    service.engine.stalled_seconds = 61.0  # type: ignore[misc]


def lose_pool(service: Service) -> None:
    service.preprocessor.failure = RuntimeError("gone")  # type: ignore[assignment]


def hang_pool(service: Service) -> None:
    service.preprocessor.is_stuck = True  # type: ignore[misc]


@pytest.mark.parametrize(
    ("happens", "trouble", "reason"),
    [
        (drain, "", "draining"),
        (lose_engine, "the engine has died", ""),
        (stall_engine, "the engine is stuck: requests wait, and no step has ended for 61 s", ""),
        (lose_pool, "the preprocessor pool has died", ""),
        (hang_pool, "the preprocessor pool is stuck: requests wait, and no request worker answers", ""),
    ],
)
def test_who_is_draining_dead_or_stuck_takes_no_requests_and_says_so(
    client: TestClient,
    service: Service,
    engine,
    happens: Callable[[Service], None],
    trouble: str,
    reason: str,
) -> None:
    engine.stalled_seconds = 59.0
    assert client.get("/health").json() == {"alive": True, "reason": ""}
    assert client.get("/ready").status_code == 200

    happens(service)

    health, ready = client.get("/health"), client.get("/ready")
    refused = client.post("/v1/completions", json={"prompt": "a"})
    assert (health.status_code, health.json()["reason"]) == (503 if trouble else 200, trouble)
    assert (ready.status_code, ready.json()["reason"]) == (503, trouble or reason)
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "ServiceUnavailableError")
    assert f"aotgaudi_stalled_seconds {engine.stalled_seconds}" in metrics_of(client)


def test_ready_tells_how_warm_the_server_is(client: TestClient) -> None:
    assert client.get("/ready").json() == {
        "ready": True,
        "reason": "",
        "entries_warm": 4,
        "entries_total": 4,
        "manifest_id": "0123456789abcdef",
        "compilations": 0,
        "guard": "seccomp+hook",
        "model": "not bound",
        "limits": {},
    }


def test_models(make_service: Callable[..., Service]) -> None:
    client = TestClient(create_app(make_service(root="/models/tiny")))
    listed = client.get("/v1/models").json()
    one = client.get("/v1/models/org/tiny").json()

    assert [model["id"] for model in listed["data"]] == ["tiny", "org/tiny"]
    assert one["max_model_len"] == 64
    assert (one["root"], one["parent"]) == ("/models/tiny", None)
    assert client.get("/v1/models/other").status_code == 404


def test_version(client: TestClient) -> None:
    assert client.get("/version").json() == {"version": "9.9.9"}


def test_unknown_path_and_method_have_openai_errors(client: TestClient) -> None:
    errors = [client.get(path).json()["error"] for path in ("/v2", "/v1/completions")]

    assert [error["type"] for error in errors] == ["Not Found", "Method Not Allowed"]
    assert [error["code"] for error in errors] == [404, 405]


def metrics_of(client: TestClient) -> set[str]:
    """The lines of the metrics."""
    return set(client.get("/metrics").text.splitlines())


def warmth(
    layers: tuple[str, ...] = ("seccomp", "hook"), splits: tuple[SplitCounts, ...] = (), **causes: int
) -> Warmth:
    return Warmth(4, 4, {**dict.fromkeys(CAUSES, 0), **causes}, layers, splits=splits)


FROM_THE_START = """
aotgaudi_compilations_total{cause="process"} 0.0
aotgaudi_compilations_total{cause="import"} 0.0
aotgaudi_compilations_total{cause="torchscript"} 0.0
aotgaudi_compilations_total{cause="dynamo"} 0.0
aotgaudi_compilations_total{cause="backend"} 0.0
aotgaudi_guard{layer="seccomp"} 1.0
aotgaudi_guard{layer="hook"} 1.0
aotgaudi_ready 1.0
aotgaudi_entries_warm 4.0
aotgaudi_entries 4.0
aotgaudi_requests_running 2.0
aotgaudi_requests_waiting 3.0
aotgaudi_kv_blocks_used 5.0
aotgaudi_kv_blocks_free 7.0
aotgaudi_preemptions_total 11.0
aotgaudi_defrag_swaps_total 13.0
aotgaudi_invalid_logits_total 19.0
aotgaudi_requests_refused_total{reason="server_requests"} 17.0
aotgaudi_oldest_waiting_request_seconds 1.5
aotgaudi_stalled_seconds 0.0
"""
COMPILED = """
aotgaudi_compilations_total{cause="dynamo"} 5.0
aotgaudi_compilations_total{cause="process"} 1.0
aotgaudi_compilations_total{cause="import"} 0.0
"""
WITH_HYPER_CONNECTIONS = """
aotgaudi_mhc_steps_total{n_splits="1"} 2.0
aotgaudi_mhc_tokens_total{n_splits="1"} 320.0
aotgaudi_mhc_steps_total{n_splits="4"} 3.0
aotgaudi_mhc_cold_steps_total 3.0
"""
WITHOUT_THE_KERNEL = """
aotgaudi_guard{layer="seccomp"} 0.0
aotgaudi_guard{layer="hook"} 1.0
"""
SPLITS = (SplitCounts(1, 2, 320, is_warm=True), SplitCounts(4, 3, 12, is_warm=False))


@pytest.mark.parametrize(
    ("warmth", "ready", "lines"),
    [
        (warmth(), {"guard": "seccomp+hook"}, FROM_THE_START),
        (warmth(dynamo=5, process=1), {"compilations": 6}, COMPILED),
        (warmth(splits=SPLITS), {}, WITH_HYPER_CONNECTIONS),
        (warmth(layers=("hook",)), {"guard": "hook"}, WITHOUT_THE_KERNEL),
    ],
)
def test_metrics_and_readiness_tell_what_engine_and_guard_say(
    make_service: Callable[..., Service], warmth: Warmth, ready: dict[str, object], lines: str
) -> None:
    client = TestClient(create_app(make_service(warmth=lambda: warmth)))

    assert set(lines.split("\n")[1:-1]) - metrics_of(client) == set()
    assert client.get("/ready").json().items() >= ready.items()


def test_sampling_defaults_stand_in_for_what_a_request_does_not_state(
    make_service: Callable[..., Service], engine
) -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "max_tokens": 12}
    client = TestClient(create_app(make_service(defaults=defaults)))

    client.post("/v1/chat/completions", json=HI)
    client.post("/v1/chat/completions", json={**HI, "temperature": 0, "max_tokens": 5})
    client.post("/v1/chat/completions", json={**HI, "max_tokens": 20})

    params = [added.params for added in engine.added]
    assert [(p.temperature, p.top_p, p.max_tokens) for p in params] == [
        (0.6, 0.9, 12),
        (0.0, 0.9, 5),
        (0.6, 0.9, 12),
    ]


def test_metrics_count_requests_tokens_and_time(client: TestClient, service: Service) -> None:
    client.post("/v1/completions", json={"prompt": "hi"})
    client.post("/v1/completions", json={"prompt": 1})
    client.get("/no/such/path")
    service.metrics.observe_step("decode", 0.01)
    service.metrics.time_to_ready.set(1.5)

    expected = """
aotgaudi_requests_total{endpoint="/v1/completions",status="200"} 1.0
aotgaudi_requests_total{endpoint="/v1/completions",status="400"} 1.0
aotgaudi_requests_total{endpoint="other",status="404"} 1.0
aotgaudi_prompt_tokens_total 3.0
aotgaudi_generation_tokens_total 3.0
aotgaudi_time_to_first_token_seconds_count 1.0
aotgaudi_time_per_output_token_seconds_count 1.0
aotgaudi_e2e_request_latency_seconds_count 1.0
aotgaudi_step_seconds_count{kind="decode"} 1.0
aotgaudi_time_to_ready_seconds 1.5
"""
    assert set(expected.split("\n")[1:-1]) - metrics_of(client) == set()


def test_no_gauge_is_named_as_a_counter(client: TestClient) -> None:
    families = text_string_to_metric_families(client.get("/metrics").text)

    assert [f.name for f in families if f.type == "gauge" and f.name.endswith("_total")] == []


def test_metrics_say_what_the_process_uses_and_which_program_it_is(
    make_service: Callable[..., Service],
) -> None:
    client = TestClient(create_app(make_service(metrics=Metrics("tiny", "9.9.9"))))
    families = text_string_to_metric_families(client.get("/metrics").text)
    samples = {sample.name: sample for family in families for sample in family.samples}

    process = psutil.Process()
    assert samples["process_start_time_seconds"].value == pytest.approx(process.create_time(), abs=2)
    assert samples["process_resident_memory_bytes"].value == pytest.approx(process.memory_info().rss, rel=0.2)
    assert samples["process_open_fds"].value == pytest.approx(process.num_fds(), abs=5)
    assert samples["process_max_fds"].value >= samples["process_open_fds"].value
    assert 0 < samples["process_cpu_seconds_total"].value <= sum(process.cpu_times()[:2]) + 1
    assert samples["aotgaudi_build_info"].labels == {"version": "9.9.9"}
    assert samples["aotgaudi_build_info"].value == 1


def test_every_metric_is_documented(client: TestClient, pytestconfig: pytest.Config) -> None:
    documented = (pytestconfig.rootpath / "docs" / "metrics.md").read_text()
    families = list(text_string_to_metric_families(client.get("/metrics").text))

    names = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in families
        if not family.name.endswith("_created") and not family.name.startswith("vllm:")
    }

    assert {name for name in names if f"`{name}`" not in documented} == set()


def test_every_name_of_vllms_is_documented(pytestconfig: pytest.Config) -> None:
    documented = (pytestconfig.rootpath / "docs" / "metrics.md").read_text()

    for ours, theirs in SAME.items():
        assert f"| `{ours}` | {', '.join(f'`{name}`' for name in theirs)} |" in documented


@pytest.mark.parametrize("is_stream", [True, False])
def test_client_that_goes_is_aborted(service: Service, engine, scripts, is_stream: bool) -> None:
    engine.script = scripts["hold"]
    body = json.dumps({"prompt": "a", "stream": is_stream}).encode()

    asyncio.run(_call_and_go(create_app(service), body, wait_for_output=is_stream))

    assert engine.aborted.get(timeout=WAIT_SECONDS) == engine.added[0].request_id


def test_events_of_a_client_that_has_gone_are_dropped(service: Service, engine) -> None:
    engine.script = lambda request_id: ()

    async def leave() -> list[object]:
        generation = Generation(engine, "r", service.metrics, service.clock)
        generation.submit(prepared([1], [2]))
        generation.close()
        for added in engine.added:
            added.on_event(token(added.request_id, finish_reason="abort"))
        await asyncio.sleep(0.01)
        return [*generation._arrived, *[event async for event in generation.events()]]

    assert asyncio.run(leave()) == []
    assert [engine.aborted.get_nowait() for _ in range(2)] == ["r-0", "r-1"]


def test_client_that_goes_while_it_sends_is_never_submitted(service: Service, engine) -> None:
    asyncio.run(_call_and_go(create_app(service), None, wait_for_output=False))

    assert engine.added == []


async def _call_and_go(app, body: bytes | None, *, wait_for_output: bool) -> None:
    """Sends `body` (None: half of one) and disconnects: after the first output, or at once."""
    may_go = asyncio.Event()
    messages = [{"type": "http.request", "body": body or b"{", "more_body": body is None}]

    async def receive() -> dict[str, object]:
        if messages:
            return messages.pop()
        if wait_for_output:
            await may_go.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, object]) -> None:
        if message.get("body"):
            may_go.set()

    headers = [(b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": headers,
    }
    await asyncio.wait_for(app(scope, receive, send), WAIT_SECONDS)
