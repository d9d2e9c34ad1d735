"""Without --require-warm a missing entry is built on first use by another process, counted, said, and kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.harness import Server, Workplace

pytestmark = pytest.mark.slow

COLD_LINE = "Configuration: (decode, 1, 1, 2) was not warmed-up!"
PROMPT = [17] * 20  # In its second block: a decode step over two blocks.


@pytest.fixture
def store(holed_store: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(holed_store, tmp_path / "store"))


def ask(server: Server) -> list[object]:
    answer = server.complete(PROMPT, max_tokens=8, ignore_eos=True)
    return list(answer["choices"])


def counts(server: Server) -> tuple[float, float, float]:
    names = ("aotgaudi_not_warmed_total", "aotgaudi_compilations_total", "aotgaudi_entries_warm")
    return tuple(server.metric(name) for name in names)  # type: ignore[return-value]


def test_a_missing_entry_is_compiled_once_answered_right_and_kept_in_the_store(
    workplace: Workplace, server: Server, holed_bundle: Path, store: Path
) -> None:
    expected = ask(server)
    total = server.metric("aotgaudi_entries_total")

    with workplace.serve("--store", store, bundle=holed_bundle, strict=False) as cold:
        assert COLD_LINE not in cold.log
        assert counts(cold) == (0, 0, total - 1)
        assert ask(cold) == expected
        assert counts(cold) == (1, 1, total)
        assert ask(cold) == expected
        assert counts(cold) == (1, 1, total)
        assert cold.log.count(COLD_LINE) == 1

    with workplace.serve("--store", store, bundle=holed_bundle, strict=False) as again:
        assert ask(again) == expected
        assert counts(again) == (1, 0, total)
        assert "(decode, 1, 1, 2) is warm now (0 units compiled)" in again.log

    done = workplace.run("build", "cache", workplace.spec, "--store", store, "--json")
    assert json.loads(done.stdout)["num_compiled"] == 0


def test_a_whole_bundle_needs_no_store_without_require_warm(workplace: Workplace, tmp_path: Path) -> None:
    with workplace.serve("--store", tmp_path / "none", strict=False) as server:
        ask(server)
        assert counts(server)[:2] == (0, 0)

    assert not (tmp_path / "none").exists()
