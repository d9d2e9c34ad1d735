"""The preprocessor pool, with real processes: requests are prepared, and the server outlives its workers."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from aotgaudi.bundle.model_directory import ModelDirectory
from aotgaudi.errors import RequestError, SpecError
from aotgaudi.llm.tokenizer import Tokenizer
from aotgaudi.server.options import ReplyParsers
from aotgaudi.server.preprocess.pool import PreprocessorPool
from aotgaudi.server.preprocess.prepare import Kind, ServedModel
from aotgaudi.server.preprocess.worker import WORKERS, WorkerLimits
from tests.unit.llm.conftest import make_backend

pytestmark = pytest.mark.process

T = TypeVar("T")
can_filter = pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no filter is known")
MODEL = ServedModel(names=("tiny",), max_len=10_000, defaults={"temperature": 0.5})
QUICK = {
    "completion": WorkerLimits(seconds=1.0, memory_bytes=32 << 20, wall_seconds=2.0),
    "chat": WorkerLimits(seconds=0.2, memory_bytes=32 << 20),
    "slow": WorkerLimits(seconds=1.0, memory_bytes=72 << 20, niceness=10, wall_seconds=200.0),
}
"""Beside others that want all cores, the nice one may need a minute for a second of processor time."""
BOMBS = """
{%- set what = messages[0].content -%}
{%- if what == 'time' -%}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{%- elif what == 'power' -%}{% set x = 9 ** 999999999 %}
{%- elif what == 'memory' -%}{{ 'a' * 3000000000 }}
{%- elif what == 'pieces' -%}{% set ns = namespace(x=['a' * 1000000]) %}
    {%- for i in range(9999) %}{% set ns.x = ns.x + ['a' * 1000000] %}{% endfor %}
{%- elif what == 'indent' -%}{{ messages | tojson(indent=2000000000) }}
{%- elif what == 'recursion' -%}{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}
{%- elif what == 'refuse' -%}{{ raise_exception('no') }}
{%- else -%}{{ what }}{%- endif -%}
"""


TOKENIZER = Tokenizer(make_backend())


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def completion(prompt: object, **fields: object) -> bytes:
    return json.dumps({"prompt": prompt, **fields}).encode()


def chat(content: str, **fields: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}], **fields}).encode()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_backend().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(BOMBS, encoding="utf-8")
    (folder / "generation_config.json").write_text('{"eos_token_id": 256}', encoding="utf-8")
    return folder


@contextmanager
def opened(
    model_dir: Path, workers: dict[str, WorkerLimits] | None = None, stall_seconds: float = 400.0
) -> Iterator[PreprocessorPool]:
    others = psutil.Process().children(recursive=True)
    with PreprocessorPool(workers or QUICK) as pool:
        pool.load(ModelDirectory(model_dir))
        pool.open(MODEL, stall_seconds)
        yield pool
    assert set(psutil.Process().children(recursive=True)) <= {*others}


@pytest.fixture
def pool(model_dir: Path) -> Iterator[PreprocessorPool]:
    with opened(model_dir) as pool:
        yield pool


def run(pool: PreprocessorPool, use: Callable[[], Awaitable[T]]) -> T:
    async def attached() -> T:
        pool.attach()
        return await asyncio.wait_for(use(), 300)

    return asyncio.run(attached())


async def works(pool: PreprocessorPool) -> None:
    assert (await pool.prepare("completion", completion("a"))).prompts == [[256, *ids("a")]]


def with_pool(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs a test on an event loop to which its `pool` is attached."""

    @functools.wraps(test)
    def attached(pool: PreprocessorPool, **others: object) -> None:
        run(pool, lambda: test(pool, **others))

    return attached


def fork_server() -> psutil.Process:
    (found,) = [
        child
        for child in psutil.Process().children()
        if "aotgaudi.server.preprocess.worker" in child.cmdline()
    ]
    return found


def workers() -> list[psutil.Process]:
    """In the order of `WORKERS`, as long as none was forked again."""
    return sorted(fork_server().children(), key=lambda child: child.pid)


