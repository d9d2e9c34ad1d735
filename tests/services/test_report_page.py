"""Pages of reports in a real headless browser: nothing is complained of, nothing asked for, and every number is the JSON's.

The browser is Debian's chromium-headless-shell; without one the tests are skipped, with --services they fail.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aotgaudi.report.html import number_at
from aotgaudi.store.store import Store
from tests.browser import NAMES, Browser, Page, find_browser, run_browser
from tests.e2e.conftest import workplace
from tests.e2e.harness import Workplace
from tests.environment import ROOT
from tests.services.conftest import REQUIRED, aotgaudi
from tests.unit.compile.conftest import store
from tests.unit.report.reports import HOSTILE, sealed_bundle

__all__ = ["store", "workplace"]

MANIFESTS = ROOT / "manifests"
DEMO = Path(os.environ.get("AOTGAUDI_DEMO_DIR", ROOT / ".aotgaudi")) / "smollm2-135m.cpu.bundle"
MOST_BYTES, MOST_TIMES = 5_000_000, 1.5
"""Of a page; and of the processor time that writing the manifest takes, which a loaded machine lengthens as much."""
WIDTHS = (1200, 768, 360)

MILLION = f"""
schema = "aotgaudi.spec/1"
[model]
name = "llama-3.1-8b"
dtype = "bfloat16"
config = "{MANIFESTS / "configs" / "llama-3.1-8b.json"}"
[limits]
max_num_seqs = 256
max_num_batched_tokens = 131072
max_model_len = 131072
block_size = 128
num_blocks = 5746
[bucketing]
strategy = "linear"
coverage = "upstream"
"""
"""1,057,197 entries of benchmarks/bench_enumerate.py."""

DATA = "Array.from(document.querySelectorAll('data'), e => [e.dataset.path, e.value, e.textContent])"
TEXT_COLOURS = """
[...Array.from(document.querySelectorAll('svg text'), e => getComputedStyle(e).fill),
 getComputedStyle(document.querySelector('td')).color]
"""
MARKS = "Array.from(document.querySelectorAll('svg [data-path]'), e => e.dataset.path)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    binary = find_browser()
    if binary is None:
        reason = f"not installed: none of {', '.join(NAMES)} (apt-get install {NAMES[0]})"
        if REQUIRED:
            pytest.fail(reason)
        pytest.skip(reason)
    with run_browser(binary, tmp_path_factory.mktemp("browser") / "profile") as running:
        yield running


def reported(path: Path, folder: Path, *more: object) -> tuple[Path, dict[str, Any]]:
    """The page of a subject, and the same as JSON."""
    page = folder / "report.html"
    aotgaudi("report", path, "-o", page, *more)
    return page, json.loads(aotgaudi("report", path, "--json", *more).stdout)


def check(page: Page, document: dict[str, Any]) -> None:
    """The page has nothing to complain of, and shows the JSON's numbers, no other."""
    assert page.complaints() == []
    assert page.requests() == []
    shown = page.value(DATA)
    assert len(shown) > 10
    for place, value, text in shown:
        assert json.loads(value) == number_at(document, place), place
        assert text.strip()
    assert {f"kinds.{index}.num_entries" for index in range(len(document["kinds"]))} <= {
        place for place, _, _ in shown
    }
    cells = [
        f"heat_maps.{index}.cells.{number}"
        for index, heat_map in enumerate(document["heat_maps"])
        for number in range(len(heat_map["cells"]))
    ]
    assert [mark for mark in page.value(MARKS) if ".cells." in mark] == cells


def check_layout(page: Page) -> None:
    """Nothing is wider than its window, on a phone or on a desk, and text can be told from what it stands on."""
    for width in WIDTHS:
        page.resize(width, 900)
        assert page.value("document.documentElement.scrollWidth") <= width
        assert page.value(
            "Array.from(document.querySelectorAll('figure svg'), e => e.getBoundingClientRect().width > 250).every(Boolean)"
        )
    light = page.value("getComputedStyle(document.body).backgroundColor")
    page.prefer(dark=True)
    dark = page.value("getComputedStyle(document.body).backgroundColor")
    assert _brightness(light) > 0.8 > 0.2 > _brightness(dark)
    assert all(_brightness(colour) > 0.7 for colour in page.value(TEXT_COLOURS))
    page.prefer(dark=False)
    assert all(_brightness(colour) < 0.4 for colour in page.value(TEXT_COLOURS))


