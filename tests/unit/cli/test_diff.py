from __future__ import annotations

from pathlib import Path

import pytest

from tests.command import Command
from tests.specs import ONE_SEQUENCE, spec_toml

run = Command()

TEXT = spec_toml(
    limits=ONE_SEQUENCE,
    rest="""
[bucketing]
coverage = "upstream"
[defrag]
enabled = true
padded_swaps = [1, 2, 4]
threshold = 1
""",
)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "old.toml"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def new(tmp_path: Path) -> Path:
    path = tmp_path / "new.toml"
    text = TEXT.replace("max_model_len = 32", "max_model_len = 48")
    text = text.replace("[1, 2, 4]", "[4]").replace("threshold = 1", "threshold = 2")
    path.write_text(text, encoding="utf-8")
    return path


def test_values_entries_and_causes_are_shown(old: Path, new: Path) -> None:
    result = run("diff", old, new)

    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "spec:",
        "  defrag.padded_swaps: [1, 2, 4] -> [4]",
        "  defrag.threshold: 1 -> 2",
        "  limits.max_model_len: 32 -> 48",
        "entries:",
        "  prompt   +2 (prompt, 1, 16, 2) (prompt, 1, 32, 2)",
        "  decode   +1 (decode, 1, 1, 3)",
        "  defrag   -2 (defrag, 1) (defrag, 2)",
        "caused by:",
        "  defrag.padded_swaps: defrag -2",
        "  limits.max_model_len: prompt +2, decode +1",
    ]


def test_json_has_all_of_it(old: Path, new: Path) -> None:
    document = run.document("diff", old, new)

    assert document["different"] is True
    assert document["a"]["path"] == str(old)
    assert document["b"]["num_entries"] == document["a"]["num_entries"] + 3 - 2
    assert document["values"][1] == {"where": "defrag.threshold", "old": 1, "new": 2}
    assert document["entries"]["decode"] == {
        "added": 1,
        "removed": 0,
        "added_examples": ["(decode, 1, 1, 3)"],
        "removed_examples": [],
    }
    assert document["causes"] == [
        {"where": "defrag.padded_swaps", "entries": {"defrag": {"added": 0, "removed": 2}}, "problem": ""},
        {
            "where": "limits.max_model_len",
            "entries": {"prompt": {"added": 2, "removed": 0}, "decode": {"added": 1, "removed": 0}},
            "problem": "",
        },
    ]
    assert document["reordered"] == []


def test_a_spec_and_its_manifest_do_not_differ(old: Path) -> None:
    run("build", "manifest", old)

    result = run("diff", old, old.with_name("old.manifest.json"), "--exit-code")

    assert result.exit_code == 0
    assert result.stdout == "no difference\n"
    document = run.document("diff", old, old)
    assert (document["different"], document["values"], document["entries"]) == (False, [], {})


def test_exit_code_tells_a_difference_only_where_it_is_asked_for(old: Path, new: Path) -> None:
    assert run("diff", old, new).exit_code == 0
    assert run("diff", old, new, "--exit-code").exit_code == 3
    assert run("diff", old, new, "--exit-code", "--json").exit_code == 3
