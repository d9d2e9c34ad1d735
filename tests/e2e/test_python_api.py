"""`aotgaudi.llm.LLM`: what a server answers, in a process of one's own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from aotgaudi import LLM, SamplingParams, StructuredOutputs
from aotgaudi.errors import AotGaudiError, NotWarmError, RequestError, SpecError, UntrustedError
from tests.e2e.harness import Server, Workplace, environment

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm(workplace: Workplace) -> Iterator[LLM]:
    with LLM(workplace.bundle, workplace.model, threads=1) as made:
        yield made


def test_answers_are_the_servers(llm: LLM, server: Server) -> None:
    prompts = ["the quick brown fox", "seven wizards"]

    outputs = llm.generate(prompts, GREEDY)

    served = [server.complete(prompt, max_tokens=8) for prompt in prompts]
    assert [output.text for output in outputs] == [answer["choices"][0]["text"] for answer in served]
    assert [output.finish_reason for output in outputs] == [a["choices"][0]["finish_reason"] for a in served]
    assert [len(o.prompt_token_ids) for o in outputs] == [a["usage"]["prompt_tokens"] for a in served]
    assert [len(o.token_ids) for o in outputs] == [a["usage"]["completion_tokens"] for a in served]


def test_a_chat_is_the_servers(llm: LLM, server: Server) -> None:
    messages = [{"role": "user", "content": "the fox"}]

    (output,) = llm.chat(messages, GREEDY)
    (other, same) = llm.chat([[{"role": "user", "content": "jumps"}], messages], GREEDY)

    body = {"messages": messages, "temperature": 0, "max_tokens": 8}
    served = server.post("/v1/chat/completions", body).json()
    assert output.text == same.text == served["choices"][0]["message"]["content"]
    assert other.prompt_token_ids != same.prompt_token_ids


def test_an_answer_is_of_its_grammar(llm: LLM) -> None:
    outputs = StructuredOutputs(regex="(ab|cd){2}")
    asked = [SamplingParams(max_tokens=40, seed=n, structured_outputs=outputs) for n in (1, 2)]

    answers = llm.generate(["the quick", "seven"], asked)

    assert {answer.finish_reason for answer in answers} == {"stop"}
    assert {answer.text for answer in answers} <= {"abab", "abcd", "cdab", "cdcd"}
    bad = SamplingParams(structured_outputs=StructuredOutputs(json='{"items": {"type": "strin"}}'))
    with pytest.raises(RequestError, match="cannot be used at /items: Invalid type: strin"):
        llm.generate("a", bad)


def test_token_ids_are_taken_as_they_are_one_prompt_or_several(llm: LLM) -> None:
    (one,) = llm.generate([3, 4, 5], GREEDY)
    several = llm.generate([[3, 4, 5], [6, 7]], [GREEDY, SamplingParams(temperature=0, max_tokens=2)])

    assert one.prompt_token_ids == (3, 4, 5)
    assert several[0].token_ids == one.token_ids
    assert len(several[1].token_ids) <= 2
    assert llm.generate([], GREEDY) == []


def test_a_prompt_is_scored_as_the_server_scores_it(llm: LLM, server: Server) -> None:
    prompt = [(n * 37) % 500 + 4 for n in range(40)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)

    plain, scored = llm.generate([prompt, prompt], [GREEDY, params])

    served = server.complete(prompt, max_tokens=0, echo=True, logprobs=2)["choices"][0]["logprobs"]
    assert plain.prompt_logprobs is None
    assert scored.prompt_logprobs is not None
    assert [place.logprob for place in scored.prompt_logprobs] == pytest.approx(
        served["token_logprobs"][1:], abs=1e-4
    )


def test_threads_share_the_batch(llm: LLM) -> None:
    expected = [llm.generate([[n, n + 1]], GREEDY)[0].token_ids for n in range(3, 9)]
    found: dict[int, tuple[int, ...]] = {}

    def ask(n: int) -> None:
        found[n] = llm.generate([[n, n + 1]], GREEDY)[0].token_ids

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(3, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert [found[n] for n in range(3, 9)] == expected


def test_a_refusal_names_the_limit_and_leaves_nothing_running(llm: LLM) -> None:
    with pytest.raises(RequestError, match="max_model_len"):
        llm.generate([[3], [3] * 5000], GREEDY)
    with pytest.raises(RequestError, match="2 prompts were given, and 1 params"):
        llm.generate([[3], [4]], [GREEDY])
    with pytest.raises(RequestError, match="all be text"):
        llm.generate(["a", [3]], GREEDY)  # type: ignore[list-item]
    with pytest.raises(RequestError, match="role and a content"):
        llm.chat([{"role": "user"}], GREEDY)

    assert len(llm.generate([[3]], GREEDY)) == 1


def test_nothing_is_compiled_and_this_process_may_still_start_others(llm: LLM) -> None:
    llm.generate([[3] * n for n in (1, 5, 20)], SamplingParams(temperature=1, top_k=5, max_tokens=5))

    assert subprocess.run(["true"], check=True).returncode == 0
    assert set(llm.warmth.compilations.values()) == {0}
    assert llm.warmth.num_warm == llm.warmth.num_total > 0


def test_a_model_that_is_closed_says_so(workplace: Workplace) -> None:
    llm = LLM(workplace.bundle, workplace.model, threads=1)
    llm.close()
    llm.close()

    with pytest.raises(AotGaudiError, match="shutting down"):
        llm.generate("a", GREEDY)


def test_a_bundle_that_may_not_be_used_is_refused_as_by_serve(
    workplace: Workplace, holed_bundle: Path, tmp_path: Path
) -> None:
    assert workplace.run("key", "generate", tmp_path / "mine.key").returncode == 0

    with pytest.raises(UntrustedError, match="not signed"):
        LLM(workplace.bundle, workplace.model, trusted_keys=[next(tmp_path.glob("*.pub"))])
    with pytest.raises(NotWarmError):
        LLM(holed_bundle, workplace.model)
    with pytest.raises(SpecError, match=r"config\.json"):
        LLM(workplace.bundle, tmp_path)


def test_the_how_tos_example_runs_as_printed(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "python.md").read_text(encoding="utf-8")
    generate, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "chat.bundle").symlink_to(workplace.bundle)
    (tmp_path / "my-model").symlink_to(workplace.model)
    monkeypatch.chdir(tmp_path)

    exec(compile(generate, "python.md", "exec"), {})

    assert len(capsys.readouterr().out.splitlines()) >= 2


SCRIPT = """
import json, subprocess, sys
from aotgaudi.errors import CompileForbiddenError
from aotgaudi import LLM, SamplingParams
assert "torch" not in sys.modules
with LLM(*sys.argv[1:], guard="process", threads=1) as llm:
    output = llm.generate([3, 4], SamplingParams(temperature=0, max_tokens=3, logprobs=None))[0]
    try:
        subprocess.run(["true"])
    except CompileForbiddenError:
        pass
    counts = dict(llm.warmth.compilations)