def let_each_answer(pool: PreprocessorPool) -> None:
    """A worker that has answered has confined itself, which takes reading files; `open` waits for forks only."""

    async def ask() -> None:
        short = completion("x")
        bodies: list[tuple[Kind, bytes]] = [
            ("completion", short),
            ("chat", chat("x")),
            ("completion", short + b" " * 65536),
        ]
        await asyncio.gather(*(pool.prepare(*body) for body in bodies))

    run(pool, ask)


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE  # Whoever adopted it may take its time.
    except psutil.NoSuchProcess:
        return True


def eventually(condition: Callable[[], bool], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@with_pool
async def test_what_goes_in_comes_out(pool: PreprocessorPool) -> None:
    text, numbers, told = await asyncio.gather(
        pool.prepare("completion", completion(["ab", "c"], stop=["x"], stop_token_ids=[7], stream=True)),
        pool.prepare("completion", completion([[1, 2], [3]], logprobs=2, temperature=0, seed=-5)),
        pool.prepare("chat", chat("ab", max_completion_tokens=9, model="tiny")),
    )
    assert text.prompts == [[256, *ids("ab")], [256, *ids("c")]]
    assert (text.params.stop, text.params.stop_token_ids, text.stream) == (("x",), (7,), True)
    assert text.params.temperature == 0.5
    assert numbers.prompts == [[1, 2], [3]]
    assert (numbers.params.logprobs, numbers.params.temperature, numbers.params.seed) == (2, 0.0, -5)
    assert told.prompts == [ids("ab")]
    assert (told.model, told.params.max_tokens, told.stream) == ("tiny", 9, False)
    assert told.own_names["max_tokens"] == "max_completion_tokens"


@with_pool
async def test_tokens_and_text_come_from_workers_too(pool: PreprocessorPool) -> None:
    tokens, told, text = await asyncio.gather(
        pool.tokenize("tokenize", completion("ab", return_token_strs=True)),
        pool.tokenize("tokenize", chat("ab")),
        pool.tokenize("detokenize", json.dumps({"tokens": ids("ab")}).encode()),
    )
    assert (tokens.token_ids, tokens.strings) == ([256, *ids("ab")], ("<s>", "a", "b"))
    assert (told.token_ids, told.strings) == (ids("ab"), None)
    assert text.text == "ab"
    with pytest.raises(RequestError, match="either 'prompt' or 'messages'"):
        await pool.tokenize("tokenize", b"{}")


def test_no_answer_is_anothers(pool: PreprocessorPool) -> None:
    async def ask(number: int) -> bool:
        text = f"{number}." + "x" * (number * 7919 % 3000) + ("y" * 70_000 if number % 17 == 0 else "")
        if number % 11 == 0:
            with pytest.raises(RequestError, match=f"model 'm{number}' does not exist"):
                await pool.prepare("completion", completion(text, model=f"m{number}"))
            return True
        task = asyncio.ensure_future(pool.prepare("completion", completion(text[:9000], seed=number)))
        if number % 5 == 0:
            await asyncio.sleep(0.001 * (number % 13))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return True
        prepared = await task
        return prepared.prompts == [[256, *ids(text[:9000])]] and prepared.params.seed == number

    async def use() -> list[bool]:
        return await asyncio.gather(*map(ask, range(400)))

    assert all(run(pool, use))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("time", "took more than 0.2 s of processor time"),
        ("power", "took more than 0.2 s of processor time"),
        ("memory", "refuses these messages: MemoryError"),
        ("pieces", "refuses these messages: MemoryError"),
        ("indent", "refuses these messages"),
        ("recursion", "refuses these messages: maximum recursion"),
        ("refuse", "refuses these messages: no"),
    ],
)
@with_pool
async def test_template_without_bound_is_refused_and_the_next_request_served(
    pool: PreprocessorPool, what: str, message: str
) -> None:
    bad = asyncio.ensure_future(pool.prepare("chat", chat(what)))
    beside = await pool.prepare("completion", completion("a"))
    assert not bad.done() or what not in ("time", "power")
    with pytest.raises(RequestError, match=message) as caught:
        await bad
    assert caught.value.http_status == 400
    assert beside.prompts == [[256, *ids("a")]]
    assert (await pool.prepare("chat", chat("fine"))).prompts == [ids("fine")]


