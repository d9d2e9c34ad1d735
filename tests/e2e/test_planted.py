"""Python files in the working directory, in a model and in a bundle are never run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from aotgaudi.child import python_command
from tests.e2e.harness import Server, Workplace, command_line, copy_bundle, environment
from tests.planted import plant

pytestmark = pytest.mark.slow


def serve(here: Path, *options: str | Path) -> Server:
    """A server that is started in the directory `here`, by a command that does not look there."""
    words = ("serve", "--port", "0", "--drain-delay", "0", *map(str, options))
    return Server(python_command("aotgaudi.cli.main", *words), environment(here.parent / "cache"), here)


def test_those_of_the_model_are_not(workplace: Workplace, tmp_path: Path) -> None:
    model = Path(shutil.copytree(workplace.model, tmp_path / "model"))
    found = plant(model, tmp_path / "found")

    with serve(model, "--model", ".", "--bundle", workplace.bundle, "--require-warm") as server:
        server.complete("the fox", max_tokens=2)
        assert server.metric("aotgaudi_compilations_total") == 0

    assert not list(found.iterdir())


def test_those_of_the_bundle_are_not_and_it_is_refused(workplace: Workplace, tmp_path: Path) -> None:
    bundle = copy_bundle(workplace.bundle, tmp_path / "e2e.bundle")
    found = plant(bundle, tmp_path / "found")
    words = ("serve", "--port", "0", "--bundle", ".", "--model", str(workplace.model), "--require-warm")

    done = subprocess.run(
        python_command("aotgaudi.cli.main", *words),
        env=environment(tmp_path / "cache"), cwd=bundle, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip

    assert done.returncode == 4
    assert "not in the index" in done.stderr
    assert not list(found.iterdir())


def with_code(model: Path, found: Path, **config: object) -> Path:
    """Gives a model directory all the code that transformers could be talked into running: each leaves a file in `found`."""
    found.mkdir()
    kinds = {
        "config.json": ("AutoConfig", "AutoModelForCausalLM"),
        "tokenizer_config.json": ("AutoTokenizer",),
    }
    for name, classes in kinds.items():
        value = json.loads((model / name).read_bytes())
        references = {kind: f"{kind.lower()}_x.X" for kind in classes}
        value["auto_map"] = {
            kind: [reference, None] if kind == "AutoTokenizer" else reference
            for kind, reference in references.items()
        }
        value |= config if name == "config.json" else {"tokenizer_class": "XTokenizer"}
        (model / name).write_text(json.dumps(value), encoding="utf-8")
        for kind in classes:
            mark = f"open({os.fspath(found / kind)!r}, 'w').close()\nclass X: pass\n"
            (model / f"{kind.lower()}_x.py").write_text(mark, encoding="utf-8")
    (model / "custom_generate").mkdir()
    (model / "custom_generate" / "generate.py").write_text(f"open({os.fspath(found / 'generate')!r}, 'w')")
    for name in ("pytorch_model.bin", "tokenizer.pkl", "training_args.bin"):
        call = f"cos\nsystem\n(S'touch {found / name}'\ntR."
        (model / name).write_bytes(call.encode())
    return found


@pytest.mark.parametrize("model_type", ["llama", "distilbert", "x"])
def test_no_verb_runs_the_python_of_a_model_even_when_every_question_is_answered_with_yes(
    workplace: Workplace, tmp_path: Path, model_type: str
) -> None:
    model = Path(shutil.copytree(workplace.model, tmp_path / "model"))
    found = with_code(model, tmp_path / "found", model_type=model_type, _name_or_path=str(model))
    if model_type == "x":
        (model / "model.safetensors").unlink()  # Only pickles are left.
    spec = tmp_path / "spec.toml"
    spec.write_text(workplace.spec.read_text().replace("model/config.json", str(model / "config.json")))
    served = ("--bundle", workplace.bundle, "--model", model)
    (tmp_path / "requests.jsonl").write_text("{}")

    for words in (
        ("model", "import", model, tmp_path / "imported"),
        # A llama would be built, which takes minutes.
        ("build", "plan" if model_type == "llama" else "cache", spec, "--store", tmp_path / "store"),
        ("build", "manifest", spec, "-o", tmp_path / "manifest.json"),
        ("build", "manifest", "--from-vllm", f"vllm serve {model} --trust-remote-code", "-o", tmp_path / "m"),
        (
            "build",
            "bundle",
            workplace.spec,
            "-o",
            tmp_path / "b",
            "--model",
            model,
            "--store",
            workplace.store,
        ),
        ("verify", workplace.bundle, "--model", model),
        ("serve", *served, "--port", "0", "--require-warm"),
    ):
        done = subprocess.run(
            command_line(*words), cwd=tmp_path, env=environment(tmp_path / "cache"),
            input="y\n" * 10_000, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert not list(found.iterdir()), (words, done.stderr)
        assert "Traceback" not in done.stderr, (words, done.stderr)