subprocess.run(["true"], check=True)
absent = {"fastapi", "uvicorn", "transformers", "prometheus_client", "torch._dynamo"} - sys.modules.keys()
print(json.dumps({"counts": counts, "num": len(output.token_ids), "absent": sorted(absent)}))
"""


def test_a_process_may_be_guarded_whole_until_the_model_is_closed(
    workplace: Workplace, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(workplace.bundle), str(workplace.model)],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert {cause: num for cause, num in said["counts"].items() if num} == {"process": 1}
    assert said["absent"] == ["fastapi", "prometheus_client", "torch._dynamo", "transformers", "uvicorn"]
    assert 1 <= said["num"] <= 3


KERNEL_SCRIPT = """
import ctypes, subprocess, sys
from aotgaudi import LLM, SamplingParams
system = ctypes.CDLL(None).system
assert system(b"exit 3") == 3 << 8
with LLM(*sys.argv[1:], guard="kernel", threads=2) as llm:
    output = llm.generate([3, 4], SamplingParams(temperature=0, max_tokens=3))[0]
    print(len(output.token_ids) > 0, llm.warmth.layers, system(b"exit 3") == 127 << 8)
try:
    subprocess.run(["true"])
except PermissionError as error:
    print(error.strerror)
"""


def test_the_kernel_guards_a_process_that_asks_for_it_to_its_end(
    workplace: Workplace, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KERNEL_SCRIPT, str(workplace.bundle), str(workplace.model)],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True ('seccomp', 'hook') True", "Operation not permitted"]


def test_the_kernel_guards_only_what_must_be_warm(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="require_warm=False has no guard"):
        LLM(tmp_path, tmp_path, guard="kernel", require_warm=False)