SLOW_SCHEMA = {
    "$defs": {"large": {"enum": [f"value {number}" for number in range(4000)]}},
    "properties": {f"p{number}": {"$ref": "#/$defs/large"} for number in range(199)} | {"last": {"not": {}}},
}
"""Each of its parts is compiled alone, to name the one with the mistake."""


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (completion("a", guided_json=SLOW_SCHEMA), "guided_json"),
        (chat("a", structured_outputs={"json": SLOW_SCHEMA}), "structured_outputs"),
    ],
)
@with_pool
async def test_a_grammar_that_takes_more_than_there_is_is_named_and_delays_nobody_without_one(
    pool: PreprocessorPool, body: bytes, param: str
) -> None:
    kind: Kind = "completion" if b"prompt" in body else "chat"
    bad = asyncio.ensure_future(pool.prepare(kind, body))
    await asyncio.sleep(0.05)
    await works(pool)
    assert not bad.done()
    with pytest.raises(RequestError, match="its grammar is too complex") as caught:
        await bad
    assert (caught.value.param, caught.value.http_status) == (param, 400)
    await works(pool)


def test_text_that_takes_its_tokenizer_more_memory_than_there_is_is_refused(model_dir: Path) -> None:
    tight = {**QUICK, "slow": WorkerLimits(seconds=9, memory_bytes=6 << 20, memory_bytes_per_token=100)}

    with opened(model_dir, tight) as pool:

        async def use() -> None:
            with pytest.raises(RequestError, match="needs more than 6 MiB of memory") as caught:
                await pool.prepare("completion", completion("é" * 39_000))
            assert caught.value.http_status == 400
            await works(pool)

        run(pool, use)


@with_pool
async def test_the_request_of_a_worker_that_is_killed_is_refused_and_the_next_one_served(
    pool: PreprocessorPool,
) -> None:
    worker = workers()[0]
    worker.suspend()
    asked = [asyncio.ensure_future(pool.prepare("completion", completion(text))) for text in "ab"]
    await asyncio.sleep(0.05)
    worker.kill()
    with pytest.raises(RequestError, match="the worker that prepared it was ended") as caught:
        await asked[0]
    assert caught.value.http_status == 503
    assert (await asked[1]).prompts == [[256, *ids("b")]]
    workers()[-1].kill()
    while pool._queues["completion"]._replacements.empty():  # The fork server tells in its own time.
        await asyncio.sleep(0.01)
    assert (await pool.prepare("completion", completion("c"))).prompts == [[256, *ids("c")]]


@with_pool
async def test_worker_that_does_not_answer_is_killed(pool: PreprocessorPool) -> None:
    worker = workers()[0]
    worker.suspend()
    with pytest.raises(RequestError, match="the worker that prepared it was ended"):
        await pool.prepare("completion", completion("a"))
    assert is_gone(worker)
    await works(pool)


def test_worker_that_has_grown_ends_and_gives_its_memory_back(model_dir: Path) -> None:
    with opened(model_dir, dict(WORKERS)) as pool:

        async def use() -> None:
            before = {worker.pid for worker in workers()}
            prompts = [[7] * 8000] * 60
            assert (await pool.prepare("completion", completion(prompts))).prompts == prompts
            assert (await pool.prepare("completion", completion(prompts))).prompts == prompts
            assert len(before & {worker.pid for worker in workers()}) == len(WORKERS) - 1

        run(pool, use)


