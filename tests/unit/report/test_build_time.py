"""Where a build's time went, from what it printed: shown as told; anything else is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotgaudi.errors import SpecError
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.report.holdings import read_build_time
from tests.workload import tiny_spec

MANIFEST = Manifest.of(tiny_spec())
OUTCOME = {
    "num_traced": 3,
    "num_compiled": 5,
    "seconds": 20.0,
    "num_workers": 2,
    "worker_seconds": {"trace": 4.0, "compile": 30.5},
    "units": [],
}
PHASES = [
    {"phase": "enumerate", "begin": 0.0, "end": 0.25},
    {"phase": "plan", "begin": 0.25, "end": 1.0},
    {"phase": "run", "begin": 1.0, "end": 21.0},
]


def told(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "document",
    [
        {**OUTCOME, "phases": PHASES},
        {"cache": OUTCOME, "phases": PHASES, "manifest": {"id": MANIFEST.id}, "bundle": {}},
    ],
    ids=["build cache", "build"],
)
def test_it_is_what_the_build_told(document: Any, tmp_path: Path) -> None:
    found = read_build_time(told(tmp_path / "x.json", document), MANIFEST)

    assert [(one.name, one.begin, one.seconds) for one in found.phases] == [
        ("enumerate", 0.0, 0.25),
        ("plan", 0.25, 0.75),
        ("run", 1.0, 20.0),
    ]
    assert (found.seconds, found.num_traced, found.num_compiled, found.num_workers) == (21.0, 3, 5, 2)
    assert found.worker_seconds == {"tracing": 4.0, "compiling": 30.5, "idle": 5.5}


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ([], "holds list"),
        ({}, "phases"),
        ({"phases": PHASES}, "num_traced"),
        ({**OUTCOME, "phases": [{"phase": "a.b", "begin": 0, "end": 1}]}, r"phases\.0\.phase"),
        ({**OUTCOME, "phases": [{"phase": "run", "begin": -1, "end": 1}]}, r"phases\.0\.begin"),
        ({**OUTCOME, "worker_seconds": {"<b>": 1.0}, "phases": PHASES}, "worker_seconds"),
        ({**OUTCOME, "num_workers": 1e30, "phases": PHASES}, "num_workers"),
        ({"cache": 7, "phases": PHASES}, "does not tell"),
        ({**OUTCOME, "phases": PHASES, "manifest": {"id": "f" * 64}}, "another manifest, 'ffff"),
    ],
)
def test_what_tells_of_no_build_of_this_manifest_is_refused(
    document: object, problem: str, tmp_path: Path
) -> None:
    path = told(tmp_path / "x.json", document)

    with pytest.raises(SpecError, match=problem) as raised:
        read_build_time(path, MANIFEST)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.touch()])
def test_a_file_that_cannot_be_read_is_refused(make: Any, tmp_path: Path) -> None:
    make(tmp_path / "x.json")

    with pytest.raises(SpecError, match=r"x\.json"):
        read_build_time(tmp_path / "x.json", MANIFEST)


seconds = st.floats(0, 1e6)


@given(
    spans=st.lists(st.tuples(seconds, seconds), max_size=5),
    work=st.dictionaries(st.sampled_from(["trace", "compile"]), seconds),
    num_workers=st.integers(0, 64),
    total=seconds,
)
def test_whatever_a_build_tells_no_time_is_negative(
    spans, work, num_workers, total, tmp_path_factory
) -> None:
    phases = [{"phase": f"p{i}", "begin": a, "end": b} for i, (a, b) in enumerate(spans)]
    outcome = {**OUTCOME, "seconds": total, "num_workers": num_workers, "worker_seconds": work}
    path = told(tmp_path_factory.mktemp("t") / "x.json", {**outcome, "phases": phases})

    found = read_build_time(path, MANIFEST)

    assert all(one.seconds >= 0 for one in found.phases)
    assert min(found.worker_seconds.values()) >= 0
    assert found.seconds == max((b for _, b in spans), default=0.0)
