from __future__ import annotations

import json
from pathlib import Path

import pytest
from aotgaudi_witness.report import CompileForbidden, Report
from aotgaudi_witness.settings import Settings, State, read_settings


def make_report(settings: Settings, byte: str, place: Path) -> Report:
    (place / "state").write_text(byte)
    return Report(settings, State(str(place / "state")))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "root" / "events").mkdir(parents=True)
    (tmp_path / "allowed").write_text(f"{tmp_path}/root/cache/a.so\n{tmp_path}/root/b.so\nc.so\n\n")
    read = read_settings(
        {
            "AOTGAUDI_WITNESS": str(tmp_path / "root" / "events"),
            "AOTGAUDI_WITNESS_ROOTS": json.dumps([str(tmp_path / "root"), str(tmp_path / "root" / "cache")]),
            "AOTGAUDI_WITNESS_ALLOWED": str(tmp_path / "allowed"),
        }
    )
    assert read is not None
    return read


def events(settings: Settings) -> list[dict[str, object]]:
    return [
        json.loads(line) for path in Path(settings.events).iterdir() for line in path.read_text().splitlines()
    ]


def test_a_path_lies_below_the_nearest_root(settings: Settings, tmp_path: Path) -> None:
    report = make_report(settings, "c", tmp_path)
    root = tmp_path / "root"

    assert report.below_root(f"{root}/cache/a.so") == (f"{root}/cache", "a.so")
    assert report.below_root(f"{root}/tmp/x") == (str(root), "tmp/x")
    assert report.below_root(f"{root}/cached") == (str(root), "cached")
    assert report.below_root(f"{root}-other/x") is None
    assert report.below_root(str(root)) is None
    assert report.below_root(f"{root}/events/1-2.jsonl") is None


def test_a_root_that_is_a_link_is_known_by_both_names(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    read = read_settings(
        {"AOTGAUDI_WITNESS": "/e", "AOTGAUDI_WITNESS_ROOTS": json.dumps([str(tmp_path / "link")])}
    )

    assert read is not None
    assert set(read.roots) == {str(tmp_path / "link"), str(tmp_path / "real")}


@pytest.mark.parametrize(
    ("path", "is_sealed"),
    [
        ("root/cache/a.so", True),
        ("root/b.so", True),
        ("root/cache/b.so", False),
        ("root/a.so", False),
        ("root/c.so", False),
        ("root/cache/c.so", False),
        ("root/cache/x/a.so", False),
    ],
)
def test_a_file_is_sealed_by_its_whole_path(
    settings: Settings, tmp_path: Path, path: str, *, is_sealed: bool
) -> None:
    """What is sealed in one folder is not what has its name in another."""
    report = make_report(settings, "c", tmp_path)
    found = report.below_root(str(tmp_path / path))

    assert found is not None
    assert report.is_sealed(*found) is is_sealed


def test_what_is_sealed_below_a_link_is_sealed_where_that_leads(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "allowed").write_text(f"{tmp_path}/link/a.so\n")
    read = read_settings(
        {
            "AOTGAUDI_WITNESS": "/e",
            "AOTGAUDI_WITNESS_ROOTS": json.dumps([str(tmp_path / "link")]),
            "AOTGAUDI_WITNESS_ALLOWED": str(tmp_path / "allowed"),
        }
    )

    assert read is not None
    assert read.allowed == {f"{tmp_path}/link/a.so", f"{tmp_path}/real/a.so"}


def test_what_is_refused_is_told_before_it_is_raised(settings: Settings, tmp_path: Path) -> None:
    report = make_report(settings, "l", tmp_path)

    with pytest.raises(CompileForbidden, match=r"a compiler: g\+\+ x.cpp from torch:1 f"):
        report.refuse("a compiler", ["torch:1 f"], argv=["g++", "x.cpp"])

    (event,) = events(settings)
    assert (event["e"], event["phase"], event["why"]) == ("refused", "l", "a compiler")


@pytest.mark.parametrize("byte", list("cmevf"))
def test_nothing_is_refused_in_other_states(settings: Settings, tmp_path: Path, byte: str) -> None:
    make_report(settings, byte, tmp_path).refuse("a compiler", [], argv=["g++", "x.cpp"])

    assert events(settings) == []


def test_a_state_that_cannot_be_read_any_more_is_the_last_one(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("l")
    state = State(str(tmp_path / "state"))
    assert state.read() == "l"

    (tmp_path / "state").unlink()

    assert state.read() == "l"
    assert not state.is_told()


def test_a_fault_is_told_once_and_not_for_ever(settings: Settings, tmp_path: Path) -> None:
    report = make_report(settings, "c", tmp_path)

    for number in range(300):
        report.fault("audit", ValueError("again"))
        report.fault("audit", ValueError(str(number)))

    assert len(events(settings)) == 100


@pytest.mark.parametrize(
    ("text", "seconds"), [("", 0.25), ("0.05", 0.05), ("0", 0.01), ("1e9", 10.0), ("x", 0.25)]
)
def test_how_often_it_looks_is_bounded(text: str, seconds: float) -> None:
    read = read_settings({"AOTGAUDI_WITNESS": "/e", "AOTGAUDI_WITNESS_INTERVAL": text})

    assert read is not None
    assert read.interval == seconds
    assert ("AOTGAUDI_WITNESS_INTERVAL" in read.mistakes) is (text == "x")
