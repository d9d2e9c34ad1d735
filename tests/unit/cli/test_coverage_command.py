"""``aotgaudi coverage``: 0 closed, 7 holes; what is missing, and what closes it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from aotgaudi.manifest.manifest import Manifest, write_manifest
from aotgaudi.spec.parse import load_spec
from tests.command import Command
from tests.specs import spec_of, spec_toml

run = Command("coverage")

SPEC = spec_toml("[bucketing]\n")
EXAMPLE = "a prompt chunk of 1 token after 113 tokens (8 blocks), 114 in all"


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    path = tmp_path / "closed.toml"
    path.write_text(SPEC, encoding="utf-8")
    return path


@pytest.fixture
def holed(tmp_path: Path) -> Path:
    path = tmp_path / "holed.toml"
    path.write_text(SPEC + 'coverage = "upstream"\n', encoding="utf-8")
    return path


def test_a_closed_spec_exits_0_with_a_line_for_each_kind_of_step(closed: Path) -> None:
    result = run(closed)

    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == f'{closed}: closed (coverage = "closed")'
    assert [line.split()[:4] for line in lines[2:]] == [
        ["prompt", "17", "cells", "0"],
        ["decode", "23", "steps", "0"],
        ["sampler", "12", "steps", "0"],
        ["defrag", "0", "steps", "0"],
    ]


def test_holes_exit_7_with_the_smallest_and_what_closes_them(holed: Path) -> None:
    result = run(holed)

    assert result.exit_code == 7
    assert result.stderr == f"error: {holed}: no entry for 1 of 17 prompt cells; the smallest: {EXAMPLE}\n"
    assert result.stdout.splitlines()[-6:] == [
        "no entry for:",
        "  prompt chunks of any length after 8 context blocks",
        f"the smallest of them: {EXAMPLE}",
        'what mends it: coverage = "closed" in the [bucketing] of the spec adds 1 entry',
        "which then has:",
        "  (prompt, 1, 16, 8)",
    ]


def test_a_manifest_file_is_judged_as_its_spec_is(holed: Path) -> None:
    path = holed.with_suffix(".manifest.json")
    write_manifest(path, Manifest.of(load_spec(holed)))

    result = run(path)

    assert result.exit_code == 7
    assert result.stdout.splitlines()[1:] == run(holed).stdout.splitlines()[1:]


def test_json(closed: Path, holed: Path) -> None:
    whole, broken = run(closed, "--json"), run(holed, "--json")

    assert (whole.exit_code, broken.exit_code) == (0, 7)
    document = json.loads(whole.stdout)
    assert (document["closed"], document["smallest"], document["mend"]) == (True, None, None)
    assert document["phases"][0]["padding"]["num_steps"] == 17
    document = json.loads(broken.stdout)
    assert document["holes"] == ["prompt chunks of any length after 8 context blocks"]
    assert document["smallest"] == {"num_tokens": 114, "kind": "prompt", "shape": [1, 1, 8], "text": EXAMPLE}
    assert document["closing_entries"] == ["(prompt, 1, 16, 8)"]
    assert document["phases"][0]["num_uncovered"] == 1


def test_a_manifest_of_a_closed_spec_that_lacks_an_entry_is_to_be_enumerated_anew(closed: Path) -> None:
    manifest = Manifest.of(load_spec(closed))
    kept = tuple(entry for entry in manifest.entries if entry.kind != "decode")
    path = closed.with_suffix(".manifest.json")
    write_manifest(path, Manifest(manifest.spec, kept))

    result = run(path)

    assert result.exit_code == 7
    assert "what mends it: enumerate it anew: aotgaudi build manifest SPEC" in result.stdout
    assert "  (decode, 2, 1, 16)" in result.stdout


def test_a_unified_table_is_not_closed_and_nothing_is_claimed_of_it(closed: Path) -> None:
    text = SPEC + 'strategy = "unified"\nversion = "vllm-gaudi@v0.14.1"\ncontiguous_pa = true\n'
    closed.write_text(text, encoding="utf-8")

    result = run(closed)

    assert result.exit_code == 7
    assert "what mends it: another bucketing.strategy" in result.stdout
    assert "of unified entries nothing is proved" in result.stdout


def test_a_target_without_graphs_has_nothing_to_cover(closed: Path) -> None:
    text = SPEC + '[target]\nbackend = "hpu"\nexecution_mode = "eager"\n'
    closed.write_text(text, encoding="utf-8")

    result = run(closed)

    assert result.exit_code == 0
    assert "nothing has to be warm: the target runs without graphs" in result.stdout


def test_of_a_vllm_server_both_tables_are_judged_and_what_is_left_out_is_named(closed: Path) -> None:
    text = SPEC + 'num_speculative_tokens = 1\n[scheduler]\nengine = "vllm"\n'
    closed.write_text(text, encoding="utf-8")

    result, document = run(closed), run.document(closed)

    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[:2] == [
        f'{closed}: closed (coverage = "closed")',
        "  the steps are those of vLLM (chunked prefill, prefix caching, 1 speculative token)",
    ]
    assert ["speculative", "23", "steps", "0"] in [line.split()[:4] for line in lines]
    own = lines.index(
        "the server's own table (vllm-gaudi@091bbad, exponential) has no bucket for 1 of 17 prompt cells"
    )
    assert lines[own + 1 : own + 3] == [
        f"  the smallest: {EXAMPLE}",
        "  it then compiles (1, 1, 8) while the request waits, unless that is warm",
    ]
    assert [line for line in lines if line.startswith("left out of the proof:")] == [
        "left out of the proof: decodes that count a shared block for each of its sequences, and so have more blocks"
        " than the cache",
        "left out of the proof: the graphs of the draft model, and of accepting its tokens",
    ]
    assert (document["closed"], document["server_table"]["closed"]) == (True, False)
    assert document["server_table"]["fallback"] == [1, 1, 8]
    assert len(document["left_out"]) == 2
    kinds = {row["kind"]: row["state"] for row in document["live_graphs"]}
    assert (kinds["sampling"], kinds["speculative decoding"], kinds["penalties"]) == (
        "closed",
        "open",
        "open",
    )
    first = lines.index("traffic on a server that `build capture --shapes` captured:")
    assert [line.split(": ")[0].strip() for line in lines[first + 1 :]] == [
        {"open": "not closed"}.get(state, state)
        for state in sorted(kinds.values(), key=("open", "bounded", "closed").index)
    ]


def test_unified_steps_of_a_vllm_server_are_not_proved_and_no_others_are_counted(closed: Path) -> None:
    text = SPEC + 'strategy = "unified"\nversion = "vllm-gaudi@v0.14.1"\ncontiguous_pa = true\n'
    closed.write_text(text + '[scheduler]\nengine = "vllm"\n', encoding="utf-8")

    result = run(closed)

    assert result.exit_code == 7
    assert result.stdout.splitlines()[0] == f'{closed}: not proved (coverage = "closed")'
    assert "cells" not in result.stdout
    assert result.stderr == (
        f"error: {closed}: nothing is proved of unified steps, which are all that this server forms\n"
    )


def test_our_own_engine_has_the_table_of_the_manifest_and_nothing_is_left_out(closed: Path) -> None:
    document = run.document(closed)

    assert (document["scheduler"], document["server_table"], document["left_out"]) == ("aotgaudi", None, [])


def test_long_lists_are_cut_and_the_json_has_all(closed: Path) -> None:
    text = (SPEC + 'coverage = "upstream"\n').replace(
        "max_position_embeddings = 512", "max_position_embeddings = 200000"
    )
    for key, value in {"max_model_len": 131072, "max_num_batched_tokens": 131072, "num_blocks": 8192}.items():
        text = "\n".join(
            f"{key} = {value}" if line.startswith(f"{key} =") else line for line in text.splitlines()
        )
    closed.write_text(text, encoding="utf-8")

    result = run(closed)

    holes = run.document(closed, code=7)["holes"]
    assert len(holes) > 12
    assert f"  and {len(holes) - 12} more (--json lists all)" in result.stdout


def test_the_command_imports_no_torch_and_no_numpy(closed: Path) -> None:
    code = (
        "import sys\nfrom aotgaudi.cli.main import cli\n"
        f"try: cli.main(['coverage', {str(closed)!r}], prog_name='aotgaudi')\n"
        "except SystemExit: pass\n"
        "sys.exit(' '.join({'torch', 'numpy', 'rich', 'transformers', 'fastapi'} & sys.modules.keys()))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert process.stderr.strip() == ""
    assert ": closed" in process.stdout


def test_buckets_of_a_server_that_its_warm_up_leaves_out_are_said(tmp_path: Path) -> None:
    limits = {
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "max_model_len": 4096,
        "block_size": 128,
        "num_blocks": 5746,
    }
    spec = spec_of(config={"max_position_embeddings": 4096}, limits=limits, scheduler={"engine": "vllm"})
    path = tmp_path / "m.json"
    write_manifest(path, Manifest.of(spec))

    lines = Command("coverage")(path).stdout.splitlines()
    document = json.loads(Command("coverage")(path, "--json").stdout)

    assert len(document["server_table"]["cold"]) == 8
    (line,) = (line for line in lines if "its warm-up does not compile" in line)
    assert line.startswith("  8 of its buckets its warm-up does not compile, (1, ")
