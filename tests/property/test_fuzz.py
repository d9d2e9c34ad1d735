"""A sample of what benchmarks/fuzz.py does for hours: no parser lets go of anything but its own one-line error."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aotgaudi.errors import AotGaudiError
from aotgaudi.share.layer import DirectorySink
from tests.property.fuzz_targets import Fuzz, archive_of, honest_members, hostile_archives, targets
from tests.unit.share.archives import unpack

SAMPLE = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
def test_a_parser_survives(target: Fuzz) -> None:
    @SAMPLE
    @given(target.inputs)
    def survive(data: bytes) -> None:
        target.check(data)

    survive()


def test_an_archive_writes_nothing_outside_and_leaves_only_files_and_folders(tmp_path: Path) -> None:
    numbers = iter(range(10**6))
    (tmp_path / "outside").write_text("mine")

    @SAMPLE
    @given(hostile_archives(honest_members()) | st.just(archive_of(honest_members())))
    def survive(data: bytes) -> None:
        root = tmp_path / "roots" / str(next(numbers))
        root.parent.mkdir(exist_ok=True)
        with contextlib.suppress(AotGaudiError):
            unpack(data, root)
        assert not any(path.is_symlink() or not (path.is_file() or path.is_dir()) for path in root.rglob("*"))
        assert {path.name for path in tmp_path.iterdir()} == {"outside", "roots"}
        assert (tmp_path / "outside").read_text() == "mine"

    survive()


def test_a_sink_never_writes_over_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("mine")

    with pytest.raises(FileExistsError):
        DirectorySink(tmp_path).write("manifest.json", None, iter((b"x",)))
    assert (tmp_path / "manifest.json").read_text() == "mine"