def test_requests_of_one_worker_are_prepared_in_the_order_they_come(pool: PreprocessorPool) -> None:
    ended: list[str] = []

    async def ask(name: str, num_chars: int) -> None:
        await pool.prepare("chat", chat("x" * num_chars))
        ended.append(name)

    async def use() -> None:
        slow = asyncio.ensure_future(pool.prepare("chat", chat("time")))
        await asyncio.sleep(0.05)
        waiting = [ask("long", 3000), ask("short", 10), ask("longer", 3100)]
        await asyncio.gather(*waiting, slow, return_exceptions=True)

    run(pool, use)
    assert ended == ["long", "short", "longer"]


def test_only_what_a_worker_dies_of_is_refused(pool: PreprocessorPool) -> None:
    async def use() -> list[object]:
        slow = asyncio.ensure_future(pool.prepare("chat", chat("time")))
        await asyncio.sleep(0.05)
        texts = ["a", "bb", "time", "eeeee", "ffffff"]
        asked = [pool.prepare("chat", chat(text)) for text in texts]
        outcomes = await asyncio.gather(*asked, slow, return_exceptions=True)
        return [type(each) if isinstance(each, Exception) else each.prompts for each in outcomes]

    expected = [[ids("a")], [ids("bb")], RequestError, [ids("eeeee")], [ids("ffffff")], RequestError]
    assert run(pool, use) == expected


@with_pool
async def test_clients_that_leave_leave_the_queue(pool: PreprocessorPool) -> None:
    slow = asyncio.ensure_future(pool.prepare("chat", chat("time")))
    await asyncio.sleep(0.01)
    gone = [asyncio.ensure_future(pool.prepare("chat", chat("x"))) for _ in range(1000)]
    await asyncio.sleep(0)
    for task in gone:
        task.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    many = [asyncio.ensure_future(pool.prepare("chat", chat("x"))) for _ in range(1023)]
    with pytest.raises(RequestError, match="took more than"):
        await slow
    assert [prepared.prompts for prepared in await asyncio.gather(*many)] == [[ids("x")]] * 1023


def test_without_its_fork_server_it_is_dead_and_says_so(
    pool: PreprocessorPool, caplog: pytest.LogCaptureFixture
) -> None:
    async def use() -> None:
        worker = workers()[0]
        worker.suspend()
        asked = asyncio.ensure_future(pool.prepare("completion", completion("a")))
        await asyncio.sleep(0.05)
        assert pool.failure is None
        fork_server().kill()
        for _ in range(2):
            with pytest.raises(RequestError, match="its preprocessor pool has died") as caught:
                await asked
            assert caught.value.http_status == 503
            asked = asyncio.ensure_future(pool.prepare("completion", completion("a")))
        await asyncio.gather(asked, return_exceptions=True)
        assert "the preprocessor pool has died" in str(pool.failure)

    others = workers()
    run(pool, use)
    assert "the preprocessor pool has died" in caplog.text
    assert eventually(lambda: all(map(is_gone, others)))


