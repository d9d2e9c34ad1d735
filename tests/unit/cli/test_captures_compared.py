"""``aotgaudi diff`` of wrapped servers, and what a miss costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.store.store import Store
from aotgaudi.wrap.capture_records import CaptureRow, capture_key, record_capture
from tests.command import Command
from tests.guests_here import Here, seal, vllm_here

pytestmark = pytest.mark.process

run = Command()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    found = vllm_here(tmp_path)
    for name, value in found.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AOTGAUDI_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    return found


@pytest.fixture
def bundle(here: Here) -> Path:
    launch = here.launch("vllm", "serve", here.model(), "--max-model-len", "512")
    return seal(launch, here.folder / "a.bundle", {"cache/x": b"x", "cache/y": b"y"})


def recorded(here: Here, path: Path) -> None:
    """Records the bundle's capture in the store, as a build does."""
    store, bundle = Store.open(here.folder / "store"), open_bundle(path)
    documents = [store.objects.put_bytes(data) for data in (bundle.launch.dumps(), bundle.receipt.dumps())]
    row = CaptureRow(
        label="tiny",
        launch=documents[0],
        receipt=documents[1],
        objects=(),
        cold_seconds=152.4,
        warm_seconds=45.0,
        build_seconds=231.0,
        cold_counts={},
    )
    record_capture(store, capture_key(bundle.launch).hex, row)


def test_two_captures_differ_by_component_condition_and_file(here: Here, bundle: Path) -> None:
    launch = here.launch("vllm", "serve", here.model("other"), "--max-model-len", "1024", VLLM_IMAGE_TAG="v2")
    other = seal(launch, here.folder / "b.bundle", {"cache/y": b"other", "cache/z": b"z"})

    result = run("diff", bundle, other, "--exit-code")
    document = json.loads(run("diff", bundle, other, "--json").output)

    assert result.exit_code == 3
    assert "flag.max-model-len  A: 512  B: 1024" in result.output
    assert document["files"] == {"added": ["cache/z"], "removed": ["cache/x"], "changed": ["cache/y"]}
    assert {row["name"] for row in document["conditions"]} == {"model.name", "variable.VLLM_IMAGE_TAG"}


def test_a_capture_does_not_differ_from_itself(bundle: Path) -> None:
    result = run("diff", bundle, bundle, "--exit-code")

    assert (result.exit_code, result.output) == (0, "no difference\n")


def test_a_miss_costs_what_the_cold_start_took(here: Here, bundle: Path) -> None:
    recorded(here, bundle)

    result = run("explain", bundle, "--", "vllm", "serve", here.model())

    assert "cost: a cold start, which took 152 s when it was built" in result.output
