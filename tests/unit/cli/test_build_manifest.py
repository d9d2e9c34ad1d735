from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from aotgaudi.cli.main import cli
from aotgaudi.manifest.codec import read_manifest

MANIFESTS = Path(__file__).parents[3] / "manifests"
SPECS = sorted(MANIFESTS.glob("*.toml"))
TEXT = """
schema = "aotgaudi.spec/1"
[model]
name = "tiny"
dtype = "float32"
config = { model_type = "llama", max_position_embeddings = 512 }
[limits]
max_num_seqs = 1
max_num_batched_tokens = 32
max_model_len = 32
block_size = 16
num_blocks = 8
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["build", "manifest", *map(str, arguments)])


def test_manifest_lies_beside_its_spec_and_the_summary_says_what_is_in_it(spec: Path) -> None:
    result = run(spec)

    manifest = read_manifest(spec.with_name("tiny.manifest.json"))
    assert result.exit_code == 0
    assert f"id: {manifest.id}" in result.stdout
    assert "prompt        4   largest (prompt, 1, 32, 1)" in result.stdout
    assert "coverage: every step that the scheduler can form has an entry" in result.stdout


def test_output_and_json(spec: Path, tmp_path: Path) -> None:
    result = run(spec, "-o", tmp_path / "m.json", "--json")

    summary = json.loads(result.stdout)
    assert summary["id"] == read_manifest(tmp_path / "m.json").id
    assert summary["num_entries"] == {"prompt": 4, "decode": 2, "sampler": 12, "defrag": 7}
    assert summary["uncovered"] == []
    assert not spec.with_name("tiny.manifest.json").exists()


def test_check_passes_on_what_was_just_written(spec: Path) -> None:
    run(spec)

    assert run(spec, "--check").exit_code == 0


def test_check_of_a_missing_manifest_exits_3_and_writes_nothing(spec: Path) -> None:
    result = run(spec, "--check")

    path = spec.with_name("tiny.manifest.json")
    assert result.exit_code == 3
    assert result.stderr == f"error: {path}: there is no manifest (run `aotgaudi build manifest {spec}`)\n"
    assert not path.exists()


def test_check_of_a_changed_spec_exits_3_and_names_what_differs_and_what_mends_it(spec: Path) -> None:
    output = spec.with_name("m.json")
    run(spec, "-o", output)
    spec.write_text(TEXT.replace("max_model_len = 32", "max_model_len = 48"), encoding="utf-8")

    result = run(spec, "-o", output, "--check")

    assert result.exit_code == 3
    assert "limits.max_model_len: 32 -> 48; prompt entries: +2" in result.stderr
    assert f"(run `aotgaudi build manifest {spec} -o {output}`)" in result.stderr
    assert result.stderr.count("\n") == 1


def test_check_notices_other_formatting(spec: Path) -> None:
    run(spec)
    path = spec.with_name("tiny.manifest.json")
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8"))), encoding="utf-8")

    result = run(spec, "--check")

    assert result.exit_code == 3
    assert "formatted otherwise" in result.stderr


def test_check_of_an_edited_manifest_exits_2(spec: Path) -> None:
    run(spec)
    path = spec.with_name("tiny.manifest.json")
    path.write_bytes(path.read_bytes().replace(b'"threshold": 32', b'"threshold": 33'))

    result = run(spec, "--check")

    assert result.exit_code == 2
    assert "the content hashes to" in result.stderr


def test_a_bad_spec_exits_2_and_writes_nothing(spec: Path) -> None:
    spec.write_text(TEXT.replace("num_blocks", "num_block"), encoding="utf-8")

    result = run(spec)

    assert result.exit_code == 2
    assert result.stderr == f"error: {spec}: limits.num_block: unknown key (did you mean 'num_blocks'?)\n"
    assert not spec.with_name("tiny.manifest.json").exists()


def test_unwritable_output_is_one_line(spec: Path, tmp_path: Path) -> None:
    result = run(spec, "-o", tmp_path / "absent" / "m.json")

    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {tmp_path}/absent/m.json: cannot be written: ")


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.name)
def test_committed_manifests_are_up_to_date_and_closed(path: Path) -> None:
    result = run(path, "--check", "--json")

    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["uncovered"] == []


def test_there_are_committed_manifests() -> None:
    assert {path.name for path in SPECS} >= {
        "llama-3.1-8b.gaudi3.toml",
        "smollm2-135m.cpu.toml",
        "tiny-llama.cpu.toml",
    }


def test_whole_command_imports_no_torch_and_no_numpy(spec: Path) -> None:
    code = (
        "import sys\nfrom aotgaudi.cli.main import cli\n"
        f"try: cli.main(['build', 'manifest', {str(spec)!r}], prog_name='aotgaudi')\n"
        "except SystemExit: pass\n"
        "sys.exit(' '.join({'torch', 'numpy', 'rich', 'transformers', 'fastapi'} & sys.modules.keys()))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert process.stderr.strip() == ""
    assert spec.with_name("tiny.manifest.json").exists()