def _brightness(colour: str) -> float:
    red, green, blue = (int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255


def test_llama_for_gaudi_with_and_without_its_added_entries(browser: Browser, tmp_path: Path) -> None:
    spec = (MANIFESTS / "llama-3.1-8b.gaudi3.toml").read_text(encoding="utf-8")
    (tmp_path / "configs").symlink_to(MANIFESTS / "configs")
    for mode, num_entries in (("closed", 195), ("upstream", 189)):
        (tmp_path / "x.toml").write_text(spec.replace("[bucketing]", f'[bucketing]\ncoverage = "{mode}"'))

        path, document = reported(tmp_path / "x.toml", tmp_path, "--store", tmp_path / "none")

        page = browser.open(path.as_uri())
        check(page, document)
        check_layout(page)
        assert document["num_entries"] == num_entries
        assert bool(document["num_holes"]) == (mode == "upstream")


def test_a_bundle(browser: Browser, store: Store, tmp_path: Path) -> None:
    bundle = sealed_bundle(store, tmp_path / "x.bundle")

    path, document = reported(bundle.path, tmp_path, "--store", store.root)

    page = browser.open(path.as_uri())
    check(page, document)
    check_layout(page)
    shown = {place for place, _, _ in page.value(DATA)}
    assert {f"built.units.{index}.size_bytes" for index in range(document["built"]["num_units"])} <= shown


def test_a_bundle_that_was_really_compiled(browser: Browser, workplace: Workplace, tmp_path: Path) -> None:
    path, document = reported(workplace.bundle, tmp_path, "--store", workplace.store)

    page = browser.open(path.as_uri())
    check(page, document)
    check_layout(page)
    assert document["num_built"] == document["num_entries"]
    assert document["built"]["num_timed"] == document["built"]["num_units"] > 0
    shown = {place for place, _, _ in page.value(DATA)}
    assert {f"built.units.{index}.size_bytes" for index in range(document["built"]["num_units"])} <= shown


def test_the_demo(browser: Browser, tmp_path: Path) -> None:
    """The bundle that ci/demo made, where it ran; else its spec."""
    subject = DEMO if DEMO.is_dir() else MANIFESTS / "smollm2-135m.cpu.toml"

    path, document = reported(subject, tmp_path, "--store", DEMO.parent / "store")

    page = browser.open(path.as_uri())
    check(page, document)
    check_layout(page)
    assert document["num_entries"] == 61


@pytest.mark.alone
def test_a_million_entries(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "million.toml").write_text(MILLION)
    path = tmp_path / "million.manifest.json"
    begun = time.process_time()
    aotgaudi("build", "manifest", tmp_path / "million.toml", "-o", path)
    started = time.process_time()

    page_path, document = reported(path, tmp_path, "--store", tmp_path / "none")
    seconds = (time.process_time() - started) / 2  # The page, and the JSON.

    assert document["num_entries"] > 1_000_000
    assert page_path.stat().st_size <= MOST_BYTES
    assert seconds <= MOST_TIMES * (started - begun)
    page = browser.open(page_path.as_uri())
    check(page, document)
    check_layout(page)


def test_hostile_names_do_nothing(browser: Browser, tmp_path: Path) -> None:
    spec = (MANIFESTS / "tiny-llama.cpu.toml").read_text(encoding="utf-8")
    (tmp_path / "configs").symlink_to(MANIFESTS / "configs")
    folder = tmp_path / HOSTILE.replace("/", "\u2215")
    folder.mkdir()
    (folder / "configs").symlink_to(MANIFESTS / "configs")
    name = next(line for line in spec.splitlines() if line.startswith("name = "))
    (folder / "x.toml").write_text(spec.replace(name, f"name = {json.dumps(HOSTILE)}"))

    path, document = reported(folder / "x.toml", tmp_path, "--store", tmp_path / "none")

    page = browser.open(path.as_uri())
    check(page, document)
    assert page.value("document.querySelector('h1').textContent") == HOSTILE
    assert page.value("document.querySelectorAll('script, img, iframe').length") == 0


def test_a_trace(browser: Browser, tmp_path: Path) -> None:
    rows = "\n".join(f"{n / 10},{100 + 37 * n % 3000},{5 + n % 90}" for n in range(60))
    (tmp_path / "x.csv").write_text(f"time,prompt_tokens,generated_tokens\n{rows}\n")
    subject = MANIFESTS / "llama-3.1-8b.gaudi3.toml"

    path, document = reported(subject, tmp_path, "--trace", tmp_path / "x.csv", "--store", tmp_path / "none")

    page = browser.open(path.as_uri())
    check(page, document)
    check_layout(page)
    shown = {place for place, _, _ in page.value(DATA)}
    assert {"trace.num_steps", "trace.factor"} <= shown
