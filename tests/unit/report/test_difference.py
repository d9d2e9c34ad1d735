"""The page of what differs: its numbers are those of ``diff --json``, and its cells add up to the entries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from aotgaudi.cli.main import cli
from aotgaudi.manifest.difference import difference
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.report.difference import DifferenceReport, difference_report
from aotgaudi.report.page import difference_page, number_at
from tests.specs import spec_of, spec_toml
from tests.unit.bundle.conftest import SealedCapture, captured
from tests.unit.report.reports import HOSTILE
from tests.unit.report.test_page import Elements, needs_plots, numbers

__all__ = ["SealedCapture", "captured"]


def compared(path: str = "a.toml") -> tuple[Manifest, Manifest, DifferenceReport]:
    old = Manifest.of(spec_of())
    new = Manifest.of(spec_of(limits={"max_model_len": 96, "max_num_seqs": 3}, defrag={"padded_swaps": [4]}))
    found = difference(old, new)
    return old, new, difference_report(found, (path, old), ("b.toml", new), with_planes=True)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["diff", *map(str, arguments)])


def test_cells_add_up_to_the_entries_of_both() -> None:
    old, new, report = compared()

    assert [plane.phase for plane in report.planes] == ["prompt", "decode"]
    for plane in report.planes:
        kept, added, removed = (
            sum(getattr(cell, f"num_{name}") for cell in plane.cells) for name in ("kept", "added", "removed")
        )
        assert (kept + removed, kept + added) == (
            len(old.of_kind(plane.phase)),
            len(new.of_kind(plane.phase)),
        )
        assert (added, removed) == (report.entries[plane.phase].added, report.entries[plane.phase].removed)


@needs_plots
def test_every_number_and_mark_on_the_page_is_of_the_json() -> None:
    _, _, report = compared()
    document = json.loads(report.model_dump_json())

    page = difference_page(report)

    found = list(numbers(page))
    assert {"a.num_entries", "entries.prompt.removed", "entries.decode.added"} <= {
        place for place, _, _ in found
    }
    for place, value, _ in found:
        assert json.loads(value) == number_at(document, place)
    marks = {a["data-path"] for tag, a, _ in Elements(page).found if tag == "path" and "data-path" in a}
    assert marks == {
        f"planes.{index}.cells.{i}"
        for index, plane in enumerate(report.planes)
        for i in range(len(plane.cells))
    }


@needs_plots
def test_no_name_is_more_than_text() -> None:
    _, _, report = compared(HOSTILE)
    value = report.values[0].model_copy(
        update={"where": HOSTILE, "old": HOSTILE, "new": {HOSTILE: [HOSTILE]}}
    )
    cause = report.causes[0].model_copy(update={"where": HOSTILE, "problem": HOSTILE})

    page = difference_page(report.model_copy(update={"values": (value,), "causes": (cause,)}))

    assert {"script", "img"}.isdisjoint(Elements(page).tags)
    assert page.count("alert(1)") > 5
    assert "<script" not in page


@needs_plots
def test_the_command_writes_the_page_and_prints_as_without(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(spec_toml())
    (tmp_path / "b.toml").write_text(spec_toml("[defrag]\npadded_swaps = [4]\n"))
    page = tmp_path / "x.html"

    plain, with_page = (
        run(tmp_path / "a.toml", tmp_path / "b.toml", *more) for more in ((), ("--html", page))
    )

    assert (with_page.exit_code, with_page.stdout) == (0, plain.stdout)
    assert "What differs" in page.read_text(encoding="utf-8")


@needs_plots
def test_no_difference_is_a_page_too(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(spec_toml())

    result = run(tmp_path / "a.toml", tmp_path / "a.toml", "--html", tmp_path / "x.html", "--exit-code")

    assert (result.exit_code, result.stdout) == (0, "no difference\n")
    assert "No difference" in (tmp_path / "x.html").read_text(encoding="utf-8")


def test_json_has_the_cells_only_beside_a_page(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(spec_toml())

    assert "planes" not in json.loads(run(tmp_path / "a.toml", tmp_path / "a.toml", "--json").stdout)


def test_captures_have_no_page(captured: SealedCapture, tmp_path: Path) -> None:
    result = run(captured.path, captured.path, "--html", tmp_path / "x.html")

    assert result.exit_code == 2
    assert result.stderr.startswith("error: --html: ")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "x.html").exists()


def test_without_the_extra_it_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    (tmp_path / "a.toml").write_text(spec_toml())

    result = run(tmp_path / "a.toml", tmp_path / "a.toml", "--html", tmp_path / "x.html")

    assert (result.exit_code, result.stdout) == (2, "")
    assert "pip install 'aotgaudi[report]'" in result.stderr
