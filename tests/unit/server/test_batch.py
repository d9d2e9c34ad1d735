"""A batch: what its files may be, that its answers are the server's, and that it goes on where it stopped."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import os
import resource
import signal
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from aotgaudi.engine.output import Event, TokenEvent
from aotgaudi.errors import AotGaudiError, SpecError, StoreError
from aotgaudi.server.app import create_app
from aotgaudi.server.batch import Batch, BatchProgress, _StoppedError, check_fingerprints
from aotgaudi.server.batch_files import AnswerFile, BatchAnswer, RequestFile, id_hash
from aotgaudi.server.service import Service

URLS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings")


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body or {"prompt": custom_id}}


def write(path: Path, lines: Sequence[object]) -> RequestFile:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf-8")
    return RequestFile(path, URLS)


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The answers by id, each of which must be there once."""
    found = [json.loads(each) for each in path.read_text(encoding="utf-8").splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}


def run(
    service: Service,
    requests: RequestFile,
    out: Path,
    on_progress: Callable[[BatchProgress], None] = lambda _: None,
) -> BatchProgress:
    with AnswerFile.open(out, requests) as answers:
        return asyncio.run(Batch(service, requests, answers, on_progress).run())


def same(body: Mapping[str, Any]) -> dict[str, Any]:
    """What two answers to one request have in common: all but id and time."""
    left_out = ("id", "created", "created_at", "completed_at", "output")
    return {name: value for name, value in body.items() if name not in left_out}


CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ASKED = [
    line("text"),
    line("ids", prompt=[1, 2, 3], max_tokens=5),
    line("several", prompt=["a", "b"], echo=False),
    line("chat", "/v1/chat/completions", **CHAT),
    line("logprobs", "/v1/chat/completions", **CHAT, logprobs=True, top_logprobs=0),
    line("named", model="org/tiny", prompt="hi"),
    line("response", "/v1/responses", input="hi"),
    line("misspelt", prompt="hi", temprature=1),
    line("unsupported", prompt="hi", best_of=3),
    line("too long", prompt="x" * 1000),
    line("no prompt", model="tiny"),
    line("no model", model="other", prompt="hi"),
    line("not a number", prompt="hi", temperature=float("nan")),
    line("large", prompt="x" * (5 * 1024 * 1024)),
]


def test_every_answer_and_every_refusal_is_the_servers(service: Service, tmp_path: Path) -> None:
    requests = write(tmp_path / "in.jsonl", ASKED)

    done = run(service, requests, tmp_path / "out.jsonl")

    answers, client = read(tmp_path / "out.jsonl"), TestClient(create_app(service))
    assert answers.keys() == {each["custom_id"] for each in ASKED}
    for each in ASKED:
        expected = client.post(
            each["url"], content=json.dumps(each["body"]), headers={"content-type": "application/json"}
        )
        found = answers[each["custom_id"]]
        assert found["response"]["status_code"] == expected.status_code
        assert same(found["response"]["body"]) == same(expected.json())
        assert found["error"] is None
        assert found["id"].startswith("batch_req_")
        assert found["response"]["request_id"]
    assert len({found["response"]["request_id"] for found in answers.values()}) == len(ASKED)
    num_errors = sum(found["response"]["status_code"] != 200 for found in answers.values())
    assert (done.num_done, done.num_total, done.num_errors) == (len(ASKED), len(ASKED), num_errors)
    assert 0 < num_errors < len(ASKED)
    assert done.num_tokens == 3 * 8  # Each choice has three.


def test_an_answer_in_pieces_is_not_given(service: Service, tmp_path: Path) -> None:
    requests = write(
        tmp_path / "in.jsonl", [line("a", prompt="hi", stream=True), line("b", prompt="hi", stream=False)]
    )

    run(service, requests, tmp_path / "out.jsonl")

    answers = read(tmp_path / "out.jsonl")
    assert answers["a"]["response"]["status_code"] == 400
    assert answers["a"]["response"]["body"]["error"]["param"] == "stream"
    assert answers["b"]["response"]["status_code"] == 200


