"""The page of what differs: its numbers are those of ``diff --json``."""

from __future__ import annotations

import json
from pathlib import Path

from aotgaudi.report.html import number_at
from aotgaudi.report.page import difference_page
from tests.command import Command
from tests.specs import LIMITS, spec_toml
from tests.unit.bundle.conftest import SealedCapture, captured
from tests.unit.report.reports import HOSTILE
from tests.unit.report.test_page import Elements, numbers

run = Command("diff")

__all__ = ["SealedCapture", "captured"]


def specs(folder: Path) -> tuple[Path, Path]:
    (folder / "a.toml").write_text(spec_toml())
    (folder / "b.toml").write_text(
        spec_toml("[defrag]\nenabled = true\npadded_swaps = [4]\n", {**LIMITS, "max_num_seqs": 3})
    )
    return folder / "a.toml", folder / "b.toml"


def test_every_number_on_the_page_is_of_the_json(tmp_path: Path) -> None:
    page = tmp_path / "x.html"

    document = run.document(*specs(tmp_path), "--html", page)

    found = list(numbers(page.read_text(encoding="utf-8")))
    places = {"a.num_entries", "b.num_entries", "entries.decode.removed", "causes.0.entries.decode.added"}
    assert places <= {place for place, _, _ in found}
    assert all(json.loads(value) == number_at(document, place) for place, value, _ in found)
    assert "What differs" in page.read_text(encoding="utf-8")


def test_no_name_is_more_than_text(tmp_path: Path) -> None:
    document = run.document(*specs(tmp_path))
    document["a"]["path"] = document["values"][0]["where"] = document["values"][0]["old"] = HOSTILE
    document["values"][0]["new"] = {HOSTILE: [HOSTILE]}
    document["causes"][0] = {"where": HOSTILE, "entries": {}, "problem": HOSTILE}

    page = difference_page(document)

    assert {"script", "img"}.isdisjoint(Elements(page).tags)
    assert page.count("alert(1)") > 5
    assert "<script" not in page


def test_the_command_prints_with_a_page_what_it_prints_without(tmp_path: Path) -> None:
    a, b = specs(tmp_path)

    plain, with_page = (run(a, b, *more) for more in ((), ("--html", tmp_path / "x.html")))
    same = run(a, a, "--html", tmp_path / "same.html", "--exit-code")

    assert (with_page.exit_code, with_page.stdout) == (0, plain.stdout)
    assert (same.exit_code, same.stdout) == (0, "no difference\n")
    assert "No difference" in (tmp_path / "same.html").read_text(encoding="utf-8")


def test_captures_have_no_page(captured: SealedCapture, tmp_path: Path) -> None:
    result = run(captured.path, captured.path, "--html", tmp_path / "x.html")

    assert result.exit_code == 2
    assert result.stderr.startswith("error: --html: ")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "x.html").exists()
