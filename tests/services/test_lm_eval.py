"""lm-eval gives a served model the scores that transformers has in float32, for choices and for generated text.

It needs lm-eval with what its APIs need: importable, or in the folder `AOTGAUDI_LM_EVAL` (ci/lm-eval installs it there).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import workplace
from tests.e2e.harness import CORPUS, MAX_MODEL_LEN, Workplace

__all__ = ["workplace"]

FOLDER = os.environ.get("AOTGAUDI_LM_EVAL", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not FOLDER and find_spec("lm_eval") is None, reason="lm-eval is not installed: ci/lm-eval"
    ),
]
CHOICE, GENERATE = "aotgaudi_choice", "aotgaudi_generate"
NUM_CHOICES, NUM_TEXTS, NUM_GENERATED = 48, 12, 8
MAX_LOGPROB_DIFFERENCE = 1e-4
_PROGRAM = (
    "import sys; sys.path.append(sys.argv.pop(1)); from lm_eval.__main__ import cli_evaluate; cli_evaluate()"
)


@pytest.fixture(scope="module")
def tasks(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task of choices, and one of texts of which transformers gives every other one."""
    folder, draw = tmp_path_factory.mktemp("tasks"), random.Random(3)

    def words(num: int) -> str:
        return " ".join(draw.choice(CORPUS.split()) for _ in range(num))

    choices = [
        {
            "question": words(6),
            "choices": [words(draw.randint(1, 3)) for _ in range(4)],
            "answer": draw.randrange(4),
        }
        for _ in range(NUM_CHOICES)
    ]
    questions = [words(6) for _ in range(NUM_TEXTS)]
    answers = _greedy(workplace.model, questions)
    texts = [
        {"question": question, "answer": answer if number % 2 else "something else"}
        for number, (question, answer) in enumerate(zip(questions, answers, strict=True))
    ]
    _write(
        folder,
        CHOICE,
        choices,
        output_type="multiple_choice",
        doc_to_choice="{{choices}}",
        metrics=["acc", "acc_norm"],
    )
    generation = {"until": ["\n"], "max_gen_toks": NUM_GENERATED, "do_sample": False}
    _write(
        folder,
        GENERATE,
        texts,
        output_type="generate_until",
        generation_kwargs=generation,
        metrics=["exact_match"],
    )
    return folder


def _greedy(model_dir: Path, questions: Sequence[str]) -> list[str]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    answers = []
    for question in questions:
        ids = tokenizer(question, return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=NUM_GENERATED, do_sample=False)
        answers.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).split("\n")[0])
    return answers


def _write(
    folder: Path, name: str, docs: Sequence[Mapping[str, object]], metrics: Sequence[str], **task: object
) -> None:
    """Writes a task, as JSON, which is YAML, too."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(f"{json.dumps(doc)}\n" for doc in docs), encoding="utf-8")
    whole = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in metrics
        ],
        **task,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(whole), encoding="utf-8")


def evaluate(tasks: Path, out: Path, kind: str, **arguments: object) -> tuple[dict[str, Any], list[Any]]:
    """Returns lm-eval's results, and what each question got: log-probabilities of choices, texts."""
    told = ",".join(f"{name}={value}" for name, value in arguments.items())
    options = (
        *("--model", kind, "--model_args", told, "--batch_size", "4", "--device", "cpu"),
        *("--tasks", f"{CHOICE},{GENERATE}", "--include_path", tasks, "--log_samples", "--output_path", out),
    )
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, FOLDER or ".", "run", *map(str, options)],
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tasks / "hf"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = out.glob("*/results_*.json")
    samples = [
        sample["filtered_resps"]
        for name in (CHOICE, GENERATE)
        for path in out.glob(f"*/samples_{name}_*.jsonl")
        for sample in sorted(map(json.loads, path.read_text().splitlines()), key=lambda one: one["doc_id"])
    ]
    found = json.loads(results.read_text())["results"]
    scores = {
        name: {k: v for k, v in found[name].items() if k.endswith(",none")} for name in (CHOICE, GENERATE)
    }
    return scores, samples


def test_a_served_model_has_the_scores_of_transformers(
    workplace: Workplace, tasks: Path, tmp_path: Path
) -> None:
    with workplace.serve() as server:
        scores, answers = evaluate(
            tasks,
            tmp_path / "served",
            "local-completions",
            base_url=f"{server.base_url}/v1/completions",
            model=server.model_name,
            tokenizer=workplace.model,
            max_length=MAX_MODEL_LEN - 1,
            num_concurrent=2,
        )
        assert server.metric("aotgaudi_compilations_total") == 0
    expected, theirs = evaluate(
        tasks,
        tmp_path / "transformers",
        "hf",
        pretrained=workplace.model,
        dtype="float32",
        max_length=MAX_MODEL_LEN - 1,
    )

    assert scores == expected
    assert scores[GENERATE]["exact_match,none"] == 0.5
    assert len(answers) == len(theirs) == NUM_CHOICES + NUM_TEXTS
    for mine, other in zip(answers[:NUM_CHOICES], theirs[:NUM_CHOICES], strict=True):
        for (logprob, is_greedy), (other_logprob, is_other_greedy) in zip(mine, other, strict=True):
            assert float(logprob) == pytest.approx(float(other_logprob), abs=MAX_LOGPROB_DIFFERENCE)
            assert str(is_greedy) == str(is_other_greedy)
    assert answers[NUM_CHOICES:] == theirs[NUM_CHOICES:]