def test_what_has_an_answer_is_not_asked_again(service: Service, engine, tmp_path: Path) -> None:
    lines = [line(f"r{index}") for index in range(10)]
    run(service, write(tmp_path / "in.jsonl", lines[:4]), tmp_path / "out.jsonl")
    before, num_asked = (tmp_path / "out.jsonl").read_bytes(), len(engine.added)

    done = run(service, write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")

    assert (tmp_path / "out.jsonl").read_bytes().startswith(before)
    assert len(engine.added) - num_asked == 6
    assert (done.num_done, read(tmp_path / "out.jsonl").keys()) == (10, {f"r{index}" for index in range(10)})


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_file_that_is_cut_anywhere_is_completed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    ids = data.draw(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=6, unique=True))
    requests = write(folder / "in.jsonl", [line(each) for each in ids])
    answers = [BatchAnswer(each, 200, "r", {"text": each + "\n\u2028"}) for each in ids]
    with AnswerFile.open(folder / "out.jsonl", requests) as file:
        for answer in answers:
            file.append(answer)
    whole = (folder / "out.jsonl").read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    (folder / "out.jsonl").write_bytes(whole[:cut])

    with AnswerFile.open(folder / "out.jsonl", requests) as file:
        assert len(file.done) == whole[:cut].count(b"\n")
        missing = [each.custom_id for each in requests.requests(file.done)]
        for answer in answers:
            if answer.custom_id in missing:
                file.append(answer)

    assert missing == ids[len(ids) - len(missing) :]
    assert [
        each["custom_id"] for each in map(json.loads, (folder / "out.jsonl").read_bytes().splitlines())
    ] == ids


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no request"),
        ("\n  \n", "has no request"),
        ("{", "line 1 is not JSON"),
        ("[" * 100_000, "line 1 is not JSON"),
        ("[]", "line 1 is not a JSON object"),
        ("\x00", "line 1 is not JSON"),
        ('{"custom_id": 7}', "line 1 has no custom_id"),
        (json.dumps(line("")), "line 1 has no custom_id"),
        (json.dumps(line("x" * 513)), "line 1 has no custom_id"),
        (json.dumps({**line("a"), "method": "GET"}), "line 1 has another method than POST"),
        (
            json.dumps(line("a", "/v1/nothing")),
            "line 1 has no url of these: /v1/completions, /v1/chat/completions, /v1/responses",
        ),
        (json.dumps({**line("a"), "url": ["/v1/completions"]}), "line 1 has no url of these"),
        (json.dumps({**line("a"), "body": "x"}), "line 1 has no body"),
        (
            f"{json.dumps(line('a'))}\n\n{json.dumps(line('a'))}",
            "line 3 has the custom_id of an earlier line: 'a'",
        ),
        ("x\n" * 8, "line 5 is not JSON.*, and 3 more"),
        ("x" * (9 * 1024 * 1024), "line 1 is longer than"),
    ],
)
def test_a_file_with_a_malformed_line_is_refused_before_anything_is_asked(
    tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "in.jsonl").write_text(text)

    with pytest.raises(SpecError, match=said) as refused:
        RequestFile(tmp_path / "in.jsonl", URLS)

    assert refused.value.exit_code == 2
    assert len(str(refused.value)) < 3000


@given(st.binary(max_size=200))
def test_no_bytes_are_a_traceback(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("bytes") / "in.jsonl"
    path.write_bytes(content)

    with pytest.raises(SpecError):
        RequestFile(path, URLS)


def test_a_file_that_editors_of_windows_wrote_is_read(tmp_path: Path) -> None:
    text = "\ufeff" + "\r\n".join(json.dumps(line(each)) for each in "ab")
    (tmp_path / "in.jsonl").write_bytes(text.encode())

    requests = RequestFile(tmp_path / "in.jsonl", URLS)

    assert [each.custom_id for each in requests.requests(set())] == ["a", "b"]


@pytest.mark.parametrize("change", ["shorter", "other", "broken"])
def test_a_file_of_requests_that_changes_meanwhile_is_noticed(
    service: Service, tmp_path: Path, change: str
) -> None:
    requests = write(tmp_path / "in.jsonl", [line("a"), line("b")])
    lines = {"shorter": [line("a")], "other": [line("a"), line("c")], "broken": [line("a"), "x"]}[change]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))

    with pytest.raises(SpecError, match="was changed while it was read"):
        run(service, requests, tmp_path / "out.jsonl")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("not an answer\n", "line 1 is not an answer of a batch"),
        ('{"custom_id": "a"}\n', "line 1 is not an answer of a batch"),
        ("[]\n", "line 1 is not an answer of a batch"),
        (
            '{"custom_id": "z", "response": {"status_code": 200, "body": {}}}\n',
            "line 1 answers 'z', which is not among the requests",
        ),
    ],
)
def test_another_file_is_never_taken_for_answers_or_changed(tmp_path: Path, content: str, said: str) -> None:
    requests = write(tmp_path / "in.jsonl", [line("a")])
    (tmp_path / "out.jsonl").write_text(content)

    with pytest.raises(SpecError, match=said):
        AnswerFile.open(tmp_path / "out.jsonl", requests)

    assert (tmp_path / "out.jsonl").read_text() == content


def test_answers_are_not_written_over_requests_or_where_nothing_can_be(tmp_path: Path) -> None:
    requests = write(tmp_path / "in.jsonl", [line("a")])

    with pytest.raises(SpecError, match="is the file of requests"):
        AnswerFile.open(tmp_path / "in.jsonl", requests)
    with pytest.raises(StoreError, match="cannot write to"):
        AnswerFile.open(tmp_path / "none" / "out.jsonl", requests)
    with pytest.raises(StoreError, match="cannot write to"):
        AnswerFile.open(tmp_path, requests)


