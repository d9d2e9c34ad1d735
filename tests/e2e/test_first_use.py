"""Without --require-warm a missing entry is built on first use by another process, counted, said, and kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.conftest import HOLE, HOLES
from tests.e2e.harness import Server, Workplace, copy_bundle, own_object

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
    total = server.metric("aotgaudi_entries")

    with workplace.serve("--store", store, bundle=holed_bundle, strict=False) as cold:
        assert COLD_LINE not in cold.log
        assert counts(cold) == (0, 0, total - len(HOLES))
        assert ask(cold) == expected
        assert counts(cold) == (1, 1, total - len(HOLES) + 1)
        assert ask(cold) == expected
        assert counts(cold) == (1, 1, total - len(HOLES) + 1)
        assert cold.log.count(COLD_LINE) == 1

    with workplace.serve("--store", store, bundle=holed_bundle, strict=False) as again:
        assert ask(again) == expected
        assert counts(again) == (1, 0, total - len(HOLES) + 1)
        assert "(decode, 1, 1, 2) is warm now (0 units compiled)" in again.log

    done = workplace.run("build", "cache", workplace.spec, "--entry", HOLE.id, "--store", store, "--json")
    assert json.loads(done.stdout)["num_compiled"] == 0


def test_a_cold_entry_is_not_compiled_where_a_larger_warm_one_covers_the_step(
    workplace: Workplace, server: Server, tmp_path: Path
) -> None:
    bundle = copy_bundle(workplace.bundle, tmp_path / "lossy.bundle")
    own_object(bundle, HOLE).unlink()

    with workplace.serve("--store", tmp_path / "none", bundle=bundle, strict=False) as lossy:
        assert ask(lossy) == ask(server)
        assert counts(lossy)[:2] == (0, 0)
        assert COLD_LINE not in lossy.log

    assert not (tmp_path / "none").exists()


def test_an_entry_whose_file_was_lost_from_the_bundle_is_loaded_from_the_store(
    workplace: Workplace, server: Server, tmp_path: Path
) -> None:
    bundle = copy_bundle(workplace.bundle, tmp_path / "lossy.bundle")
    for hole in HOLES:
        own_object(bundle, hole).unlink()

    with workplace.serve("--store", workplace.store, bundle=bundle, strict=False) as lossy:
        assert ask(lossy) == ask(server)
        assert counts(lossy)[:2] == (1, 0)
        assert COLD_LINE in lossy.log


def test_a_bundle_with_nothing_in_it_is_served_from_the_store(
    workplace: Workplace, server: Server, tmp_path: Path
) -> None:
    bundle = tmp_path / "empty.bundle"
    done = workplace.run(
        "build", "bundle", workplace.spec, "-o", bundle, "--allow-missing", "--store", tmp_path / "empty"
    )
    assert done.returncode == 0

    with workplace.serve("--store", workplace.store, bundle=bundle, strict=False) as bare:
        assert counts(bare) == (0, 0, 0)
        assert ask(bare) == ask(server)
        num_cold, num_compiled, num_warm = counts(bare)
        assert num_cold == num_warm == bare.log.count("was not warmed-up!") > 0
        assert num_compiled == 0


def test_a_whole_bundle_needs_no_store_without_require_warm(workplace: Workplace, tmp_path: Path) -> None:
    with workplace.serve("--store", tmp_path / "none", strict=False) as server:
        ask(server)
        assert counts(server)[:2] == (0, 0)

    assert not (tmp_path / "none").exists()