def test_where_all_processes_hang_requests_are_refused_in_time_and_the_pool_is_stuck(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(model_dir, stall_seconds=4.0) as pool:

        async def use() -> None:
            hanging = (fork_server(), *workers())
            for process in hanging:
                process.suspend()
            large = completion("a", user="x" * (3 << 20))  # More than a socket takes: sending it blocks.
            kinds = ("completion", "chat", "completion", "completion")
            bodies = (completion("a"), chat("a"), large, completion("b"))
            asked = [pool.prepare(kind, body) for kind, body in zip(kinds, bodies, strict=True)]
            began = time.monotonic()
            refused = await asyncio.gather(*asked, return_exceptions=True)
            assert time.monotonic() - began < 20
            for error in (
                *refused,
                *await asyncio.gather(pool.prepare("chat", b"{}"), return_exceptions=True),
            ):
                assert isinstance(error, RequestError)
                assert (error.http_status, "do not answer" in str(error)) == (503, True)
            assert pool.is_stuck
            for process in hanging:
                with suppress(
                    psutil.NoSuchProcess
                ):  # The fork server goes on first, and was asked to kill them.
                    process.resume()
            while pool.is_stuck:
                await asyncio.sleep(0.01)
            await works(pool)

        run(pool, use)
    assert "no request worker has answered for 4 s" in caplog.text


def test_workers_that_hang_end_with_their_fork_server(model_dir: Path) -> None:
    with opened(model_dir) as pool:
        hanging = workers()
        for worker in hanging:
            worker.suspend()
        fork_server().kill()
        assert eventually(lambda: all(map(is_gone, hanging)))
        del pool


@with_pool
async def test_signals_to_the_group_are_not_for_it(pool: PreprocessorPool) -> None:
    for process in (fork_server(), *workers()):
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
    await works(pool)
    assert (await pool.prepare("chat", chat("a"))).prompts == [ids("a")]


@can_filter
def test_kernel_lets_fork_server_run_no_program_and_workers_start_no_process(pool: PreprocessorPool) -> None:
    def num_filters(process: psutil.Process) -> int:
        status = Path("/proc", str(process.pid), "status").read_text(encoding="ascii")
        assert re.search(r"^Seccomp:\s+2$", status, re.MULTILINE)
        return int(re.findall(r"^Seccomp_filters:\s+(\d+)$", status, re.MULTILINE)[0])

    let_each_answer(pool)
    assert {num_filters(worker) for worker in workers()} == {num_filters(fork_server()) + 1}


def test_it_has_one_thread_each_and_no_torch(pool: PreprocessorPool) -> None:
    let_each_answer(pool)

    for process in (fork_server(), *workers()):
        assert process.num_threads() == 1
        assert not [entry.path for entry in process.memory_maps() if "torch" in entry.path]
        assert {fd.path for fd in process.open_files()} <= {os.devnull}


def test_server_does_little_for_a_large_body(pool: PreprocessorPool) -> None:
    raw = b'{"messages": [' + b",".join([b"{}"] * 1_000_000) + b"]}"

    async def use() -> float:
        began = time.process_time()
        for _ in range(10):
            with pytest.raises(RequestError, match="objects and arrays"):
                await pool.prepare("chat", raw)
        return time.process_time() - began

    assert run(pool, use) < 0.3


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("chat_template.jinja", "{% if %}", "chat_template.jinja:1: is not a valid chat template"),
        ("tokenizer.json", "{}", "is not a usable tokenizer"),
    ],
)
def test_model_that_cannot_be_used_is_a_spec_error(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    make_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_text(text, encoding="utf-8")

    with PreprocessorPool() as pool:
        pool.load(ModelDirectory(tmp_path))
        with pytest.raises(SpecError, match=message):
            pool.open(MODEL)


@pytest.mark.parametrize(
    ("template", "is_warned"), [("{{ messages }}", True), ("{{ messages }}{{ tools }}", False)]
)
def test_a_tool_parser_without_a_template_that_takes_tools_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, template: str, is_warned: bool
) -> None:
    make_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")

    with PreprocessorPool(QUICK) as pool:
        pool.load(ModelDirectory(tmp_path))
        pool.open(replace(MODEL, parsers=ReplyParsers(tool_call_parser="hermes")))

    assert ("--tool-call-parser hermes: the chat template does not mention tools" in caplog.text) == is_warned


def test_interrupt_or_failure_at_the_start_ends_it_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    with PreprocessorPool():
        starting = fork_server()
        starting.send_signal(signal.SIGINT)
        time.sleep(0.2)
        assert not is_gone(starting)

    assert is_gone(starting)
    assert capfd.readouterr().err == ""


def test_nothing_is_left_of_it_when_the_server_is_killed(model_dir: Path) -> None:
    code = (
        "import sys, time, psutil, pathlib; from tests.unit.server.preprocess.test_pool import *\n"
        "pool = PreprocessorPool(); pool.load(ModelDirectory(pathlib.Path(sys.argv[1]))); pool.open(MODEL)\n"
        "print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(model_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        processes = [psutil.Process(int(pid)) for pid in server.stdout.readline().split()]
        assert len(processes) == 1 + len(WORKERS)

        server.kill()

        assert eventually(lambda: all(map(is_gone, processes)))
        assert server.stderr.read() == ""