def test_two_processes_do_not_write_to_one_file(tmp_path: Path) -> None:
    requests = write(tmp_path / "in.jsonl", [line("a")])
    with (tmp_path / "out.jsonl").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        with pytest.raises(SpecError, match="is written to by another process"):
            AnswerFile.open(tmp_path / "out.jsonl", requests)


def test_answers_of_another_bundle_are_not_continued(service: Service, tmp_path: Path) -> None:
    requests = write(tmp_path / "in.jsonl", [line("a"), line("b")])
    run(service, write(tmp_path / "first.jsonl", [line("a")]), tmp_path / "out.jsonl")

    with AnswerFile.open(tmp_path / "out.jsonl", requests) as answers:
        check_fingerprints(answers, service.fingerprint)
        with pytest.raises(
            SpecError, match=r"has answers of aotgaudi-0123456789ab; this bundle is aotgaudi-x"
        ):
            check_fingerprints(answers, "aotgaudi-x")


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    requests = write(tmp_path / "in.jsonl", [line("a"), line("b")])
    with AnswerFile.open(tmp_path / "out.jsonl", requests) as answers:
        answers.append(BatchAnswer("a", 200, "r", {}))
        whole = (tmp_path / "out.jsonl").read_bytes()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 40, before[1]))
        try:
            with pytest.raises(StoreError, match="free space there"):
                answers.append(BatchAnswer("b", 200, "r", {"text": "x" * 1000}))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, ignored)

    assert (tmp_path / "out.jsonl").read_bytes() == whole


def test_an_engine_that_dies_ends_the_batch_and_no_answer_says_so(
    service: Service, engine, tmp_path: Path
) -> None:
    requests = write(tmp_path / "in.jsonl", [line(f"r{index}") for index in range(5)])
    answered = engine.script

    def dies(request_id: str) -> Sequence[Event]:
        if len(engine.added) < 4:
            return answered(request_id)
        engine.failure = AotGaudiError("the engine's process has ended")
        return (TokenEvent(request_id=request_id, text="", token_ids=(), finish_reason="abort"),)

    engine.script = dies

    with pytest.raises(AotGaudiError, match="engine"):
        run(service, requests, tmp_path / "out.jsonl")

    assert all(each["response"]["status_code"] == 200 for each in read(tmp_path / "out.jsonl").values())


def test_an_engine_that_is_stuck_ends_the_batch(service: Service, engine, scripts, tmp_path: Path) -> None:
    engine.script, engine.stalled_seconds = scripts["hold"], 100.0

    with pytest.raises(AotGaudiError, match="the engine is stuck"):
        run(service, write(tmp_path / "in.jsonl", [line("a")]), tmp_path / "out.jsonl")

    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_signal_ends_the_batch_and_keeps_what_is_answered(service: Service, engine, tmp_path: Path) -> None:
    answered, numbers = engine.script, itertools.count()
    engine.script = lambda name: answered(name) if next(numbers) < 3 else ()
    requests, out = (
        write(tmp_path / "in.jsonl", [line(f"r{index}") for index in range(50)]),
        tmp_path / "out.jsonl",
    )

    def interrupt() -> None:
        deadline = time.monotonic() + 10
        while not (out.exists() and out.read_bytes().count(b"\n") == 3) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(_StoppedError):
        run(service, requests, out)
    thread.join()

    assert len(read(out)) == 3
    engine.script = answered
    assert run(service, requests, out).num_done == 50
    assert read(out).keys() == {f"r{index}" for index in range(50)}


class Lines:
    """As many lines of requests as are asked for, written without holding them."""

    def __init__(self, path: Path, num: int) -> None:
        with path.open("w") as file:
            for index in range(num):
                file.write(json.dumps(line(f"request {index}", prompt="hello " * 8)) + "\n")


def test_thousands_of_requests_take_bounded_memory_and_few_run_at_once(
    make_service: Callable[..., Service], engine, tmp_path: Path
) -> None:
    most = 0
    answered = engine.script

    def counting(request_id: str) -> Iterator[Event]:
        nonlocal most
        most = max(most, engine._work.qsize() + 1)
        return iter(answered(request_id))

    engine.script = counting

    def peak(num: int) -> int:
        Lines(tmp_path / f"{num}.jsonl", num)
        requests = RequestFile(tmp_path / f"{num}.jsonl", URLS)
        engine.added = Forgetful()
        service = make_service()
        tracemalloc.start()
        try:
            assert run(service, requests, tmp_path / f"{num}.out").num_done == num
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(50)
    few, many = peak(300), peak(3000)

    assert (
        many - few
    ) / 2700 < 400  # An answer alone has about 400 bytes; of each id, two hashes of 16 are kept.
    assert most <= 32


class Forgetful(list):
    """In the place of what a fake engine remembers of all that it was asked."""

    def append(self, one: object) -> None:
        self[:] = [one]


def test_what_is_remembered_of_an_id_does_not_depend_on_its_length() -> None:
    assert len(id_hash("a")) == len(id_hash("a" * 512)) == 16
    assert id_hash("\ud800") != id_hash("a")
