"""``aotgaudi report`` of stores, bundles and closed folders; more is in tests/transcripts/report.txt."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from aotgaudi.store.store import Store
from tests.command import Command
from tests.environment import ROOT
from tests.specs import spec_toml
from tests.unit.bundle.conftest import SealedCapture, captured
from tests.unit.compile.conftest import store
from tests.unit.report.reports import sealed_bundle
from tests.workload import SPEC_TEXT

run = Command("report")

__all__ = ["SealedCapture", "captured", "store"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AOTGAUDI_STORE", str(tmp_path / "no store"))


@pytest.fixture
def closed() -> Iterator[Path]:
    """A folder that the process may not enter, also where it runs as root. A spec lies beside it."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "x.toml").write_text(SPEC_TEXT)
        (folder / "closed").mkdir()
        (folder / "closed").chmod(0o700 if user == 0 else 0)
        if user == 0:
            os.seteuid(65534)
        try:
            yield folder / "closed"
        finally:
            if user == 0:
                os.seteuid(user)
            (folder / "closed").chmod(0o700)


def test_a_page_below_a_folder_that_one_may_not_enter_is_refused_in_a_line(closed: Path) -> None:
    result = run(closed.parent / "x.toml", "-o", closed / "inner" / "x.html")

    assert (result.exit_code, result.stdout) == (2, ""), result.exception
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "closed" in result.stderr
    assert "Permission denied" in result.stderr


def test_a_bundle_is_reported_with_the_times_of_its_store(store: Store, tmp_path: Path) -> None:
    bundle = sealed_bundle(store, tmp_path / "x.bundle")

    document = run.document(bundle.path, "--store", store.root)

    assert document["subject"]["kind"] == "bundle"
    assert document["built"]["source"] == "bundle"
    assert document["built"]["num_timed"] == document["built"]["num_units"] == 4


def test_of_a_manifest_the_store_says_what_is_built(store: Store, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(SPEC_TEXT)

    before = run.document("x.toml", "--store", store.root)
    sealed_bundle(store, tmp_path / "x.bundle")
    after = run.document("x.toml", "--store", store.root)

    assert (before["num_built"], before["built"]["num_units"]) == (0, 0)
    assert after["num_built"] == after["num_entries"]


def test_a_gaudi_spec_without_its_target_says_why_nothing_is_known(store: Store) -> None:
    document = run.document(ROOT / "manifests/llama-3.1-8b.gaudi3.toml", "--store", store.root)

    assert document["built"] is None
    assert "what is built is not known: target.backend" in document["notes"][0]


def test_a_capture_is_refused_by_name(captured: SealedCapture) -> None:
    result = run(captured.path, "--json")

    assert result.exit_code == 2
    assert "holds the caches of another server, no programs" in result.stderr


CONFIG = """config = { model_type = "llama", max_position_embeddings = 512, hidden_size = 64, intermediate_size = 128, \
num_hidden_layers = 2, num_attention_heads = 4, num_key_value_heads = 2, vocab_size = 256 }"""
CSV = "time,prompt_tokens,generated_tokens\n0,17,3\n0.5,90,9\n2,300,9\n"


@pytest.fixture
def traced() -> None:
    """A spec, x.toml, and a trace, x.csv."""
    text = spec_toml()
    line = next(line for line in text.splitlines() if line.startswith("config = "))
    Path("x.toml").write_text(text.replace(line, CONFIG))
    Path("x.csv").write_text(CSV)


@pytest.mark.usefixtures("traced")
def test_a_trace_is_replayed() -> None:
    found = run.document("x.toml", "--trace", "x.csv")["trace"]

    assert (found["path"], found["num_requests"], found["num_refused"]) == ("x.csv", 2, 1)
    assert found["factor"] > 1
    assert found["basis"].startswith("assumed")


@pytest.mark.usefixtures("traced")
def test_a_manifest_with_a_hole_is_reported_without_the_trace_that_meets_it() -> None:
    rest = '[bucketing]\ncoverage = "upstream"\nstrategy = "linear"\n[bucketing.decode]\nnum_blocks = { max = 2 }\n'
    Path("y.toml").write_text(Path("x.toml").read_text() + rest)

    found = run.document("y.toml", "--trace", "x.csv")

    assert found["num_holes"] > 0
    assert found["trace"] is None
    assert any(
        note.startswith("the trace was not replayed: a step of it, (decode") for note in found["notes"]
    )
